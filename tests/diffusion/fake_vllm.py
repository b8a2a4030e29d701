"""What a vLLM server shows to the outside, without a model: started in its place by the tests of the judge's server.

``FAKE`` in its environment says how it behaves: ``hang`` (never listens), ``die`` (with a traceback), ``awake`` (has no
sleep mode), ``slow`` (answers a chat after half a second). It starts a process of its own, as vLLM does, and writes
that one's number and what it was asked to the file ``FAKE_RECORD``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOW = os.environ.get("FAKE", "")
RECORD = Path(os.environ["FAKE_RECORD"])
LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    asleep = False

    def do_GET(self) -> None:
        answers: dict[str, object] = {"/health": {}}
        if HOW != "awake":
            answers["/is_sleeping"] = {"is_sleeping": Handler.asleep}
        self.answer(answers.get(self.path))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.removeprefix("/v1")
        note(path)
        if path in {"/sleep?level=1", "/wake_up"} and HOW != "awake":
            Handler.asleep = path != "/wake_up"
            self.answer({})
        elif path == "/chat/completions" and not Handler.asleep:
            time.sleep(0.5 if HOW == "slow" else 0)
            self.answer({"choices": [{"message": {"content": "Score: 7"}, "finish_reason": "stop"}]})
        else:
            self.answer(None)

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        print(f"{format % args} \x1b[31m", flush=True)


def note(text: str) -> None:
    with LOCK, RECORD.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def main() -> None:
    if HOW == "die":
        raise RuntimeError("no room for the weights \x1b[31m")
    note(f"arguments {json.dumps(sys.argv[1:])}")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(f"started {child.pid}")
    if HOW == "hang":
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


main()

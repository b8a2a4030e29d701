"""Rewards of other servers: deadlines, retries, the circuit breaker, keys, and answers that are none.

Every test talks to a real HTTP server of this process, whose behaviour is a function per request.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from digen.diffusion.families.base import Images
from digen.diffusion.rewards.compute import build_callable, compute_rewards
from digen.diffusion.rewards.endpoint import Breaker, Endpoint
from digen.diffusion.rewards.judge import VisionJudge
from digen.diffusion.rewards.remote import RemoteScorer
from digen.errors import ConfigError, RewardError
from digen.types import Prompt

PROMPTS = [Prompt("a cat", {"id": 0}), Prompt("a dog", {"id": 1}), Prompt("ein Häuschen ☃", {"id": 2})]
NAMES = ["s0p0/0", "s0p1/0", "s0p2/0"]
FAST: dict[str, Any] = {"backoff_s": 0.01, "timeout_s": 5.0, "deadline_s": 10.0}
SHORT_S = 0.3
"""Deadline where a server does not answer."""


def shades() -> Images:
    """Three pictures of one grey each, 0, 100 and 200 of 255."""
    values: Images = np.zeros((3, 3, 4, 6), dtype=np.float32)
    for row in range(3):
        values[row] = row * 100 / 255
    return values


Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Hands every request to the server's ``behave``; what came is kept in ``server.requests``."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), self.question))
            self.number = len(self.server.requests)
        self.server.behave(self)

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def hang(self) -> None:
        """Do nothing until the test is over."""
        self.server.over.wait(30)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name of the base class
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.lock, self.over = threading.Lock(), threading.Event()
        self.behave: Behaviour = lambda handler: handler.answer({"scores": [1.0]})
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away, as the tests want it


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def dead() -> str:
    """The URL of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def picture_of(data: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,")))))


def failures(values: Sequence[float | Exception]) -> list[str]:
    assert all(isinstance(value, RewardError) for value in values), values
    return [str(value) for value in values]


def brightness(handler: Handler) -> None:
    samples = handler.question["samples"]
    handler.answer({"scores": [float(picture_of(sample["images"][0]).mean()) for sample in samples]})


class TestRemoteScorer:
    def test_pictures_prompts_and_metadata_arrive_and_scores_come_back_in_order(self, server: Server) -> None:
        server.behave = brightness
        reward = RemoteScorer(f"{server.url}/score?who=me", **FAST)
        assert compute_rewards("http", reward, shades(), PROMPTS, NAMES) == (0.0, 100.0, 200.0)
        assert len(server.requests) == 3
        path, headers, _ = server.requests[0]
        assert path == "/score?who=me"
        assert headers["Content-Type"] == "application/json"
        assert "Authorization" not in headers
        sent = sorted(
            (request[2]["samples"][0] for request in server.requests), key=lambda sample: sample["metadata"]["id"]
        )
        assert [sample["prompt"] for sample in sent] == [prompt.text for prompt in PROMPTS]
        assert [sample["metadata"] for sample in sent] == [prompt.metadata for prompt in PROMPTS]
        assert picture_of(sent[1]["images"][0]).shape == (4, 6, 3)
        assert (picture_of(sent[1]["images"][0]) == 100).all()

    def test_several_samples_in_a_request(self, server: Server) -> None:
        server.behave = brightness
        assert RemoteScorer(server.url, batch_size=2, **FAST)(shades(), PROMPTS) == [0.0, 100.0, 200.0]
        assert sorted(len(request[2]["samples"]) for request in server.requests) == [1, 2]

    def test_a_request_that_fails_costs_all_of_its_samples_and_no_others(self, server: Server) -> None:
        def behave(handler: Handler) -> None:
            samples = handler.question["samples"]
            handler.answer({"scores": [1.0] * len(samples)}, 200 if len(samples) == 1 else 404)

        server.behave = behave
        with pytest.raises(RewardError, match=r"failed on 2 of 3 samples: s0p0/0: .* answered 404.*; s0p1/0: [^;]*$"):
            compute_rewards("http", RemoteScorer(server.url, batch_size=2, **FAST), shades(), PROMPTS, NAMES)

    def test_frames_of_a_video(self, server: Server) -> None:
        video = np.stack([shades()] * 2)  # two videos of three frames
        assert RemoteScorer(server.url, frames=2, **FAST)(video, PROMPTS[:2]) == [1.0, 1.0]
        for _, _, question in server.requests:
            shown = [int(picture_of(image)[0, 0, 0]) for image in question["samples"][0]["images"]]
            assert shown == [0, 200]

    def test_one_sample_without_a_score_is_named_alone(self, server: Server) -> None:
        server.behave = lambda handler: handler.answer({"scores": [0.5, None, 0.25]})
        reward = RemoteScorer(server.url, batch_size=3, **FAST)
        with pytest.raises(
            RewardError, match=r"^reward 'http' failed on 1 of 3 samples: s0p1/0: the server scored it 'None'"
        ):
            compute_rewards("http", reward, shades(), PROMPTS, NAMES)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"scores": [1, 2]}, r'must answer \{"scores": \[...\]\} with 1 numbers'),
            ({"scores": []}, "must answer"),
            ({"scores": 1}, "must answer"),
            ([1.0], "must answer"),
            (7, "must answer"),
            ({"scores": ["high"]}, "scored it 'high', which is not a number"),
            ({"scores": [True]}, "scored it 'True', which is not a number"),
            (b"<html>no\x1b[2J\xff</html>", r"answered no JSON: '<html>no\\x1b\[2J�</html>'"),
            (b"[" * 100_000, "answered no JSON"),
            (b"", "answered no JSON: ''"),
        ],
    )
    def test_an_answer_that_is_none_is_not_asked_again(self, server: Server, content: Any, message: str) -> None:
        server.behave = lambda handler: handler.answer(content)
        with pytest.raises(RewardError, match=message):
            compute_rewards("http", RemoteScorer(server.url, **FAST), shades()[:1], PROMPTS[:1], NAMES[:1])
        assert len(server.requests) == 1

    @pytest.mark.parametrize("score", ["NaN", "Infinity"])
    def test_a_number_that_is_not_finite(self, server: Server, score: str) -> None:
        server.behave = lambda handler: handler.answer(f'{{"scores": [{score}]}}'.encode())
        with pytest.raises(RewardError, match=r"reward 'http' is (nan|inf) for sample s0p0/0"):
            compute_rewards("http", RemoteScorer(server.url, **FAST), shades()[:1], PROMPTS[:1], NAMES[:1])

    def test_an_answer_without_end_is_cut(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("digen.diffusion.rewards.endpoint._MAX_ANSWER", 2**20)
        server.behave = lambda handler: handler.answer(b" " * 2**22)
        assert failures(RemoteScorer(server.url, **FAST)(shades()[:1], PROMPTS[:1])) == [
            f"{server.url} answered more than 1 MiB"
        ]


class TestEndpoint:
    def ask(self, url: str, **options: Any) -> Any:
        return Endpoint(url, **{**FAST, **options}).ask({"n": 1})

    @pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
    def test_what_may_pass_is_asked_again(self, server: Server, status: int) -> None:
        server.behave = lambda handler: handler.answer({"ok": 1}, status if handler.number < 3 else 200)
        assert self.ask(server.url) == {"ok": 1}
        assert len(server.requests) == 3
        assert server.requests[0][2] == server.requests[2][2] == {"n": 1}

    def test_retries_are_bounded_and_say_what_the_server_said(self, server: Server) -> None:
        server.behave = lambda handler: handler.answer(b"out of\nmemory", 500)
        with pytest.raises(RewardError, match=r"/v1 answered 500: 'out of memory'; given up after 3 requests$"):
            self.ask(f"{server.url}/v1", retries=2)
        assert len(server.requests) == 3

    @pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
    def test_what_will_not_pass_is_not(self, server: Server, status: int) -> None:
        server.behave = lambda handler: handler.answer(b"no", status, {"Location": f"{server.url}/other"})
        with pytest.raises(RewardError, match=f"answered {status}: 'no'$"):
            self.ask(server.url)
        assert len(server.requests) == 1, "nor is a redirect followed"

    def test_a_server_that_never_answers(self, server: Server) -> None:
        server.behave = Handler.hang
        began = time.monotonic()
        with pytest.raises(RewardError, match="did not answer in time; given up after 2 requests"):
            self.ask(server.url, timeout_s=SHORT_S, retries=1)
        assert 2 * SHORT_S <= time.monotonic() - began < 4

    def test_a_server_that_drips(self, server: Server) -> None:
        def drip(handler: Handler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            while not handler.server.over.wait(0.02):  # a byte at a time, each well before a socket's own timeout
                handler.wfile.write(b" ")

        server.behave = drip
        began = time.monotonic()
        with pytest.raises(RewardError, match="did not answer in time"):
            self.ask(server.url, timeout_s=SHORT_S, retries=0)
        assert time.monotonic() - began < 3

    def test_a_dripping_answer_of_unknown_length_is_not_taken_for_a_whole_one(self, server: Server) -> None:
        def drip(handler: Handler) -> None:
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b"1")  # JSON already
            handler.hang()

        server.behave = drip
        with pytest.raises(RewardError, match="did not answer in time"):
            self.ask(server.url, timeout_s=SHORT_S, retries=0)

    def test_a_deadline_for_all_requests_together(self, server: Server) -> None:
        server.behave = Handler.hang
        with pytest.raises(RewardError, match=r"did not answer in time; no time for another request within 0\.4 s"):
            self.ask(server.url, timeout_s=SHORT_S, deadline_s=0.4, retries=50, backoff_s=0.2)
        assert len(server.requests) == 1

    def test_a_server_that_hangs_up_in_the_middle(self, server: Server) -> None:
        def cut(handler: Handler) -> None:
            if handler.number > 1:
                return handler.answer({"ok": 1})
            handler.send_response(200)
            handler.send_header("Content-Length", "8")
            handler.end_headers()
            handler.wfile.write(b'{"o')
            handler.close_connection = True
            return None

        server.behave = cut
        assert self.ask(server.url) == {"ok": 1}
        assert len(server.requests) == 2

    def test_a_dead_server(self, dead: str) -> None:
        with pytest.raises(RewardError, match=r"cannot be asked: ConnectionRefusedError.*given up after 3 requests"):
            self.ask(dead, retries=2)

    def test_what_listens_does_not_speak_http(self) -> None:
        def babble() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(100_000)
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=babble)
            thread.start()
            port = listener.getsockname()[1]
            with pytest.raises(RewardError, match="cannot be asked: BadStatusLine"):
                self.ask(f"http://127.0.0.1:{port}", retries=0)
            with pytest.raises(RewardError, match="cannot be asked: SSLError"):
                self.ask(f"https://127.0.0.1:{port}", retries=0)
            thread.join()

    def test_an_unknown_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(RewardError, match=r"http://judge.example cannot be asked: gaierror"):
            self.ask("http://judge.example", retries=0)

    def test_waits_grow_and_are_decided_by_the_seed(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        server.behave = lambda handler: handler.answer(b"busy", 503)

        def waits(**options: Any) -> list[float]:
            slept: list[float] = []
            with monkeypatch.context() as patch:
                patch.setattr("digen.diffusion.rewards.endpoint.time.sleep", slept.append)
                with pytest.raises(RewardError):
                    self.ask(server.url, retries=4, backoff_s=1.0, deadline_s=100.0, **options)
            return slept

        first = waits()
        assert all(0.5 * 2**n <= wait <= 2**n for n, wait in enumerate(first))
        assert len(first) == 4
        assert len({wait / 2**n for n, wait in enumerate(first)}) == 4, "no two alike"
        assert waits() == first
        assert waits(seed=1) != first

    def test_retry_after_is_heeded_within_the_deadline(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        slept: list[float] = []
        monkeypatch.setattr("digen.diffusion.rewards.endpoint.time.sleep", slept.append)
        server.behave = lambda handler: handler.answer(
            {"ok": 1}, 429 if handler.number == 1 else 200, {"Retry-After": "7"}
        )
        assert self.ask(server.url) == {"ok": 1}
        assert slept == [7.0]
        server.requests.clear()
        with pytest.raises(RewardError, match="no time for another request within 5 s"):
            self.ask(server.url, deadline_s=5.0)

    def test_at_most_so_many_requests_at_a_time(self, server: Server) -> None:
        inside, most, gate = 0, 0, threading.Barrier(3, timeout=10)

        def behave(handler: Handler) -> None:
            nonlocal inside, most
            with server.lock:
                inside += 1
                most = max(most, inside)
            gate.wait()  # nobody leaves before three are in
            with server.lock:
                inside -= 1
            handler.answer({})

        server.behave = behave
        endpoint = Endpoint(server.url, concurrency=3, **FAST)
        assert endpoint.map(lambda number: endpoint.ask({"n": number}), range(9)) == [{}] * 9
        assert most == 3


class TestBreaker:
    def test_it_opens_tries_once_and_closes(self) -> None:
        now = 0.0
        breaker = Breaker(failures=2, pause_s=10, clock=lambda: now)
        breaker.failed("died")
        breaker.check("x")
        breaker.succeeded()
        breaker.failed("died")
        breaker.check("x")  # the success between the two began the count anew
        breaker.failed("hung")
        with pytest.raises(
            RewardError, match=r"x failed 2 times in a row and is not asked for another 10\.0 s; last: it hung"
        ):
            breaker.check("x")
        now = 10.0
        breaker.check("x")  # one may try
        with pytest.raises(RewardError, match="not asked"):
            breaker.check("x")
        breaker.failed("hung")
        now = 19.9
        with pytest.raises(RewardError, match="failed 3 times in a row"):
            breaker.check("x")
        now = 20.0
        breaker.check("x")
        breaker.succeeded()
        breaker.check("x")

    def test_a_dead_server_is_not_asked_for_every_sample(self, server: Server) -> None:
        server.behave = lambda handler: handler.answer(b"", 500)
        reward = RemoteScorer(server.url, concurrency=1, retries=1, breaker_failures=3, breaker_s=60, **FAST)
        images, prompts = np.concatenate([shades()] * 3), PROMPTS * 3
        told = failures(reward(images, prompts))
        assert len(server.requests) == 3
        assert "given up after 2 requests" in told[0]
        assert all("failed 3 times in a row and is not asked" in reason for reason in told[1:])

    def test_a_server_that_comes_back_is_asked_again(self, server: Server) -> None:
        server.behave = lambda handler: handler.answer({"scores": [1]}, 500 if handler.number == 1 else 200)
        reward = RemoteScorer(server.url, retries=0, breaker_failures=1, breaker_s=1e-3, **FAST)
        failures(reward(shades()[:1], PROMPTS[:1]))
        while isinstance((reward(shades()[:1], PROMPTS[:1]))[0], RewardError):
            pass  # a millisecond
        assert reward(shades()[:1], PROMPTS[:1]) == [1.0]

    def test_an_answer_that_is_no_use_counts_as_alive(self, server: Server) -> None:
        server.behave = lambda handler: handler.answer(b"who?", 401)
        reward = RemoteScorer(server.url, breaker_failures=1, **FAST)
        assert all("answered 401" in reason for reason in failures(reward(shades(), PROMPTS)))

    @pytest.mark.parametrize("status", [200, 404])
    def test_only_failures_in_a_row_count(self, server: Server, status: int) -> None:
        server.behave = lambda handler: handler.answer({}, 500 if handler.number % 2 else status)
        endpoint = Endpoint(server.url, retries=0, breaker_failures=2, concurrency=1, **FAST)
        endpoint.map(lambda number: endpoint.ask({"n": number}), range(6))
        assert len(server.requests) == 6

    def test_it_is_safe_between_threads(self) -> None:
        now = 0.0
        breaker = Breaker(failures=50, pause_s=10, clock=lambda: now)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: breaker.failed("x"), range(49)))
            breaker.check("x")
            breaker.failed("x")
            now = 11.0

            def passes(_: int) -> bool:
                try:
                    breaker.check("x")
                except RewardError:
                    return False
                return True

            assert sum(pool.map(passes, range(64))) == 1, "one tries, the others wait"


class TestKeys:
    KEY = "sk-0123456789abcdef"

    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SCORER_API_KEY", self.KEY)

    def test_it_is_sent_and_never_shown(self, server: Server) -> None:
        server.behave = lambda handler: handler.answer(
            f"bad {handler.headers['Authorization']}".encode(), [401, 500, 200][handler.number - 1]
        )
        endpoint = Endpoint(server.url, api_key_env="SCORER_API_KEY", retries=0, **FAST)
        for _ in range(3):
            with pytest.raises(RewardError, match=r"bad Bearer \*\*\*") as caught:
                endpoint.ask({})
            assert self.KEY not in str(caught.value)
        assert [headers["Authorization"] for _, headers, _ in server.requests] == [f"Bearer {self.KEY}"] * 3
        assert self.KEY not in repr(vars(endpoint))

    def test_it_does_not_leave_this_machine_in_the_clear(self) -> None:
        for url in ("http://scorer.example/v1", "http://10.0.0.7/v1", "http://127.0.0.1.example"):
            with pytest.raises(ConfigError, match=r"would be sent to .* in the clear; use https"):
                Endpoint(url, api_key_env="SCORER_API_KEY")
        for url in ("https://scorer.example/v1", "http://localhost:8000/v1", "http://[::1]:8000"):
            Endpoint(url, api_key_env="SCORER_API_KEY")

    @pytest.mark.parametrize(
        ("value", "message"), [("", "is not set"), ("a b", "no header may hold"), ("a\nb", "no header")]
    )
    def test_a_key_that_is_none(self, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SCORER_API_KEY", value)
        with pytest.raises(ConfigError, match=f"SCORER_API_KEY.*{message}") as caught:
            Endpoint("https://scorer.example", api_key_env="SCORER_API_KEY")
        assert not value.strip() or value not in str(caught.value)

    def test_proxies_are_not_used(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert Endpoint(server.url, **FAST).ask({}) == {"scores": [1.0]}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"url": "ftp://host/x"}, r"must be http://... or https://..., got 'ftp://host/x'"),
        ({"url": "file:///etc/passwd"}, "must be http"),
        ({"url": "localhost:8000"}, "must be http"),
        ({"url": "http://"}, "must be http"),
        ({"url": "http://host/a b"}, "must be http"),
        ({"url": "http://host/\r\nX: y"}, "must be http"),
        ({"url": "http://host:99999"}, "URL of a remote reward is wrong: Port out of range"),
        ({"url": "https://me:secret@host"}, "holds a user name or password; use api_key_env"),
        ({"url": "https://secret@host"}, "holds a user name or password; use api_key_env"),
        ({"timeout_s": 0}, "timeout_s of a remote reward must be a positive number of seconds"),
        ({"deadline_s": float("nan")}, "deadline_s of a remote reward must be"),
        ({"breaker_s": -1}, "breaker_s"),
        ({"backoff_s": -1}, "backoff_s"),
        ({"retries": -1}, "retries of a remote reward is too small"),
        ({"concurrency": 0}, "concurrency of a remote reward is too small"),
        ({"breaker_failures": 0}, "breaker_failures of a remote reward is too small"),
        ({"batch_size": 0}, "batch_size of a remote reward must be at least 1"),
        ({"patience": 1}, r"does not take reward\.kwargs \['patience', 'url'\]"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_callable("digen.diffusion.rewards.remote:RemoteScorer", {"url": "http://localhost", **kwargs})
    assert "secret" not in str(caught.value)


def says(text: Any, finish: str = "stop") -> Behaviour:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return lambda handler: handler.answer({"choices": [choice]})


def prefers(**logprobs: float) -> Behaviour:
    tops = [{"token": token.replace("_", " "), "logprob": value} for token, value in logprobs.items()]
    choice = {"message": {"content": "x"}, "logprobs": {"content": [{**tops[0], "top_logprobs": tops}]}}
    return lambda handler: handler.answer({"choices": [choice]})


class TestJudge:
    def judge(self, server: Server, **options: Any) -> VisionJudge:
        return VisionJudge(f"{server.url}/v1/", "judge", **{**FAST, **options})

    def score(self, judge: VisionJudge) -> float:
        (value,) = compute_rewards("judge", judge, shades()[1:2], PROMPTS[2:], NAMES[2:])
        return value

    def test_the_question(self, server: Server) -> None:
        server.behave = says("Score: 7")
        assert self.score(self.judge(server)) == 0.7
        ((path, _, question),) = server.requests
        assert path == "/v1/chat/completions"
        ((message),) = question.pop("messages")
        assert question == {"model": "judge", "temperature": 0, "max_tokens": 512}
        assert message["role"] == "user"
        image, text = message["content"]
        assert (picture_of(image["image_url"]["url"]) == 100).all()
        assert image["image_url"]["url"].startswith("data:image/png;base64,")
        assert "from 0 (not at all) to 10 (perfectly)" in text["text"]
        assert text["text"].endswith("Description: ein Häuschen ☃")

    def test_a_question_of_ones_own(self, server: Server) -> None:
        server.behave = says("<rating>3</rating>")
        judge = self.judge(
            server,
            question='Judge {"as": "json"}: {prompt}, {low}',
            pattern="<rating>(.*?)</rating>",
            score_range=[1, 5],
            request={"max_completion_tokens": 9},
        )
        assert self.score(judge) == 0.5
        question = server.requests[0][2]
        assert question.pop("messages")[0]["content"][1]["text"] == 'Judge {"as": "json"}: ein Häuschen ☃, {low}'
        assert question == {"model": "judge", "max_completion_tokens": 9}

    def test_a_prompt_is_text_and_fills_no_other_place(self, server: Server) -> None:
        server.behave = says("Score: 1")
        self.judge(server)(shades()[:1], [Prompt("{prompt} {low} {answers}")])
        assert server.requests[0][2]["messages"][0]["content"][1]["text"].endswith(
            "Description: {prompt} {low} {answers}"
        )

    def test_frames_of_a_video(self, server: Server) -> None:
        server.behave = says("Score: 1")
        self.judge(server, frames=3)(shades()[None], PROMPTS[:1])
        content = server.requests[0][2]["messages"][0]["content"]
        assert [part["type"] for part in content] == ["image_url"] * 3 + ["text"]
        assert [int(picture_of(part["image_url"]["url"])[0, 0, 0]) for part in content[:3]] == [0, 100, 200]

    @pytest.mark.parametrize(
        ("text", "score"),
        [
            ("Score: 7", 0.7),
            ("score: 7.5", 0.75),
            ("**Score:** 10", 1.0),
            ("Score: **0**", 0.0),
            ("Score: 7.", 0.7),
            ("Score: 7/10", 0.7),
            ("At first sight Score: 2, but looking closer\nScore: 9", 0.9),
            ("Score:3", 0.3),
        ],
    )
    def test_a_score_that_can_be_read(self, server: Server, text: str, score: float) -> None:
        server.behave = says(text)
        assert self.score(self.judge(server)) == pytest.approx(score, abs=1e-15)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a fine picture", "no score .* in the judge's answer 'a fine picture'"),
            ("7", "no score"),
            ("Score: high", "no score"),
            ("Score: 7e5", "no score"),
            ("Score: 7.5.3", "no score"),
            ("Score: 7,5", "no score"),
            ("", "no score"),
            ("Score: 11", "score 11 is not between 0 and 10"),
            ("Score: -1", "score -1 is not between 0 and 10"),
            (None, "holds no text but 'None'"),
            (["Score: 7"], "holds no text"),
        ],
    )
    def test_a_score_that_cannot(self, server: Server, text: Any, message: str) -> None:
        server.behave = says(text)
        with pytest.raises(RewardError, match=f"^reward 'judge' failed on 1 of 1 samples: s0p2/0: .*{message}"):
            self.score(self.judge(server))
        assert len(server.requests) == 1

    def test_an_answer_that_was_cut_short_says_so(self, server: Server) -> None:
        server.behave = says("Let me think", "length")
        with pytest.raises(RewardError, match="it was cut short: raise max_tokens in request"):
            self.score(self.judge(server))

    def test_a_number_that_the_pattern_lets_through_and_is_none(self, server: Server) -> None:
        server.behave = says("rating: many")
        with pytest.raises(RewardError, match="the judge's score 'many' is not a number"):
            self.score(self.judge(server, pattern=r"rating: (\w+)"))

    @pytest.mark.parametrize(
        "content", [{}, {"choices": []}, {"choices": [{}]}, [], {"choices": [{"message": "Score: 7"}]}]
    )
    def test_an_answer_of_another_form(self, server: Server, content: Any) -> None:
        server.behave = lambda handler: handler.answer(content)
        with pytest.raises(RewardError, match=r"the judge's answer has no (choices\.0|message\.content)"):
            self.score(self.judge(server))

    def test_the_expected_value_of_the_answers(self, server: Server) -> None:
        server.behave = prefers(yes=np.log(0.5), _Yes=np.log(0.125), No=np.log(0.25), maybe=np.log(0.1))
        judge = self.judge(server, answers={"yes": 1, "no": 0})
        assert self.score(judge) == pytest.approx(0.625 / 0.875, abs=1e-12)
        question = server.requests[0][2]
        text = question.pop("messages")[0]["content"][1]["text"]
        assert "Answer with one word: yes, no." in text
        assert question == {"model": "judge", "temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        server.behave = prefers(**{"5": np.log(0.25), "1": np.log(0.25), "3": np.log(0.5)})
        assert self.score(self.judge(server, answers={str(n): n for n in range(1, 6)})) == pytest.approx(3, abs=1e-12)

    @pytest.mark.parametrize(
        ("behaviour", "message"),
        [
            (
                prefers(yes=np.log(0.3), hello=np.log(0.6)),
                r"gives yes, no a probability of 0\.3 in all, less than 0\.5",
            ),
            (prefers(hello=0.0), "a probability of 0 in all"),
            (prefers(yes=float("nan")), "a probability of nan in all"),
            (prefers(yes="high"), "has a log-probability that is none"),  # type: ignore[arg-type]
            (says("yes"), r"the judge's answer has no logprobs\.content\.0\.top_logprobs"),
        ],
    )
    def test_probabilities_that_say_nothing(self, server: Server, behaviour: Behaviour, message: str) -> None:
        server.behave = behaviour
        with pytest.raises(RewardError, match=message):
            self.score(self.judge(server, answers={"yes": 1, "no": 0}))

    def test_a_hung_judge_and_a_dead_one(self, server: Server, dead: str) -> None:
        server.behave = Handler.hang
        hung = self.judge(server, timeout_s=SHORT_S, retries=0)
        assert all("did not answer in time" in reason for reason in failures(hung(shades(), PROMPTS)))
        gone = VisionJudge(dead, "judge", retries=0, **FAST)
        assert all("ConnectionRefusedError" in reason for reason in failures(gone(shades(), PROMPTS)))

    def test_one_that_answers_some(self, server: Server) -> None:
        def behave(handler: Handler) -> None:
            told = handler.question["messages"][0]["content"][1]["text"]
            says("Score: 5" if "a dog" in told else "Hm.")(handler)

        server.behave = behave
        with pytest.raises(RewardError, match=r"failed on 2 of 3 samples: s0p0/0: no score .*; s0p2/0: no score"):
            compute_rewards("judge", self.judge(server), shades(), PROMPTS, NAMES)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"pattern": "("}, "pattern of a judge is no regular expression"),
            ({"pattern": r"\d+"}, r"must have one group, the number; '\\\\d\+' has 0"),
            ({"score_range": [1]}, "score_range of a judge must be two numbers"),
            ({"score_range": "ab"}, "score_range of a judge must be two numbers"),
            ({"score_range": [5, 5]}, "must rise from its lowest"),
            ({"question": "How fine?"}, r"must hold \{prompt\}"),
            ({"request": {"model": "x", "n": 2}}, "request of a judge must not set model, n"),
            ({"answers": {"yes": 1, "no": 0}, "pattern": "(.)"}, "leave out pattern and score_range"),
            ({"answers": {True: 1, False: 0}}, "True is no text; in YAML put quotes around yes, no and numbers"),
            ({"answers": {"yes": 1}}, "at least two"),
            ({"answers": {"yes": 1, "Yes ": 0}}, "different apart from letter case"),
            ({"answers": {"yes": "1", "no": 0}}, "the value of 'yes' is '1', not a finite number"),
            ({"answers": {"yes": 1, "no": 0}, "min_probability": 0}, "min_probability of a judge"),
            ({"temperature": 0}, "does not take reward.kwargs"),
            ({"frames": 0}, "frames must be"),
        ],
    )
    def test_wrong_arguments(self, kwargs: dict[str, Any], message: str) -> None:
        target = "digen.diffusion.rewards.judge:VisionJudge"
        with pytest.raises(ConfigError, match=message):
            build_callable(target, {"url": "http://localhost", "model": "m", **kwargs})

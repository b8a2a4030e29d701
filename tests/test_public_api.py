"""The public names, and what importing them costs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import digen

ROOT = Path(digen.__file__).parents[1]
OPTIONAL = ("datasets", "onnxruntime", "rapidocr", "ray", "sklearn", "tensorboard", "vllm", "vllm_omni", "wandb")


def fresh(code: str) -> Any:
    """Run ``code`` in a new interpreter and return the JSON that it prints last."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_is_sorted_and_complete() -> None:
    assert digen.__all__ == sorted(set(digen.__all__))
    assert sorted(digen._HOME) == digen.__all__
    assert set(digen.__all__) <= set(dir(digen))


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    tree = ast.parse(Path(digen.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: str(node.module).removeprefix("digen.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == digen._HOME


@pytest.mark.parametrize("name", digen.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(digen, name)
    documentation = vars(value).get("__doc__") if isinstance(value, type) else inspect.getdoc(value)
    assert documentation, f"digen.{name} has no docstring of its own"
    if isinstance(value, type):
        for attribute, member in vars(value).items():
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"digen.{name}.{attribute} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'digen' has no attribute 'Sheduler'"):
        _ = digen.Sheduler


def test_no_submodule_shadows_a_public_name() -> None:
    assert not {module.name for module in pkgutil.iter_modules(digen.__path__)} & set(digen.__all__)


@pytest.mark.parametrize("module", ["digen", "digen.sched"])
def test_importing_loads_nothing_heavy_and_touches_nothing(module: str) -> None:
    found = fresh(
        "import json, logging, signal, sys, threading\n"
        "handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}\n"
        f"import {module}\n"
        "print(json.dumps({\n"
        "    'loaded': sorted({name.partition('.')[0] for name in sys.modules}),\n"
        "    'signals': handlers == {s: signal.getsignal(s) for s in signal.valid_signals()},\n"
        "    'logging': [len(logging.root.handlers), logging.root.level],\n"
        "    'threads': threading.active_count(),\n"
        "}))"
    )
    assert not {"torch", "ray", "pydantic", "numpy", "diffusers", "transformers", "datasets"} & set(found["loaded"])
    assert found["signals"]
    assert found["logging"] == [0, 30]
    assert found["threads"] == 1


def test_the_scheduler_is_loaded_without_heavy_modules_by_name_too() -> None:
    loaded = fresh("import json, sys, digen; digen.Scheduler; digen.Plan; print(json.dumps(sorted(sys.modules)))")
    assert not {"torch", "ray", "numpy"} & set(loaded)


def test_every_submodule_can_be_imported_and_run_stays_a_function() -> None:
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    result = fresh(
        "import gc, importlib, json, pkgutil, types, digen\n"
        "gc.disable()  # it is all imports\n"
        f"missing, failed, count = {missing!r}, {{}}, 0\n"
        "for module in pkgutil.walk_packages(digen.__path__, 'digen.', onerror=lambda name: None):\n"
        "    if module.name.endswith('__main__'):\n"
        "        continue\n"
        "    try:\n"
        "        importlib.import_module(module.name)\n"
        "        count += 1\n"
        "    except ImportError as error:\n"
        "        if (error.name or '').partition('.')[0] not in missing:\n"
        "            failed[module.name] = repr(error)\n"
        "names = {name: isinstance(getattr(digen, name), types.ModuleType) for name in digen.__all__}\n"
        "print(json.dumps({'failed': failed, 'count': count, 'run': type(digen.run).__name__,\n"
        "                  'modules': [name for name, module in names.items() if module]}))"
    )
    assert result["failed"] == {}
    assert result["count"] > 10
    assert result["run"] == "function"
    assert result["modules"] == []

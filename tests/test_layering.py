"""The layering of design.md section 4, and what no module may do, checked on the syntax tree of every module.

Imports inside functions count; imports under ``if TYPE_CHECKING`` do not. A name that is imported from ``digen``
counts as an import of the module that defines it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import digen

ROOT = Path(digen.__file__).parent
MODULES = {
    ".".join(("digen", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

LOOP = ("digen.sched.loop", "digen.sched.sync")
LAYERS: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    # modules, except these, must not import
    (
        tuple(
            f"digen.{name}"
            for name in (
                "errors",
                "types",
                "handles",
                "config",
                "resources",
                "restarts",
                "schema",
                "events",
                "extras",
                "files",
                "plan",
                "groups",
                "guard",
                "quarantine",
                "signals",
                "data",
                "durations",
            )
        ),
        (),
        ("anyio", "asyncio", "digen.sched", "digen.workers", "torch"),
    ),
    (("digen.sched",), LOOP, ("anyio", "asyncio", "time", "digen.workers", "subprocess", "torch")),
    (LOOP, (), ("digen.workers", "subprocess", "torch")),
    (("digen.workers",), (), ("digen.sched", "digen.plan", "torch")),
    (("digen.diffusion",), (), ("digen.sched", "digen.workers")),
    (("digen.diffusion",), ("digen.diffusion.engines",), ("anyio", "asyncio")),
    (
        tuple(
            f"digen.{name}"
            for name in (
                "runner",
                "fleet",
                "offline",
                "presets",
                "checkpoint",
                "planner",
                "planned",
                "capacity",
                "costs",
                "twin",
                "timeline",
                "cli",
                "judges",
                "placement",
                "machine",
            )
        ),
        (),
        ("torch", "ray"),
    ),
    (("digen.observe",), (), ("digen.sched", "digen.workers", "torch")),
]
UNBOUND = ("digen.doctor", "digen.__main__")
"""Modules that no row binds: the doctor looks at everything, ``python -m digen`` is the command line."""

ORDER: list[tuple[str, ...]] = [
    ("digen.errors", "digen.types", "digen.handles", "digen.events", "digen.config"),
    ("digen.plan", "digen.groups", "digen.data"),
    ("digen.sched",),
    ("digen.runner",),
    ("digen.cli",),
]
"""Imports run from right to left: errors, types, handles, events, config <- plan, groups <- sched <- runner <- cli."""

PICKLERS = ("pickle", "_pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "joblib", "jsonpickle")


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def live_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` that runs, which leaves out the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from live_nodes(other)
        else:
            yield child
            yield from live_nodes(child)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for names and attributes of names, otherwise the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imports(tree: ast.Module, module: str, *, package: bool) -> set[str]:
    """Everything that ``module`` imports, as dotted names; ``from a import b`` gives ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in live_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + package]
                base = ".".join([*parents, base] if base else parents)
            found.add(base)
            for alias in node.names:
                home = digen._HOME.get(alias.name, alias.name) if base == "digen" else alias.name
                found.add(f"{base}.{home}")
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func).rpartition(".")[2] in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            found.add(node.args[0].value)
    return found


def read(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> set[str]:
    return imports(read(module), module, package=MODULES[module].name == "__init__.py")


def dangers(tree: ast.Module) -> list[str]:
    """Calls and imports that no module of digen may hold, with their lines."""
    found = []
    for node in live_nodes(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            arguments = {keyword.arg: keyword.value for keyword in node.keywords}
            shell = arguments.get("shell")
            if name in {"eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"}:
                found.append(f"line {node.lineno}: {name}()")
            if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
                found.append(f"line {node.lineno}: shell=True")
            if name in {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}:
                found.append(f"line {node.lineno}: {name}()")
            if name == "torch.load" and ast.dump(arguments.get("weights_only", ast.Constant(False))) != ast.dump(
                ast.Constant(True)
            ):
                found.append(f"line {node.lineno}: torch.load() without weights_only=True")
            if "allow_pickle" in arguments and ast.dump(arguments["allow_pickle"]) != ast.dump(ast.Constant(False)):
                found.append(f"line {node.lineno}: allow_pickle")
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            bad = {alias.name for alias in node.names} & {"load", "load_all", "unsafe_load", "full_load"}
            found += [f"line {node.lineno}: from yaml import {name}" for name in sorted(bad)]
    return found


def clocks(tree: ast.Module) -> list[str]:
    """Readings of the wall clock."""
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
    found = []
    for node in live_nodes(tree):
        if isinstance(node, ast.Attribute) and ".".join(dotted(node).split(".")[-2:]) in wall:
            found.append(f"line {node.lineno}: {dotted(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"line {node.lineno}: {alias.name}" for alias in node.names if alias.name in {"time", "time_ns"}]
    return found


def unseeded(tree: ast.Module) -> list[str]:
    """Uses of Python's random numbers that no seed decides."""
    found = []
    for node in live_nodes(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) == "random" and node.attr != "Random":
            found.append(f"line {node.lineno}: random.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            bad = [alias.name for alias in node.names if alias.name != "Random"]
            found += [f"line {node.lineno}: from random import {name}" for name in bad]
        elif isinstance(node, ast.Call) and dotted(node.func) in {"random.Random", "Random"} and not node.args:
            found.append(f"line {node.lineno}: Random() without a seed")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_keep_to_the_layers(module: str) -> None:
    names = imports_of(module)
    for modules, exceptions, forbidden in LAYERS:
        if within(module, modules) and not within(module, exceptions):
            bad = sorted(name for name in names if within(name, forbidden))
            assert not bad, f"{module} must not import {', '.join(bad)}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_in_one_direction(module: str) -> None:
    rank = next((rank for rank, modules in enumerate(ORDER) if within(module, modules)), None)
    if rank is not None:
        later = tuple(name for modules in ORDER[rank + 1 :] for name in modules)
        bad = sorted(name for name in imports_of(module) if within(name, later))
        assert not bad, f"{module} must not import {', '.join(bad)}"


def test_every_module_has_a_layer() -> None:
    bound = tuple(name for modules, _, _ in LAYERS for name in modules) + UNBOUND
    assert [module for module in MODULES if module != "digen" and not within(module, bound)] == []


def test_the_package_itself_imports_nothing_outside_the_standard_library() -> None:
    assert imports_of("digen") <= {"__future__", "__future__.annotations", "importlib", "importlib.import_module"} | {
        "typing",
        "typing.TYPE_CHECKING",
        "typing.Any",
    }


@pytest.mark.parametrize("module", MODULES)
def test_nothing_unpickles_evaluates_or_starts_a_shell(module: str) -> None:
    assert sorted(name for name in imports_of(module) if within(name, PICKLERS)) == []
    assert dangers(read(module)) == []


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, ("digen.sched",))])
def test_the_scheduler_reads_no_wall_clock_and_draws_no_unseeded_number(module: str) -> None:
    assert clocks(read(module)) == []
    assert unseeded(read(module)) == []


class TestTheCheckerItself:
    SOURCE = """
from __future__ import annotations
import typing
from typing import TYPE_CHECKING
import a.b as c
from . import near
from ..far import thing
from digen import Pool
if TYPE_CHECKING:
    import unseen
else:
    import seen
if typing.TYPE_CHECKING:
    import unseen_too
def f():
    import inner
    if x:
        from inner.deep import y
    importlib.import_module("dynamic.one")
"""

    def test_imports(self) -> None:
        found = imports(ast.parse(self.SOURCE), "digen.sched.loop", package=False)
        assert {"a.b", "digen.sched.near", "digen.far.thing", "seen", "inner", "inner.deep.y"} <= found
        assert {"digen.workers", "dynamic.one"} <= found
        assert not {"unseen", "unseen_too"} & found
        assert "digen.sched.near" in imports(ast.parse("from .near import x"), "digen.sched", package=True)

    @pytest.mark.parametrize(
        "source",
        [
            "eval('1')",
            "def f():\n    exec(x)",
            "subprocess.run('ls', shell=True)",
            "subprocess.run('ls', shell=flag)",
            "yaml.load(text)",
            "from yaml import load",
            "os.system('ls')",
            "torch.load(path)",
            "torch.load(path, weights_only=False)",
            "np.load(path, allow_pickle=True)",
        ],
    )
    def test_dangers(self, source: str) -> None:
        assert len(dangers(ast.parse(source))) == 1

    def test_what_is_no_danger(self) -> None:
        harmless = (
            "model.eval()\nyaml.safe_load(t)\nrun(x, shell=False)\ntorch.load(p, weights_only=True)\nself.exec(1)"
        )
        assert dangers(ast.parse(harmless)) == []

    @pytest.mark.parametrize(
        "source", ["time.time()", "from time import time", "datetime.datetime.now(UTC)", "f(time.time)"]
    )
    def test_clocks(self, source: str) -> None:
        assert len(clocks(ast.parse(source))) == 1
        assert clocks(ast.parse("time.monotonic(); loop.time(); self.now")) == []

    @pytest.mark.parametrize("source", ["random.shuffle(x)", "from random import choice", "random.Random()"])
    def test_unseeded(self, source: str) -> None:
        assert len(unseeded(ast.parse(source))) == 1
        assert unseeded(ast.parse("random.Random(7).shuffle(x)")) == []

"""Finding families, algorithms and rewards by name: built in, from another package's entry points, or by their path.

Nothing is imported: what a config names is located here and imported in the worker.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TypeVar

from digen.errors import ConfigError

Info = TypeVar("Info")


def find(name: str, known: Mapping[str, Info], *, field: str, group: str, wrap: Callable[[str], Info]) -> Info:
    """What ``name`` stands for.

    Args:
        name: as the config has it.
        known: what is built in.
        field: the config's field, for errors.
        group: the group of entry points in which other packages offer theirs.
        wrap: makes the information of a target ``package.module:attribute`` of another package.

    Raises:
        ConfigError: nothing is called so, or its module cannot be found.
    """
    if name in known:
        return known[name]
    offered = {point.name: point.value for point in entry_points(group=group)}
    target = offered.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        names = sorted({*known, *offered})
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown {field} {name!r}; {hint}known: {', '.join(names)}; your own is written package.module:attribute"
        )
    if not all(part.isidentifier() for part in module.split(".")) or not attribute.isidentifier():
        raise ConfigError(f"{field} {name!r} is not of the form package.module:attribute")
    _locate(module, f"{field} {name!r}")
    return wrap(target)


def _locate(module: str, what: str) -> None:
    # importlib.util.find_spec("a.b") imports a; the path finder takes a's search path instead of a itself.
    top, *rest = module.split(".")
    path: Sequence[str] | None = None
    found = importlib.util.find_spec(top)
    name = top
    for part in rest:
        path = found.submodule_search_locations if found is not None else None
        if path is None:
            break
        name = f"{name}.{part}"
        # By its last part: the finder looks no farther, and for a folder without __init__.py it would ask for the
        # parent module, which is not imported.
        found = importlib.machinery.PathFinder.find_spec(part, list(path))
    if found is None or name != module:
        missing = name if found is None else f"{name}.{module.removeprefix(name + '.').split('.')[0]}"
        raise ConfigError(
            f"{what}: module {missing!r} cannot be found; "
            "install it, or add its folder to PYTHONPATH of the process that starts the run"
        )

"""Prompt sources: a text file, JSON lines, CSV or a Hugging Face data set.

============================  ======================================================================
``prompts.txt``               a prompt a line; blank lines are skipped
``prompts.jsonl``             an object a line; blank lines are skipped
``prompts.csv``               a header, then a prompt a row
``hf:NAME``                   a data set on the Hugging Face hub, through ``datasets``
a folder, or ``hf:FOLDER``    a data set written by ``datasets.save_to_disk``
============================  ======================================================================

``column`` names the key or column that holds the text; the others become the prompt's metadata. Text files are
UTF-8. Shuffling and epochs belong to :class:`digen.Plan`.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from digen.errors import ConfigError
from digen.extras import explain
from digen.types import Prompt, derive_seed

if TYPE_CHECKING:
    from digen.config import PromptSection


class PromptSet(Struct, frozen=True):
    """The prompts of a run, both parts in the order of their source."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    """For evaluation. No text of it is trained on, unless ``held_out`` is 0: then it equals ``train``."""


def load_prompts(section: PromptSection, default: Path | None, seed: int) -> PromptSet:
    """Read the prompts that ``section`` names and split off the held-out ones.

    Args:
        section: where the prompts are and how many are wanted.
        default: the source to use when ``section`` names none, usually the model family's own.
        seed: the run's seed; draws the held-out prompts from a stream of its own, so that neither shuffling nor the
            number of steps changes them.

    Raises:
        ConfigError: there is no such source, it cannot be read, it holds no prompts, or fewer than are to be held
            out; the message names the file and line.
        MissingExtra: the source is a Hugging Face data set and ``datasets`` is not installed.
    """
    source = section.source if section.source is not None else default
    if source is None:
        raise ConfigError("prompts.source is not set and the model family has no prompts of its own; name a file")
    prompts = list(islice(_read(str(source), section), section.limit))
    if not prompts:
        raise ConfigError(f"{source} holds no prompts")
    if section.held_out == 0:
        return PromptSet(train=tuple(prompts), held_out=tuple(prompts))
    return _split(prompts, section.held_out, seed, str(source))


def _split(prompts: list[Prompt], num_held_out: int, seed: int, source: str) -> PromptSet:
    # Texts are drawn, not rows: a copy of a held-out prompt must not be trained on.
    first = {prompt.text: prompt for prompt in reversed(prompts)}
    texts = list(reversed(first))
    if num_held_out >= len(texts):
        raise ConfigError(
            f"prompts.held_out={num_held_out} leaves nothing to train on: {source} gives {len(texts)} different "
            f"prompts; hold out at most {len(texts) - 1}"
        )
    stream = random.Random(derive_seed(seed, "held_out"))  # noqa: S311 - not for secrets
    drawn = set(stream.sample(texts, num_held_out))
    return PromptSet(
        train=tuple(prompt for prompt in prompts if prompt.text not in drawn),
        held_out=tuple(first[text] for text in texts if text in drawn),
    )


def _read(source: str, section: PromptSection) -> Iterator[Prompt]:
    if source.startswith("hf:"):
        return _read_hugging_face(source.removeprefix("hf:"), section)
    path = Path(source)
    if path.is_dir():
        return _read_hugging_face(source, section)
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"prompts.source={source}: unknown kind of file {path.suffix!r}; known: {', '.join(readers)}, and hf:NAME "
            "for a Hugging Face data set"
        )
    return reader(path, section.column)


def _read_txt(path: Path, column: str) -> Iterator[Prompt]:
    for line in io.StringIO(_text(path), newline=None):
        if text := line.strip():
            yield Prompt(text=text)


def _read_jsonl(path: Path, column: str) -> Iterator[Prompt]:
    for number, line in enumerate(io.StringIO(_text(path), newline=None), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object such as {{{column!r}: ...}}, got {type(row).__name__}")
        yield _prompt(row, column, where)


def _read_csv(path: Path, column: str) -> Iterator[Prompt]:
    rows = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    number = 1
    try:
        header = next(rows, [])
        if header:
            _require(column, header, f"{path} line 1")
        if len(set(header)) < len(header):
            raise ConfigError(f"{path} line 1: a column name occurs twice: {', '.join(header)}")
        number = rows.line_num + 1
        for row in rows:
            if row:
                if len(row) != len(header):
                    raise ConfigError(f"{path} line {number}: {len(row)} fields, but the header has {len(header)}")
                yield _prompt(dict(zip(header, row, strict=True)), column, f"{path} line {number}")
            number = rows.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{path} line {number}: not valid CSV: {error}") from None


def _read_hugging_face(name: str, section: PromptSection) -> Iterator[Prompt]:
    try:
        import datasets  # optional, and slow to import
    except ImportError as error:
        explain(error, "data")
        raise
    where = f"hf:{name}"
    try:
        if Path(name).is_dir():
            rows = datasets.load_from_disk(name)
            if isinstance(rows, datasets.DatasetDict):
                _require(section.split, rows, where, what="split")
                rows = rows[section.split]
        else:
            rows = datasets.load_dataset(name, split=section.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error}") from error
    _require(section.column, rows.column_names, where)
    # Images and the like would be decoded row by row and cannot travel as metadata.
    plain = [key for key, feature in rows.features.items() if key == section.column or _is_plain(feature, datasets)]
    for number, row in enumerate(rows.select_columns(plain)):
        yield _prompt(msgspec.to_builtins(row), section.column, f"{where} row {number}")


def _is_plain(feature: Any, datasets: Any) -> bool:
    if isinstance(feature, dict):
        return all(_is_plain(part, datasets) for part in feature.values())
    if isinstance(feature, list):
        return all(_is_plain(part, datasets) for part in feature)
    if hasattr(feature, "feature"):
        return _is_plain(feature.feature, datasets)
    return isinstance(feature, datasets.Value | datasets.ClassLabel)


def _prompt(row: dict[str, Any], column: str, where: str) -> Prompt:
    _require(column, row, where)
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {column!r} must be text, got {text!r} ({type(text).__name__})")
    if not text.strip():
        raise ConfigError(f"{where}: the prompt is empty")
    return Prompt(text=text, metadata={key: value for key, value in row.items() if key != column})


def _require(name: str, known: Iterable[str], where: str, what: str = "column") -> None:
    names = list(known)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(names) or 'none'}"
    raise ConfigError(f"{where} has no {what} {name!r}; {hint} (set prompts.{what})")


def _text(path: Path) -> str:
    try:
        return path.read_bytes().removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"prompt file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} line {line}: not UTF-8 text; save the file as UTF-8") from None

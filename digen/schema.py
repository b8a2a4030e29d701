"""What the sections of a config have in common."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A part of a config: frozen, unknown keys are errors, the docstring under a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes true for 1: a limit of one byte, or one restart.
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        if kinds & {int, float, Decimal, ByteSize} and not kinds & {bool, Any} and (found := _truths(value)):
            raise ValueError(f"{str(found[0]).lower()} is not a number")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of."""
    args = get_args(annotation)
    return set().union(*map(_kinds, args)) if args else {annotation}


def _truths(value: Any) -> list[bool]:
    """The booleans in plain data."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [value] if isinstance(value, bool) else [found for item in items for found in _truths(item)]

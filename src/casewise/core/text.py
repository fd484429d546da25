"""Text for people: short representations of dataclasses, and plural forms."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

FEW = 4
LONG = 60
UNIT = ("patient", "patients")  # the words for a cluster, for :func:`pluralize`; a sequence counts as a patient


def brief(record: Any) -> str:
    """Return a dataclass in one line, for its ``__repr__``, without empty fields and those with ``repr=False``."""
    shown = {field.name: getattr(record, field.name) for field in fields(record) if field.repr}
    words = [f"{name}={_value(value)}" for name, value in shown.items() if not _is_nothing(value)]
    return f"{type(record).__name__}({', '.join(words)})"


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (str, tuple, Mapping)) and not value)


def _value(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{' x '.join(str(side) for side in value.shape) or 'scalar'} {value.dtype}>"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (bool, int, Enum)) or value is None:
        return str(value)
    if isinstance(value, (str, Path)):
        text = str(value)
        return repr(text if len(text) <= LONG else f"{text[: LONG - 3]}...")
    if isinstance(value, Mapping):
        return (
            f"<{len(value)} by name>"
            if len(value) > FEW
            else _together("{}", (f"{k}: {_value(v)}" for k, v in value.items()))
        )
    if isinstance(value, (tuple, list)):
        return f"<{len(value)} items>" if len(value) > FEW else _together("()", map(_value, value))
    if is_dataclass(value) and not isinstance(value, type):
        text = repr(value)
        return text if len(text) <= LONG else f"<{type(value).__name__}>"
    return f"<{type(value).__name__} of {len(value)}>" if isinstance(value, Sized) else f"<{type(value).__name__}>"


def _together(brackets: str, parts: Any) -> str:
    return f"{brackets[0]}{', '.join(parts)}{brackets[1]}"


def pluralize(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: "1 case", "3 cases"; ``many`` is the plural if it does not end in s.

    >>> pluralize(1, "case"), pluralize(0, "labelled case"), pluralize(2, "class", "classes")
    ('1 case', '0 labelled cases', '2 classes')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"

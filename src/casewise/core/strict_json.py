"""JSON that every reader can read: infinity is the word "inf" or "-inf", and NaN, which says nothing, is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def json_text(value: Any, **options: Any) -> str:
    """Strict JSON of plain types; ``options`` are those of ``json.dumps``.

    >>> json_text({"cut": float("-inf"), "mean": float("nan")})
    '{"cut": "-inf", "mean": null}'
    """
    return json.dumps(worded(value), allow_nan=False, **options)


def json_bytes(value: Any) -> bytes:
    """A value as a small file or an answer: strict JSON, indented, keys in order."""
    return f"{json_text(value, indent=1, sort_keys=True)}\n".encode()


def worded(value: Any) -> Any:
    """The same value with words for infinities and None for NaN; NumPy's numbers as Python's."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: worded(item) for key, item in value.items()}
    return [worded(item) for item in value] if isinstance(value, list | tuple) else value


def numbered(value: Any) -> Any:
    """The inverse for parts of a file that hold numbers, where no name can be "inf"."""
    if isinstance(value, str):
        return _INFINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: numbered(item) for key, item in value.items()}
    return [numbered(item) for item in value] if isinstance(value, list) else value

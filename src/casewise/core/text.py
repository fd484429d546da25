"""Text for people: short representations of dataclasses, and plural forms."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

UNIT = ("patient", "patients")  # the words for a cluster, for :func:`pluralize`; a sequence counts as a patient


def brief(record: Any) -> str:
    """Return a dataclass in one line, for its ``__repr__``, without empty fields and those with ``repr=False``."""
    shown = {field.name: getattr(record, field.name) for field in fields(record) if field.repr}
    words = [f"{name}={_SHORT.repr(value)}" for name, value in shown.items() if not _is_nothing(value)]
    return f"{type(record).__name__}({', '.join(words)})"


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (str, tuple, Mapping)) and not value)


class _Short(reprlib.Repr):
    """Four digits of a number, the shape of an array, the begin of long texts and collections."""

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.4g}"

    def repr_ndarray(self, value: Any, level: int) -> str:
        return f"<{' x '.join(map(str, value.shape)) or 'scalar'} {value.dtype}>"

    def repr_mappingproxy(self, value: Any, level: int) -> str:
        return self.repr_dict(value, level)

    repr_float64 = repr_float


_SHORT = _Short()
_SHORT.maxdict = _SHORT.maxtuple = _SHORT.maxlist = 4
_SHORT.maxstring = _SHORT.maxother = 60


def pluralize(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: "1 case", "3 cases"; ``many`` is the plural if it does not end in s.

    >>> pluralize(1, "case"), pluralize(0, "labelled case"), pluralize(2, "class", "classes")
    ('1 case', '0 labelled cases', '2 classes')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def p_text(p: float) -> str:
    """Return a p-value with three digits; no p is 0.

    >>> p_text(0.0312), p_text(0.0002)
    ('p 0.031', 'p < 0.001')
    """
    return f"p {p:.3f}" if p >= 0.001 else "p < 0.001"

"""Cells of a CSV file that a spreadsheet shows and does not run."""

from __future__ import annotations

from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe in front; numbers stay numbers.

    >>> csv_cell("=HYPERLINK(1)"), csv_cell("-0.5"), csv_cell("case_1"), csv_cell(-2)
    ("'=HYPERLINK(1)", '-0.5', 'case_1', -2)
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def from_csv_cell(text: str) -> str:
    """The inverse of :func:`csv_cell`, for tables that are read again."""
    return text[1:] if text.startswith("'") and text[1:].startswith(_FORMULA) else text

"""What may stand in a table: a number, an estimate with its interval, or a plain statement of why there is none.

Nothing is ever blank: what was not computed says "not run", what has no value says "undefined (n=...)", and what does
not apply is a dash. The page and LaTeX print three decimals (H11); CSV and JSON keep full precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its 95 % interval; ``digits`` overrides the column's."""

    value: float
    low: float
    high: float
    digits: int | None = None


@dataclass(frozen=True)
class Pair:
    """Two numbers that are read together, such as mIoU / HA or a share with the mean of its class."""

    first: float | None
    second: float | None
    pattern: str = "{} / {}"
    first_digits: int = 3
    first_signed: bool = False
    second_signed: bool = False


@dataclass(frozen=True)
class Undefined:
    """A statistic without a value, and the number of cases that were not enough for it."""

    n: int


@dataclass(frozen=True)
class NotRun:
    """Not computed, and what it would have needed."""

    reason: str = ""


@dataclass(frozen=True)
class NotApplicable:
    """A cell that has no meaning in its row, such as the rolled-back share of a fixed budget."""


NOT_RUN = NotRun()
DASH = NotApplicable()

Cell: TypeAlias = str | bool | int | float | Estimate | Pair | Undefined | NotRun | NotApplicable | None


def number(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """A number as a person reads it: fixed decimals, a true minus sign, powers of ten where decimals would hide it.

    >>> number(-0.0049), number(0.000016), number(0.0), number(0.000016, signed=True)
    ('−0.005', '1.6e−05', '0.000', '+1.6e−05')
    """
    if value is None:
        return "not run"
    value = float(value)
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    hidden = value != 0 and abs(value) < 0.5 * 10.0**-digits
    text = f"{abs(value):.1e}" if hidden else f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 else "+" if signed and value > 0 else ""
    return sign + text.replace("e-", "e−")


def text_of(cell: Any, *, digits: int = 3, signed: bool = False) -> str:
    """A cell as plain text.

    >>> text_of(Estimate(-0.116, -0.152, -0.081)), text_of(Undefined(0)), text_of(None), text_of(DASH)
    ('−0.116 [−0.152, −0.081]', 'undefined (n=0)', 'not run', '—')
    """
    if isinstance(cell, Estimate):
        places = digits if cell.digits is None else cell.digits
        value, low, high = (number(part, places, signed=signed) for part in (cell.value, cell.low, cell.high))
        return f"{value} [{low}, {high}]"
    if isinstance(cell, Pair):
        first = number(cell.first, cell.first_digits, signed=cell.first_signed)
        return cell.pattern.format(first, number(cell.second, digits, signed=cell.second_signed))
    if isinstance(cell, Undefined):
        return f"undefined (n={cell.n})"
    if cell is None or isinstance(cell, NotRun):
        return "not run"
    if isinstance(cell, NotApplicable):
        return "—"
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, int | np.integer):
        return f"{int(cell)}"
    if isinstance(cell, float | np.floating):
        return number(float(cell), digits, signed=signed)
    return str(cell)


def in_percent(cell: Any) -> Any:
    """A share as percent; anything that is not a share stays as it is."""
    if isinstance(cell, Estimate):
        return Estimate(100 * cell.value, 100 * cell.low, 100 * cell.high, cell.digits)
    if isinstance(cell, Pair):
        return replace(cell, first=None if cell.first is None else 100 * cell.first)
    is_share = isinstance(cell, float | np.floating | int | np.integer) and not isinstance(cell, bool | np.bool_)
    return 100 * float(cell) if is_share else cell


def sort_key(cell: Any) -> float | str | None:
    """What a table sorts a cell by; None goes last."""
    if isinstance(cell, Estimate):
        cell = cell.value
    if isinstance(cell, Pair):
        cell = cell.first
    if isinstance(cell, bool | np.bool_ | int | np.integer | float | np.floating):
        value = float(cell)
        return None if math.isnan(value) else value
    return cell if isinstance(cell, str) else None


_TEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "≥": r"$\geq$", "≤": r"$\leq$"}
_TEX |= {"Δ": r"$\Delta$", "δ": r"$\delta$", "ρ": r"$\rho$", "τ": r"$\tau$", "α": r"$\alpha$", "μ": r"$\mu$"}
_TEX |= {"→": r"$\to$", "×": r"$\times$", "∞": r"$\infty$", "—": "---", "–": "--", "′": "$'$", "₀": "$_0$", "ₖ": "$_k$"}
_TEX |= {"<": "$<$", ">": "$>$", "|": r"\textbar{}", "⁺": "$^+$", "⁻": "$^-$", "←": r"$\leftarrow$"}
_TEX |= {"…": r"\ldots{}", "·": r"$\cdot$", "≈": r"$\approx$", "±": r"$\pm$", "²": "$^2$", "‖": r"$\Vert$"}


def tex_of(text: str) -> str:
    r"""Text that LaTeX prints as it stands.

    >>> tex_of("M&Ms 50 %, Δ −0.1")
    'M\\&Ms 50 \\%, $\\Delta$ $-$0.1'
    """
    return "".join(_TEX.get(letter, letter) for letter in text)

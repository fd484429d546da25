"""Tables for the page, as CSV at full precision, and as LaTeX (booktabs) in the shapes of the paper.

A cell holds a number, an estimate with its interval, or words. No cell is blank: a value that was not computed prints
"not run", a value that does not exist "undefined (n=...)", and a value that has no meaning in its row a dash. The page
and LaTeX print three decimals (H11); CSV and JSON keep full precision.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from casewise.core.formats import csv_cell


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its 95 % interval; ``digits`` overrides the column's."""

    value: float
    low: float
    high: float
    digits: int | None = None


@dataclass(frozen=True)
class PairCell:
    """Two numbers that are read together, such as mIoU / HA or a share with the mean of its class."""

    first: float | None
    second: float | None
    pattern: str = "{} / {}"
    first_digits: int = 3
    second_signed: bool = False


NOT_RUN = "not run"
DASH = "—"

Cell: TypeAlias = str | bool | int | float | Estimate | PairCell | None


def undefined(n: int) -> str:
    """Return the words for a statistic without a value; ``n`` cases were not enough for it."""
    return f"undefined (n={n})"


def number(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """Format a number: fixed decimals and a true minus sign; a difference that rounds to zero has no sign.

    A share whose decimals would all be zero gets two digits.

    >>> number(-0.0049), number(0.00016), number(0.0), number(-0.000016, signed=True)
    ('−0.005', '0.00016', '0.000', '0.000')
    """
    if value is None:
        return NOT_RUN
    value = float(value)
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{abs(value):.{digits}f}"
    if value and not float(text):
        return text if signed else f"{value:.2g}".replace("-", "−")
    return ("−" if value < 0 else "+" if signed and value > 0 else "") + text


def interval(value: float, low: float, high: float, digits: int = 3, *, signed: bool = False) -> str:
    """Format an estimate and its interval; beside powers of ten a zero has no decimals.

    Equal values have an interval without width, which says nothing about other patients; it is not shown.

    >>> interval(0.000016, 0.0, 0.1), interval(1.0, 1.0, 1.0)
    ('1.6e−05 [0, 0.100]', '1.000 (no interval)')
    """
    if value == value and not low < high:
        return f"{number(value, digits, signed=signed)} (no interval)"
    parts = [number(part, digits, signed=signed) for part in (value, low, high)]
    if any("e−" in part for part in parts):
        parts = ["0" if one == 0 else part for one, part in zip((value, low, high), parts, strict=True)]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]"


def text_of(cell: Any, *, digits: int = 3, signed: bool = False) -> str:
    """Format a cell as plain text.

    >>> text_of(Estimate(-0.116, -0.152, -0.081)), text_of(None), text_of(DASH)
    ('−0.116 [−0.152, −0.081]', 'not run', '—')
    """
    if isinstance(cell, Estimate):
        places = digits if cell.digits is None else cell.digits
        return interval(cell.value, cell.low, cell.high, places, signed=signed)
    if isinstance(cell, PairCell):
        first = number(cell.first, cell.first_digits)
        return cell.pattern.format(first, number(cell.second, digits, signed=cell.second_signed))
    if cell is None:
        return NOT_RUN
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, int | np.integer):
        return f"{int(cell)}"
    if isinstance(cell, float | np.floating):
        return number(float(cell), digits, signed=signed)
    return str(cell)


def in_percent(cell: Any) -> Any:
    """Return a share as percent; words and truth values stay as they are."""
    if isinstance(cell, Estimate):
        return Estimate(100 * cell.value, 100 * cell.low, 100 * cell.high, cell.digits)
    if isinstance(cell, PairCell):
        return replace(cell, first=None if cell.first is None else 100 * cell.first)
    is_share = isinstance(cell, float | np.floating | int | np.integer) and not isinstance(cell, bool | np.bool_)
    return 100 * float(cell) if is_share else cell


def sort_key(cell: Any) -> float | None:
    """Return the number by which a table sorts a cell; None if the cell has none."""
    if isinstance(cell, Estimate | PairCell):
        cell = cell.value if isinstance(cell, Estimate) else cell.first
    if cell is None or isinstance(cell, str) or math.isnan(cell):
        return None
    return float(cell)


_TEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "≥": r"$\geq$", "≤": r"$\leq$"}
_TEX |= {"Δ": r"$\Delta$", "δ": r"$\delta$", "ρ": r"$\rho$", "τ": r"$\tau$", "α": r"$\alpha$", "μ": r"$\mu$"}
_TEX |= {"→": r"$\to$", "×": r"$\times$", "∞": r"$\infty$", "—": "---", "–": "--", "′": "$'$", "₀": "$_0$", "ₖ": "$_k$"}
_TEX |= {"<": "$<$", ">": "$>$", "|": r"\textbar{}", "⁺": "$^+$", "⁻": "$^-$", "←": r"$\leftarrow$", "₁": "$_1$"}
_TEX |= {"…": r"\ldots{}", "·": r"$\cdot$", "≈": r"$\approx$", "±": r"$\pm$", "²": "$^2$", "‖": r"$\Vert$"}
_TEX |= {"ŷ": r"$\hat y$"}


def tex_of(text: str) -> str:
    r"""Escape text so that LaTeX prints it unchanged.

    >>> tex_of("M&Ms 50 %, Δ −0.1")
    'M\\&Ms 50 \\%, $\\Delta$ $-$0.1'
    """
    return "".join(_TEX.get(letter, letter) for letter in text)


@dataclass(frozen=True)
class Column:
    """A column: the key of its cells, its heading, and how its numbers are printed."""

    key: str
    title: str
    digits: int = 3
    signed: bool = False
    text: bool = False  # left-aligned words instead of numbers
    percent: bool = False  # a share in [0, 1] that is printed as percent; CSV keeps the share
    interval: tuple[str, str] | None = None  # the columns of its 95 % interval


@dataclass(frozen=True)
class Table:
    """Rows of named cells with a title, a caption and the label of the paper's table of the same shape."""

    id: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    caption: str = ""
    paper: str = ""  # label of a table of the paper, such as tab:mnm
    rules: Collection[int] = ()  # rows with a line above
    bold: Collection[tuple[int, str]] = ()  # (row, key) of the best value of a block (H11)
    collapsed: bool = False  # the page opens the table on request

    def text(self, row: int, column: Column) -> str:
        """Format one cell for a reader."""
        cell = self.rows[row].get(column.key)
        return text_of(in_percent(cell) if column.percent else cell, digits=column.digits, signed=column.signed)

    def sort_key(self, row: int, column: Column) -> float | str:
        """Return the sort key of a cell on the page; an empty string goes last."""
        cell = self.rows[row].get(column.key)
        key = cell if column.text and isinstance(cell, str) else sort_key(cell)
        return "" if key is None else key


def rows_of(frame: pd.DataFrame, columns: Sequence[Column]) -> list[dict[str, Cell]]:
    """Return the rows of a frame: NaN becomes "undefined (n=...)", a column that is missing "not run"."""
    return [{column.key: _cell(row, column) for column in columns} for row in frame.to_dict("records")]


def _cell(row: Mapping[str, Any], column: Column) -> Cell:
    value = row.get(column.key)
    value = value.item() if isinstance(value, np.generic) else value
    if column.key not in row or isinstance(value, str | bool | Estimate | PairCell):
        return DASH if value == "" else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        n = row.get("n", 0)
        return undefined(0 if n is None or math.isnan(n) else int(n))
    if column.interval and not math.isnan(row[column.interval[0]]):
        low, high = (float(row[key]) for key in column.interval)
        return Estimate(float(value), low, high)
    return value if isinstance(value, int | float) else str(value)


def best(
    rows: Sequence[Mapping[str, Cell]], key: str, among: Iterable[int], pick: Callable[[Iterable[float]], float]
) -> set[tuple[int, str]]:
    """Return the cells, among some rows, with the smallest (``min``) or largest (``max``) printed number (H11)."""
    numbers = {row: rows[row].get(key) for row in among}
    values = {row: round(cell, 3) for row, cell in numbers.items() if isinstance(cell, float) and cell == cell}
    return {(row, key) for row, value in values.items() if value == pick(values.values())}


def csv_text(made: Table) -> str:
    """Write a table as CSV at full precision; an interval becomes three columns ``key, key_low, key_high``."""
    spread = {column.key: _parts(made, column) for column in made.columns}
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([name for names in spread.values() for name in names])
    for row in made.rows:
        cells = [value for key, names in spread.items() for value in _values(row.get(key), len(names))]
        writer.writerow([csv_cell(value) for value in cells])
    return text.getvalue()


def write_csv(path: Path, made: Table) -> None:
    """Write a table as CSV."""
    path.write_bytes(csv_text(made).encode())


def _parts(made: Table, column: Column) -> list[str]:
    cells = [row.get(column.key) for row in made.rows]
    if any(isinstance(cell, Estimate) for cell in cells):
        return [column.key, f"{column.key}_low", f"{column.key}_high"]
    if any(isinstance(cell, PairCell) for cell in cells):
        return [column.key, f"{column.key}_second"]
    return [column.key]


def _values(cell: Any, width: int) -> list[Any]:
    """Return the CSV value of a cell; a cell without an interval repeats its words or says "undefined"."""
    if isinstance(cell, Estimate):
        return [_written(part) for part in (cell.value, cell.low, cell.high)]
    if isinstance(cell, PairCell):
        return [_written(part) for part in (cell.first, cell.second)]
    if isinstance(cell, bool) or sort_key(cell) is None:
        return [text_of(cell)] * width
    return [cell] + ["undefined"] * (width - 1)


def _written(part: float | None) -> str:
    return text_of(part) if part is None or math.isnan(part) else repr(float(part))


def markdown(made: Table) -> str:
    """Write a table as Markdown, with its caption below."""
    lines = [[column.title for column in made.columns], ["---"] * len(made.columns)]
    lines += [
        [made.text(row, column).replace("|", "/").replace("<", "&lt;") for column in made.columns]
        for row in range(len(made.rows))
    ]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{made.caption}" if made.caption else text


def tex(made: Table) -> str:
    """Return a booktabs tabular with the caption as a comment; ``\\input`` it inside your own table environment."""
    letters = "".join("l" if column.text else "c" for column in made.columns)
    lines = [f"% {made.title}. {made.caption}".replace("\n", " "), rf"\begin{{tabular}}{{{letters}}}", r"\toprule"]
    lines += [" & ".join(tex_of(column.title) for column in made.columns) + r" \\", r"\midrule"]
    for row in range(len(made.rows)):
        if row in made.rules and row:
            lines.append(r"\midrule")
        texts = {column.key: tex_of(made.text(row, column)) for column in made.columns}
        cells = [rf"\textbf{{{text}}}" if (row, key) in made.bold else text for key, text in texts.items()]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

"""The common frame of the analyses: findings (tidy tables at full precision) and the section that shows them."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.core.errors import BadInput
from casewise.render.ink import Picture
from casewise.render.tables import Cell, Column, Table, rows_of


@dataclass(frozen=True, eq=False)
class Finding:
    """The result of one computation. NaN in ``table`` means undefined; the row's ``n`` and ``reason`` say why."""

    name: str  # stable key, such as "deployment.intervals"
    table: pd.DataFrame
    n: int  # number of cases
    spec: str  # items of the specification, such as "H1-H9"
    made: Mapping[str, Any] = field(default_factory=dict)  # options, seed, proof of the random stream, scalar results
    notes: tuple[str, ...] = ()  # sentences for a person
    reason: str = ""  # why there is no result; "" if there is one

    def row(self, **where: Any) -> pd.Series:
        """Return the one row that matches."""
        chosen = self.table
        for column, value in where.items():
            chosen = chosen[chosen[column] == value]
        if len(chosen) != 1:
            raise BadInput(f"{self.name} has {len(chosen)} rows with {where}, expected one; see its table")
        return chosen.iloc[0]

    def number(self, column: str, **where: Any) -> float:
        """Return one number of the table."""
        return float(self.row(**where)[column])


@dataclass(frozen=True, eq=False)
class Section:
    """The result of one analysis: a sentence or two, tables, figures, and the findings behind them."""

    id: str  # name of the analysis in ANALYSES
    title: str
    lead: str = ""  # the result in a sentence or two
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: tuple[Finding, ...] = ()  # go to results.json at full precision
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)  # what is not computed, and the inputs it needs


INTERVAL = ("low", "high")


def _headings() -> Iterator[Column]:
    with Path(__file__).with_name("headings.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            options: dict[str, Any] = dict.fromkeys(row["format"].split(), True)
            interval = INTERVAL if options.pop("interval", False) else None
            yield Column(row["key"], row["title"], int(row["digits"]), interval=interval, **options)


HEADS = {one.key: one for one in _headings()}
"""Heading and format of every quantity that several tables show; ``{metric}`` becomes the name of the metric."""


def show(
    id: str, title: str, found: Finding | pd.DataFrame | Sequence[Mapping[str, Cell]], keys: str = "", *,
    heads: Mapping[str, str | Column] | None = None, caption: str = "", paper: str = "", rules: Collection[int] = (),
    bold: Collection[tuple[int, str]] = (), collapsed: bool = False,
) -> Table:  # fmt: skip
    """Make a table of a finding, a frame or rows of cells.

    Args:
        id: Name of the files.
        title: Heading.
        found: The finding or table to show.
        keys: Columns with spaces between; all of a frame by default.
        heads: Headings of columns that :data:`HEADS` lacks or that differ here.
        caption: Text below the table.
        paper: Label of the table of the paper that has this shape.
        rules: Rows with a line above.
        bold: (row, key) of bold cells.
        collapsed: True if the page opens the table on request only.
    """
    frame = found.table if isinstance(found, Finding) else found
    is_frame = isinstance(frame, pd.DataFrame)
    named = keys.split() or ([str(key) for key in frame] if is_frame else list(frame[0] if len(frame) else ()))
    columns = [_column(key, frame if is_frame else None, heads or {}) for key in named]
    cells: Any = rows_of(frame, columns) if is_frame else frame
    return Table(id, title, columns, cells, caption, paper, rules, bold, collapsed)


def _column(key: str, frame: pd.DataFrame | None, heads: Mapping[str, str | Column]) -> Column:
    asked = heads.get(key)
    if isinstance(asked, Column):
        return asked
    words = frame is not None and key in frame and not pd.api.types.is_numeric_dtype(frame[key])
    known = HEADS.get(key, Column(key, key.replace("_", " "), text=words))
    if known.interval and (frame is None or known.interval[0] not in frame):
        known = Column(key, known.title, known.digits, known.signed)
    return known if asked is None else Column(key, asked, known.digits, known.signed, known.text, known.percent)


def not_run(id: str, title: str, what: str, reason: str) -> Section:
    """Return the section of an analysis that cannot be computed, with the missing input."""
    return Section(id, title, missing={what: reason})


def sentences(finding: Finding) -> str:
    """Join the notes of a finding to a paragraph."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in finding.notes)


def notes_of(*findings: Finding) -> tuple[str, ...]:
    """Return the notes of several findings, each once."""
    return tuple(dict.fromkeys(note for finding in findings for note in finding.notes))


def rows(records: Iterable[Any], columns: str | Sequence[str]) -> pd.DataFrame:
    """Make a frame with exactly these columns, also if there is no record; records are mappings or tuples."""
    names = columns.split() if isinstance(columns, str) else list(columns)
    return pd.DataFrame.from_records(list(records), columns=names)


def need_columns(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Refuse a frame that lacks columns."""
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise BadInput(f"{what} needs the columns {missing}, got {list(frame.columns)}; build it with judge.outcomes")

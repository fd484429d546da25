"""What an analysis gives: findings (tidy tables at full precision), and the section that shows them to a person."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from casewise.core.errors import BadInput
from casewise.render.ink import Picture
from casewise.render.tables import Column, Table, rows_of, table


@dataclass(frozen=True, eq=False)
class Finding:
    """The answer of one analysis. NaN in ``table`` means undefined; the row's ``n`` and ``reason`` say why."""

    name: str  # stable key, such as "deployment.intervals"
    table: pd.DataFrame
    n: int  # cases that it rests on
    spec: str  # "H1-H9"
    made: Mapping[str, Any] = field(default_factory=dict)  # options, seed, proof of the random stream, scalar results
    notes: tuple[str, ...] = ()  # sentences for a person
    reason: str = ""  # why there is nothing; "" when there is something

    def row(self, **where: Any) -> pd.Series:
        """The one row that fits; an error names what was asked for when none or several do."""
        chosen = self.table
        for column, value in where.items():
            chosen = chosen[chosen[column] == value]
        if len(chosen) != 1:
            raise BadInput(f"{self.name} has {len(chosen)} rows with {where}, expected one; see its table")
        return chosen.iloc[0]

    def number(self, column: str, **where: Any) -> float:
        """One number of the table."""
        return float(self.row(**where)[column])


@dataclass(frozen=True, eq=False)
class Section:
    """What one analysis says: a sentence or two, tables, pictures, and the findings behind them."""

    id: str  # the name of the analysis in ANALYSES
    title: str
    lead: str = ""  # the finding, in a sentence or two
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    findings: tuple[Finding, ...] = ()  # go to results.json at full precision
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)  # what was not run, and what it needs


def plain_table(id: str, title: str, finding: Finding, *, caption: str = "") -> Table:
    """Every column of a finding as it is, for analyses whose table needs no shape of its own."""
    columns = [
        Column(str(name), str(name).replace("_", " "), text=not pd.api.types.is_numeric_dtype(finding.table[name]))
        for name in finding.table
    ]
    return table(id, title, columns, rows_of(finding.table, columns), caption=caption)


def sentences(finding: Finding) -> str:
    """The notes of a finding as one paragraph."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in finding.notes)


def notes_of(*findings: Finding) -> tuple[str, ...]:
    """The notes of several findings, each once."""
    return tuple(dict.fromkeys(note for finding in findings for note in finding.notes))


def rows(records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Records as a frame with exactly these columns, also when there is no record."""
    return pd.DataFrame.from_records([dict(record) for record in records], columns=list(columns))


def need_columns(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Refuse a frame that lacks columns, naming them."""
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise BadInput(f"{what} needs the columns {missing}, got {list(frame.columns)}; build it with judge.outcomes")

"""What one analysis found: a tidy table, the cases it rests on, how it was made, and why it is undefined if it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from casewise.core.errors import BadInput


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


def rows(records: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Records as a frame with exactly these columns, also when there is no record."""
    return pd.DataFrame.from_records([dict(record) for record in records], columns=list(columns))


def need_columns(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Refuse a frame that lacks columns, naming them."""
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise BadInput(f"{what} needs the columns {missing}, got {list(frame.columns)}; build it with judge.outcomes")


def is_undefined(value: float | None) -> bool:
    """Whether there is no number."""
    return value is None or math.isnan(value)

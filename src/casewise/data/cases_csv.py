"""``cases.csv``: which column says group, cluster and split, and the values for each case."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from casewise.core.csv_text import csv_cell, from_csv_cell
from casewise.core.errors import BadInput
from casewise.core.records import made_case_id
from casewise.data.cohort import Cohort

NAME = "cases.csv"
COLUMNS = {
    "group": ("group", "site", "vendor", "condition", "domain", "centre", "center"),
    "cluster": ("cluster", "patient", "subject", "sequence"),
    "split": ("split",),
}
"""For each property the columns that may say it; the first that the table has is taken, and the facts name it."""


class Unopened(Protocol):
    """A case whose files are known and not yet opened: a loader's or an input folder's."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def id(self) -> str:
        """The case."""
        ...

    @property
    def group(self) -> str | None:
        """Site, vendor, condition."""
        ...

    @property
    def cluster(self) -> str | None:
        """Patient, sequence."""
        ...

    @property
    def split(self) -> str | None:
        """Calibration, evaluation."""
        ...


Found = TypeVar("Found", bound=Unopened)


@dataclass(frozen=True)
class Table:
    """The rows of a table by case, and the column that each property is read from (None: no column says it)."""

    name: str  # of the file
    rows: Mapping[str, Mapping[str, str]]
    columns: Mapping[str, str | None]

    @property
    def facts(self) -> dict[str, str]:
        """Where each property comes from, in words."""
        return {name: f"column {column} of {self.name}" for name, column in self.columns.items() if column}


def table_for(root: Path) -> Path | None:
    """``cases.csv`` in a folder or one level above it."""
    return next((path for path in (root / NAME, root.resolve().parent / NAME) if path.is_file()), None)


def read_table(path: Path) -> Table:
    """Read a table that has the column ``case``; every case may stand in it once."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        read = csv.DictReader(file)
        rows = [{name: from_csv_cell(cell or "") for name, cell in row.items() if name} for row in read]
    if not rows or "case" not in rows[0]:
        known = ", ".join(column for names in COLUMNS.values() for column in names)
        raise BadInput(f"{path} needs a header with case and any of {known}")
    by_case = {made_case_id(row["case"]): row for row in rows}  # as file names become ids
    if len(by_case) < len(rows):
        twice = sorted(case for case in by_case if sum(made_case_id(row["case"]) == case for row in rows) > 1)
        raise BadInput(f"{path} has more than one row for {twice[:5]}; keep one a case")
    columns = {name: next((column for column in known if column in rows[0]), None) for name, known in COLUMNS.items()}
    return Table(path.name, by_case, columns)


def with_table(found: Sequence[Found], table: Table) -> list[Found]:
    """Cases with what the table says of them; what it leaves open stays as it was found."""
    missing = [one.id for one in found if one.id not in table.rows]
    if missing:
        raise BadInput(f"{table.name} has no row for {missing[:5]} ({len(missing)} cases); add them")
    return [_described(one, table) for one in found]


def _described(one: Found, table: Table) -> Found:
    def said(name: str, found: str | None) -> str | None:
        column = table.columns[name]
        return (table.rows[one.id][column] if column else None) or found

    return replace(
        one, group=said("group", one.group), cluster=said("cluster", one.cluster), split=said("split", one.split)
    )


def write_table(cohort: Cohort, folder: Path) -> Path:
    """Write ``cases.csv``: case, group, cluster, split."""
    with (folder / NAME).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["case", "group", "cluster", "split"])
        cells = ([m.id, m.group or "", m.cluster or "", m.split or ""] for m in cohort.members.values())
        rows.writerows([csv_cell(cell) for cell in row] for row in cells)
    return folder / NAME

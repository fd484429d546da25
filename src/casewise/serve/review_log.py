"""Decisions of reviewers: appended to reviews.jsonl and to the audit log, never edited; the last one of a case counts.

Both files are hash chains (:mod:`casewise.core.chain`). ``casewise calibrate --reviews`` reads reviews.jsonl.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from casewise.core.chain import Chain
from casewise.core.csv_text import csv_cell
from casewise.core.errors import BadInput
from casewise.core.records import check_case_id

REVIEWS = "reviews.jsonl"
EVENT = "review"
DECISIONS = ("keep-m0", "keep-adapted", "flag")
NAME_LENGTH, NOTE_LENGTH = 100, 500


@dataclass(frozen=True)
class Review:
    """One decision of one person about one output."""

    case: str
    decision: str  # keep-m0, keep-adapted or flag
    reviewer: str
    about: str  # sha256 of what was looked at
    adapted: str | None = None  # the adapted state that was looked at; None where its mask was not there
    note: str = ""

    def __post_init__(self) -> None:
        check_case_id(self.case)
        if self.decision not in DECISIONS:
            raise BadInput(f"a decision is one of {', '.join(DECISIONS)}, got {self.decision!r}")
        if not self.reviewer.strip() or len(self.reviewer) > NAME_LENGTH or not self.reviewer.isprintable():
            raise BadInput(f"a reviewer's name has 1 to {NAME_LENGTH} printable characters; enter yours first")
        if len(self.note) > NOTE_LENGTH:
            raise BadInput(f"a note has at most {NOTE_LENGTH} characters, got {len(self.note)}; shorten it")


@dataclass(frozen=True)
class ReviewLog:
    """reviews.jsonl of a folder, and the audit log that gets the same lines."""

    path: Path
    audit: Path | None = None

    @property
    def problems(self) -> list[str]:
        """What is wrong with the chains; empty where every line follows from the one before."""
        paths = [path for path in (self.path, self.audit) if path is not None]
        return [problem for path in paths for problem in Chain(path).problems]

    def check(self) -> None:
        """Refuse to append to a file that is something else."""
        for problem in self.problems:
            if problem.endswith("is not a line of a hash-chained log"):
                raise BadInput(f"{problem}; move the file away, or restore it, before reviewing")

    def append(self, review: Review) -> None:
        """Write one decision, durably: the audit log first, then the reviews."""
        facts = asdict(review)
        if self.audit is not None:
            Chain(self.audit).append(EVENT, facts)
        Chain(self.path).append(EVENT, facts)

    def lines(self) -> list[dict[str, Any]]:
        """Every decision, oldest first."""
        return [line for line in Chain(self.path).lines() if line.get("event") == EVENT]

    def latest(self) -> dict[str, dict[str, Any]]:
        """The last decision of each case."""
        return {line["case"]: line for line in self.lines()}


COLUMNS = (
    "case", "decision", "reviewer", "time", "current", "note", "adapted", "group", "status", "action", "coordinate",
    "value", "risk", "about",
)  # fmt: skip


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table; a cell that a spreadsheet would take for a formula gets an apostrophe in front."""
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(["" if row.get(name) is None else csv_cell(row[name]) for name in COLUMNS] for row in rows)
    return buffer.getvalue()

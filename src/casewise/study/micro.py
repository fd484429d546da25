"""mIoU over all voxels of a cohort by step: what panel A of the teaser shows, beside the tables' case mean (A11)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.archive.tables import cached_table
from casewise.core.records import Mask, State
from casewise.core.strict_json import json_text
from casewise.measure.metrics.overlap import micro_miou
from casewise.study.finding import Finding, rows

_VERSION = 1  # of the table; raise it when a column changes its meaning


def micro_ladder(archive: Archive, *, by_group: bool = False) -> Finding:
    """Micro-mIoU at every step, M0 included: counts of all voxels are added before they are divided (A11).

    Made from masks and labels once, then kept beside the archive. Cases without a label are left out.
    """
    ignore = archive.configuration.get("ignore")
    key = json_text([_VERSION, archive.digest, ignore, by_group])
    name = f"micro-{hashlib.sha256(key.encode()).hexdigest()}"
    table = cached_table(archive.path, name, lambda: _table(archive, ignore, by_group))
    labelled = sum(entry.labelled for entry in archive.entries.values())
    made = {"by_group": by_group, "average": "micro", "ignore": ignore}
    return Finding("budget.micro", table, labelled, "A11, G1", made)


def _table(archive: Archive, ignore: int | None, by_group: bool) -> pd.DataFrame:
    records: list[dict[str, Any]] = [
        {"group": group, "step": step, "n": len(ids), "micro_miou": _at(archive, ids, step, ignore)}
        for group, ids in _scopes(archive, by_group)
        for step in range(archive.steps + 1)
    ]
    return rows(records, ("group", "step", "n", "micro_miou"))


def _at(archive: Archive, ids: list[str], step: int, ignore: int | None) -> float:
    return micro_miou(_pairs(archive, ids, State(step)), ignore=ignore)


def _pairs(archive: Archive, ids: list[str], state: State) -> Iterator[tuple[Mask, Mask]]:
    return ((archive.mask(case_id, state), archive.label(case_id)) for case_id in ids)


def _scopes(archive: Archive, by_group: bool) -> Iterator[tuple[str, list[str]]]:
    scored = {name: entry.group for name, entry in archive.entries.items() if entry.labelled}
    yield "all", list(scored)
    if by_group:
        for group in sorted({one for one in scored.values() if one is not None}):
            yield group, [name for name, of in scored.items() if of == group]

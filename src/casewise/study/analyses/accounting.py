"""Where the edited area went, for all cases, for cases with regions, for retained cases, by bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pandas as pd

from casewise.render.tables import Column, rows_of, table
from casewise.study.finding import Finding, Section, rows
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan


def section(study: Study) -> Section:
    """tab:app-accounting."""
    found = accounting_of(study)
    columns = (
        Column("method", "Method", text=True),
        Column("bucket", "Bucket", text=True),
        Column("n", "n"),
        Column("ha", "HA"),
        Column("ba", "BA"),
        Column("ratio", "BA/HA", 2),
        Column("scored", "n with regions"),
        Column("ha_within", "HA within"),
        Column("coverage", "coverage", 6),
    )
    named = found.table.assign(method=[study.title(name) for name in found.table["method"]])
    caption = (
        "HA over all cases; within: over the cases with a region that counts; coverage: mean share of voxels that the "
        "deployed edit touches. BA/HA is a ratio of cohort means."
    )
    rows = rows_of(named, columns)
    edits = table("accounting", "Edit accounting", columns, rows, caption=caption, paper="tab:app-accounting")
    lead = "Low HA can come from deploying little. Coverage and the cases with regions say how much is deployed at all."
    return Section("accounting", "Edit accounting", lead, (edits,), (), (found,), found.notes)


@once
def accounting_of(study: Study) -> Finding:
    """Accounting of every method, and of the buckets of the policy where it has any."""
    return accounting(study.methods, buckets_of=(study.ours,) if study.is_router else ())


BUCKETS = ("low", "mid", "hard")


COLUMNS = (
    "method",
    "bucket",
    "n",
    "ha",
    "ba",
    "ratio",
    "scored",
    "ha_within",
    "retained",
    "ha_retained",
    "coverage",
    "reason",
)


def accounting(methods: Mapping[str, pd.DataFrame], *, buckets_of: Collection[str] = ()) -> Finding:
    """Accounting of every method, and of each bucket of the methods named in ``buckets_of``.

    ha_within = sum HA / cases with regions, so ha = ha_within * scored / n (Q8); ratio = mean BA / mean HA, comparable
    across rows where BA - HA is not (B12); coverage = mean delta of the deployed edit (B11). When a bucket is empty, no
    bucket of that method gets means (F4).
    """
    records = []
    for name, frame in methods.items():
        records.append({"method": name, "bucket": "all", **_row(frame)})
        if name in buckets_of:
            records.extend({"method": name, **row} for row in _buckets(frame))
    n = max((len(frame) for frame in methods.values()), default=0)
    return Finding("accounting", rows(records, COLUMNS), n, "M4, B10-B12")


def _row(frame: pd.DataFrame) -> dict[str, Any]:
    harm = frame["ha"].dropna()
    total, scored = float(harm.sum()), int((frame["regions"] >= 1).sum())
    retained = int((~frame["rolled_back"].astype(bool)).sum())
    ha, ba = mean_or_nan(frame["ha"]), mean_or_nan(frame["ba"])
    return {
        "n": len(harm),
        "ha": ha,
        "ba": ba,
        "ratio": ba / ha if ha > 0 else float("inf") if ba > 0 else float("nan"),
        "scored": scored,
        "ha_within": total / scored if scored else float("nan"),
        "retained": retained,
        "ha_retained": total / retained if retained else float("nan"),
        "coverage": mean_or_nan(frame["delta"]),
        "reason": "" if scored else "no case has a region",
    }


def _buckets(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    empty = [name for name in BUCKETS if not (frame["bucket"] == name).any()]
    for name in BUCKETS:
        part = frame[frame["bucket"] == name]
        if empty:
            reason = f"bucket {', '.join(empty)} is empty, so bucket means are not reported"
            yield {"bucket": name, "n": len(part), "scored": int((part["regions"] >= 1).sum()), "reason": reason}
        else:
            yield {"bucket": name, **_row(part)}

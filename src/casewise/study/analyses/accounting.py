"""Edit accounting: harmful and beneficial area of all cases, of cases with regions, and of each bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pandas as pd

from casewise.study.finding import Finding, Section, rows, show
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan

BUCKETS = ("low", "mid", "hard")
COLUMNS = "method bucket n ha ba ratio scored ha_within retained ha_retained coverage reason"


def section(study: Study) -> Section:
    """tab:app-accounting."""
    found = accounting_of(study)
    caption = (
        "HA is the mean over all cases. BA / HA is a ratio of cohort means. A low HA can come from changing little: "
        "the share of changed voxels and the cases with regions say how much was deployed."
    )
    keys = "method bucket n ha ba ratio scored ha_within coverage"
    made = show("accounting", "Edit accounting", found, keys, caption=caption, paper="tab:app-accounting")
    ours = found.row(method=study.ours, bucket="all")
    lead = f"The deployed masks of {int(ours['scored'])} of {int(ours['n'])} cases differ from M0 in a region."
    return Section("accounting", "Edit accounting", lead, (made,), (), (found,), found.notes)


@once
def accounting_of(study: Study) -> Finding:
    """Accounting of every method, and of the buckets of the policy."""
    return accounting(study.methods, buckets_of=(study.ours,) if study.is_router else ())


def accounting(methods: Mapping[str, pd.DataFrame], *, buckets_of: Collection[str] = ()) -> Finding:
    """Accounting of every method, and of each bucket of the methods in ``buckets_of``.

    ha_within = sum HA / cases with regions, so ha = ha_within * scored / n (Q8); ratio = mean BA / mean HA (B12);
    coverage = mean delta of the deployed edit (B11). If a bucket is empty, no bucket of that method gets means (F4).
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

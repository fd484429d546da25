"""Who was helped and who was hurt: the mean hides it, the counts do not (M1-M3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.study.finding import Finding, rows
from casewise.study.trajectories import mean_or_nan

CLASSES = ("helped", "hurt", "rolled_back", "unchanged")


def side(frame: pd.DataFrame) -> pd.Series:
    """Each case's class: rolled back by decision; then helped above zero, hurt below, else unchanged; no tolerance."""
    change, rolled_back = frame["change"], frame["rolled_back"].astype(bool)
    named = np.select(
        [change.isna(), rolled_back, change > 0, change < 0],
        ["undefined", "rolled_back", "helped", "hurt"],
        "unchanged",
    )
    return pd.Series(named, index=frame.index)


def help_hurt(methods: Mapping[str, pd.DataFrame]) -> Finding:
    """Counts, shares of all cases and mean change of each class, one row per method (M1).

    change = metric(deployed) - metric(M0); the overall mean is p_helped * mean_helped + p_hurt * mean_hurt (Q7).
    """
    records = [{"method": name, **_row(frame)} for name, frame in methods.items()]
    shares = [f"share_{name}" for name in CLASSES]
    columns = ("method", "n", "undefined", *CLASSES, *shares, "mean_helped", "mean_hurt", "mean_change")
    n = max((record["n"] for record in records), default=0)
    return Finding("helphurt", rows(records, columns), int(n), "M1")


def _row(frame: pd.DataFrame) -> dict[str, Any]:
    sides = side(frame)
    defined = frame[sides != "undefined"]
    n, counts = len(defined), {name: int((sides == name).sum()) for name in CLASSES}
    return {
        "n": n,
        "undefined": len(frame) - n,
        **counts,
        **{f"share_{name}": count / n if n else float("nan") for name, count in counts.items()},
        "mean_helped": mean_or_nan(frame.loc[sides == "helped", "change"]),
        "mean_hurt": mean_or_nan(frame.loc[sides == "hurt", "change"]),
        "mean_change": mean_or_nan(defined["change"]),
    }


def weaker_source(router: pd.DataFrame) -> Finding:
    """Are rolled-back cases those on which M0 was weaker to begin with? Mean M0 metric of both sides (M2)."""
    records = []
    for name, flag in (("rolled back", True), ("kept", False)):
        part = router[router["rolled_back"].astype(bool) == flag]
        reason = "" if part["metric_source"].notna().any() else f"no case was {name}"
        records.append(
            {"side": name, "n": len(part), "metric_source": mean_or_nan(part["metric_source"]), "reason": reason}
        )
    return Finding("helphurt.weaker_source", pd.DataFrame(records), len(router), "M2")


def net_helped(router: pd.DataFrame) -> Finding:
    """Go or no-go before deployment: are more kept cases of the labelled holdout helped than hurt (M3)?"""
    kept = router[~router["rolled_back"].astype(bool)]
    sides = side(kept)
    helped, hurt = int((sides == "helped").sum()), int((sides == "hurt").sum())
    reason = "" if len(kept) else "every case was rolled back, so nothing was kept to judge"
    go = helped > hurt
    table = pd.DataFrame([{"n": len(kept), "helped": helped, "hurt": hurt, "go": go, "reason": reason}])
    note = reason or f"{'go' if go else 'no-go'}: {helped} helped and {hurt} hurt of {len(kept)} kept holdout cases"
    return Finding("helphurt.net_helped", table, len(kept), "M3", notes=(note,), reason=reason)

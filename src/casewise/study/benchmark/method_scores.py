"""The numbers of one method from its cases: gain, whom it helped and hurt, harm, cost, chance, what was promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.judge.outcomes import POINT, judged_share
from casewise.measure.metrics.selective import auroc, risk_coverage
from casewise.study.statistics.chance import chance_draws
from casewise.study.statistics.resample import clusters_of as units_of
from casewise.study.statistics.resample import mean_interval

FEWEST = 5  # clusters from which an interval is given
POOR = 0.7  # cases whose metric is below this should be found by a signal of quality
DEALS, DEAL_SEED = 1000, 1000


def summary(rows: pd.DataFrame, oracle: float | None = None) -> dict[str, Any]:
    """The numbers of one method: gain with its interval by cluster, whom it helped and hurt, harm, cost.

    ``rows``: one per case, with the columns of ``judge.outcomes.deployed`` or those that a result keeps. ``oracle`` is
    the mean gain of the best recorded candidate of each case. Cases whose metric is undefined are counted, no more.
    """
    known = rows.loc[rows["change"].notna()]
    change = known["change"].to_numpy(float)
    units = units_of(known)
    several = len(change) and units.max() + 1 >= FEWEST
    gain = float(change.mean()) if len(change) else None
    interval = mean_interval(change, clusters=units) if several else None
    judged = judged_share(rows)
    return {
        "cases": len(rows),
        "clusters": int(units.max() + 1) if len(change) else 0,
        "undefined": len(rows) - len(known),
        "metric": _mean(known, "metric"),
        "gain": gain,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "captured": None if gain is None or not oracle or oracle <= 0 else gain / oracle,
        "helped": int((change > 0).sum()),
        "hurt": int((change < 0).sum()),
        "hurt_by_a_point": int((change < -POINT).sum()),
        "worst": float(change.min()) if len(change) else None,
        "ha": None if judged is None else _mean(rows, "ha"),
        "ba": None if judged is None else _mean(rows, "ba"),
        "judged": judged,
        "worse_voxels": None if judged is None else _mean(rows, "worse_voxels"),
        "flagged": int(rows["flagged"].sum()) if "flagged" in rows else None,
        "forwards": _mean(rows, "forwards"),
        "updates": _mean(rows, "updates"),
        "seconds": float(rows["seconds"].median()) if "seconds" in rows and rows["seconds"].notna().all() else None,
        **_told_apart(known),
    }


def _told_apart(rows: pd.DataFrame) -> dict[str, float | None]:
    """AURC where cases are trusted in the order of agreement, and AUROC of agreement for poor ones."""
    found: dict[str, float | None] = {"aurc": None, "aurc_best": None, "auroc": None}
    seen = rows.loc[rows["agreement"].notna()] if "agreement" in rows else rows.iloc[:0]
    if len(seen) >= 3 and seen["agreement"].nunique() > 1:
        signal, metric = seen["agreement"].to_numpy(float), seen["metric"].to_numpy(float)
        curve = risk_coverage(signal, 1 - metric)
        poor = metric < POOR
        found |= {"aurc": curve.aurc, "aurc_best": curve.optimum}
        found["auroc"] = auroc(-signal, poor) if 0 < poor.sum() < len(poor) else None
    return found


def _mean(rows: pd.DataFrame, name: str) -> float | None:
    if name not in rows or not len(rows) or rows[name].isna().any():
        return None
    return float(rows[name].mean())


def quota_p(dealt: Mapping[str, Any] | None, units: Any) -> dict[str, float | None]:
    """How often dealing the same states to the patients at random gains as much, and harms as little.

    ``units`` numbers the patient of each case. One-sided, with the observed deal among the draws.
    """
    found: dict[str, float | None] = {"p_gain": None, "p_ha": None}
    if dealt is None:
        return found
    given = np.array(dealt["given"], int)
    for name, column, sign in (("p_gain", "change", 1), ("p_ha", "ha", -1)):
        values = np.array(dealt[column], float)
        drawn = sign * chance_draws(values, given, DEALS, DEAL_SEED, np.asarray(units))
        observed = sign * float(np.nanmean(values[np.arange(len(values)), given]))
        found[name] = (1 + int((drawn >= observed - 1e-12).sum())) / (1 + DEALS)
    return found


def realised(promise: Mapping[str, Any] | None, rows: pd.DataFrame) -> float | None:
    """What a promised loss came to on the evaluation cases."""
    if promise is None:
        return None
    change = rows["change"].to_numpy(float)
    losses: dict[str, Callable[[], float]] = {
        "ha": lambda: float(rows["ha"].mean()),
        "worse-voxels": lambda: float(rows["worse_voxels"].mean()),
        "harmed": lambda: float((change[np.isfinite(change)] < -float(promise["margin"])).mean()),
        "dice": lambda: float(np.maximum(0.0, -change[np.isfinite(change)]).mean()),
    }
    return losses[promise["loss"]]()


def oracle_gain(cases: pd.DataFrame) -> float | None:
    """Mean gain of the best recorded candidate of each case, which only the label can choose."""
    gains = (cases["best"] - cases["metric"]).dropna()
    return float(gains.mean()) if len(gains) else None

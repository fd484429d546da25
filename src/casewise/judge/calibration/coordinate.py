"""Which coordinate to route on: a rule for calibration cases only, without labels, fixed before evaluation (S11)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from casewise.judge.calibration.cuts import Floats, bucket_counts, cut_points
from casewise.judge.calibration.stability import stability
from casewise.measure.signals import SIGNALS

SMALLEST_SHARE = 0.10
DISTINCT_SHARE = 2 / 3
_BOOKKEEPING = frozenset({"area", "largest"})  # counts of voxels: delta and largest_share say the same without units


def candidates(step_one: pd.DataFrame) -> dict[str, Floats]:
    """Every registered signal that all cases have, turned so that higher is riskier."""
    found = {}
    for name, info in SIGNALS.items():
        if name in step_one and name not in _BOOKKEEPING and np.isfinite(step_one[name].astype(float)).all():
            values = step_one[name].to_numpy(dtype=np.float64)
            found[name if info.higher_is_riskier else f"-{name}"] = values if info.higher_is_riskier else -values
    return found


def judged(values: Floats, convention: str) -> dict[str, Any]:
    """One coordinate: its cuts, its buckets, and why it is unfit; stability where it is fit."""
    low, high = cut_points(values, convention)
    counts = bucket_counts(values, low, high)
    distinct = len(np.unique(values))
    reasons = [f"{name} holds {count} of {len(values)}" for name, count in counts.items() if _small(count, values)]
    if low == high:
        reasons.insert(0, "cut-points coincide")
    if distinct < DISTINCT_SHARE * len(values):
        reasons.append(f"{distinct} distinct values of {len(values)}")
    row = {"cut_low": low, "cut_high": high, "counts": counts, "distinct": distinct, "unfit": reasons}
    moved = None if reasons else stability(values, convention, resamples=1000)["changed_median"]
    return {**row, "changed_median": moved}


def recommended(step_one: pd.DataFrame, convention: str) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """The fit coordinate whose buckets are most stable (ties: registry order), and the evidence for all."""
    table = {name: judged(values, convention) for name, values in candidates(step_one).items()}
    fit = [name for name, row in table.items() if not row["unfit"]]
    return min(fit, key=lambda name: table[name]["changed_median"], default=None), table


def _small(count: int, values: Floats) -> bool:
    return count < SMALLEST_SHARE * len(values)

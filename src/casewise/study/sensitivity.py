"""How much hangs on which calibration cases were at hand: cut-points refitted on fewer or resampled cases (K, F9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput, TooFewCases
from casewise.core.seeds import RESAMPLING_SEED
from casewise.study.assignment import BUCKETS, Arms
from casewise.study.finding import Finding
from casewise.study.statistics.resample import RESAMPLES, draws
from casewise.study.trajectories import mean_or_nan

Floats = NDArray[np.float64]
MEDICAL = (33.33, 66.67)
DRIVING = (33.0, 66.0)


def buckets_at(values: Floats, cut_low: ArrayLike, cut_high: ArrayLike) -> NDArray[np.int64]:
    """0 hard (u >= cut_high), 1 mid (u > cut_low), 2 low; cut-points of many draws give (draw, case) (E6).

    >>> buckets_at(np.array([1.0, 2.0, 3.0]), 1.0, 3.0).tolist()
    [[2, 1, 0]]
    """
    low, high = (np.atleast_1d(np.asarray(cut, dtype=np.float64))[:, None] for cut in (cut_low, cut_high))
    return np.where(values >= high, 0, np.where(values > low, 1, 2))


def calibration_sensitivity(
    calibration_values: ArrayLike,
    evaluation_values: pd.Series,
    arms: Arms,
    *,
    reference: pd.DataFrame,
    sizes: Sequence[int] = (5, 10, 15),
    draws: int = 500,
    seed: int = RESAMPLING_SEED,
    percentiles: tuple[float, float] = MEDICAL,
    vary: str = "both",
    cuts: tuple[float, float] | None = None,
) -> Finding:
    """Refit the cut-points on subsamples of the calibration cases and replay the whole evaluation split (K1-K5).

    ``evaluation_values`` is the coordinate by case. ``reference`` is the deployed frame of the budget to beat.
    ``vary="high"`` refits the rollback cut only (K5). The first row is the full calibration, or the given ``cuts``.
    """
    pool = np.asarray(calibration_values, dtype=np.float64)
    if vary not in ("both", "high"):
        raise BadInput(f"vary is 'both' or 'high', got {vary!r}")
    fitted = tuple(np.percentile(pool, percentiles)) if cuts is None else cuts
    harm, metric = (_arm_values(arms, evaluation_values.index, name) for name in ("ha", "metric"))
    u, rng = evaluation_values.to_numpy(float), np.random.default_rng(seed)
    to_beat = mean_or_nan(reference["ha"])
    whole = _replayed(u, np.array([fitted[0]]), np.array([fitted[1]]), harm, metric)
    records = [_row(len(pool), whole, to_beat, len(u))]
    for size in sizes:
        if size > len(pool):
            raise TooFewCases(f"a subsample of {size} needs at least as many calibration cases, got {len(pool)}")
        chosen = rng.permuted(np.tile(np.arange(len(pool)), (draws, 1)), axis=1)[:, :size]
        low, high = np.percentile(pool[chosen], percentiles, axis=1)
        low = np.full(draws, fitted[0]) if vary == "high" else low
        records.append(_row(size, _replayed(u, np.minimum(low, high), high, harm, metric), to_beat, len(u)))
    made = {
        "draws": draws,
        "seed": seed,
        "percentiles": list(percentiles),
        "vary": vary,
        "cuts": [float(c) for c in fitted],
    }
    return Finding("sensitivity.calibration", pd.DataFrame(records), len(u), "K1-K5", {**made, "to_beat": to_beat})


def _arm_values(arms: Arms, cases: pd.Index, column: str) -> Floats:
    return np.column_stack([arms[name].set_index("case")[column].reindex(cases).to_numpy(float) for name in BUCKETS])


def _replayed(u: Floats, low: Floats, high: Floats, harm: Floats, metric: Floats) -> dict[str, Floats]:
    """Cohort means in every draw."""
    bucket = buckets_at(u, low, high)[:, :, None]
    took = {
        name: np.take_along_axis(values[None], bucket, axis=2)[:, :, 0]
        for name, values in (("ha", harm), ("metric", metric))
    }
    return {name: np.nanmean(values, axis=1) for name, values in took.items()}


def _row(size: int, drawn: dict[str, Floats], to_beat: float, n: int) -> dict[str, Any]:
    record: dict[str, Any] = {"cases": size, "draws": len(drawn["ha"]), "n": n}
    for name, values in drawn.items():
        low, high = np.percentile(values, [2.5, 97.5])
        record |= {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
    return {**record, "ha_worst": float(drawn["ha"].max()), "beats_reference": float((drawn["ha"] < to_beat).mean())}


def cut_stability(
    calibration_values: ArrayLike,
    evaluation_values: ArrayLike,
    *,
    percentiles: tuple[float, float] = MEDICAL,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Bootstrap intervals of both cut-points, and how many evaluation cases would change their bucket (F9)."""
    pool, u = (np.asarray(values, dtype=np.float64) for values in (calibration_values, evaluation_values))
    drawn = draws(len(pool), resamples, seed)
    fitted, cuts = np.percentile(pool, percentiles), np.percentile(pool[drawn.index], percentiles, axis=1)
    changed = (buckets_at(u, *cuts) != buckets_at(u, *fitted)).mean(axis=1)
    records = []
    for number, name in enumerate(("cut_low", "cut_high")):
        low, high = np.percentile(cuts[number], [2.5, 97.5])
        records.append({"cut": name, "estimate": fitted[number], "low": low, "high": high, "n": len(pool)})
    median, upper = np.percentile(changed, [50, 97.5])
    note = f"a resampled calibration rebuckets {median:.1%} of {len(u)} evaluation cases (97.5 %: {upper:.1%})"
    made = {"changed_median": float(median), "changed_high": float(upper), "stream": drawn.proof}
    return Finding("sensitivity.cuts", pd.DataFrame(records), len(u), "F9", made, (note,))

"""How much the cut-points would move with other calibration cases: a bootstrap of the pool (F9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.calibration.cuts import CONVENTIONS, Floats, buckets, checked, cut_points


def stability(
    values: Floats,
    convention: str = "medical",
    *,
    judged: Floats | None = None,
    resamples: int = 5000,
    seed: int = RESAMPLING_SEED,
) -> dict[str, Any]:
    """Percentile intervals of both cuts, and the share of ``judged`` cases (default: the pool) that change bucket."""
    pool = checked(values, what="a bootstrap of cut-points")
    judged = pool if judged is None else judged
    drawn = np.random.default_rng(seed).integers(0, len(pool), size=(resamples, len(pool)))
    low, high = CONVENTIONS[convention].cuts(pool[drawn])
    deployed = buckets(judged, *cut_points(pool, convention))
    moved = (buckets(judged, low[:, None], high[:, None]) != deployed).mean(axis=1)
    return {
        "cut_low": _interval(low),
        "cut_high": _interval(high),
        "changed_median": float(np.median(moved)),
        "changed_upper": float(np.percentile(moved, 97.5)),
        "judged": len(judged),
        "resamples": resamples,
        "seed": seed,
        "stream": {"first_row": drawn[0, :5].tolist(), "sum": int(drawn.sum())},
    }


def _interval(draws: Floats) -> list[float]:
    finite = draws[np.isfinite(draws)]
    return [float(value) for value in np.percentile(finite, [2.5, 97.5])] if len(finite) else []

"""Can a step-1 signal pick out the cases that will come out worse? Case-level AUROC with bootstrap intervals (I8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.seeds import RESAMPLING_SEED
from casewise.study.association import signals_in
from casewise.study.finding import Finding, rows
from casewise.study.statistics.ranks import auroc, auroc_draws, shuffle_p
from casewise.study.statistics.resample import RESAMPLES, clusters_of, draws, interval_of
from casewise.study.trajectories import horizon, unshrunk

COLUMNS = ("signal", "target", "auroc", "low", "high", "p_shuffled", "positives", "n", "skipped", "threshold", "reason")


def auroc_table(
    outcomes: pd.DataFrame,
    *,
    signals: Sequence[str] | None = None,
    budget: int | None = None,
    step: int = 1,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """AUROC of each step-1 signal for "worse" (metric falls at the budget) and "harm" (HA in the top tertile).

    Scores are used as they are, higher = positive; MSP therefore appears inverted (C12). Draws with one class are
    skipped and counted. The budget is the last step unless given.
    """
    depth = horizon(outcomes) if budget is None else budget
    names = signals_in(outcomes, signals)
    scores = unshrunk(outcomes)[lambda frame: frame["step"] == step].set_index("case")
    records = [
        _row(scores, name, target, positive, threshold, resamples, seed)
        for target, positive, threshold in _targets(outcomes, depth)
        for name in names
    ]
    made = {"budget": depth, "step": step, "resamples": resamples, "seed": seed}
    return Finding("ranking.auroc", rows(records, COLUMNS), len(scores), "I8", made)


def top_tertile(harm: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
    """HA above its 66.67th percentile; above zero when that percentile is zero (I8).

    >>> flags, threshold = top_tertile(np.array([0.0, 0.0, 0.0, 0.0, 0.4]))
    >>> flags.tolist(), threshold
    ([False, False, False, False, True], 0.0)
    """
    threshold = float(np.percentile(harm, 66.67))
    return harm > threshold, threshold


def _targets(outcomes: pd.DataFrame, budget: int) -> Iterator[tuple[str, pd.Series, float]]:
    frame = unshrunk(outcomes)
    source, final = (frame[frame["step"] == step].set_index("case") for step in (0, budget))
    change = (final["metric"] - source["metric"]).dropna()
    yield "worse", change < 0, 0.0
    harm = final["ha"].dropna()
    if len(harm):
        flags, threshold = top_tertile(harm.to_numpy(float))
        yield "harm", pd.Series(flags, index=harm.index), threshold


def _row(
    scores: pd.DataFrame, name: str, target: str, positive: pd.Series, threshold: float, resamples: int, seed: int
) -> dict[str, Any]:
    part = scores.loc[scores[name].notna() & scores.index.isin(positive.index)].reset_index()
    flags = positive.loc[part["case"]].to_numpy(bool)
    values = part[name].to_numpy(float)
    record = {"signal": name, "target": target, "positives": int(flags.sum()), "n": len(part), "threshold": threshold}
    point = auroc(values, flags)
    if np.isnan(point):
        reason = f"all {len(part)} cases are on one side"
        nothing = dict.fromkeys(("auroc", "low", "high", "p_shuffled"), np.nan)
        return {**record, **nothing, "skipped": 0, "reason": reason}
    units = clusters_of(part)
    drawn = auroc_draws(values, flags, units, draws(int(units.max()) + 1, resamples, seed).counts)
    found = interval_of(point, drawn, n=len(part), clusters=int(units.max()) + 1)
    p = float(shuffle_p(values[:, None], flags.astype(np.float64), units, seed=seed)[0])
    fields = {"auroc": point, "low": found.low, "high": found.high, "p_shuffled": p, "skipped": found.skipped}
    return {**record, **fields, "reason": ""}

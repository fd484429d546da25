"""AUROC of every signal after one update for the cases that the full budget makes worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.seeds import RESAMPLING_SEED
from casewise.measure.metrics.selective import auroc
from casewise.render.tables import Cell, Estimate, Table, number, undefined
from casewise.study.finding import Finding, Section, rows, show
from casewise.study.statistics.ranks import auroc_draws, shuffle_p
from casewise.study.statistics.resample import RESAMPLES, cluster_numbers, draws, interval_of
from casewise.study.study import Study, once
from casewise.study.trajectories import horizon, signals_in, unshrunk

COLUMNS = "signal target auroc low high p_shuffled positives n skipped threshold reason"


def section(study: Study) -> Section:
    """tab:app-auroc."""
    found = ranking_of(study)
    return Section("ranking", "Ranking the cases", _lead(study, found), (_table(study, found),), (), (found,))


@once
def ranking_of(study: Study) -> Finding:
    """How well each signal ranks the cases."""
    return auroc_table(study.outcomes, **study.bootstrap)


def auroc_table(outcomes: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED) -> Finding:
    """AUROC of each step-1 signal for "worse" (metric falls at the budget) and "harm" (HA in the top tertile).

    Scores are used as they are, higher = positive; MSP therefore appears inverted (C12). Draws with one class are
    skipped and counted. The budget is the last step.
    """
    depth = horizon(outcomes)
    scores = unshrunk(outcomes)[lambda frame: frame["step"] == 1].set_index("case")
    records = [
        _row(scores, name, target, positive, threshold, resamples, seed)
        for target, positive, threshold in _targets(outcomes, depth)
        for name in signals_in(outcomes)
    ]
    made = {"budget": depth, "resamples": resamples, "seed": seed}
    return Finding("ranking.auroc", rows(records, COLUMNS), len(scores), "I8", made)


def top_tertile(harm: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
    """HA above its 66.67th percentile; above zero if that percentile is zero (I8).

    >>> flags, threshold = top_tertile(np.array([0.0, 0.0, 0.0, 0.0, 0.4]))
    >>> flags.tolist(), threshold
    ([False, False, False, False, True], 0.0)
    """
    threshold = float(np.percentile(harm, 66.67))
    return harm > threshold, threshold


def _targets(outcomes: pd.DataFrame, budget: int) -> Iterator[tuple[str, pd.Series, float]]:
    frame = unshrunk(outcomes)
    source, final = (frame[frame["step"] == step].set_index("case") for step in (0, budget))
    yield "worse", (final["metric"] - source["metric"]).dropna() < 0, 0.0
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
    if flags.all() or not flags.any():
        nothing = dict.fromkeys(("auroc", "low", "high", "p_shuffled"), np.nan)
        return {**record, **nothing, "skipped": 0, "reason": f"all {len(part)} cases are on one side"}
    point, units = auroc(values, flags), cluster_numbers(part)
    amount = int(units.max()) + 1
    drawn = auroc_draws(values, flags, units, draws(amount, resamples, seed).counts)
    found = interval_of(point, drawn, n=len(part), clusters=amount)
    p = float(shuffle_p(values[:, None], flags.astype(np.float64), units, seed=seed)[0])
    fields = {"auroc": point, "low": found.low, "high": found.high, "p_shuffled": p, "skipped": found.skipped}
    return {**record, **fields, "reason": ""}


def _lead(study: Study, found: Finding) -> str:
    defined = found.table[found.table["target"] == "worse"].dropna(subset=["auroc"])
    if defined.empty:
        return f"No case, or every case, is made worse by {study.reference}, so there is nothing to rank."
    best = defined.loc[defined["auroc"].idxmax()]
    interval = f"{number(best['auroc'])} [{number(best['low'])}, {number(best['high'])}]"
    return (
        f"Of {defined['signal'].nunique()} signals after one update, {best['signal']} ranked best which cases "
        f"{study.reference} makes worse: AUROC {interval}, n = {int(best['n'])}. It was picked in hindsight."
    )


def _table(study: Study, ranked: Finding) -> Table:
    cells: list[dict[str, Cell]] = []
    for signal, part in ranked.table.groupby("signal", sort=False):
        row: dict[str, Cell] = {"signal": str(signal)}
        for record in part.to_dict("records"):
            value, low, high = (float(record[key]) for key in ("auroc", "low", "high"))
            row[record["target"]] = undefined(int(record["n"])) if value != value else Estimate(value, low, high)
        cells.append({**row, "n": int(part["n"].max())})
    heads = {
        "signal": "Signal after one update",
        "worse": f"AUROC for a lower {study.metric} [95 %]",
        "harm": "AUROC for top-tertile HA [95 %]",
    }
    caption = f"Targets at {study.reference}. Higher means riskier for every signal but MSP, which is inverted."
    keys = "signal worse harm n"
    return show("auroc", "Ranking the cases", cells, keys, heads=heads, caption=caption, paper="tab:app-auroc")

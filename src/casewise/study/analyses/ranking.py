"""Can a signal of the first update pick out the cases that will come out worse? Case-level AUROC with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.tables import Cell, Column, Estimate, Table, Undefined, number, table
from casewise.study.finding import Finding, Section, rows
from casewise.study.statistics.ranks import auroc, auroc_draws, shuffle_p
from casewise.study.statistics.resample import RESAMPLES, clusters_of, draws, interval_of
from casewise.study.study import Study, once
from casewise.study.trajectories import horizon, signals_in, unshrunk


def section(study: Study) -> Section:
    """tab:app-auroc: how well each signal ranks the cases."""
    found = ranking_of(study)
    return Section(
        "ranking", "Ranking the cases", _lead(study, found), (_table(study, found),), (), (found,), found.notes
    )


@once
def ranking_of(study: Study) -> Finding:
    """How well each signal ranks the cases."""
    return auroc_table(study.outcomes, **study.bootstrap)


def _lead(study: Study, found: Finding) -> str:
    defined = found.table.dropna(subset=["auroc"])
    defined = defined[defined["target"] == "worse"]
    if defined.empty:
        return f"No case, or every case, is made worse by {study.reference}, so there is nothing to rank."
    best = defined.loc[defined["auroc"].idxmax()]
    interval = f"{number(best['auroc'])} [{number(best['low'])}, {number(best['high'])}]"
    return (
        f"Of {defined['signal'].nunique()} signals after one update, {best['signal']} ranked best which cases "
        f"{study.reference} makes worse: AUROC {interval}, n = {int(best['n'])}. It was picked in hindsight."
    )


def _table(study: Study, ranked: Finding) -> Table:
    columns = (
        Column("signal", "Signal after one update", text=True),
        Column("worse", f"AUROC, Δ {study.metric} < 0"),
        Column("harm", "AUROC, top-tertile HA"),
        Column("n", "n"),
    )
    rows: list[dict[str, Cell]] = []
    for signal, part in ranked.table.groupby("signal", sort=False):
        row: dict[str, Cell] = {"signal": str(signal), "n": int(part["n"].max())}
        for record in part.to_dict("records"):
            value = float(record["auroc"])
            undefined = value != value
            row[record["target"]] = (
                Undefined(int(record["n"]))
                if undefined
                else Estimate(value, float(record["low"]), float(record["high"]))
            )
        rows.append(row)
    caption = (
        f"Targets at {study.reference}. Higher means riskier for every signal; MSP is taken as it is, so it inverts."
    )
    return table("auroc", "Ranking the cases", columns, rows, caption=caption, paper="tab:app-auroc")


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

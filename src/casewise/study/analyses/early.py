"""Is there an early segment worth keeping? Where the first step already loses, stopping cannot create value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.controllers.depth import FragStop
from casewise.render.tables import Column, rows_of, table
from casewise.study.assignment import replay_oracle
from casewise.study.finding import Finding, Section
from casewise.study.statistics.resample import RESAMPLES, Interval, clusters_of, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import horizon, labelled, mean_or_nan, same_cases, unshrunk


def section(study: Study) -> Section:
    """Is any early segment of the trajectory worth keeping? (O12)"""
    found = early_segment(
        study.outcomes,
        study.methods,
        stop=FragStop.name,
        reference=study.reference,
        **study.bootstrap,
    )
    columns = (
        Column("row", "Deployed", text=True),
        Column("metric", study.metric),
        Column("ha", "HA"),
        Column("steps", "Steps", 2),
        Column("n", "n"),
    )
    made = table(
        "early",
        "Ladder, stop rule and oracle",
        columns,
        rows_of(found.table, columns),
        caption="The oracle stop sees labels.",
    )
    return Section("early", "An early segment worth keeping?", found.notes[0], (made,), (), (found,), found.notes[1:])


def early_segment(
    outcomes: pd.DataFrame,
    methods: Mapping[str, pd.DataFrame],
    *,
    stop: str,
    reference: str,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """The ladder, a stop rule and the oracle stop on the same trajectories (O12, E12).

    Worth keeping: some adapted step has a mean metric above the source's. The oracle stop takes each case's best step
    from 1 on, ties to the smallest; it bounds the metric only.
    """
    ladder = unshrunk(labelled(outcomes))
    source = mean_or_nan(ladder.loc[ladder["step"] == 0, "metric"])
    records = [_ladder_row(ladder, step) for step in range(horizon(ladder) + 1)]
    records += [_method_row(stop, methods[stop]), _oracle_row(ladder)]
    better = [record["row"] for record in records[1 : horizon(ladder) + 1] if record["metric"] > source]
    left, right = same_cases(methods[stop], methods[reference])
    options: dict[str, Any] = {"clusters": clusters_of(left), "resamples": resamples, "seed": seed}
    cut = paired_interval(left["ha"], right["ha"], **options)
    made = {
        "worth_keeping": bool(better),
        "cut": cut.estimate,
        "low": cut.low,
        "high": cut.high,
        "reference": reference,
    }
    return Finding(
        "early", pd.DataFrame(records), len(left), "O12", made, (_verdict(better, source, stop, reference, cut),)
    )


def _ladder_row(ladder: pd.DataFrame, step: int) -> dict[str, Any]:
    part = ladder[ladder["step"] == step]
    name = f"fixed-{step}" if step else "M0"
    return {
        "row": name,
        "n": len(part),
        "metric": mean_or_nan(part["metric"]),
        "ha": mean_or_nan(part["ha"]),
        "steps": float(step),
    }


def _method_row(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    means = {column: mean_or_nan(frame[column]) for column in ("metric", "ha")}
    return {"row": name, "n": len(frame), **means, "steps": mean_or_nan(frame["deployed"])}


def _oracle_row(ladder: pd.DataFrame) -> dict[str, Any]:
    adapted = ladder[ladder["step"] >= 1]
    whole = adapted[~adapted["metric"].isna().groupby(adapted["case"]).transform("any")]
    if whole.empty:
        return {"row": "oracle stop", "n": 0, "metric": float("nan"), "ha": float("nan"), "steps": float("nan")}
    best = {one.case_id: one.deployed for one in replay_oracle(whole, include_source=False)}
    rows = whole[whole["step"] == whole["case"].map(best)]
    means = {name: float(rows[name].mean()) for name in ("metric", "ha")}
    return {"row": "oracle stop", "n": len(rows), **means, "steps": float(rows["step"].mean())}


def _verdict(better: list[str], source: float, stop: str, reference: str, cut: Interval) -> str:
    kept = f"{', '.join(better)} lie above the source" if better else "no step lies above the source: nothing to keep"
    how = "is separated from zero" if cut.shown else "is not told from zero"
    return (
        f"source {source:.4f}; {kept}; HA of {stop} against {reference} {cut.estimate:+.4f} "
        f"[{cut.low:+.4f}, {cut.high:+.4f}] {how} (sign-flip p {cut.p_flip:.3f}, n={cut.n})"
    )

"""The ladder, a stop rule and the oracle stop: if the first step already loses, stopping cannot create value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.controllers.depth import FRAG_STOP
from casewise.study.assignment import oracle_steps
from casewise.study.finding import Finding, Section, show
from casewise.study.statistics.resample import RESAMPLES, cluster_numbers, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import horizon, labelled, mean_or_nan, same_cases, unshrunk


def section(study: Study) -> Section:
    """Is an early segment of the trajectory worth keeping? (O12)"""
    found = early_segment(study.outcomes, study.methods, stop=FRAG_STOP, reference=study.reference, **study.bootstrap)
    made = show("early", "Ladder, stop rule and oracle", found, caption="The oracle stop sees labels.")
    return Section("early", "Early stopping", found.notes[0], (made,), (), (found,))


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

    Worth keeping: some adapted step has a mean metric above that of M0. The oracle stop takes the best step of each
    case from 1 on, ties to the smallest; it bounds the metric only.
    """
    ladder = unshrunk(labelled(outcomes))
    last = horizon(ladder)
    records = [
        _row(f"fixed-{step}" if step else "M0", ladder[ladder["step"] == step], "step") for step in range(last + 1)
    ]
    source = records[0]["metric"]
    better = [record["row"] for record in records[1:] if record["metric"] > source]
    adapted = ladder[ladder["step"] >= 1]
    whole = adapted[~adapted["metric"].isna().groupby(adapted["case"]).transform("any")]
    best = oracle_steps(whole, include_source=False) if len(whole) else whole
    records += [
        _row(stop, methods[stop], "deployed"),
        _row("oracle stop", best, "step"),
    ]
    left, right = same_cases(methods[stop], methods[reference])
    cut = paired_interval(left["ha"], right["ha"], clusters=cluster_numbers(left), resamples=resamples, seed=seed)
    kept = f"{', '.join(better)} lie above it" if better else "no step lies above it: nothing to keep"
    how = "is shown to differ from zero" if cut.shown else "is not shown to differ from zero"
    note = (
        f"M0 {source:.4f}; {kept}. HA of {stop} against {reference}: {cut.estimate:+.4f} [{cut.low:+.4f}, "
        f"{cut.high:+.4f}], which {how} (sign-flip p {cut.p_flip:.3f}, n={cut.n})."
    )
    made = {"cut": cut.estimate, "low": cut.low, "high": cut.high, "reference": reference}
    return Finding("early", pd.DataFrame(records), len(left), "O12", {"worth_keeping": bool(better), **made}, (note,))


def _row(name: str, frame: pd.DataFrame, depth: str) -> dict[str, Any]:
    means = {column: mean_or_nan(frame[column]) for column in ("metric", "ha")}
    return {"row": name, "n": len(frame), **means, "steps": mean_or_nan(frame[depth])}

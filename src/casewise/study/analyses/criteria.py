"""Expectations against outcomes: the paper's criteria or declared ones, and three lines of evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.archive.layout import CASES, ENTRY
from casewise.archive.store import Archive
from casewise.core.brief import counted
from casewise.core.records import State
from casewise.judge.ledger import read_ledger
from casewise.judge.outcomes import outcomes
from casewise.render.tables import NOT_RUN, Cell, Column, Table, number, rows_of, table
from casewise.study.analyses.association import association
from casewise.study.analyses.budget import ladder_shape
from casewise.study.analyses.controls import attribution_of, chance_of, matched_of
from casewise.study.analyses.deployment import interval_between
from casewise.study.analyses.ranking import ranking_of
from casewise.study.analyses.sensitivity import refit_of
from casewise.study.finding import Finding, Section
from casewise.study.preregistration import PAPER_CRITERIA, Declaration, Fact, reconcile
from casewise.study.statistics.resample import LEVEL, Interval, clusters_of, interval_of_row, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import deployed_at, same_cases


def section(study: Study) -> Section:
    """tab:app-prereg and tab:app-three-pillars."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; the criteria are about a router"
        return Section("criteria", "Expectations", missing={"criteria": reason})
    found = _reconciled(study)
    missing = {}
    if study.extras.criteria is None:
        missing["declared criteria"] = "needs a file that was declared before the run (--criteria)"
    tables = (_table(found), _lines(study))
    return Section("criteria", "Expectations", _lead(study, found), tables, (), (found,), missing=missing)


def _reconciled(study: Study) -> Finding:
    """Declared criteria, judged for lateness too; without a declaration the paper's, which only describe."""
    declared = study.extras.criteria
    if declared is None:
        return reconcile(Declaration(PAPER_CRITERIA, "1970-01-01T00:00:00+00:00"), facts(study), needs=NEEDS)
    moment, event = results_at(study.evaluation)
    return reconcile(declared, facts(study), results_at=moment, event=event, needs=NEEDS)


def _lead(study: Study, found: Finding) -> str:
    if study.extras.criteria is None:
        return (
            f"The paper's criteria on this archive: {found.notes[0]}. They were not declared for it and only describe."
        )
    when = f"{found.made['declared_at']} (sha256 {str(found.made['sha256'])[:12]})"
    timing = "in time, before" if found.made["in_time"] else "too late, after"
    known = f"{found.made['event']} ({str(found.made['results_at'])[:19]} UTC)"
    return f"Declared {when}, {timing} {known}: {found.notes[0]}."


def _table(found: Finding) -> Table:
    columns = (
        Column("id", "Id", text=True),
        Column("expectation", "Expectation", text=True),
        Column("observed", "observed", 4, interval=("low", "high")),
        Column("verdict", "Verdict", text=True),
        Column("reason", "Remark", text=True),
    )
    rows = rows_of(found.table, columns)
    for row in rows:
        if row["verdict"] == "not run":
            row["observed"] = NOT_RUN
    for row, quantity in zip(rows, found.table["quantity"], strict=True):
        if quantity == "ladder.non_monotone" and row["observed"] is not NOT_RUN:
            row["observed"] = row["observed"] == 1
    caption = (
        f"n = {counted(found.n, 'case')}. Brackets are 95 % intervals; a margin below its resolution is unresolved."
    )
    return table("prereg", "Expectations and outcomes", columns, rows, caption=caption, paper="tab:app-prereg")


def _lines(study: Study) -> Table:
    """tab:app-three-pillars: replay, ranking and calibration perturbation, said in words that follow from numbers."""
    columns = (Column("analysis", "Analysis", text=True), Column("verdict", "Here", text=True))
    rows: list[dict[str, Cell]] = [
        {"analysis": "Deployment replay at matched quota", "verdict": _replayed(study)},
        {"analysis": "Case-level ranking AUROC (top-tertile HA)", "verdict": _ranked(study)},
        {"analysis": "Calibration perturbation", "verdict": _perturbed(study)},
    ]
    caption = "Three analyses that share no method; agreement between them is evidence, disagreement a warning."
    return table(
        "three-lines", "Three lines of evidence", columns, rows, caption=caption, paper="tab:app-three-pillars"
    )


def _replayed(study: Study) -> str:
    row = chance_of(study).row(scope="all", quantity="ha")
    draws, p = int(chance_of(study).made["draws"]), float(row["p_draws_corrected"])
    word = "better than random" if p <= LEVEL else "not better than random"
    found = f"HA {number(row['deployed'])} against {number(row['mean_exact'])}"
    below = round(float(row["p_draws"]) * draws)
    return f"{word}: {found}; {below} of {draws} draws at or below, p = {number(p)}"


def _ranked(study: Study) -> str:
    frame = ranking_of(study).table
    frame = frame[frame["target"] == "harm"].dropna(subset=["auroc"])
    own = frame[frame["signal"] == study.coordinate]
    if own.empty:
        return "undefined: one class only"
    row = own.iloc[0]
    p = float(row["p_shuffled"])
    word = "above chance" if float(row["low"]) > 0.5 and p <= LEVEL else "not separated from chance"
    interval = f"{number(row['auroc'])} [{number(row['low'])}, {number(row['high'])}]"
    return f"{word}: {study.coordinate} {interval}, p = {number(p)} with cases shuffled, n = {int(row['n'])}"


def _perturbed(study: Study) -> str:
    drawn = refit_of(study).table[refit_of(study).table["draws"] > 1]
    if drawn.empty:
        return "not run: too few calibration cases"
    row = drawn.loc[drawn["cases"].idxmin()]
    share = 100 * float(row["beats_reference"])
    return f"below {study.retrospective} in {share:.0f} % of refits on {int(row['cases'])} cases"


TENT = "metric.first_minus_tent"


NEEDS = {TENT: "needs a TENT archive of the same cases (--other TENT=ARCHIVE)"}


def facts(study: Study) -> dict[str, Fact]:
    """Everything that a criterion may ask about the studied archive."""
    tent = tent_outcomes(study, study.evaluation)
    return trajectory_facts(study.outcomes, tent, study) | router_facts(study)


def trajectory_facts(frame: pd.DataFrame, tent: pd.DataFrame | None, study: Study) -> dict[str, Fact]:
    """What the recorded trajectories say without a controller: correlations, the ladder's shape, the first step."""
    shape = ladder_shape(frame).row(group="all")
    found: dict[str, Fact | None] = {
        **{f"rho.{name}": _rho(frame, name, study) for name in ("delta", "regions")},
        "ladder.non_monotone": bool(shape["non_monotone"]),
        "ladder.last_minus_best": float(shape["ha_last"] - shape["ha_best"]),
        "metric.first_minus_source": _first_step(frame, frame, 0, study),
        TENT: None if tent is None else _first_step(frame, tent, 1, study),
    }
    return {key: value for key, value in found.items() if value is not None}


def router_facts(study: Study) -> dict[str, Fact]:
    """What the router did: HA and metric against the full budget, and what chance does at its quota."""
    harm = interval_between(study, study.ours, study.reference, "ha")
    metric = interval_between(study, study.ours, study.reference, "metric")
    ha = matched_of(study).table[matched_of(study).table["scope"] == "all"].set_index("selector")["ha"]
    found: dict[str, Fact | None] = {
        "ha.router_minus_default": _interval(harm),
        "metric.default_minus_router": _turned(_interval(metric)),
        "share.random": float(attribution_of(study).row(control="random")["share"]),
        "p.random": float(chance_of(study).row(scope="all", quantity="ha")["p_draws_corrected"]),
        "ha.oracle_minus_router": _minus_router(ha, "oracle metric"),
        "ha.entropy_minus_router": _minus_router(ha, "entropy"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _minus_router(ha: pd.Series, selector: str) -> float | None:
    return float(ha[selector] - ha["deployed"]) if selector in ha.index else None


def tent_outcomes(study: Study, archive: Archive) -> pd.DataFrame | None:
    """The TENT archive among the others, for V0; None when there is none or the archive is TENT itself."""
    if _is_tent(str(archive.configuration.get("objective", ""))):
        return None
    for name, other in study.extras.others.items():
        if other.path != archive.path and (_is_tent(name) or _is_tent(str(other.configuration.get("objective", "")))):
            return outcomes(other.select(ids=study.evaluation.ids))
    return None


def _is_tent(words: str) -> bool:
    return re.match(r"tent\b", words, re.IGNORECASE) is not None


def _rho(frame: pd.DataFrame, signal: str, study: Study) -> Interval | None:
    """Pooled case-clustered Spearman with HA (I1, I3)."""
    if signal not in frame.columns:
        return None
    found = association(frame, signals=[signal], differences=False, **study.bootstrap).table.iloc[0]
    return interval_of_row(found, estimate="rho", resamples=study.resamples)


def _first_step(frame: pd.DataFrame, other: pd.DataFrame, step: int, study: Study) -> Interval:
    """Metric after the first update minus the metric of a step of another (or the same) archive, by case."""
    left, right = same_cases(deployed_at(frame, State(1)), deployed_at(other, State(step)))
    defined = (left["metric"].notna() & right["metric"].notna()).to_numpy()
    left, right = left[defined], right[defined]
    return paired_interval(left["metric"], right["metric"], clusters=clusters_of(left), **study.bootstrap)


def _interval(row: Mapping[str, Any] | None) -> Interval | None:
    return None if row is None else interval_of_row(row)


def _turned(found: Interval | None) -> Interval | None:
    """The same interval seen from the other side."""
    if found is None:
        return None
    fields = {"estimate": -found.estimate, "low": -found.high, "high": -found.low, "p_below": 1 - found.p_below}
    return Interval(**{**vars(found), **fields})


def results_at(archive: Archive) -> tuple[datetime, str]:
    """When results could first have been known, and why: the first case was recorded, or a label was read (J10, F12).

    A recording is dated by its files, so a copy that did not keep their times looks younger; the ledger keeps its own.
    It counts whole seconds, so files do too: within one second the recording came first.
    """
    times = [(_written(file), "the evaluation cases were recorded") for file in archive.path.glob(f"{CASES}/*/{ENTRY}")]
    for line in read_ledger(archive.path):
        if line.get("labels_visible", True):
            times.append((datetime.fromisoformat(line["when"]), "evaluation labels were read"))
    return min(times, key=lambda found: found[0], default=(datetime.now(timezone.utc), "this study"))


def _written(file: Path) -> datetime:
    return datetime.fromtimestamp(int(file.stat().st_mtime), timezone.utc)

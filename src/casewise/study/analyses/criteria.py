"""The criteria of the paper (V0-V4 and its matched controls) against what was observed, and three lines of evidence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.text import pluralize
from casewise.judge.outcomes import outcomes
from casewise.render.tables import NOT_RUN, Table, number
from casewise.study.analyses.association import association
from casewise.study.analyses.budget import ladder_shape
from casewise.study.analyses.controls import attribution_of, chance_of, matched_of
from casewise.study.analyses.deployed_methods import interval_between
from casewise.study.analyses.ranking import ranking_of
from casewise.study.analyses.sensitivity import refit_of
from casewise.study.finding import Finding, Section, not_run, rows, show
from casewise.study.statistics.resample import LEVEL, Interval, cluster_numbers, interval_of_row, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import same_cases, unshrunk

Fact = float | bool | Interval
TENT = "metric.first_minus_tent"
NEEDS = {TENT: "needs a TENT archive of the same cases (--other TENT=ARCHIVE)"}


@dataclass(frozen=True)
class DeclaredCriterion:
    """One expectation about one quantity; margins smaller than ``resolution`` stay unresolved (H9, R14)."""

    id: str
    expectation: str
    quantity: str  # key of the facts
    test: str  # name in TESTS
    bound: Any = None
    resolution: float = 0.0


def _value(fact: Fact) -> float:
    return fact.estimate if isinstance(fact, Interval) else float(fact)


TESTS: dict[str, Callable[[Any, Any], float]] = {
    "at least": lambda fact, bound: _value(fact) - bound,
    "at most": lambda fact, bound: bound - _value(fact),
    "between": lambda fact, bound: min(_value(fact) - bound[0], bound[1] - _value(fact)),
    "upper at most": lambda fact, bound: bound - fact.high,
    "is true": lambda fact, bound: float("inf") if fact else float("-inf"),
    "report": lambda fact, bound: float("inf"),
}
"""Margin of each test; a criterion holds if its margin is at least 0."""
STRICT = {"above": "at least", "below": "at most"}  # tests whose margin must be above 0

CRITERIA = (
    DeclaredCriterion("V0a", "the first step is at least as good as TENT's", TENT, "at least", 0.0),
    DeclaredCriterion("V0b", "and at most 0.01 below the source", "metric.first_minus_source", "at least", -0.01),
    DeclaredCriterion("V1a", "pooled rho of delta with HA lies in [0.4, 0.6]", "rho.delta", "between", (0.4, 0.6)),
    DeclaredCriterion("V1b", "pooled rho of regions with HA lies in [0.4, 0.6]", "rho.regions", "between", (0.4, 0.6)),
    DeclaredCriterion("V2a", "cohort HA is non-monotone in the budget", "ladder.non_monotone", "is true"),
    DeclaredCriterion("V2b", "and ends above its minimum", "ladder.last_minus_best", "above", 0.0, 0.02),
    DeclaredCriterion("V3a", "HA of the router is below the full budget's", "ha.router_minus_default", "below", 0.0),
    DeclaredCriterion(
        "V3b", "at a metric cost of at most 0.005 (upper bound)", "metric.default_minus_router", "upper at most", 0.005
    ),
    DeclaredCriterion("V4", "share of the HA reduction that the quota alone makes", "share.random", "report"),
    DeclaredCriterion("matched-random", "random at the matched rate is worse", "p.random", "at most", 0.05),
    DeclaredCriterion(
        "matched-entropy", "entropy at the matched rate is not better", "ha.entropy_minus_router", "at least", 0.0
    ),
    DeclaredCriterion(
        "matched-oracle", "the metric oracle at the matched rate is a bound", "ha.oracle_minus_router", "at most", 0.0
    ),
)
"""V0-V4 of the paper's section on objectives, and the expectations of its matched controls."""


def section(study: Study) -> Section:
    """tab:app-prereg and tab:app-three-pillars."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; the criteria are about a router"
        return not_run("criteria", "Expectations", "criteria", reason)
    found = reconcile(facts(study))
    lead = f"The paper's criteria on this archive: {found.notes[0]}. They were not declared for it and only describe."
    return Section("criteria", "Expectations", lead, (_table(found), _lines(study)), (), (found,))


def reconcile(known: Mapping[str, Fact]) -> Finding:
    """Every criterion with what was observed: held, failed, unresolved, reported or not run (J10)."""
    records = [_reconciled(one, known.get(one.quantity)) for one in CRITERIA]
    counts = {name: sum(record["verdict"] == name for record in records) for name in ("held", "failed", "unresolved")}
    note = ", ".join(f"{count} {name}" for name, count in counts.items())
    n = max((fact.n for fact in known.values() if isinstance(fact, Interval)), default=0)
    table = rows(records, "id expectation quantity observed low high n verdict reason")
    return Finding("prereg", table, n, "J10, O6-O10", notes=(note,))


def _reconciled(one: DeclaredCriterion, fact: Fact | None) -> dict[str, Any]:
    record = {"id": one.id, "expectation": one.expectation, "quantity": one.quantity, "reason": ""}
    if fact is None or _value(fact) != _value(fact):
        missing = NEEDS.get(one.quantity, f"{one.quantity} was not computed")
        reason = missing if fact is None else f"{one.quantity} is undefined"
        return {**record, "observed": float("nan"), "verdict": "not run", "reason": reason}
    margin = TESTS[STRICT.get(one.test, one.test)](fact, one.bound)
    held = margin > 0 if one.test in STRICT else margin >= 0
    limits = {"low": fact.low, "high": fact.high, "n": fact.n} if isinstance(fact, Interval) else {}
    found = {**record, "observed": _value(fact), **limits, "verdict": "held" if held else "failed"}
    if one.test == "report":
        return {**found, "verdict": "reported"}
    if abs(margin) < one.resolution:
        small = f"margin {margin:+.4f} is below the resolution {one.resolution:g}"
        return {**found, "verdict": "unresolved", "reason": small}
    return found


def facts(study: Study) -> dict[str, Fact]:
    """Everything that a criterion asks about the studied archive."""
    tent = tent_outcomes(study, study.evaluation)
    return trajectory_facts(study.outcomes, tent, study) | router_facts(study)


def trajectory_facts(frame: pd.DataFrame, tent: pd.DataFrame | None, study: Study) -> dict[str, Fact]:
    """Facts of the recorded trajectories without a controller: correlations, shape of the ladder, the first step."""
    shape = ladder_shape(frame).row(group="all")
    found: dict[str, Fact] = {
        "ladder.non_monotone": bool(shape["non_monotone"]),
        "ladder.last_minus_best": float(shape["ha_last"] - shape["ha_best"]),
        "metric.first_minus_source": _first_step(frame, frame, 0, study),
    }
    names = [name for name in ("delta", "regions") if name in frame.columns]
    for row in association(frame, signals=names, differences=False, **study.bootstrap).table.to_dict("records"):
        found[f"rho.{row['signal']}"] = interval_of_row({str(key): row[key] for key in row}, estimate="rho")
    return found if tent is None else {**found, TENT: _first_step(frame, tent, 1, study)}


def router_facts(study: Study) -> dict[str, Fact]:
    """Facts of the router: HA and metric against the full budget, and chance at its quota."""
    ha = matched_of(study).table[matched_of(study).table["scope"] == "all"].set_index("selector")["ha"]
    found: dict[str, Fact] = {
        "share.random": float(attribution_of(study).row(control="random")["share"]),
        "p.random": float(chance_of(study).row(scope="all", quantity="ha")["p_draws_corrected"]),
    }
    for key, selector in (("ha.oracle_minus_router", "oracle metric"), ("ha.entropy_minus_router", "entropy")):
        if selector in ha.index:
            found[key] = float(ha[selector] - ha["deployed"])
    if (harm := interval_between(study, study.ours, study.reference, "ha")) is not None:
        found["ha.router_minus_default"] = interval_of_row(harm)
    if (metric := interval_between(study, study.ours, study.reference, "metric")) is not None:
        own = interval_of_row(metric)
        found["metric.default_minus_router"] = replace(
            own, estimate=-own.estimate, low=-own.high, high=-own.low, p_below=1 - own.p_below
        )
    return found


def tent_outcomes(study: Study, archive: Archive) -> pd.DataFrame | None:
    """Outcomes of the TENT archive among the others, for V0; None if there is none or the archive is TENT itself."""

    def is_tent(words: object) -> bool:
        return re.match(r"tent\b", str(words), re.IGNORECASE) is not None

    if is_tent(archive.configuration.get("objective", "")):
        return None
    for name, other in study.extras.others.items():
        if other.path != archive.path and (is_tent(name) or is_tent(other.configuration.get("objective", ""))):
            return outcomes(other.select(ids=study.evaluation.ids))
    return None


def _first_step(frame: pd.DataFrame, other: pd.DataFrame, step: int, study: Study) -> Interval:
    """Metric after the first update minus the metric of a step of another (or the same) archive, by case."""
    frame, other = unshrunk(frame), unshrunk(other)
    left, right = same_cases(frame[frame["step"] == 1], other[other["step"] == step])
    defined = (left["metric"].notna() & right["metric"].notna()).to_numpy()
    left, right = left[defined], right[defined]
    return paired_interval(left["metric"], right["metric"], clusters=cluster_numbers(left), **study.bootstrap)


# ---- what the page shows ----


def _table(found: Finding) -> Table:
    frame = found.table.astype({"observed": object})
    frame.loc[frame["verdict"] == "not run", "observed"] = NOT_RUN
    told = (frame["quantity"] == "ladder.non_monotone") & (frame["verdict"] != "not run")
    frame.loc[told, "observed"] = frame.loc[told, "observed"] == 1
    caption = (
        f"n = {pluralize(found.n, 'case')}. Brackets are 95 % intervals; a margin below its resolution is unresolved."
    )
    keys = "id expectation observed verdict reason"
    return show("prereg", "Expectations and outcomes", frame, keys, caption=caption, paper="tab:app-prereg")


def _lines(study: Study) -> Table:
    """tab:app-three-pillars: replay, ranking and calibration perturbation in words."""
    lines = pd.DataFrame(
        [
            {"analysis": "Deployment replay at matched quota", "verdict": _replayed(study)},
            {"analysis": "Case-level ranking AUROC (top-tertile HA)", "verdict": _ranked(study)},
            {"analysis": "Calibration perturbation", "verdict": _perturbed(study)},
        ]
    )
    caption = "Three analyses that share no method; agreement between them is evidence, disagreement a warning."
    heads, paper = {"verdict": "Here"}, "tab:app-three-pillars"
    return show("three-lines", "Three lines of evidence", lines, heads=heads, caption=caption, paper=paper)


def _replayed(study: Study) -> str:
    row = chance_of(study).row(scope="all", quantity="ha")
    draws, p = int(chance_of(study).made["draws"]), float(row["p_draws_corrected"])
    word = "better than random" if p <= LEVEL else "not better than random"
    found = f"HA {number(row['deployed'])} against {number(row['mean_exact'])}"
    return f"{word}: {found}; {round(float(row['p_draws']) * draws)} of {draws} draws at or below, p = {number(p)}"


def _ranked(study: Study) -> str:
    frame = ranking_of(study).table
    own = frame[(frame["target"] == "harm") & (frame["signal"] == study.coordinate)].dropna(subset=["auroc"])
    if own.empty:
        return "undefined: one class only"
    row = own.iloc[0]
    p = float(row["p_shuffled"])
    word = "above chance" if float(row["low"]) > 0.5 and p <= LEVEL else "not separated from chance"
    interval = f"{number(row['auroc'])} [{number(row['low'])}, {number(row['high'])}]"
    return f"{word}: {study.coordinate} {interval}, permutation p = {number(p)}, n = {int(row['n'])}"


def _perturbed(study: Study) -> str:
    drawn = refit_of(study).table[refit_of(study).table["draws"] > 1]
    if drawn.empty:
        return "not run: too few calibration cases"
    row = drawn.loc[drawn["cases"].idxmin()]
    share = 100 * float(row["beats_reference"])
    return f"below {study.retrospective} in {share:.0f} % of refits on {int(row['cases'])} cases"

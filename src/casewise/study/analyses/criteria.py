"""The criteria of the paper (V0-V4, matched controls) beside the observations, here and with other objectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import CasewiseError
from casewise.core.text import pluralize
from casewise.judge.outcomes import outcomes
from casewise.render.tables import DASH, NOT_RUN, Cell, Column, Estimate, Table, interval, number
from casewise.study.analyses.association import association, ranking_of
from casewise.study.analyses.budget import ladder_shape
from casewise.study.analyses.controls import attribution_of, chance_of, matched_of
from casewise.study.analyses.cut_points import refit_of, refitted
from casewise.study.analyses.deployed_methods import interval_between
from casewise.study.finding import Finding, Section, not_run, notes_of, rows, show
from casewise.study.statistics.resample import LEVEL, Interval, cluster_numbers, interval_of_row, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import by_step, mean_or_nan, same_cases, unshrunk

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

_DECLARED: tuple[tuple[Any, ...], ...] = (
    ("V0a", "the first step is at least as good as TENT's", TENT, "at least", 0.0),
    ("V0b", "and at most 0.01 below the source", "metric.first_minus_source", "at least", -0.01),
    ("V1a", "pooled rho of delta with HA lies in [0.4, 0.6]", "rho.delta", "between", (0.4, 0.6)),
    ("V1b", "pooled rho of regions with HA lies in [0.4, 0.6]", "rho.regions", "between", (0.4, 0.6)),
    ("V2a", "cohort HA is non-monotone in the budget", "ladder.non_monotone", "is true"),
    ("V2b", "and ends above its minimum", "ladder.last_minus_best", "above", 0.0, 0.02),
    ("V3a", "HA of the router is below the full budget's", "ha.router_minus_default", "below", 0.0),
    (
        "V3b",
        "and it loses at most 0.005 of the metric (upper bound)",
        "metric.default_minus_router",
        "upper at most",
        0.005,
    ),
    ("V4", "share of the HA reduction by the number of rollbacks alone", "share.random", "report"),
    ("matched-random", "random at the matched rate is worse", "p.random", "at most", 0.05),
    ("matched-entropy", "entropy at the matched rate is not better", "ha.entropy_minus_router", "at least", 0.0),
    ("matched-oracle", "the metric oracle at the matched rate bounds it", "ha.oracle_minus_router", "at most", 0.0),
)
CRITERIA = tuple(DeclaredCriterion(*one) for one in _DECLARED)
"""V0-V4 of the paper's section on objectives, and the expectations of its matched controls."""


def section(study: Study) -> Section:
    """tab:app-prereg and tab:app-three-pillars."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; the criteria apply only to a router"
        return not_run("criteria", "Expectations", "criteria", reason)
    found = reconcile(facts(study))
    lead = f"The paper's criteria on this archive: {found.notes[0]}. They were not fixed before and only describe it."
    return Section("criteria", "Expectations", lead, (_table(found), _lines(study)), (), (found,))


def reconcile(known: Mapping[str, Fact]) -> Finding:
    """Every criterion with its observation: held, failed, unresolved, reported or not run (J10)."""
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
    """Return all quantities of the criteria for the studied archive."""
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
    lines = {
        "Deployment replay at matched quota": _replayed(study),
        "Case-level ranking AUROC (top-tertile HA)": _ranked(study),
        "Calibration perturbation": _perturbed(study),
    }
    frame = pd.DataFrame({"analysis": list(lines), "verdict": list(lines.values())})
    caption = "Three analyses with different methods; agreement between them is evidence, disagreement is a warning."
    heads, paper = {"verdict": "Here"}, "tab:app-three-pillars"
    return show("three-lines", "Three lines of evidence", frame, heads=heads, caption=caption, paper=paper)


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
    spread = interval(*row[["auroc", "low", "high"]])
    return f"{word}: {study.coordinate} {spread}, permutation p = {number(p)}, n = {int(row['n'])}"


def _perturbed(study: Study) -> str:
    drawn = refit_of(study).table[refit_of(study).table["draws"] > 1]
    if drawn.empty:
        return "not run: too few calibration cases"
    row = drawn.loc[drawn["cases"].idxmin()]
    share = 100 * float(row["beats_reference"])
    return f"below {study.retrospective} in {share:.0f} % of refits on {int(row['cases'])} cases"


# ---- other objectives on the same cases ----

_NO_HOLDOUT = "its router needs its own calibration archive: --other NAME=EVALUATION,CALIBRATION"
_ROUTED = ("budget", "budget_ha", "router_metric", "router_ha", "rolled_back")


def objectives_section(study: Study) -> Section:
    """tab:newobj, and the ladder of each objective."""
    checked = gradient_checks({label_of(study.configuration): study.evaluation, **study.extras.others})
    tables, found = [], []
    if len(checked.table):
        caption = " ".join(f"{note}." for note in checked.notes)
        tables.append(show("grata-checks", "Checks of GraTa's rule", checked, caption=caption))
        found.append(checked)
    if study.is_router:
        compared, one = objectives(study)
        tables, found = [*compared, *tables], [one, *found]
        lead = "One row for each objective, to see whether the conclusions depend on it."
        needs = {"other objectives (tab:newobj)": "need --other NAME=EVALUATION[,CALIBRATION] for each"}
        missing = {} if study.extras.others else needs
    else:
        reason = f"the policy is a {study.controller.name}; the criteria apply only to a router"
        lead, missing = "", {"criteria by objective": reason}
    return Section("objectives", "Other objectives", lead, tuple(tables), (), tuple(found), notes_of(*found), missing)


SPAN = (0.2, 0.9)
"""Range that the multiplier of GraTa's rate must reach (the paper's check)."""
STILL = 0.01
"""A cosine whose standard deviation over all updates is below this does not react to the case."""


def gradient_checks(archives: Mapping[str, Archive]) -> Finding:
    r"""Five checks of GraTa's rule over every update of every case that recorded a multiplier.

    The rate is :math:`\tfrac14 (1 + \cos)^2` of its base. The paper makes five checks and names one, the span of the
    multiplier; the other four here are ours: losses above zero, gradients that do not vanish, a cosine that differs
    between updates, a rate that never becomes zero.
    """
    records, notes = [], []
    for name, archive in archives.items():
        updates = pd.DataFrame([one for entry in archive.entries.values() for one in entry.diagnostics])
        if not {"cosine", "multiplier"} <= set(updates.columns):
            continue
        made = updates[["cosine", "multiplier"]].dropna()
        records += [(name, *check, len(made)) for check in _checks(updates)]
        mean, spread = made["cosine"].mean(), made["cosine"].std(ddof=0)
        notes.append(
            f"{name}: cosine {mean:+.3f} (s.d. {spread:.3f}, {pluralize(len(made), 'update')}), so the mean rate is "
            f"{made['multiplier'].mean():.3f} of its base"
        )
    columns = ("objective", "check", "wanted", "observed", "holds", "n")
    return Finding("objectives.grata", rows(records, columns), len(archives), "O11", {"span": list(SPAN)}, tuple(notes))


def _checks(updates: pd.DataFrame) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (check, expectation, observation, True if it holds)."""
    cosine, multiplier = updates["cosine"], updates["multiplier"]
    losses = updates[[name for name in ("entropy_loss", "consistency_loss") if name in updates]]
    lowest = float(losses.min().min())
    yield "both losses are above zero", "> 0", f"{lowest:.3g}", bool(losses.notna().all().all()) and lowest > 0
    defined = cosine.notna() & (cosine != 0) & (cosine.abs() <= 1 + 1e-6)
    yield "both gradients exist", "every update", f"{int(defined.sum())} of {len(cosine)}", bool(defined.all())
    spread = float(cosine.std(ddof=0))
    yield "the cosine differs between updates", f"s.d. > {STILL}", f"{spread:.3f}", spread > STILL
    least, most = float(multiplier.min()), float(multiplier.max())
    yield "the rate never becomes zero", "multiplier > 0", f"{least:.3g}", least > 0
    wanted, span = f"holds [{SPAN[0]}, {SPAN[1]}]", f"[{least:.2f}, {most:.2f}]"
    yield "the multiplier spans its range", wanted, span, least <= SPAN[0] and most >= SPAN[1]


@dataclass(frozen=True, eq=False)
class Arm:
    """One objective on the studied cases: its ladders, and its own router if its holdout was given."""

    name: str
    archive: Archive
    outcomes: pd.DataFrame
    routed: Study | None
    reason: str = ""  # why there is no router
    notes: tuple[str, ...] = ()


def label_of(configuration: Mapping[str, Any]) -> str:
    """The objective as it was recorded, with the given rate instead of its own."""
    text, rate = str(configuration.get("objective", "this archive")), configuration.get("learning_rate")
    if rate is None:
        return text
    named, found = re.subn(r"learning_rate=[^,)]+", f"learning_rate={rate:g}", text)
    return named if found else f"{text}, learning_rate={rate:g}"


def _others(study: Study) -> Iterator[Arm]:
    for name, archive in study.extras.others.items():
        shared = archive.select(ids=study.evaluation.ids)
        frame, holdout = outcomes(shared), study.extras.holdouts.get(name)
        if holdout is None:
            yield Arm(name, shared, frame, None, _NO_HOLDOUT)
            continue
        shrunk = all(any(state.shrink for state in one.states) for one in (shared, holdout))
        more = [] if shrunk else ["mid bucket at its full depth: no shrunk state was recorded"]
        try:
            policy, notes = refitted(study, holdout, unshrunk=not shrunk)  # same actions, cut-points of its own holdout
            routed = Study.of(shared, holdout, policy, **study.bootstrap)
            yield Arm(name, shared, frame, routed, notes=(*notes, *more))
        except CasewiseError as error:
            yield Arm(name, shared, frame, None, str(error))


def objectives(study: Study) -> tuple[tuple[Table, Table], Finding]:
    """The two tables about objectives, and the finding behind them."""
    found = [Arm(label_of(study.configuration), study.evaluation, study.outcomes, study), *_others(study)]
    records = [_record(study, arm) for arm in found]
    notes = tuple(f"{arm.name}: {note}" for arm in found for note in (arm.reason, *arm.notes) if note)
    table, n = pd.DataFrame([_flat(record) for record in records]), max(int(record["n"]) for record in records)
    finding = Finding("objectives", table, n, "O6-O11", study.bootstrap, notes)
    return (_criteria_table(records), _ladder_table(study, records)), finding


def _record(study: Study, arm: Arm) -> dict[str, Any]:
    facts = trajectory_facts(arm.outcomes, tent_outcomes(study, arm.archive), study)
    if arm.routed is not None:
        facts |= router_facts(arm.routed)
    judged = reconcile(facts).table
    verdicts = dict(zip(judged["id"], judged["verdict"], strict=True))
    missing = NOT_RUN
    ha, metric = by_step(arm.outcomes, "ha"), by_step(arm.outcomes, "metric")
    routed: dict[str, Any] = dict.fromkeys(_ROUTED, missing)
    if arm.routed is not None:
        ours, budget = arm.routed.policy_rows, arm.routed.deployable
        routed = {"budget": budget, "budget_ha": mean_or_nan(arm.routed.methods[budget]["ha"])}
        routed |= {"router_metric": mean_or_nan(ours["metric"]), "router_ha": mean_or_nan(ours["ha"])}
        routed["rolled_back"] = int(ours["rolled_back"].sum())
    return {
        "objective": arm.name,
        "dataset": str(arm.archive.configuration.get("dataset", "this archive")),
        "n": int(ha[1].notna().sum()),
        "delta": _estimate(facts.get("rho.delta")),
        "regions": _estimate(facts.get("rho.regions")),
        **{name: _whole([verdicts[f"{name}{part}"] for part in "ab"]) for name in ("V0", "V1", "V2", "V3")},
        "share": facts.get("share.random", missing),
        "m0": mean_or_nan(metric[0]),
        "last": mean_or_nan(metric[arm.archive.steps]),
        **{f"ha_{step}": mean_or_nan(ha[step]) for step in range(1, arm.archive.steps + 1)},
        **routed,
    }


def _estimate(fact: Fact | None) -> Cell:
    return Estimate(fact.estimate, fact.low, fact.high) if isinstance(fact, Interval) else None


def _whole(parts: list[str]) -> str:
    """A criterion of several parts holds if all parts hold; V0 is not run without TENT."""
    return next((word for word in ("not run", "failed", "unresolved") if word in parts), "held")


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Put the bounds of intervals into columns, and None for analyses that were not run."""
    flat: dict[str, Any] = {}
    for key, cell in record.items():
        flat[key] = cell.value if isinstance(cell, Estimate) else None if cell == NOT_RUN else cell
        if isinstance(cell, Estimate):
            flat |= {f"{key}_low": cell.low, f"{key}_high": cell.high}
    return flat


def _criteria_table(records: list[dict[str, Any]]) -> Table:
    caption = (
        "One row for each objective that was recorded on these cases; cut-points are refitted on its own holdout, "
        "actions stay. V1: both ρ with HA in [0.4, 0.6]. V2: HA is non-monotone in the budget and ends above its "
        "minimum. V3: the router lowers HA and costs at most 0.005 (upper end of the interval). V4: share of the "
        "router's HA reduction that random assignment with as many rollbacks gives; reported, not tested."
    )
    heads: dict[str, str | Column] = {"delta": "ρ(δ) [95 %]", "regions": "ρ(regions) [95 %]", "share": "V4 random"}
    heads |= {name: Column(name, name, text=True) for name in ("V1", "V2", "V3")}
    heads["dataset"] = Column("dataset", "Benchmark", text=True)
    keys = "objective dataset delta regions V1 V2 V3 share n"
    return show("objectives", "Criteria by objective", records, keys, heads=heads, caption=caption, paper="tab:newobj")


def _ladder_table(study: Study, records: list[dict[str, Any]]) -> Table:
    deepest = max(int(key.removeprefix("ha_")) for record in records for key in record if key.startswith("ha_"))
    steps = {f"ha_{step}": f"HA, k = {step}" for step in range(1, deepest + 1)}
    heads: dict[str, str | Column] = {
        "m0": f"{study.metric} of M0", "last": f"{study.metric} of fixed-K", **steps,
        "budget": Column("budget", "deployable", text=True), "budget_ha": "its HA",
        "router_metric": f"{study.metric} of the router", "router_ha": "HA of the router",
        "V0": Column("V0", "V0", text=True),
    }  # fmt: skip
    caption = (
        "The ladder of each objective, the budget that its holdout chooses, and its router. V0: the first update is at "
        "least as good as TENT's first update, and at most 0.01 below M0. A dash is a step that was not recorded."
    )
    cells = [{**dict.fromkeys(steps, DASH), **record} for record in records]
    keys = f"objective m0 last {' '.join(steps)} {' '.join(_ROUTED)} V0 n"
    title = "Ladders by objective"
    return show("objective-ladders", title, cells, keys, heads=heads, caption=caption, collapsed=True)

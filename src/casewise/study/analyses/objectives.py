"""The criteria of the paper for every objective that made trajectories of the same cases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import CasewiseError
from casewise.core.records import Policy
from casewise.core.text import pluralize
from casewise.judge.outcomes import outcomes
from casewise.render.tables import DASH, NOT_RUN, Cell, Column, Estimate, Table
from casewise.study.analyses.criteria import Fact, reconcile, router_facts, tent_outcomes, trajectory_facts
from casewise.study.analyses.sensitivity import refitted
from casewise.study.finding import Finding, Section, notes_of, rows, show
from casewise.study.statistics.resample import Interval
from casewise.study.study import Study
from casewise.study.trajectories import by_step, mean_or_nan

_NO_HOLDOUT = "its router needs its own calibration archive: --other NAME=EVALUATION,CALIBRATION"
_ROUTED = ("budget", "budget_ha", "router_metric", "router_ha", "rolled_back")


def section(study: Study) -> Section:
    """tab:newobj, and the ladder of each objective."""
    checked = gradient_checks({label_of(study.configuration): study.evaluation, **study.extras.others})
    tables, found = [], []
    if len(checked.table):
        caption = " ".join(f"{note}." for note in checked.notes)
        tables.append(show("grata-checks", "Checks of GraTa's rule", checked, caption=caption))
        found.append(checked)
    missing = {}
    if not study.is_router:
        missing["criteria by objective"] = f"the policy is a {study.controller.name}; the criteria are about a router"
    elif not study.extras.others:
        missing["other objectives (tab:newobj)"] = "need --other NAME=EVALUATION[,CALIBRATION] for each"
    if study.is_router:
        compared, one = objectives(study)
        tables, found = [*compared, *tables], [one, *found]
    lead = "One row for each objective that was given: do the conclusions depend on it?" if study.is_router else ""
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
        records += [{"objective": name, "n": len(made), **check} for check in _checks(updates)]
        mean, spread = made["cosine"].mean(), made["cosine"].std(ddof=0)
        notes.append(
            f"{name}: cosine {mean:+.3f} (s.d. {spread:.3f}, {pluralize(len(made), 'update')}), so the mean rate is "
            f"{made['multiplier'].mean():.3f} of its base"
        )
    columns = ("objective", "check", "wanted", "observed", "holds", "n")
    return Finding("objectives.grata", rows(records, columns), len(archives), "O11", {"span": list(SPAN)}, tuple(notes))


def _checks(updates: pd.DataFrame) -> Iterator[dict[str, Any]]:
    cosine, multiplier = updates["cosine"], updates["multiplier"]
    losses = updates[[name for name in ("entropy_loss", "consistency_loss") if name in updates]]
    lowest = float(losses.min().min())
    yield _check("both losses are above zero", "> 0", f"{lowest:.3g}", bool(losses.notna().all().all()) and lowest > 0)
    defined = cosine.notna() & (cosine != 0) & (cosine.abs() <= 1 + 1e-6)
    yield _check("both gradients exist", "every update", f"{int(defined.sum())} of {len(cosine)}", bool(defined.all()))
    spread = float(cosine.std(ddof=0))
    yield _check("the cosine differs between updates", f"s.d. > {STILL}", f"{spread:.3f}", spread > STILL)
    least, most = float(multiplier.min()), float(multiplier.max())
    yield _check("the rate never becomes zero", "multiplier > 0", f"{least:.3g}", least > 0)
    span = f"[{least:.2f}, {most:.2f}]"
    wanted = f"holds [{SPAN[0]}, {SPAN[1]}]"
    yield _check("the multiplier spans its range", wanted, span, least <= SPAN[0] and most >= SPAN[1])


def _check(what: str, wanted: str, observed: str, holds: bool) -> dict[str, Any]:
    return {"check": what, "wanted": wanted, "observed": observed, "holds": holds}


@dataclass(frozen=True, eq=False)
class Arm:
    """One objective on the studied cases: its ladders, and its own router if its holdout was given."""

    name: str
    archive: Archive
    outcomes: pd.DataFrame
    routed: Study | None
    reason: str = ""  # why there is no router
    notes: tuple[str, ...] = ()


def arms(study: Study) -> list[Arm]:
    """The studied objective first, then every other one."""
    return [Arm(label_of(study.configuration), study.evaluation, study.outcomes, study), *_others(study)]


def label_of(configuration: Mapping[str, Any]) -> str:
    """The objective as it was recorded, with the rate that was asked for in place of its own."""
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
        try:
            policy, notes = recalibrated(study, shared, holdout)
            yield Arm(name, shared, frame, Study.of(shared, holdout, policy, **study.bootstrap), notes=notes)
        except CasewiseError as error:
            yield Arm(name, shared, frame, None, str(error))


def recalibrated(study: Study, archive: Archive, holdout: Archive) -> tuple[Policy, tuple[str, ...]]:
    """The same actions with cut-points from the objective's own holdout; without shrink where none was recorded."""
    unshrunk = not all(any(state.shrink for state in one.states) for one in (archive, holdout))
    policy, notes = refitted(study, holdout, unshrunk=unshrunk)
    return policy, (*notes, *(["mid bucket at its full depth: no shrunk state was recorded"] if unshrunk else []))


def objectives(study: Study) -> tuple[tuple[Table, Table], Finding]:
    """The two tables about objectives, and the finding behind them."""
    found = arms(study)
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
        ours, budget = arm.routed.router, arm.routed.deployable
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
    if not isinstance(fact, Interval):
        return None
    return Estimate(fact.estimate, fact.low, fact.high)


def _whole(parts: list[str]) -> str:
    """A criterion of several parts holds if all parts hold; V0 is not run without TENT."""
    return next((word for word in ("not run", "failed", "unresolved") if word in parts), "held")


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Put the bounds of intervals into columns, and None for what was not run."""
    flat: dict[str, Any] = {}
    for key, cell in record.items():
        flat[key] = cell.value if isinstance(cell, Estimate) else None if cell == NOT_RUN else cell
        if isinstance(cell, Estimate):
            flat |= {f"{key}_low": cell.low, f"{key}_high": cell.high}
    return flat


def _criteria_table(records: list[dict[str, Any]]) -> Table:
    caption = (
        "One row for each objective that made trajectories of these cases; cut-points are refitted on its own holdout, "
        "actions stay. V1: both ρ with HA in [0.4, 0.6]. V2: HA is non-monotone in the budget and ends above its "
        "minimum. V3: the router lowers HA and costs at most 0.005 (upper end of the interval). V4: share of the "
        "router's HA reduction that random assignment at the same quota makes; reported, not tested."
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

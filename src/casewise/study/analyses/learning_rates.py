"""The stop rule over learning rates, refitted at each, against the full budget at the same rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import Controller
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.controllers.depth import FixedK, StopRule, TauStop
from casewise.judge.outcomes import deployed, outcomes
from casewise.judge.policy import controller_of
from casewise.render.tables import Cell, Column, PairCell
from casewise.replay import replay
from casewise.study.finding import Finding, Section, not_run, show
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan


def section(study: Study) -> Section:
    """tab:supp-acdc-lr."""
    paper = "tab:supp-acdc-lr"
    if not study.extras.sweep:
        reason = "needs archives at several learning rates: --sweep RATE=EVALUATION[,CALIBRATION], once for each"
        return not_run("learning-rates", "Learning rates", f"learning-rate sweep ({paper})", reason)
    stopped: dict[float, Any] = {}
    fixed: dict[float, Any] = {}
    rules = set()
    for rate, (archive, holdout) in sorted(study.extras.sweep.items()):
        frame, rule = outcomes(archive), _stop_of(archive, holdout)
        rules.add(rule.name)
        stopped[rate] = deployed(frame, replay(archive, rule))
        fixed[rate] = deployed(frame, replay(archive, FixedK(archive.steps)))
    found = learning_rate_sweep(stopped, fixed)
    cells: list[dict[str, Cell]] = [
        {
            "rate": f"{row['learning_rate']:g}",
            "stop": PairCell(row["stop_metric"], row["stop_ha"]),
            "fixed": PairCell(row["fixed_metric"], row["fixed_ha"]),
            **{name: row[name] for name in ("ha_cut", "steps", "n")},
        }
        for row in found.table.to_dict("records")
    ]
    heads: dict[str, str | Column] = {
        "rate": Column("rate", "learning rate", text=True),
        "stop": f"{' / '.join(sorted(rules))} ({study.metric} / HA)",
        "fixed": f"{study.reference} ({study.metric} / HA)",
        "ha_cut": Column("ha_cut", "HA reduction", signed=True),
        "steps": "steps of the stop rule",
    }
    caption = "τ-stop if a calibration archive was given for the rate (refitted there), else FragStop."
    made = show("learning-rates", "Stop rule over learning rates", cells, heads=heads, caption=caption, paper=paper)
    return Section("learning-rates", "Learning rates", "", (made,), (), (found,))


def _stop_of(archive: Archive, holdout: Archive | None) -> Controller:
    """tau-stop refitted at this rate if there is a holdout, else the parameter-free rule."""
    return StopRule(archive.steps) if holdout is None else controller_of(calibrate(holdout, TauStop.name))


def learning_rate_sweep(stopped: Mapping[float, pd.DataFrame], fixed: Mapping[float, pd.DataFrame]) -> Finding:
    """A stop rule refitted at every learning rate, against the full budget at the same rate (G8)."""
    if set(stopped) != set(fixed):
        raise BadInput(f"both arms need the same learning rates, got {sorted(stopped)} and {sorted(fixed)}")
    records = []
    for rate in sorted(stopped):
        arms = {"stop": stopped[rate], "fixed": fixed[rate]}
        means = {f"{arm}_{name}": mean_or_nan(frame[name]) for arm, frame in arms.items() for name in ("metric", "ha")}
        cut, steps = means["fixed_ha"] - means["stop_ha"], mean_or_nan(stopped[rate]["deployed"])
        records.append({"learning_rate": rate, "n": len(stopped[rate]), **means, "ha_cut": cut, "steps": steps})
    n = max((len(frame) for frame in stopped.values()), default=0)
    return Finding("budget.learning_rate_sweep", pd.DataFrame(records), n, "G8")

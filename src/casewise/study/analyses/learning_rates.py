"""The stop rule over learning rates, refitted at each, against the full budget at the same rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import Controller
from casewise.judge.calibration.fit import calibrate
from casewise.judge.controllers.depth import FixedK, FragStop, TauStop
from casewise.judge.outcomes import deployed, outcomes
from casewise.judge.policy import controller_of
from casewise.render.tables import Cell, Column, Pair, table
from casewise.replay import replay
from casewise.study.finding import Finding, Section
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan


def section(study: Study) -> Section:
    """tab:supp-acdc-lr: the stop rule over learning rates."""
    if not study.extras.sweep:
        reason = "needs archives at several learning rates; give --sweep RATE=EVALUATION[,CALIBRATION] once for each"
        return Section("learning-rates", "Learning rates", missing={"learning-rate sweep (tab:supp-acdc-lr)": reason})
    stopped: dict[float, Any] = {}
    fixed: dict[float, Any] = {}
    rules = set()
    for rate, (archive, holdout) in sorted(study.extras.sweep.items()):
        frame = outcomes(archive)
        rule = _stop_of(archive, holdout)
        rules.add(rule.name)
        stopped[rate] = deployed(frame, replay(archive, rule))
        fixed[rate] = deployed(frame, replay(archive, FixedK(archive.steps)))
    found = learning_rate_sweep(stopped, fixed)
    columns = (
        Column("rate", "lr", text=True),
        Column("stop", f"{' / '.join(sorted(rules))} ({study.metric} / HA)"),
        Column("fixed", f"{study.reference} ({study.metric} / HA)"),
        Column("ha_cut", "HA cut", signed=True),
        Column("steps", "steps of the stop rule", 2),
        Column("n", "n"),
    )
    rows: list[dict[str, Cell]] = [
        {
            "rate": f"{row['learning_rate']:g}",
            "stop": Pair(row["stop_metric"], row["stop_ha"]),
            "fixed": Pair(row["fixed_metric"], row["fixed_ha"]),
            "ha_cut": float(row["ha_cut"]),
            "steps": float(row["steps"]),
            "n": int(row["n"]),
        }
        for row in found.table.to_dict("records")
    ]
    caption = (
        "τ-stop where a calibration archive was given for the rate (refitted there), else FragStop, which needs none."
    )
    made = table(
        "learning-rates", "Stop rule over learning rates", columns, rows, caption=caption, paper="tab:supp-acdc-lr"
    )
    return Section("learning-rates", "Learning rates", "", (made,), (), (found,), found.notes)


def _stop_of(archive: Archive, holdout: Archive | None) -> Controller:
    """tau-stop refitted at this rate when there is a holdout, else the parameter-free rule."""
    if holdout is None:
        return FragStop(archive.steps)
    return controller_of(calibrate(holdout, TauStop.name))


def learning_rate_sweep(stopped: Mapping[float, pd.DataFrame], fixed: Mapping[float, pd.DataFrame]) -> Finding:
    """A stop rule refitted at every learning rate, against the full budget at the same rate (G8)."""
    if set(stopped) != set(fixed):
        raise BadInput(f"both arms need the same learning rates, got {sorted(stopped)} and {sorted(fixed)}")
    records = []
    for rate in sorted(stopped):
        stop, full = stopped[rate], fixed[rate]
        records.append(
            {
                "learning_rate": rate,
                "n": len(stop),
                "stop_metric": mean_or_nan(stop["metric"]),
                "stop_ha": mean_or_nan(stop["ha"]),
                "fixed_metric": mean_or_nan(full["metric"]),
                "fixed_ha": mean_or_nan(full["ha"]),
                "ha_cut": mean_or_nan(full["ha"]) - mean_or_nan(stop["ha"]),
                "steps": mean_or_nan(stop["deployed"]),
            }
        )
    n = max((record["n"] for record in records), default=0)
    return Finding("budget.learning_rate_sweep", pd.DataFrame(records), int(n), "G8")

"""Decisions: the lines of every design over views, and of budgets, stop rules and routers over gradient ladders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from real_rows import Bench, Row, quota_cell, seconds, until

from casewise.core.errors import CasewiseError
from casewise.core.records import Controller
from casewise.judge.calibration.design_comparison import compare_designs
from casewise.judge.calibration.designs import DESIGNS, Known, folds, gather
from casewise.judge.calibration.fit import calibrate
from casewise.judge.controllers.choose import AgreementRule, board, state_of
from casewise.judge.controllers.depth import FixedK
from casewise.judge.deciding import Setting, setting_of
from casewise.judge.outcomes import deployed, outcomes
from casewise.judge.policy import controller_of
from casewise.replay import replay
from casewise.study.benchmark.method_scores import POOR

RULES = {"router of the paper": "cardiac", "`default` of 0.1": "default", "frag-stop": "frag-stop",
         "tau-stop": "tau-stop"}  # fmt: skip


def best_fixed(known: Sequence[Known], setting: Setting) -> Controller:
    """The candidate with the largest mean gain on the cases that it is fitted on."""
    states = [state for state in board(known[0].seen) if state.step]
    best = max(states, key=lambda state: np.mean([one.metric[state] - one.source for one in known]))
    if best == state_of(setting.consensus):
        return AgreementRule(setting.steps, setting.consensus, rule="consensus")
    return FixedK(best.step)


WITH_BEST = {**DESIGNS, "best fixed": best_fixed}
UNFITTED = ("highest-agreement", "medoid")


def decision_rows(bench: Bench, ladder: str) -> Iterator[Row]:
    """Each design, fitted on calibration and cross-fitted over the clusters of both splits; scored on development."""
    archive = bench.development.on(ladder)
    frame, setting = outcomes(archive), setting_of(archive)
    calibration = gather(bench.calibration.on(ladder), setting)
    development = gather(archive, setting)
    known = [*calibration, *development]
    ids = {one.case_id for one in development}
    amount = archive.steps
    took = seconds(archive, *range(1, amount + 1))
    scored: dict[str, dict[str, float]] = {}
    for name, design in WITH_BEST.items():
        if name in ("m0", "consensus"):
            continue
        for how in ("fitted on calibration", "cross-fitted")[: 1 if name in UNFITTED else 2]:
            cases = []
            if how == "fitted on calibration":
                parts = [(design(calibration, setting), sorted(ids))]
            else:
                parts = [
                    (design([known[i] for i in inside], setting), [known[i].case_id for i in out])
                    for inside, out in folds([one.cluster for one in known])
                ]
            for controller, members in parts:
                mine = [one for one in members if one in ids]
                if mine:
                    decisions = replay(archive.select(ids=mine), controller)
                    cases.append(deployed(frame, decisions, archive=archive, controller=controller))
            rows = pd.concat(cases, ignore_index=True)
            if how == "fitted on calibration":
                scored[name] = dict(zip(rows["case"], rows["change"].astype(float), strict=True))
            yield Row(
                name if name in UNFITTED else f"{name}, {how}",
                rows,
                float(amount),
                seconds=took,
                p=quota_cell(frame, rows),
            )
    both = compare_designs(known, setting, WITH_BEST, level=0.975)
    inside = compare_designs(calibration, setting, DESIGNS)
    yield from shipped_rows(bench, ladder, frame, took)
    bench.kept.setdefault("designs", {})[ladder] = {
        "both": [vars(row) for row in both.rows],
        "calibration": {name: [[one.cluster, one.gain] for one in found] for name, found in inside.deployed.items()},
        "development": {**scored, "m0": dict.fromkeys(ids, 0.0), "consensus": {
            one.case_id: one.metric[state_of(setting.consensus)] - one.source for one in development}},
        "clusters": {one.case_id: one.cluster for one in development},
        "oracle": float(np.mean([max(one.metric.values()) - one.source for one in known])),
    }  # fmt: skip


def shipped_rows(bench: Bench, ladder: str, frame: pd.DataFrame, took: float) -> Iterator[Row]:
    """What ``calibrate --policy default`` takes by itself, and the same with a flag where quality may be below .7."""
    archive, amount = bench.development.on(ladder), float(bench.development.on(ladder).steps)
    for below in (None, POOR):
        try:
            policy = calibrate(bench.calibration.on(ladder), "default", flag_below=below)
        except CasewiseError as error:
            bench.refused.append(f"{ladder}: default{'' if below is None else f' with flags below {below}'}: {error}")
            continue
        decisions = replay(archive, policy)
        rows = deployed(frame, decisions, archive=archive, controller=controller_of(policy))
        name = f"`--policy default`, which takes {policy.controller}"
        if below is not None:
            flagged = np.array([one.flagged for one in sorted(decisions, key=lambda one: one.case_id)])
            poor = rows.sort_values("case")["metric"].to_numpy(float) < below
            name = (f"`flag`: the same, {flagged.sum()} of {len(flagged)} flagged, "
                    f"{(flagged & poor).sum()} of the {poor.sum()} deployed below .7 among them")  # fmt: skip
        yield Row(name, rows, amount, seconds=took, p=quota_cell(frame, rows))


def ladder_rows(bench: Bench, ladder: str) -> Iterator[Row]:
    """Fixed budgets, stop rules and routers of a gradient ladder, calibrated on calibration."""
    archive, holdout = bench.development.on(ladder), bench.calibration.on(ladder)
    frame, extra = outcomes(archive), 9.0 if ladder == "consensus" else 0.0  # forwards that make the teacher
    some = "" if ladder in bench.recorded else f" (the first {len(archive.ids)} cases)"
    for step in (1, archive.steps):
        cases = deployed(frame, replay(archive, FixedK(step)))
        yield Row(f"{ladder}: fixed-{step}{some}", cases, 1 + extra + 2 * step, step, until(archive, cases))
    for name, design in RULES.items():
        try:
            controller = controller_of(calibrate(holdout, design, unshrunk=ladder == "consensus"))
            cases = deployed(frame, replay(archive, controller))
        except CasewiseError as error:
            bench.refused.append(f"{ladder}: {name}: {error}")
            continue
        executed = float(cases["executed"].mean())
        p = quota_cell(frame, cases)
        yield Row(f"{ladder}: {name}{some}", cases, 1 + extra + 2 * executed, executed, until(archive, cases), p)


def design_lines(bench: Bench) -> Iterator[str]:
    """Every design by cross-fitting over the clusters of both splits: what the choice of a design is judged on."""
    for ladder, kept in bench.kept.get("designs", {}).items():
        names = ("gain [95 %]", "helped : hurt", "hurt by > .01", "worst", "captured")
        yield f"\n| `{ladder}`, both splits, cross-fitted | {' | '.join(names)} |"
        yield "|---|---|---|---|---|---|"
        for row in kept["both"]:
            share = "" if row["captured"] is None else f"{row['captured']:.0%}"
            yield (
                f"| {row['design']} | {row['gain']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}] | {row['helped']} : "
                f"{row['hurt']} | {row['hurt_by_a_point']} of {row['cases']} | {row['worst']:+.3f} | {share} |"
            )

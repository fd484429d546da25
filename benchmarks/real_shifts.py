"""One table per real shift: every proposer, consensus and decision on the same development cases, in one run.

    python benchmarks/real_shifts.py --data DATA -o OUT [hearts driving ...]      after real_ladders.py; prints Markdown

Reads the archives below OUT; development labels are read through the exposure ledger of each archive. What is fitted is
fitted on the calibration cases, or by cross-fitting over clusters where the row says so. Numbers of every case go to
OUT/tables/SHIFT.json, from which ``real_across.py`` leaves one shift out at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from real_folders import SPLITS, print_small
from real_ladders import HOME, Shift, shifts

from casewise.adapt.views import SETS, views_of
from casewise.archive.store import Archive, open_archive
from casewise.core.errors import CasewiseError
from casewise.core.records import SOURCE, Controller, Mask
from casewise.judge.calibration.design_comparison import compare_designs
from casewise.judge.calibration.designs import DESIGNS, Known, folds, gather
from casewise.judge.calibration.fit import calibrate
from casewise.judge.calibration.view_selection import ReadCase, chosen_views, read_case, settled_after
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.evidence import deployed_numbers
from casewise.judge.certificates.grid import certify_default
from casewise.judge.controllers.choose import AgreementRule, board, state_of
from casewise.judge.controllers.depth import FixedK
from casewise.judge.deciding import Setting, setting_of
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import POINT, deployed, edit_shares, outcomes
from casewise.judge.policy import controller_of
from casewise.measure.masks import labels_of
from casewise.measure.metrics import METRICS
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.selective import auroc, risk_coverage
from casewise.replay import replay
from casewise.study.benchmark.method_scores import FEWEST, summary
from casewise.study.quality_control import archive_opinions, controlled, quality_rows
from casewise.study.statistics.chance import chance_draws
from casewise.study.statistics.resample import clusters_of, mean_interval

POOR = 0.7
SETTLED = (0.97, 0.98, 0.985, 0.99, 0.995)
DRAWS = 1000
PATIENCE = 12  # of source_training.py
GRADIENTS = ("tent", "eata", "cotta", "consensus")
RULES = {"router of the paper": "cardiac", "`default` of 0.1": "default", "frag-stop": "frag-stop",
         "tau-stop": "tau-stop"}  # fmt: skip
PROMISES = (Promise(("ha",), (0.2,)), Promise(("harmed",), (0.2,), margin=POINT), Promise(("worse-voxels",), (0.4,)))
LEVELS, ALLOWED = (0.8, 0.9, 0.95), (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Row:
    """One line: what a method deployed on every development case, in the columns of ``judge.outcomes``; its cost."""

    name: str
    cases: pd.DataFrame
    forwards: float
    backwards: float = 0.0
    seconds: float = float("nan")
    p: str = ""

    def cells(self, oracle: float) -> Sequence[str]:
        said = summary(self.cases, oracle)  # as casewise bench scores a method
        judged = said["judged"] is not None
        back = f" + {self.backwards:.1f}b" if self.backwards else ""
        return (
            f"{said['gain']:+.4f} {spread(self.cases)}",
            "" if said["captured"] is None else f"{said['captured']:.0%}",
            f"{said['helped']} : {said['hurt']}",
            str(said["hurt_by_a_point"]),
            f"{said['ha']:.3f} ({said['judged']:.0%})" if judged else "",
            f"{said['ba']:.3f}" if judged else "",
            f"{said['worse_voxels']:.3f}" if judged else "",
            f"{self.forwards:.1f}{back}",
            "" if np.isnan(self.seconds) else f"{self.seconds:.1f}",
            self.p,
        )


def interval_of(cases: pd.DataFrame) -> dict[str, Any]:
    """The mean gain with its interval by cluster; with fewer than five clusters the mean of each instead."""
    units, change = clusters_of(cases), cases["change"].to_numpy(float)
    if units.max() < FEWEST - 1:
        means = {str(name): float(mean) for name, mean in cases.groupby("cluster")["change"].mean().items()}
        return {"gain": float(change.mean()), "low": None, "high": None, "means": means}
    found = mean_interval(change, clusters=units)
    return {"gain": found.estimate, "low": found.low, "high": found.high}


def spread(cases: pd.DataFrame) -> str:
    """The interval of the mean gain by cluster, or the mean of each cluster, in words."""
    found = interval_of(cases)
    if found["low"] is None:
        return f"({', '.join(f'{name} {mean:+.4f}' for name, mean in found['means'].items())})"
    return f"[{found['low']:+.4f}, {found['high']:+.4f}]"


BLOCKS = ("Views and their consensus", "Decisions", "Gradient ladders")
COLUMNS = (
    "gain [95 %]", "captured", "helped : hurt", "hurt by > .01", "HA (judged)", "BA", "worse-voxels",
    "forwards", "seconds as recorded", "p at its quota",
)  # fmt: skip


@dataclass
class Bench:
    """The two archives of a shift, and all that is measured on them."""

    shift: Shift
    calibration: Archive
    development: Archive
    kept: dict[str, Any] = field(default_factory=dict)  # for OUT/tables/SHIFT.json
    refused: list[str] = field(default_factory=list)  # what could not be calibrated or certified, and why

    @property
    def recorded(self) -> list[str]:
        """Ladders that hold every case of both splits."""
        return [name for name in self.begun if self.amount(name) == len(self.development.cases or ())]

    @property
    def begun(self) -> list[str]:
        """Ladders that hold every calibration case and at least five clusters of development, or all of them."""
        found, cases = [], self.calibration.cases or {}
        for name in self.shift.ladders:
            if name in self.calibration.ladders and name in self.development.ladders:
                there = self.development.on(name).entries.values()
                units = {entry.cluster or entry.id for entry in there}
                enough = len(units) >= FEWEST or len(there) == len(self.development.cases or ())
                if enough and len(self.calibration.on(name).ids) == len(cases):
                    found.append(name)
        return found

    def amount(self, ladder: str) -> int:
        """Development cases that have a ladder."""
        return len(self.development.on(ladder).ids)

    @property
    def views(self) -> list[str]:
        return [name for name in self.recorded if self.shift.ladders[name].forward_only is not None]

    def frame(self, ladder: str) -> pd.DataFrame:
        return outcomes(self.development.on(ladder))

    def fixed(self, ladder: str, step: int, **cost: float) -> Row:
        """One candidate of a ladder, for every case."""
        archive = self.development.on(ladder)
        cases = deployed(self.frame(ladder), replay(archive, FixedK(step)))
        return Row("", cases, seconds=seconds(archive, step), **cost)  # type: ignore[arg-type]


def seconds(archive: Archive, *places: int) -> float:
    """Median over cases of what M0 and some candidates took when they were recorded; M0 as long as a reading."""
    found = []
    for entry in archive.entries.values():
        readings = entry.seconds[1:-1] or entry.seconds
        source = max(entry.seconds[0], float(np.median(readings)))  # it is shared between ladders, so it may be free
        found.append(source + sum(entry.seconds[place] for place in places if place))
    return float(np.median(found))


def until(archive: Archive, cases: pd.DataFrame) -> float:
    """Median over cases of what M0 and the executed steps took when they were recorded."""
    executed = cases.set_index("case")["executed"]
    return float(np.median([sum(archive.entries[name].seconds[: int(k) + 1]) for name, k in executed.items()]))


# ---- views and kinds of consensus ----


@dataclass(frozen=True)
class Reader:
    """One development case of a ladder of views, whose consensuses become whole masks."""

    case: ReadCase
    source: Mask
    label: Mask
    changed: np.ndarray

    def row(self, labels: np.ndarray, archive: Archive) -> dict[str, Any]:
        """What deploying these labels costs, in the columns of ``judge.outcomes``."""
        mask = self.source.copy()
        mask[self.changed] = labels
        made, entry = archive.configuration, archive.entry(self.case.id)
        ignore = made.get("ignore")
        judged = harm(self.source, mask, self.label, min_area=made["min_area"], foreground=made["foreground"],
                      ignore=ignore)  # fmt: skip
        metric, source = (
            METRICS[made["metric"]].of(one, self.label, ignore=ignore, spacing_mm=entry.spacing_mm)
            for one in (mask, self.source)
        )
        return {
            "case": self.case.id, "cluster": entry.cluster, "metric": metric, "change": metric - source,
            "ha": judged.ha, "ba": judged.ba, "unscored": judged.unscored, "area": judged.area,
            **edit_shares(self.source, mask, self.label, ignore),
        }  # fmt: skip


def reader(archive: Archive, case_id: str) -> Reader:
    masks = archive.masks(case_id)
    source = masks[SOURCE]
    changed = np.any([mask != source for mask in masks.values()], axis=0)
    return Reader(read_case(archive, case_id), source, archive.label(case_id), changed)


def mean_of(case: ReadCase, places: Sequence[int]) -> np.ndarray:
    return labels_of(case.ballots[[0, *places]].mean(0, dtype=np.float32), case.head)


def vote_of(case: ReadCase) -> np.ndarray:
    """The majority of all readings; M0's label where votes are even."""
    counts = np.stack([(case.masks == value).sum(0) for value in range(case.outside.shape[1])]) * 2
    counts[case.masks[0], np.arange(case.masks.shape[1])] += 1
    return np.asarray(counts.argmax(0))


def ordered(case: ReadCase, places: Sequence[int]) -> ReadCase:
    """The case as if only these views had been read, in this order."""
    rows = [0, *places]
    names = tuple(case.names[place - 1] for place in places)
    return replace(case, ballots=case.ballots[rows], masks=case.masks[rows], names=names)


def slim(case: ReadCase, names: tuple[str, ...]) -> ReadCase:
    """What a choice of views reads, so that all calibration cases fit into memory."""
    return replace(case, names=names, masks=case.masks[:1].astype(np.uint8), label=case.label.astype(np.uint8))


def rungs_of(archive: Archive) -> tuple[str, ...]:
    """The views of a ladder by place; one that is drawn for each case is called "random view"."""
    each = zip(*(entry.rungs[:-1] for entry in archive.entries.values()), strict=True)
    return tuple(names[0] if len(set(names)) == 1 else f"random view {k}" for k, names in enumerate(each, start=1))


def places_of(names: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(names.index(name) + 1 for name in wanted if name in names)


def kinds(bench: Bench, ladder: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """The consensuses of one ladder: name -> (places of the views, how they are joined)."""
    archive = bench.calibration.on(ladder)
    names = rungs_of(archive)
    everything = tuple(range(1, len(names) + 1))
    found = {"mean of all": (everything, "mean"), "vote of all": (everything, "vote")}
    shipped = places_of(names, [str(view) for view in views_of(ladder)]) if ladder in SETS else ()
    if shipped and len(shipped) == len(views_of(ladder)):
        found[f"set `{ladder}`, uniform"] = (shipped, "mean")
        found[f"set `{ladder}`, sequential"] = (shipped, "sequential")
    else:
        found |= {f"first {size}, mean": (tuple(range(1, size + 1)), "mean") for size in (4, 8) if size < len(names)}
        found["all, sequential"] = (everything, "sequential")
    if not all("random" in name for name in names):
        mirrors = tuple(k for k, name in enumerate(names, start=1) if name.startswith("mirror("))
        if len(mirrors) > 1:
            found["mirror mean (what nnU-Net's mirroring is)"] = (mirrors, "mean")
        chosen = chosen_views([slim(read_case(archive, name), names) for name in archive.ids])
        words = ", ".join(chosen.names) or "M0 alone"
        found[f"calibrated: {words} (left-out estimate {chosen.left_out:+.4f})"] = (chosen.places, "mean")
    return found


def consensus_rows(bench: Bench, ladder: str) -> Iterator[Row]:
    """Every view alone, then every kind of consensus; cases are read one at a time."""
    archive = bench.development.on(ladder)
    for step, name in enumerate(rungs_of(archive), start=1):
        if "random" not in name:
            yield replace(bench.fixed(ladder, step, forwards=2), name=f"{name} alone")
    wanted = kinds(bench, ladder)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    read: dict[str, list[int]] = {name: [] for name in wanted}
    curve: dict[str, dict[float, list[tuple[int, float]]]] = {}
    for case_id in archive.ids:
        one = reader(archive, case_id)
        for name, (places, how) in wanted.items():
            part, amount = ordered(one.case, places), len(places)
            if how == "sequential":
                points = curve.setdefault(name, {at: [] for at in (*SETTLED, 1.01)})
                for at in points:
                    stop = settled_after(part, at)
                    row = one.row(mean_of(part, range(1, stop + 1)), archive) if at == 0.985 else None
                    value = part.consensus(range(1, stop + 1)) if row is None else row["metric"]
                    points[at].append((stop, value - part.source))
                    if row is not None:
                        rows[name].append(row)
                        amount = stop
            else:
                labels = mean_of(part, range(1, amount + 1)) if how == "mean" else vote_of(one.case)
                rows[name].append(one.row(labels, archive))
            read[name].append(amount)
    for name, (places, how) in wanted.items():
        forwards = 1 + float(np.mean(read[name]))
        took = seconds(archive, *places) * (forwards / (1 + len(places)) if how == "sequential" else 1)
        yield Row(name, pd.DataFrame(rows[name]), forwards, seconds=took)
    bench.kept.setdefault("curves", {}).update(
        {f"{ladder}: {name}": {str(at): [[k, round(gain, 5)] for k, gain in points[at]] for at in points}
         for name, points in curve.items()}
    )  # fmt: skip


# ---- decisions ----


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
                p=quota_p(frame, rows),
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
        yield Row(name, rows, amount, seconds=took, p=quota_p(frame, rows))


def quota_p(frame: pd.DataFrame, rows: pd.DataFrame) -> str:
    """How often dealing the deployed states to the clusters at random gains as much, and harms as little."""
    chosen = list(zip(rows["deployed"].astype(int), rows["shrink"].astype(float), strict=True))
    if (rows["action"] == "gate").any() or len(set(chosen)) < 2:
        return ""
    states = sorted(set(chosen))
    table = frame.set_index(["step", "shrink", "case"]).sort_index()
    buckets = np.array([states.index(one) for one in chosen])
    units = clusters_of(rows)
    found = []
    for column, sign in (("change", 1), ("ha", -1)):
        values = np.column_stack([
            table.loc[state].reindex(rows["case"])["metric" if column == "change" else "ha"].to_numpy(float)
            for state in states
        ])  # fmt: skip
        values = values - rows["metric_source"].to_numpy(float)[:, None] if column == "change" else values
        drawn = sign * chance_draws(values, buckets, DRAWS, 1000, units)
        observed = sign * float(np.nanmean(values[np.arange(len(values)), buckets]))
        found.append((1 + int((drawn >= observed - 1e-12).sum())) / (1 + DRAWS))
    return f"gain {found[0]:.3f}, HA {found[1]:.3f}"


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
        p = quota_p(frame, cases)
        yield Row(f"{ladder}: {name}{some}", cases, 1 + extra + 2 * executed, executed, until(archive, cases), p)


# ---- quality, promises ----


def number(value: float) -> str:
    """Nothing where a number is not defined, as an AUROC without cases of both kinds."""
    return f"{value:.3f}" if np.isfinite(value) else ""


def quality_lines(bench: Bench, ladder: str) -> Iterator[str]:
    """What each signal says about M0's metric over both splits, and what flags find; bounds leave the cluster out."""
    both = [one.on(ladder) for one in (bench.calibration, bench.development)]
    made = both[0].configuration
    opinions = (opinion for archive in both for opinion in archive_opinions(archive))
    rows = quality_rows(opinions, metric=made["metric"], ignore=made.get("ignore"))
    found = controlled(rows, below=POOR, level=0.9)
    yield "| signal of M0 | rank correlation | AURC [95 %] (best, chance) | normalised | AUROC(metric < .7) |"
    yield "|---|---|---|---|---|"
    for row in found.worth.to_dict("records"):
        yield (
            f"| {row['signal']} | {row['rho']:.2f} | {row['aurc']:.3f} [{row['low']:.3f}, {row['high']:.3f}] "
            f"({row['optimum']:.3f}, {row['chance']:.3f}) | {row['normalized']:.2f} | {number(row['auroc'])} |"
        )
    signals = pd.concat([archive.signals() for archive in both])
    entropy = signals.loc[signals["step"] == 0].set_index("case")["entropy"].reindex(rows["case"]).to_numpy(float)
    metric = rows["metric"].to_numpy(float)
    curve = risk_coverage(-entropy, 1 - metric)
    rho = pd.Series(-entropy).corr(pd.Series(metric), method="spearman")
    yield (
        f"| confidence (minus entropy) | {rho:.2f} | {curve.aurc:.3f} ({curve.optimum:.3f}, {curve.mean_risk:.3f}) | "
        f"{curve.normalized:.2f} | {number(auroc(entropy, metric < POOR))} |"
    )
    if found.refused:
        yield f"\nNo lower bound: {found.refused}"
        return
    flagged = found.cases["flagged"].fillna(False).astype(bool)
    poor = found.cases["metric"] < POOR
    covered = (found.cases["metric"] >= found.cases["quality_low"]).mean()
    own = found.cases["case"].isin(both[1].ids)
    kept = rows[["case", "cluster", "agreement", "metric"]].to_dict("list")
    bench.kept.setdefault("quality", {})[ladder] = kept
    yield (
        f"\nFlags (`--flag-below 0.7 --at 0.9`, each cluster's bound from the others): {int(flagged.sum())} of "
        f"{len(flagged)} cases, {int((flagged & poor).sum())} of the {int(poor.sum())} below .7 among them; on "
        f"development {int((flagged & own).sum())} of {int(own.sum())}, {int((flagged & poor & own).sum())} of "
        f"{int((poor & own).sum())}. The lower bound held for {covered:.0%} of the cases (promised 90 %)."
    )


def promise_lines(bench: Bench) -> Iterator[str]:
    """What the calibration cases could promise, and what then happened on development."""
    yield "| what | promise | patients | bound | kept | realised on development, kept |"
    yield "|---|---|---|---|---|---|"
    for ladder in bench.views:
        yield from _chosen_promises(bench, ladder)
    asked = [(ladder, "consensus") for ladder in bench.views]
    asked += [(ladder, design) for ladder in bench.begun if ladder in GRADIENTS for design in ("cardiac", "default")]
    for ladder, design in asked:
        holdout, archive = bench.calibration.on(ladder), bench.development.on(ladder)
        try:
            policy = calibrate(holdout, design, unshrunk=ladder == "consensus")
        except CasewiseError as error:
            bench.refused.append(f"{ladder}, {design}: {error}")
            continue
        for promise in PROMISES:
            try:
                certificate, certified = certify_router(holdout, policy, promise, force=True)
                after = deployed_numbers(archive, certified, margin=promise.margin)
            except CasewiseError as error:
                bench.refused.append(f"{ladder}, {design}, {promise.label}: {error}")
                continue
            bound = "refused" if certificate.bound is None else f"{certificate.bound:.3f}"
            realised = after.get(promise.label, after.get("harmed"))
            yield (
                f"| {ladder}, {design} | {_said(promise)} | {certificate.units} | {bound} | {certificate.kept:.0%} | "
                f"{realised:.3f}, {after['kept']:.0%} |"
            )


def _said(promise: Promise) -> str:
    sure = "" if promise.delta is None else f" with chance {1 - promise.delta:g}"
    return f"{promise.label} <= {promise.alphas[0]}{f', by > {promise.margin}' if promise.margin else ''}{sure}"


def _chosen_promises(bench: Bench, ladder: str) -> Iterator[str]:
    """The design chosen with labels, certified with its choice: half of the patients fit, the others test."""
    holdout, archive = bench.calibration.on(ladder), bench.development.on(ladder)
    for promise in (replace(one, delta=0.1) for one in PROMISES):
        try:
            certificate, certified = certify_default(holdout, promise, force=True)
            after = deployed_numbers(archive, certified, margin=promise.margin)
        except CasewiseError as error:
            bench.refused.append(f"{ladder}, default, {promise.label}: {error}")
            continue
        chosen = f"default, chosen with it: {certified.name}" if certificate.feasible else "default, chosen with it"
        bound = "refused" if certificate.bound is None else f"p {certificate.bound:.3f}"
        yield (
            f"| {ladder}, {chosen} | {_said(promise)} | {certificate.units} | {bound} | {certificate.kept:.0%} | "
            f"{after.get(promise.label, after.get('harmed')):.3f}, {after['kept']:.0%} |"
        )


# ---- a shift ----


def rows_of(bench: Bench) -> Iterator[tuple[str, Row]]:
    """(part of the table, line), M0 first."""
    first = bench.recorded[0]
    yield BLOCKS[0], replace(bench.fixed(first, 0, forwards=1), name="M0")
    for block, make in zip(BLOCKS, (consensus_rows, decision_rows), strict=False):
        for ladder in bench.views:
            yield from ((block, replace(row, name=f"{ladder}: {row.name}")) for row in make(bench, ladder))
    for ladder in bench.begun:
        if ladder in GRADIENTS:
            yield from ((BLOCKS[2], row) for row in ladder_rows(bench, ladder))


def oracle_of(bench: Bench) -> float:
    """What the best recorded candidate of each case would gain."""
    frames = [bench.frame(name) for name in bench.recorded]
    best = pd.concat(frames).groupby("case")["metric"].max()
    source = frames[0].loc[frames[0]["step"] == 0].set_index("case")["metric"]
    return float((best - source).mean())


def tell(shift: Shift, out: Path) -> None:
    """Print everything about one shift."""
    calibration, development = (open_archive(shift.archive(out, split)) for split in SPLITS)
    development = unlock(development.locked(), purpose="benchmarks/real_shifts.py: the table of this shift")
    bench = Bench(shift, calibration, development)
    first = bench.frame(bench.recorded[0])
    source = first.loc[first["step"] == 0]
    oracle = oracle_of(bench)
    lost = [name for name in shift.ladders if name not in bench.begun]
    units, before = clusters_of(source).max() + 1, len(calibration.cases or calibration.entries)
    print(f"\n### {shift.name}: {len(source)} development cases of {units} clusters, calibrated on {before}\n")
    print(f"M0 {source['metric'].mean():.4f}, {int((source['metric'] < POOR).sum())} cases below .7. The best recorded "
          f"candidate of each case (needs the label) would gain {oracle:+.4f}."
          + (f" Not recorded: {', '.join(lost)}." if lost else ""))  # fmt: skip
    for line in (*beside_the_set(bench), *source_of(shift, out)):
        print(f"\n{line}")
    bench.kept |= {"source": float(source["metric"].mean()), "oracle": oracle, "rows": {}}
    heading = ""
    for block, row in rows_of(bench):
        if block != heading:
            heading = block
            print(f"\n{heading}:\n\n| method | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
        print(f"| {row.name} | {' | '.join(row.cells(oracle))} |", flush=True)
        bench.kept["rows"][row.name] = {
            **interval_of(row.cases), "forwards": row.forwards,
            "hurt": int((row.cases["change"] < -POINT).sum()), "n": len(row.cases),
            "changes": dict(zip(row.cases["case"], row.cases["change"].astype(float).round(5), strict=True)),
        }  # fmt: skip
    for line in (*curve_lines(bench), *design_lines(bench)):
        print(line)
    for ladder in bench.views:
        print(f"\nQuality of M0 from `{ladder}` (both splits):\n")
        print("\n".join(quality_lines(bench, ladder)), flush=True)
    print("\nPromised on calibration, realised on development:\n")
    for line in promise_lines(bench):
        print(line, flush=True)
    if bench.refused:
        print(f"\nRefused: {'; '.join(dict.fromkeys(bench.refused))}.")
    (out / "tables").mkdir(exist_ok=True)
    (out / "tables" / f"{shift.name}.json").write_text(json.dumps(bench.kept, indent=1, default=float))


def beside_the_set(bench: Bench) -> Iterator[str]:
    """Views that a ladder holds and the named set of today does not."""
    for ladder in bench.views:
        names, shipped = (
            rungs_of(bench.development.on(ladder)),
            set(map(str, views_of(ladder) if ladder in SETS else ())),
        )
        more = [f"`{name}`" for name in names if name not in shipped]
        if more and shipped.issubset(names) and shipped:
            yield (
                f"`{ladder}` was recorded with {', '.join(more)} beside the views of the set: rows called "
                f'"set `{ladder}`" leave that out; "mean of all", "calibrated" and the decisions may use it.'
            )


def source_of(shift: Shift, out: Path) -> Iterator[str]:
    """How the source model was trained, where our script trained it; whether validation or the last epoch ended it."""
    if shift.seed is not None:
        said = json.loads((out / "sources" / f"{shift.cohort}-{shift.seed}.json").read_text())
        best, epochs = said["best_epoch"], said["epochs"]
        limit = f"; its learning rate ran out before {PATIENCE} epochs without a better one had stopped it"
        yield (
            f"Source model: seed {shift.seed}, Dice {said['validation_dice']:.3f} on {said['validation_images']} "
            f"held-out source images, best epoch {best} of {epochs}{limit if epochs - best < PATIENCE else ''}."
        )


def curve_lines(bench: Bench) -> Iterator[str]:
    """Gain against forwards of the sequential rule."""
    yield f"\n| reading stops when the consensus has settled at | {' | '.join(map(str, SETTLED))} | never |"
    yield "|---|" + "---|" * (len(SETTLED) + 1)
    for name, points in bench.kept.get("curves", {}).items():
        whole = np.array(points["1.01"], float)
        cells = []
        for at in (*SETTLED, 1.01):
            read = np.array(points[str(at)], float)
            saved, gain = 1 - read[:, 0].sum() / whole[:, 0].sum(), read[:, 1].mean()
            full = whole[:, 1].mean()
            kept = f", keeps {gain / full:.0%}" if full > 0.001 else ""
            cells.append(f"{gain:+.4f}; saves {saved:.0%}{kept}")
        yield f"| {name} | {' | '.join(cells)} |"


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


def tell_designs(shift: Shift, out: Path) -> None:
    """Print the designs alone, cross-fitted over the clusters of both splits; ``default`` compares within each fold."""
    calibration, development = (open_archive(shift.archive(out, split)) for split in SPLITS)
    development = unlock(development.locked(), purpose="benchmarks/real_shifts.py --designs: cross-fitted designs")
    bench = Bench(shift, calibration, development)
    for ladder in bench.views:
        setting = setting_of(development.on(ladder))
        known = [one for archive in (calibration, development) for one in gather(archive.on(ladder), setting)]
        chosen: list[str] = []

        def default(some: Sequence[Known], setting: Setting, chosen: list[str] = chosen) -> Controller:
            """What ``--policy default`` deploys: designs are compared within these cases, the chosen one is fitted."""
            chosen.append(compare_designs(some, setting).chosen)
            return DESIGNS[chosen[-1]](some, setting)

        both = compare_designs(known, setting, {**WITH_BEST, "default": default}, level=0.975)
        rows = {"designs": {ladder: {"both": [vars(row) for row in both.rows]}}}
        print(f"\n### {shift.name}, {len(known)} cases; in its folds `default` takes {', '.join(chosen)}")
        print("\n".join(design_lines(replace(bench, kept=rows))), flush=True)


def main() -> None:
    """Print the tables of the shifts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shifts", nargs="*", metavar="SHIFT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--designs", action="store_true", help="only the cross-fitted designs, default among them")
    options = parser.parse_args()
    sys.path.insert(0, str(HOME.parent))
    out = options.out.resolve()
    known = shifts((options.weights or options.data.resolve().parent / "weights").resolve(), out)
    print_small(out)
    for name in options.shifts or known:
        (tell_designs if options.designs else tell)(known[name], out)


if __name__ == "__main__":
    main()

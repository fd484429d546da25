"""One table per real shift: "I have a frozen model, a new scanner and some labelled cases. What should I do?"

    python benchmarks/real_question.py --data DATA -o OUT [hearts-mirrored polyps-0 ...] [--jobs 2] [--ladders ...]

For each shift the script runs ``casewise.fit`` on the calibration cases, tunes all weights as a rival, records every
candidate of the development cases, and prints the table. Development labels are read once, at the end, through the
exposure ledger of the archive. A run that was interrupted goes on where it stopped. Everything lies below
OUT/question/SHIFT; numbers of every case go to table.json there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_folders import SPLITS, print_small, small_run, start_run, write_folders
from real_shifts import HOME, Shift, cases_of, shifts, train_source, unseen_shifts
from scipy import stats

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import appearance_inputs
from casewise.adapt.proposers.live import prepare
from casewise.archive.store import Archive, open_archive
from casewise.core.errors import CasewiseError
from casewise.core.records import SOURCE, Decision, Mask, State
from casewise.data.folders import CaseFiles
from casewise.fit import fit
from casewise.judge.appearance import Appearance, KnownAppearance, appearance_numbers, outside
from casewise.judge.calibration.adoption import mean_low
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.decide import mask_of
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import POINT, scoring_options
from casewise.judge.policy import controller_of, read_policy
from casewise.learn.folds import cross_fit
from casewise.learn.tuning import Tuning, tune
from casewise.measure.cleanup import Cleanup
from casewise.measure.metrics import METRICS
from casewise.replay import replay
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, record_folder

POOR = {"dice": 0.7, "miou": 0.5}
NNUNET = "nnunet"
RIVALS = {
    "once": Tuning(),
    "all": Tuning(parameters="all", learning_rate=3e-4),  # a tenth of the rate of norm+head; fixed before any look
    NNUNET: Tuning(parameters="all", optimizer="sgd", learning_rate=1e-2, updates=250),  # nnUNetTrainer's own
}
RIVAL_NAMES = {
    "all": "tuned, all weights",
    NNUNET: "nnU-Net's own fine-tuning (all weights, SGD 0.01, 250 updates)",
}
CROPS: Any = {"patch": (256, 512), "batch": 4, "augmentation": "upright"}  # of driving frames, 512 x 1024
FEWEST = 4  # patients for folds
CLEANUPS = {"cardiac": "largest(1,2,3)", "fundus": "largest(1,2)", "polyps": "largest(1)", "driving": ""}
M0 = "leave the model alone (M0)"
LEVEL = 0.975  # of each side of a 95 % interval
COLUMNS = (
    "what to do", "gain [95 %, t by patient]", "helped : hurt", "hurt by > .01", "worst", "error of the measure",
    "CPU min to fit", "s per case",
)  # fmt: skip

Masks = Mapping[str, Mask]
"""One mask per case."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    masks: Callable[[str], Mask]  # of a case
    seconds: float = float("nan")
    cpu_minutes: float | None = None


@dataclass
class Question:
    """One shift: what is recorded, and the table."""

    shift: Shift
    data: Path
    out: Path
    jobs: int = 1
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.out / "question" / self.shift.name

    def folder(self, split: str) -> Path:
        return self.out / self.shift.cohort / "folders" / split

    def cases(self, split: str) -> list[CaseFiles]:
        return cases_of(self.folder(split), self.shift.model.load().ending)

    # ---- what is fitted and recorded ----

    def fit(self) -> None:
        """Run ``casewise.fit`` as it ships; an interrupted run goes on."""
        if (self.home / "fit" / "fit.json").exists():
            return
        before = _cpu_seconds()
        folder = self.folder("calibration")
        fit(
            self.shift.model, folder / "images", folder / "labels", patients=folder / "cases.csv",
            out=self.home / "fit", jobs=self.jobs, tuning=self.shortened(Tuning()),
            on_progress=_progress(f"{self.shift.name} fit"),
        )  # fmt: skip
        self._note_cost("fit", _cpu_seconds() - before)

    def shortened(self, how: Tuning) -> Tuning:
        """Return the schedule of a small run, which only shows that the chain runs; otherwise the one that is given."""
        return how if small_run(self.out) is None else replace(how, updates=4)

    def learn(self, rivals: Sequence[str]) -> None:
        """Tune in other ways on the same labelled cases; where patients are too few for folds, once on all of them."""
        cases = self.cases("calibration")
        patients = [one.cluster or one.id for one in cases]
        labels = [one.label for one in cases if one.label is not None]
        few = len(set(patients)) < FEWEST
        for name in (*(("once",) if few else ()), *rivals):
            if (self.home / name / "done").exists():
                continue
            how = self.shortened(RIVALS[name])
            if self.shift.kind == "driving":
                how = replace(how, **CROPS)
            if few or name == NNUNET:
                seconds = self._learn_once(cases, name, how)
            else:
                seconds = cross_fit(
                    self.shift.model, cases, labels, patients, how, folder=self.home / name, workers=self.jobs,
                    on_progress=_folds_progress(f"{self.shift.name} {name}"),
                ).cpu_seconds  # fmt: skip
            self._note_cost(name, seconds)
            (self.home / name / "done").touch()

    def _learn_once(self, cases: Sequence[CaseFiles], name: str, how: Tuning) -> float:
        """Tune on all labelled cases, without folds; returns CPU seconds."""
        backbone, began = self.shift.model.load(), time.process_time()
        read = [backbone.read(one).case for one in cases]
        labels = [backbone.read_label(one.label) for one in cases if one.label is not None]
        said = _progress_of(f"{self.shift.name} {name}")
        tuned = tune(backbone, read, labels, how, on_progress=said)
        (self.home / name).mkdir(parents=True, exist_ok=True)
        tuned.write(self.home / name / "once.safetensors")
        return time.process_time() - began

    def ladders(self, split: str) -> dict[str, Adaptation]:
        """The proposers of one split, in the order in which they are recorded."""
        fitted, crossfit = self.fitted, split == "calibration"
        found: dict[str, Adaptation] = {}
        city: Any = {"foreground": False} if self.shift.metric == "miou" else {}
        folder = self.tuned_folder
        tuned = partial(Adaptation, tuned=str(folder), crossfit=crossfit, **city)
        if split == "development":
            for name in fitted.ladders:
                how = Adaptation.from_plain(fitted.ladder(name).configuration["adaptation"])
                found[name] = how if how.tuned is None else replace(how, tuned=str(folder), crossfit=False)
            if "tuned" not in found:
                found["tuned"] = tuned("tuned:1,average")
        found["states"] = tuned("tuned:1/4,1/2,3/4")
        if split == "development":
            if len(list(folder.glob("*.safetensors"))) > 1:
                found["predictions"] = tuned("tuned:1", ensemble=True)
            for name in RIVAL_NAMES:
                if (self.home / name / "done").exists():
                    found[name] = replace(tuned("tuned:1,average"), tuned=str(self.home / name))
            views = next(str(how.objective) for how in found.values() if str(how.objective).startswith("views:"))
            found["tuned-views"] = tuned(f"tuned+{views}")
        found["tent"] = self.shift.tent
        if crossfit and not (self.home / "fit" / "tuned" / "folds.json").exists():
            found.pop("states")  # weights that were trained on these very cases
        return found

    @property
    def tuned_folder(self) -> Path:
        learned = self.home / "fit" / "tuned"
        return learned if list(learned.glob("*.safetensors")) else self.home / "once"

    def record(self, only: Sequence[str] | None) -> None:
        """Record the ladders of both splits; those of a case are made together, so that they share its M0."""
        for split in reversed(SPLITS):
            cases = self.cases(split)
            asked = {name: how for name, how in self.ladders(split).items() if not only or name in only}
            wanted = {name: how for name, how in asked.items() if self._lacks(split, name, cases)}
            if not wanted:
                continue
            work = RecordCase(self.shift.model, wanted, {one.id: one for one in cases})
            _, results = record_folder(
                work, LocalEngine(self.jobs), self.home / split, metric=self.shift.metric, dataset=self.shift.cohort
            )
            began = time.perf_counter()
            for done, result in enumerate(results, start=1):
                if result.error is not None:
                    raise SystemExit(f"{self.shift.name} {split} {result.case_id}: {result.error}")
                took = time.perf_counter() - began
                print(f"{self.shift.name} {split}: {done} cases, {took:.0f} s", file=sys.stderr, flush=True)

    def _lacks(self, split: str, name: str, cases: Sequence[CaseFiles]) -> bool:
        if not (self.home / split / "manifest.json").exists():
            return True
        there = open_archive(self.home / split)
        return name not in there.ladders or any(one.id not in there.ladder(name).entries for one in cases)

    def _note_cost(self, name: str, seconds: float) -> None:
        file = self.home / "cost.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**known, name: round(seconds / 60, 2)}, indent=1))

    # ---- the table ----

    @cached_property
    def fitted(self) -> Archive:
        """The labelled cases with the candidates that ``fit`` compared."""
        return open_archive(self.home / "fit" / "archive")

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What ``fit`` wrote about itself."""
        found: Mapping[str, Any] = json.loads((self.home / "fit" / "fit.json").read_text())
        return found

    @cached_property
    def new(self) -> Archive:
        """The development cases; opening their labels is written into the ledger."""
        archive = open_archive(self.home / "development")
        return unlock(archive.locked(), purpose="benchmarks/real_question.py: the table of this shift")

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return self.new.ladder(self.new.ladders[0]).ids

    def whole(self, name: str) -> bool:
        """Whether a ladder was recorded for every development case."""
        return name in self.new.ladders and set(self.new.ladder(name).ids) >= set(self.ids)

    def mask(self, ladder: str, rung: str | int, case_id: str) -> Mask:
        view = self.new.ladder(ladder)
        step = rung if isinstance(rung, int) else 1 + view.entries[case_id].rungs.index(rung)
        return view.mask(case_id, State(step))

    def _seconds(self, **steps: Sequence[int] | None) -> float:
        """Median over cases: M0 and some steps of some ladders (None: all of a ladder), as they were recorded."""
        found = []
        for case_id in self.ids:
            source = max(self.new.ladder(name).entries[case_id].seconds[0] for name in self.new.ladders)
            for name, chosen in steps.items():
                took = self.new.ladder(name).entries[case_id].seconds
                source += sum(took[1:] if chosen is None else (took[k] for k in chosen))
            found.append(source)
        return float(np.median(found))

    def lines(self) -> Iterator[Row]:
        """Every row of the table whose ladders were recorded."""
        cost = json.loads((self.home / "cost.json").read_text())
        views = next(name for name in self.new.ladders if name.startswith("views"))
        learning = self.facts["learned"]
        learned = cost.get("once") if learning is None else learning["cpu_seconds"] / 60
        cleaner = Cleanup.parse(CLEANUPS[self.shift.kind])

        def both(name: str, masks: Callable[[str], Mask], seconds: float, cpu: float | None = None) -> Iterator[Row]:
            yield Row(name, masks, seconds, cpu)
            if cleaner.steps:
                yield Row(f"{name}, largest component", lambda one: cleaner.apply(masks(one)), seconds, cpu)

        yield from both(M0, partial(self.mask, views, 0), self._seconds())
        yield from self._mirrored()
        yield from both(f"`{views}`, consensus", partial(self.mask, views, "mean"), self._seconds(**{views: None}))
        if self.whole("tent"):
            steps = self.new.ladder("tent").steps
            seconds = self._seconds(tent=None)
            yield Row("TENT for every case", partial(self.mask, "tent", steps), seconds)
            yield from self._decided("the paper's router on TENT", lambda: self._calibrated("tent", "cardiac"), seconds)
        if self.whole("tuned"):
            one = self._seconds(tuned=[1])
            yield from both("tuned, norm + head", partial(self.mask, "tuned", "1"), one, learned)
            yield from both("average of tuned and M0", partial(self.mask, "tuned", "average"), one, learned)
        if self.whole("states"):
            for step, share in ((1, "1/4"), (2, "1/2"), (3, "3/4")):
                yield Row(f"weights {share} of the way", partial(self.mask, "states", share),
                          self._seconds(states=[step]), learned)  # fmt: skip
        if self.whole("predictions"):
            yield Row("mean of the folds' predictions", partial(self.mask, "predictions", "1"),
                      self._seconds(predictions=[1]), learned)  # fmt: skip
        for rival, said in RIVAL_NAMES.items():
            if self.whole(rival):
                one = self._seconds(**{rival: [1]})
                yield from both(said, partial(self.mask, rival, "1"), one, cost.get(rival))
                yield from both(f"{said}; average", partial(self.mask, rival, "average"), one, cost.get(rival))
        if self.whole("tuned-views"):
            yield from both("views through the tuned weights", partial(self.mask, "tuned-views", "mean"),
                            self._seconds(**{"tuned-views": None}), learned)  # fmt: skip
        if self.whole("tuned") and "tuned" in self.fitted.ladders:
            joint = self._seconds(**dict.fromkeys(self.fitted.ladders))
            for design in ("choose", "merge"):
                yield from self._decided(
                    f"`{design}` among views and tuned", partial(self._joined, design), joint, learned
                )
            if self.whole("states") and (self.home / "calibration").exists():
                yield from self._decided(
                    "the paper's router on tuned weights", lambda: self._calibrated("states", "cardiac"),
                    self._seconds(states=[1, 2, 3]), learned,
                )  # fmt: skip
        yield self._shipped(cost.get("fit"))

    def _mirrored(self) -> Iterator[Row]:
        """nnU-Net's mirroring, where this shift is without it and the other one was recorded."""
        other = self.out / "question" / f"{self.shift.name}-mirrored" / "development"
        if (other / "manifest.json").exists():
            there = open_archive(other)
            view = there.ladder(there.ladders[0])
            took = float(np.median([view.entries[one].seconds[0] for one in self.ids]))
            yield Row("nnU-Net's mirroring", lambda one: view.mask(one, SOURCE), took)

    def _calibrated(self, ladder: str, design: str) -> Any:
        return calibrate(open_archive(self.home / "calibration").ladder(ladder), design, unshrunk=ladder == "states")

    def _joined(self, design: str) -> Any:
        return calibrate(self.fitted.join(self.fitted.ladders), design)

    def _decided(self, name: str, policy: Callable[[], Any], seconds: float, cpu: float | None = None) -> Iterator[Row]:
        try:
            made = policy()
            decisions = {one.case_id: one for one in replay(self.new, made)}
        except CasewiseError as error:
            print(f"{self.shift.name}: {name}: {error}", file=sys.stderr)
            return
        yield Row(name, partial(self._deployed, made, decisions), seconds, cpu)

    def _deployed(self, policy: Any, decisions: Mapping[str, Decision], case_id: str) -> Mask:
        decision = decisions[case_id]
        own = policy.ladder or next(iter(policy.ladders), self.new.ladders[0])

        def mask(state: State) -> Mask:
            return self.new.ladder(state.ladder or own).mask(case_id, state.on(""))

        return mask_of(controller_of(policy), mask, decision)

    def _shipped(self, cpu: float | None) -> Row:
        """What ``fit`` deploys: its policy, and M0 where an image is unlike the labelled ones."""
        policy = read_policy(self.home / "fit" / "policy.json")
        decisions = self._policy_decisions
        ladders = policy.ladders or ({policy.ladder: None} if policy.ladder else {})
        kept = self.unlike

        def mask(case_id: str) -> Mask:
            if case_id in kept or not decisions:
                return self.mask(self.new.ladders[0], 0, case_id)
            return self._deployed(policy, decisions, case_id)

        what = f"**`fit` as it ships** ({self._taken})"
        return Row(what, mask, self._seconds(**dict.fromkeys(ladders)), cpu)

    @cached_property
    def _taken(self) -> str:
        chosen = self.facts["preflight"].get("comparison", {}).get("chosen", self.facts["design"])
        return f"{chosen}{f', {len(self.unlike)} unlike images keep M0' if self.unlike else ''}"

    @cached_property
    def _policy_decisions(self) -> dict[str, Decision]:
        policy = read_policy(self.home / "fit" / "policy.json")
        reads = policy.ladders or policy.ladder
        return {one.case_id: one for one in replay(self.new, policy)} if reads else {}

    @cached_property
    def unlike(self) -> dict[str, str]:
        """Development images that the deployment finds unlike the labelled ones, and why."""
        policy, backbone = read_policy(self.home / "fit" / "policy.json"), self.shift.model.load()
        if not policy.appearance:
            return {}
        known, found = KnownAppearance.from_plain(policy.appearance), {}
        for files in self.cases("development"):
            case = backbone.read(files).case
            source = self.mask(self.new.ladders[0], 0, case.id)
            seen = appearance_inputs(case, prepare(case, backbone), source, backbone)
            look = Appearance(case.id, appearance_numbers(**seen), case.cluster)
            if said := outside(look, known, image_only=True):
                found[case.id] = said[0]
        return found

    def tell(self) -> None:
        """Score every row, print the table, and keep the numbers of every case."""
        view = self.new.ladder(self.new.ladders[0])
        options = scoring_options(view)
        labels = {one: self.new.label(one) for one in self.ids}
        clusters = [view.entries[one].cluster or one for one in self.ids]

        def scored(row: Row) -> dict[str, list[float]]:
            masks = {one: row.masks(one) for one in self.ids}
            metric = [
                float(METRICS[options["metric"]].of(masks[one], labels[one], ignore=options["ignore"], spacing_mm=None))
                for one in self.ids
            ]
            return {"metric": metric, "error": measure_errors(self.shift.kind, masks, labels, clusters)}

        found = {row.name: {**scored(row), "seconds": row.seconds, "cpu": row.cpu_minutes} for row in self.lines()}
        source = np.array(next(iter(found.values()))["metric"])
        calibrating = {one.cluster or one.id for one in self.fitted.ladder(self.fitted.ladders[0]).entries.values()}
        print(
            f"\n### {self.shift.name}: {len(self.ids)} new cases of {len(set(clusters))} patients, "
            f"{len(self.fitted.ladder(self.fitted.ladders[0]).ids)} labelled ones of {len(calibrating)}\n\n"
            f"M0 {source.mean():.4f}; {(source < POOR[options['metric']]).sum()} masks below "
            f"{POOR[options['metric']]}.\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
        )
        for name, one in found.items():
            print(line(name, np.array(one["metric"]) - source, clusters, one, self.shift.kind))
        said = list(self.flags(source, labels, found, options["metric"]))
        print("\n" + "\n".join(said), flush=True)
        kept = {"cases": list(self.ids), "clusters": clusters, "rows": found, "unlike": self.unlike, "flags": said}
        (self.home / "table.json").write_text(json.dumps(kept, indent=1, default=float))

    # ---- flags ----

    def flags(self, source: Any, labels: Mapping[str, Mask], found: Mapping[str, Any], metric: str) -> Iterator[str]:
        """Share flagged and poor masks found, for M0 and for what is deployed; both signals of agreement."""
        below = POOR[metric]
        views = next(name for name in self.new.ladders if name.startswith("views"))
        yield "| flags | flagged | poor masks | found |\n|---|---|---|---|"
        try:
            policy = calibrate(self.fitted.ladder(views), "m0", flag_below=below)
            flagged = {one.case_id for one in replay(self.new, policy) if one.flagged}
            yield _flag_line("M0", flagged, source, below, self.ids)
        except CasewiseError as error:
            yield f"| M0 | not calibrated: {error} | | |"
        shipped = next(one for name, one in found.items() if name.startswith("**`fit`"))
        flagged = {name for name, one in self._policy_decisions.items() if one.flagged} | set(self.unlike)
        yield _flag_line("what `fit` deploys", flagged, np.array(shipped["metric"]), below, self.ids)
        score = partial(METRICS[metric].of, ignore=scoring_options(self.new.ladder(views))["ignore"], spacing_mm=None)
        pairs = [agreements(self.new.ladder(views), one, score) for one in self.ids]
        poor = source < below
        for name, values in zip(("agreement", "agreement x certainty"), np.array(pairs).T, strict=True):
            rho = stats.spearmanr(values, source).statistic
            area = f"{auroc(-values, poor):.2f}" if 0 < poor.sum() < len(poor) else "-"
            yield f"\n{name} of the views against M0's {metric}: rank correlation {rho:+.2f}, AUROC of poor {area}"


def _flag_line(name: str, flagged: set[str], values: Any, below: float, ids: Sequence[str]) -> str:
    poor = {one for one, value in zip(ids, values, strict=True) if value < below}
    return f"| {name} | {len(flagged)} of {len(ids)} | {len(poor)} | {len(flagged & poor)} |"


def agreements(view: Archive, case_id: str, score: Callable[..., float]) -> tuple[float, float]:
    """Return M0's mean agreement with the views, and mean pairwise agreement times the certainty of their votes.

    q = mean over pairs of Dice x (1 - mean entropy of the vote shares over voxels that anybody calls foreground / ln C)
    """
    last = next(iter(view.entries.values())).rungs.index("mean") + 1
    masks = [view.mask(case_id, State(step)) for step in range(last)]
    first = _mean([score(masks[0], other) for other in masks[1:]])
    every = _mean([score(a, b) for a, b in combinations(masks, 2)])
    stacked = np.stack(masks)
    voted = stacked[:, (stacked > 0).any(axis=0)]
    classes = max(int(stacked.max()) + 1, 2)
    shares = np.stack([(voted == value).mean(axis=0) for value in range(classes)])
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=0)
    certainty = 1 - float(entropy.mean()) / np.log(classes) if entropy.size else 1.0
    return first, every * certainty


def _mean(values: Sequence[float]) -> float:
    """Mean of the agreements of pairs; two empty masks say nothing, and 0 stands where no pair says anything."""
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else 0.0


def auroc(values: Any, positive: Any) -> float:
    """Chance that a positive case has a larger value than a negative one."""
    ranks = stats.rankdata(values)
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def measure_errors(cohort: str, masks: Masks, labels: Masks, clusters: Sequence[str]) -> list[float]:
    """Return absolute errors of the clinical measure: ejection fraction by patient, cup-to-disc ratio by image."""
    if cohort == "fundus":
        return [abs(cup_to_disc(masks[one]) - cup_to_disc(labels[one])) for one in masks]
    if cohort != "cardiac":
        return []
    by_patient: dict[str, dict[str, str]] = {}
    for case_id, patient in zip(masks, clusters, strict=True):
        by_patient.setdefault(patient, {})[case_id.rsplit("_", 1)[-1]] = case_id
    pairs = [(found["ED"], found["ES"]) for found in by_patient.values() if {"ED", "ES"} <= set(found)]
    return [
        abs(ejection_fraction(masks[ed], masks[es]) - ejection_fraction(labels[ed], labels[es])) for ed, es in pairs
    ]


def ejection_fraction(diastole: Mask, systole: Mask) -> float:
    """Return 100 (EDV - ESV) / EDV of the left ventricle, label 1, in points; 0 where it is absent."""
    volume = int((diastole == 1).sum())
    return 100 * (volume - int((systole == 1).sum())) / volume if volume else 0.0


def cup_to_disc(mask: Mask) -> float:
    """Return the vertical cup-to-disc ratio: the height of the cup (label 2) over that of the disc; 0 without disc."""
    heights = [np.ptp(np.flatnonzero((mask >= value).any(axis=-1))) + 1 if (mask >= value).any() else 0
               for value in (2, 1)]  # fmt: skip
    return float(heights[0] / heights[1]) if heights[1] else 0.0


def line(name: str, gain: Any, clusters: Sequence[str], one: Mapping[str, Any], cohort: str) -> str:
    """Return one line of the table."""
    mean, low, high = mean_low(gain, clusters, level=LEVEL)
    sure = f" [{low:+.4f}, {high:+.4f}]" if len(set(clusters)) > 4 and gain.any() else ""
    error = "" if not one["error"] else f"{np.mean(one['error']):.{1 if cohort == 'cardiac' else 3}f}"
    cpu = "" if one["cpu"] is None else f"{one['cpu']:.0f}"
    took = "" if np.isnan(one["seconds"]) else f"{one['seconds']:.1f}"
    cells = (
        name, f"{mean:+.4f}{sure}", f"{(gain > 0).sum()} : {(gain < 0).sum()}", str((gain < -POINT).sum()),
        f"{gain.min():+.3f}", error, cpu, took,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def across(told: Mapping[str, Mapping[str, Any]], cohorts: Mapping[str, str]) -> Iterator[str]:
    """One recipe for every case, chosen by its mean gain on the other cohorts, scored on this one."""
    shared = set.intersection(*({name for name in one["rows"] if "fit` as" not in name} for one in told.values()))
    gains = {
        shift: {name: np.array(one["rows"][name]["metric"]) - np.array(one["rows"][M0]["metric"]) for name in shared}
        for shift, one in told.items()
    }
    yield "| shift | what the other cohorts choose | gain there | gain here | `fit` here |\n|---|---|---|---|---|"
    for shift, own in gains.items():
        others = [name for name in told if cohorts[name] != cohorts[shift]]
        mean = {name: float(np.mean([gains[other][name].mean() for other in others])) for name in shared}
        best = max(sorted(mean), key=lambda name: mean[name])
        shipped = next(one for name, one in told[shift]["rows"].items() if "fit` as" in name)
        fitted = float(np.mean(np.array(shipped["metric"]) - np.array(told[shift]["rows"][M0]["metric"])))
        yield f"| {shift} | {best} | {mean[best]:+.4f} | {own[best].mean():+.4f} | {fitted:+.4f} |"


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def _progress(what: str) -> Callable[[str, int, int], None]:
    def said(step: str, done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            print(f"{what}: {step} {done} of {total}", file=sys.stderr, flush=True)

    return said


def _progress_of(what: str) -> Callable[[int, float], None]:
    return lambda update, loss: _progress(what)("update", update, 0)


def _folds_progress(what: str) -> Callable[[int, int, float], None]:
    return lambda fold, update, loss: _progress(what)(f"fold {fold}, update", update, 0)


def main() -> None:
    """Run the shifts that are asked for, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shifts", nargs="*", metavar="SHIFT", help="hearts-mirrored, polyps-0, ...; default: all")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--ladders", nargs="*", help="record only these ladders")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--cases", type=int, help="a small run: so many cases of each split")
    parser.add_argument("--steps", default="fit,learn,record,tell", help="parts to run")
    parser.add_argument("--rivals", nargs="*", help=f"other ways to tune: {', '.join(RIVAL_NAMES)}; default: all")
    options = parser.parse_args()
    os.environ.setdefault("nnUNet_compile", "f")
    sys.path.insert(0, str(HOME.parent))
    torch.set_num_threads(1)
    data, out = options.data.resolve(), options.out.resolve()
    weights = (options.weights or data.parent / "weights").resolve()
    usual = shifts(weights, out)
    known = {**usual, **unseen_shifts(weights, out)}
    start_run(out, options.cases if options.cases is not None else small_run(out))
    steps = options.steps.split(",")
    print_small(out)
    for name in options.shifts or usual:
        shift = known[name]
        write_folders(shift.cohort, data, out)
        if shift.source is not None:
            train_source(shift.source, data, out)
        question = Question(shift, data, out, options.jobs)
        question.home.mkdir(parents=True, exist_ok=True)
        suits = [one for one in RIVAL_NAMES if one != NNUNET or shift.kind == "cardiac"]
        rivals = suits if options.rivals is None else options.rivals
        parts: dict[str, Callable[[], None]] = {
            "fit": question.fit, "learn": partial(question.learn, rivals),
            "record": partial(question.record, options.ladders), "tell": question.tell,
        }  # fmt: skip
        for step, run in parts.items():
            if step in steps:
                run()
    tables = {name: out / "question" / name / "table.json" for name in known}
    told = {name: json.loads(file.read_text()) for name, file in tables.items() if file.exists()}
    told = {name: one for name, one in told.items() if name in usual}
    if "tell" in steps and len({known[name].cohort for name in told}) > 1:
        print("\n### Chosen on other cohorts\n")
        print("\n".join(across(told, {name: known[name].cohort for name in told})))


if __name__ == "__main__":
    main()

"""From a frozen model and a few labelled cases to a deployment: propose, learn, compare, calibrate, certify.

:func:`fit` runs the whole chain with defaults for every step. After an interruption the same call resumes at the
last finished part.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone
from casewise.adapt.model import Model, as_model, loaded
from casewise.adapt.proposers import named_proposal
from casewise.adapt.tuned_weights import read_tuned_folder
from casewise.archive.store import Archive
from casewise.core.durable import file_lock, sweep, write_durably, write_json
from casewise.core.errors import BadInput, Refused, TooFewCases
from casewise.core.json_records import begin_or_continue, read_json
from casewise.core.records import CALIBRATION, Case, Mask, Policy, check_shares
from casewise.core.text import UNIT, pluralize
from casewise.data.folders import CaseFiles
from casewise.data.nifti import check_same_place
from casewise.data.splits import cluster_of, count_patients
from casewise.deployment import SUMMARY, Deployment
from casewise.deployment.saved import MEASURES, TUNED, predict_command, with_tuned_at
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.cuts import FEWEST
from casewise.judge.calibration.design_comparison import out_of_fold
from casewise.judge.calibration.designs import Deployed
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.certificates.evidence import LOSSES
from casewise.judge.certificates.split import PromiseSplit, certify_held_out, split_for_promise
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.outcomes import outcomes, patients_of
from casewise.judge.policy import controller_kind
from casewise.learn.folds import CrossFit, cores, cross_fit, deal, read_case
from casewise.learn.tuning import Tuning
from casewise.measure.measures import UNIT_SPACING, Measure, all_unit_spacing, check_names
from casewise.render.mask_pictures import Classes
from casewise.report.fit_page import fit_page, labelled_pictures
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, foreign_values, record_all
from casewise.study.deployed_measures import SET_ASIDE, DeployedMeasures, design_cases, fit_report, policy_cases
from casewise.study.plan import read_measures

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARCHIVE, HELD_OUT, PLAN, PAGE = "archive", "held-out", "plan.json", "fit.html"
HALF_TUNED, HALF_ARCHIVE = "tuned-half", "archive-half"  # for the learning curve
POOR = {"dice": 0.7, "miou": 0.5}  # below these a mask is worth a look
TUNED_LADDER = "tuned"
TUNED_STATES = "tuned=tuned:1,average"  # a second forward pass, beside that of M0

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a step, the number of finished parts, and the number of all parts."""
HALF = " from half"  # end of the names of steps for the learning curve


@dataclass(frozen=True)
class Labelled:
    """One labelled case, in memory or as files that are read where they are needed."""

    id: str
    patient: str
    case: Case | CaseFiles
    label: Mask | Path


def fit(
    model: Any,
    images: str | Path | Sequence[NDArray[Any] | Case | str | Path],
    labels: str | Path | Sequence[NDArray[Any] | str | Path],
    *,
    patients: Mapping[str, str] | Sequence[str] | str | Path | None = None,
    out: str | Path | None = None,
    views: str | None = None,
    learn: bool = True,
    tuning: Tuning | None = None,
    propose: Sequence[str] = (),
    metric: str | None = None,
    flag_below: float | None = None,
    allowed_hurt: float = 0.1,
    promise: float | None = None,
    loss: str = "harmed",
    margin: float = 0.01,
    measures: str | Path | Sequence[Measure] = (),
    learning_curve: bool = True,
    jobs: int | None = None,
    copy_model: bool = False,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], object] | None = None,
) -> Deployment:
    """Fit a deployment to labelled cases.

    Candidates are proposed for every labelled case: views of the frozen model, and masks of weights that were tuned on
    the other patients. Designs that choose among the candidates are compared on patients left out. The best design
    that passes the tests is fitted on all patients, and flags are calibrated. If a promise is asked for, it is
    certified on patients who took no part in the rest. If no design passes, the deployment keeps M0.

    Args:
        model: The frozen model: an ``nn.Module`` that returns logits, a model folder, a hub id, or a ``Model``.
        images: Folder of images, or a list of files, arrays ``(channel, *space)`` or cases.
        labels: Folder of labels, or a list in the order of the images.
        patients: Patient of each case: a list in the order of the images, a mapping from case id, or a table with the
            columns ``case`` and ``cluster``. Default: ``cases.csv`` beside the images, else every case is a patient.
        out: Folder of the deployment. Default: a temporary folder; ``save`` copies it.
        views: Set of views such as ``"mri"``; ``""`` for none. Default: chosen from the model and the images.
        learn: Tune the model on the labels and judge the result.
        tuning: Settings of tuning. With mIoU (scenes) the default augmentation is ``"upright"``.
        propose: Further proposers, such as ``"members:folds"`` or ``"tuned+views:mri"``.
        metric: ``"dice"`` or ``"miou"``. Default: chosen from the classes of the model.
        flag_below: Flag a case whose metric may be below this. Default: 0.7 for Dice, 0.5 for mIoU; 0 for no flags.
        allowed_hurt: Largest share of patients that may lose more than a point.
        promise: Alpha of a promise; patients are set aside for it. Default: no promise, estimates only.
        loss: Risk that is promised to be at most alpha: ``"harmed"``, ``"ha"``, ``"dice"`` or ``"worse-voxels"``.
        margin: A case is harmed if its metric falls by more than this.
        measures: ``measures.toml``, or measures: clinical numbers that every design is compared on and that ``predict``
            reports with an interval.
        learning_curve: Also tune on half of the patients, twice, and report the gain with fewer labels. Two
            trainings more; nothing that is deployed depends on it.
        jobs: Processes. Default: one for each core.
        copy_model: Put a copy of the model folder into the deployment.
        on_progress: Called with the name of a step, the parts that are done, and all parts.
        on_note: Called before the first step with each sentence about the cases and what was chosen for them.

    Returns:
        The deployment, written to ``out``.

    Raises:
        BadInput: If images and labels do not fit together.
        TooFewCases: If there are too few patients.
        Mismatch: If ``out`` holds a deployment of other options.

    Example:
        >>> deployment = casewise.fit("MODEL", "images/", "labels/", out="deployment/")  # doctest: +SKIP
        >>> print(deployment.summary())  # doctest: +SKIP
    """
    began, loss = time.monotonic(), LOSSES[loss]
    check_shares(allowed_hurt=allowed_hurt, flag_below=flag_below, margin=margin)
    given = as_model(model)
    backbone = loaded(given)
    folder = Path(tempfile.mkdtemp(prefix="casewise-fit-")) if out is None else Path(out)
    cases, notes = labelled_cases(backbone, images, labels, patients, keep=folder / "images")
    split = None if promise is None else split_for_promise([one.patient for one in cases], promise)
    held = () if split is None else split.certifying
    aside = [one for one in cases if one.patient in held]
    learners = [one for one in cases if one.patient not in held]
    if len(learners) < FEWEST:
        raise TooFewCases(f"fit compares designs on at least {FEWEST} labelled cases, got {len(learners)}; label more")
    chosen = _choices(backbone, learners, views, metric)  # a promise needs patients who took no part in any choice
    how = tuning or Tuning()
    if chosen.metric == "miou" and how.augmentation == "default":
        how = replace(how, augmentation="upright")  # a scene is never upside down
    notes += [*([] if split is None else [split.sentence()]), *chosen.notes, *_absent(backbone, learners)]
    declared = read_measures(Path(measures)) if isinstance(measures, (str, Path)) else tuple(measures)
    if not declared and (folder / MEASURES).is_file():
        declared = DeployedMeasures.from_dict(read_json(folder / MEASURES)).declared
        kept = ", ".join(one.name for one in declared)
        notes.append(f"measures of the earlier fit are kept: {kept}; choose another folder to fit without them")
    check_names(declared, {value: str(name) for value, name in backbone.labels.items() if value})
    options = {
        "model": backbone.fingerprint, "cases and patients": [[one.id, one.patient] for one in cases],
        "views": chosen.views, "metric": chosen.metric, "learn": learn, "tuning": asdict(how), "propose": list(propose),
        "promise": None if promise is None else [promise, loss, margin], "learning_curve": learning_curve,
    }  # fmt: skip
    count = pluralize(len({one.patient for one in cases}), *UNIT)
    steps = [*["learn"] * learn, "propose", *[f"learn{HALF}", f"propose{HALF}"] * (learn and learning_curve), "compare"]
    for said in (f"{pluralize(len(cases), 'labelled case')} of {count}", *notes, f"steps: {', '.join(steps)}"):
        (on_note or str)(said)
    work = _Fit(
        given, backbone, folder, chosen, tuning=how if learn else None, propose=propose,
        flag_below=flag_below, allowed_hurt=allowed_hurt, measures=declared, learning_curve=learning_curve,
        loss=loss, margin=margin, jobs=jobs, on_progress=on_progress or (lambda step, done, total: None),
        notes=notes, began=began,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "lock", wait=False) as own:
        if own is None:
            raise Refused(f"another fit writes to {folder}; wait for it, or choose another folder")
        sweep(folder)  # incomplete files of a killed run
        _check_plan(folder, options)
        return work.run(learners, aside, split, copy_model=copy_model)


def _absent(backbone: Backbone, cases: Sequence[Labelled]) -> list[str]:
    """Say which classes of the model no label holds: labels that lack them teach the model not to draw them."""
    labels = (backbone.read_label(one.label) if isinstance(one.label, Path) else one.label for one in cases)
    seen = {0}.union(*(np.unique(label).tolist() for label in labels))
    names = [str(name) for value, name in backbone.labels.items() if value not in seen]
    said = "tuned weights learn not to draw it, and all gains count it as absent; if the images show it, label it"
    return [f"no label holds {' or '.join(names)}: {said}"] if names else []


@dataclass(frozen=True)
class Choices:
    """Defaults that depend on the model and the images, and why they were taken."""

    views: str
    metric: str
    notes: tuple[str, ...] = ()


def _choices(backbone: Backbone, cases: Sequence[Labelled], views: str | None, metric: str | None) -> Choices:
    """Choose the set of views and the metric where the user did not."""
    notes, views = [], views and views.removeprefix("views:")
    if metric is None:
        named = str(backbone.labels.get(0, "background")).lower()
        metric = "miou" if backbone.classes >= 8 and named != "background" else "dice"
        if metric == "miou":
            notes.append(f"metric: mIoU, because the model has {backbone.classes} classes and no background")
    if views is None:
        views, why = _views_for(backbone, read_case(backbone, cases[0].case), metric)
        notes.append(f"views: {views}, because {why}")
    return Choices(views, metric, tuple(notes))


def _views_for(backbone: Backbone, case: Case, metric: str) -> tuple[str, str]:
    """Return the set of views that suits the images, and why."""
    if any(backbone.expects.absolute):
        return "ct", "the model normalizes with absolute intensities, as for CT"
    if case.image.shape[0] == 3 and case.image.ndim == 3:
        if metric == "miou":
            return "driving", "the images are color pictures of scenes"
        return "photo", "the images are color photographs"
    return "mri", "the intensities of the images have no fixed scale, as in MRI"


@dataclass
class _Fit:
    """The steps of :func:`fit` in one folder."""

    model: Model | Backbone
    backbone: Backbone
    folder: Path
    chosen: Choices
    tuning: Tuning | None  # None: nothing is learned
    propose: Sequence[str]
    flag_below: float | None
    allowed_hurt: float
    measures: tuple[Measure, ...]
    learning_curve: bool
    loss: str  # loss that a promise bounds, with its margin
    margin: float
    jobs: int | None
    on_progress: OnProgress
    notes: list[str]
    began: float
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for how in self._proposers(self.propose, self.folder if self.tuning else None).values():
            if not how.crossfit:
                how.binding(self.backbone)  # a wrong name ends the run here, before anything is learned

    def run(
        self, learners: Sequence[Labelled], aside: Sequence[Labelled], split: PromiseSplit | None, *, copy_model: bool
    ) -> Deployment:
        notes = self.notes
        tuned = None if self.tuning is None else self._tuned(learners, self.tuning, notes)
        proposers = self._proposers(self.propose, None if tuned is None else tuned.folder)
        archive = self._recorded(learners, proposers, self.folder / ARCHIVE)
        curve = self._curve(learners, archive) if self.learning_curve and tuned is not None else {}
        with self._timed("compare"):
            policy, deployed = self._calibrated(archive)
        certificate, held_out = None, None
        if split is not None and not metadata_of(controller_kind(policy)).adapts:
            after = f" after cleanup {policy.cleanup}, which no promise covers" if policy.cleanup else ""
            notes.append(f"nothing is promised: every case gets M0{after}")
        elif split is not None:
            held_out = self._recorded(
                aside, {name: replace(how, crossfit=False) for name, how in proposers.items()}, self.folder / HELD_OUT
            )
            certificate, policy = self._certified(held_out, policy, split, deployed["m0"])
        for name, how in proposers.items():
            if how.tuned is not None and (name == policy.ladder or name in policy.ladders):
                policy = with_tuned_at(policy, name, TUNED)
        fitted, measured = None, None
        if self.measures:
            if all_unit_spacing(one.spacing_mm for one in archive.entries.values()):
                self.notes.append(UNIT_SPACING)
            fitted, measured = self._measured(archive, deployed, policy, held_out if certificate else None)
        deployment = Deployment(self.model, policy, certificate=certificate, measures=fitted, folder=self.folder)
        deployment.save(self.folder, copy_model=copy_model)
        facts = self._facts(archive, policy, certificate, tuned)
        facts |= {"measures": measured, "learning_curve": curve}
        facts["case_s"] = round(deployment.predict(read_case(self.backbone, learners[0].case)).seconds, 2)
        write_json(self.folder / SUMMARY, facts)
        rows = policy.preflight.get("out_of_fold", ())
        known, classes = {one.id: one for one in learners}, Classes(self.backbone.labels, self.chosen.metric != "miou")
        pictures = labelled_pictures(
            archive, policy.cleanup, rows, lambda name: read_case(self.backbone, known[name].case).image, classes
        )
        write_durably(self.folder / PAGE, fit_page(facts, rows, pictures).encode())
        return deployment

    # ---- steps ----

    def _tuned(
        self, cases: Sequence[Labelled], tuning: Tuning, notes: list[str], folder: str = TUNED, folds: int | None = None
    ) -> CrossFit | None:
        """Tune the model once for each fold of the patients; None if that is not possible."""
        done: dict[int, int] = {}
        step = f"learn{HALF if folder == HALF_TUNED else ''}"

        def progress(fold: int, update: int, loss: float) -> None:
            done[fold] = update
            if not math.isnan(loss):  # folds of an earlier run say nothing about the speed of this one
                total = tuning.updates * len(deal((one.patient for one in cases), folds))
                self.on_progress(step, sum(done.values()), total)

        with self._timed("learn"):
            try:
                found = cross_fit(
                    self.model, [one.case for one in cases], [one.label for one in cases],
                    [one.patient for one in cases], tuning, folder=self.folder / folder, folds=folds,
                    workers=self.jobs, on_progress=progress,
                )  # fmt: skip
            except TooFewCases as error:
                notes.append(f"nothing was learned: {error}")
                return None
        notes += [f"fold {number} was not learned: {why}" for number, why in found.failed.items()]
        notes += found.notes
        return None if len(found.failed) == len(found.folds) else found

    def _curve(self, cases: Sequence[Labelled], archive: Archive) -> dict[str, Any]:
        """Return the mean gain of the tuned states over patients left out, by the number of patients to learn from.

        Two folds learn from half of the patients each; the folds that ``fit`` deploys learn from more. Each patient
        counts once, however many cases it has. Empty where ``fit`` itself has two folds.
        """
        if len(deal(one.patient for one in cases)) == 2:
            return {}
        half = self._tuned(cases, self.tuning or Tuning(), [], folder=HALF_TUNED, folds=2)
        if half is None:
            return {}
        proposers = {TUNED_LADDER: self._proposers((), half.folder)[TUNED_LADDER]}
        fewer = self._recorded(cases, proposers, self.folder / HALF_ARCHIVE)
        trained = max(len(one.trained_on) for one in half.read().folds)
        all_of_them = max(len(one.trained_on) for one in read_tuned_folder(self.folder / TUNED).folds)
        return {str(trained): _gains(fewer), str(all_of_them): _gains(archive)}

    def _proposers(self, further: Sequence[str], tuned: Path | None) -> dict[str, Adaptation]:
        """Return every proposer by the name of its ladder."""
        foreground = self.chosen.metric != "miou"
        texts = [f"views:{self.chosen.views}"] if self.chosen.views else []
        texts += [TUNED_STATES] if tuned is not None else []
        proposers = {}
        for text in (*texts, *further):
            name, objective = named_proposal(text)
            learned = objective.startswith(TUNED_LADDER)
            if learned and tuned is None:
                raise BadInput(f"--propose {text} needs tuned weights, and nothing was learned; leave it out")
            proposers[name] = Adaptation(
                objective, foreground=foreground, tuned=str(tuned) if learned else None, crossfit=learned
            )
        if not proposers:
            raise BadInput("there are no candidates: views, learning and --propose are all off; use at least one")
        return proposers

    def _recorded(self, cases: Sequence[Labelled], proposers: Mapping[str, Adaptation], path: Path) -> Archive:
        """Make every candidate of every case; resume an archive that lacks some."""
        files = {one.id: one.case for one in cases}
        known = {one.id: one.label for one in cases if not isinstance(one.label, Path)}
        in_memory = not isinstance(self.model, Model)
        engine = LocalEngine(jobs=1 if in_memory else self.jobs or cores())
        step = f"propose{HALF if path.name == HALF_ARCHIVE else ' for the promise' if path.name == HELD_OUT else ''}"
        work = RecordCase(self.model, proposers, files, labels=known)
        with self._timed("propose"):
            return record_all(
                work, engine, path, metric=self.chosen.metric,
                on_case=lambda done: self.on_progress(step, done, len(cases)),
            )  # fmt: skip

    def _calibrated(self, archive: Archive) -> tuple[Policy, dict[str, Sequence[Deployed]]]:
        """Compare the designs on patients left out and fit the chosen one; with a flag where labels allow it."""
        below = POOR[self.chosen.metric] if self.flag_below is None else self.flag_below
        fixed = ["tuned/1", "tuned/average"] if TUNED_LADDER in archive.ladders else []
        deployed: dict[str, Sequence[Deployed]] = {}
        policy = calibrate(
            _joined(archive), "default", allowed_hurt=self.allowed_hurt, flag_below=below or None, fixed=fixed,
            progress=self.on_progress, on_compared=deployed.update,
        )  # fmt: skip
        if empty := policy.preflight["cases"] - policy.preflight["labelled"]:
            self.notes.append(
                f"{pluralize(empty, 'labelled case')} without foreground in the label: the comparison leaves them out, "
                "because the metric is undefined there, and does not count harm to them"
            )
        return policy, deployed

    def _measured(
        self, archive: Archive, deployed: Mapping[str, Sequence[Deployed]], policy: Policy, held_out: Archive | None
    ) -> tuple[DeployedMeasures, dict[str, Any]]:
        """Compare the designs on the declared measures, and calibrate the intervals that ``predict`` prints."""
        names = {value: str(name) for value, name in self.backbone.labels.items() if value}
        compared = policy.preflight["comparison"]
        several = archive.ladders if len(archive.ladders) > 1 else ()
        cases = design_cases(archive if several else archive.only_ladder(), deployed, names, several)
        if held_out is None:
            fitted = DeployedMeasures.fitted(self.measures, cases[compared["chosen"]], policy)
        else:
            aside = policy_cases(_joined(held_out), policy, names)
            fitted = DeployedMeasures.fitted(self.measures, aside, policy, SET_ASIDE)
        gains = {row["design"]: row["gain"] for row in compared["rows"]}
        return fitted, fit_report(cases, gains, compared["chosen"], fitted)

    def _certified(
        self, held_out: Archive, policy: Policy, split: PromiseSplit, source: Sequence[Deployed]
    ) -> tuple[Certificate | None, Policy]:
        """Certify the policy on patients who took no part in learning or choosing; without a certificate keep M0."""
        with self._timed("certify"):
            certificate, certified = certify_held_out(
                _joined(held_out), policy, split, loss=self.loss, margin=self.margin
            )
        if not certificate.feasible:
            why = certificate.advice.removeprefix("Nothing is certified: ").rstrip(".")
            self.notes.append(f"nothing is promised: {why}")
            compared = policy.preflight["comparison"]
            why = f"{compared['chosen']} passes the tests, but the {UNIT[1]} set aside for --promise cannot certify it"
            compared, kept = {**compared, "chosen": "m0", "why": why}, "this policy keeps M0 for every case"
            found = {"comparison": compared, "deploys": kept, "out_of_fold": out_of_fold(source)}
            return None, replace(certified, name=policy.name, preflight={**policy.preflight, **found})
        return certificate, certified

    # ---- the summary ----

    def _facts(
        self, archive: Archive, policy: Policy, certificate: Certificate | None, tuned: CrossFit | None
    ) -> dict[str, Any]:
        entries = archive.entries.values() if archive.entries else ()
        return {
            "model": self.backbone.name,
            "cases": len(archive.ids),
            "patients": count_patients(entries),
            "ladders": list(archive.ladders),
            "metric": self.chosen.metric,
            "policy": policy.name,
            "design": policy.controller,
            "cleanup": policy.cleanup,
            "preflight": dict(policy.preflight),
            "flagged": bool(policy.flag),
            "promise": None if certificate is None else certificate.statement,
            "certified": None if certificate is None else _certified_facts(certificate),
            "learned": None if tuned is None else {"folds": len(tuned.folds), "cpu_seconds": tuned.cpu_seconds},
            "notes": list(self.notes),
            "seconds": round(time.monotonic() - self.began, 1),
            "steps_s": {name: round(value, 1) for name, value in self.seconds.items()},
            "next": predict_command(self.folder, self.model, policy),
        }

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - began


def _joined(archive: Archive) -> Archive:
    """Return the archive with all of its ladders in view."""
    return archive.join(archive.ladders) if len(archive.ladders) > 1 else archive.only_ladder()


def _gains(archive: Archive) -> dict[str, float]:
    """Return the mean change of the metric by tuned state, averaged within patients first."""
    view = archive.ladder(TUNED_LADDER)
    rungs = next(iter(view.entries.values())).rungs
    rows = outcomes(view)
    rows = rows[rows["shrink"] == 0].assign(patient=patients_of)
    means = rows.groupby(["step", "patient"])["metric"].mean().groupby("step").mean()
    return {rung: round(float(means[step] - means[0]), 4) for step, rung in enumerate(rungs, start=1)}


def _certified_facts(certificate: Certificate) -> dict[str, Any]:
    """Return the cost of the promise on the cases that were set aside: how many keep the new mask, and the mean
    change."""
    before, after = certificate.deployed["before"], certificate.deployed["certified"]
    return {"cases": certificate.cases, "kept": certificate.kept, "gain": after["gain"], "gain_before": before["gain"]}


def _check_plan(folder: Path, options: Mapping[str, Any]) -> None:
    """Write the options of a new fit, or refuse a folder that was begun with others."""
    strange = [path.name for path in folder.iterdir() if path.name not in ("lock", "images")]
    if strange and not (folder / PLAN).is_file():
        raise BadInput(f"{folder} has {', '.join(sorted(strange)[:3])} and is not a deployment; choose another folder")
    begin_or_continue(folder / PLAN, options)


# ---- the labelled cases ----


def labelled_cases(
    backbone: Backbone,
    images: str | Path | Sequence[Any],
    labels: str | Path | Sequence[Any],
    patients: Mapping[str, str] | Sequence[str] | str | Path | None,
    *,
    keep: Path,
) -> tuple[list[Labelled], list[str]]:
    """Pair images with labels and patients.

    Args:
        backbone: The model, which determines how files are named and read.
        images: Folder, files, arrays or cases.
        labels: Folder, files or arrays.
        patients: Patient of each case; see :func:`fit`.
        keep: Folder for DICOM series that are written as NIfTI.

    Returns:
        The labelled cases, and notes for a person.

    Raises:
        BadInput: If a label is missing, the numbers differ, or a label has another position than its image.
    """
    notes: list[str] = []
    if isinstance(images, (str, Path)):
        if not isinstance(labels, (str, Path)):
            raise BadInput("images is a folder, so labels must be a folder too")
        table = Path(patients) if isinstance(patients, (str, Path)) else None
        files = gathered_cases(
            backbone, Path(images), labels=Path(labels), groups=table, parts=(1, 0), keep=keep, notes=notes
        )
        if any(one.split == CALIBRATION for one in files):
            files = tuple(one for one in files if one.split == CALIBRATION)
            notes.append(f"the table marks {pluralize(len(files), 'case')} as calibration; only these are used")
        found = [Labelled(one.id, cluster_of(one), one.checked(), one.label) for one in files if one.label is not None]
        if lost := [one.id for one in files if one.label is None]:
            named = f"{', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}"
            notes.append(f"{pluralize(len(lost), 'image')} left out, because no label has the same name: {named}")
    else:
        found = list(_given(backbone, images, labels))
    found = _with_patients(found, patients)
    if not found:
        raise BadInput("there is no labelled case; every image needs a label with the same name")
    for one in found:
        if isinstance(one.case, CaseFiles) and isinstance(one.label, Path):
            check_same_place(one.case.images[0], one.label, reorients=backbone.expects.reorients)
    if (
        len({one.patient for one in found}) == len(found) > 1
        and patients is None
        and not any(isinstance(one.case, CaseFiles) and one.case.cluster for one in found)
    ):
        stems = Counter(one.id.rpartition("_")[0] for one in found)
        alike = [one.id for one in found if stems[one.id.rpartition("_")[0]] > 1 and 1 < len(stems) < len(found)][:2]
        notes.append(
            f"no patient is named, so every case counts as one; if patients have several cases"
            f"{f' (are {alike[0]} and {alike[1]} one patient?)' if alike else ''}, name them in a table with the "
            "columns case and cluster (cases.csv beside the images, or --groups)"
        )
    return found, notes


def _given(backbone: Backbone, images: Sequence[Any], labels: Any) -> Iterator[Labelled]:
    """Pair images and labels that are given as lists."""
    if labels is None or isinstance(labels, (str, Path)):
        raise BadInput(f"a list of images needs a list of labels, got {'none' if labels is None else 'a folder'}")
    if isinstance(images, Mapping) and isinstance(labels, Mapping):
        if images.keys() != labels.keys():
            raise BadInput(
                f"images and labels must have the same names; {min(images.keys() ^ labels.keys())} is in one only"
            )
        images, labels = [Case(name, image) for name, image in images.items()], [labels[name] for name in images]
    images, labels = list(images), list(labels)
    if len(images) != len(labels):
        raise BadInput(f"every image needs a label, got {len(images)} images and {len(labels)} labels")
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        if isinstance(image, (str, Path)):
            files = replace(CaseFiles.of(Path(image)), label=Path(label))
            yield Labelled(files.id, files.id, files, Path(label))
            continue
        case = image if isinstance(image, Case) else Case(f"case-{number:04d}", image)
        mask = np.asarray(label)
        if mask.shape != case.image.shape[1:]:
            raise BadInput(
                f"the label of image {number} has shape {mask.shape}, its image {case.image.shape}; an image is "
                "(channel, *space), channels first, and a label has the same shape without channels"
            )
        if mask.dtype.kind == "f" and not (np.mod(mask, 1) != 0).any():  # NaN differs from 0
            mask = mask.astype(np.int64)
        if mask.dtype.kind not in "biu":
            raise BadInput(
                f"the label of image {number} holds {mask.dtype} values; a label holds the number of a class"
            )
        if foreign := foreign_values(mask, backbone):
            raise BadInput(
                f"the label of image {number} holds {', '.join(map(str, foreign[:3]))}, no class of the model; "
                "map it to a class, or name the value to ignore: Module(network, ..., ignore=255)"
            )
        yield Labelled(case.id, cluster_of(case), case, mask)


def _with_patients(
    cases: Sequence[Labelled], patients: Mapping[str, str] | Sequence[str] | str | Path | None
) -> list[Labelled]:
    """Return the cases with the patients that were given."""
    if patients is None or isinstance(patients, (str, Path)):
        return list(cases)
    if isinstance(patients, Mapping):
        if lost := [one.id for one in cases if one.id not in patients]:
            raise BadInput(f"no patient is given for {', '.join(lost[:3])}")
        named = [str(patients[one.id]) for one in cases]
    else:
        if len(patients) != len(cases):
            raise BadInput(f"every case needs a patient, got {len(cases)} cases and {len(patients)} patients")
        named = [str(name) for name in patients]
    return [
        replace(one, patient=name, case=replace(one.case, cluster=name)) for one, name in zip(cases, named, strict=True)
    ]

"""The data that every analysis reads: two archives, their outcomes, and the results of each method on the same
cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, CasewiseError
from casewise.core.records import CALIBRATION, EVALUATION, SOURCE, Controller, Decision, Mask, Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.data.folders import CaseFiles, list_cases
from casewise.data.splits import check_disjoint, clusters_of
from casewise.judge.calibration.calibrate import calibrate, coordinate_values
from casewise.judge.calibration.cuts import CONVENTIONS
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.metadata import Metadata, metadata_of
from casewise.judge.decide import CONSENSUS_NAMES, deployed_mask, has_consensus
from casewise.judge.ledger import on_ladders, unlock
from casewise.judge.outcomes import deployed, deployed_rows, outcomes, scoring_options
from casewise.judge.policy import controller_of, judge_of, ready_policy
from casewise.measure.measures import Measure, check_names
from casewise.measure.metrics import METRICS, Metric
from casewise.render.mask_pictures import Classes, Edits, edits
from casewise.replay import replay
from casewise.study.assignment import arms_of, selector_scores
from casewise.study.trajectories import least_harm

DEPLOYED_M0 = "deployed M0"  # the method of a policy that keeps M0 everywhere

Frames = Mapping[str, pd.DataFrame]
Progress = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Extras:
    """Further archives and options of some analyses; all are optional."""

    others: Mapping[str, Archive] = field(default_factory=dict)  # MEMO, CoTTA, ... on the same cases
    holdouts: Mapping[str, Archive] = field(default_factory=dict)  # calibration archives of the others, by name
    rerun: Archive | None = None
    sweep: Mapping[float, tuple[Archive, Archive | None]] = field(default_factory=dict)  # rate: evaluation, calibration
    backbones: Mapping[str, Archive] = field(default_factory=dict)
    other_modality: Archive | None = None  # for the scale probe
    frozen: Policy | None = None  # the policy whose design was frozen
    certificate: Certificate | None = None  # certificate.json of the calibration archive
    images: Mapping[str, CaseFiles] | None = None  # images by case, for the input column of pictures
    first_step: bool = False  # differences of signal and HA begin with M0 to step 1, not with step 1 to 2
    measures: tuple[Measure, ...] = ()  # declared clinical measures; labels by number: volume(1)
    substitute: str = ""  # method whose masks also replace the actions for kept cases in the matched controls

    def unlocked(self) -> Extras:
        """Unlock the labels of these archives; each writes that into its exposure ledger."""
        read = partial(unlock, purpose="study")
        return replace(
            self,
            others={name: read(archive) for name, archive in self.others.items()},
            rerun=self.rerun and read(self.rerun),
            sweep={rate: (read(judged), holdout) for rate, (judged, holdout) in self.sweep.items()},
            backbones={name: read(archive) for name, archive in self.backbones.items()},
            other_modality=self.other_modality and read(self.other_modality),
        )


def images_of(folder: Path) -> Mapping[str, CaseFiles]:
    """Image files of a folder by case id, with nnU-Net's or plain names."""
    return {files.id: files for files in list_cases(folder)}


@dataclass(frozen=True, eq=False)
class Study:
    """The evaluation archive, the calibration archive, the policy, and the results of every method on the same cases.

    ``Study.of`` makes one. An analysis is a function of a study (:data:`casewise.study.analyses.ANALYSES`); findings
    that several analyses read are computed :func:`once` and cached in ``kept``.
    """

    evaluation: Archive
    calibration: Archive
    policy: Policy
    controller: Controller
    outcomes: pd.DataFrame  # outcomes of the evaluation cases, one row per (case, step, shrink)
    holdout: pd.DataFrame  # the same of the calibration cases
    decisions: Mapping[str, tuple[Decision, ...]]  # by method, without the other objectives
    methods: Frames  # masks that each method deployed, one row per case, in the order of the tables
    kinds: Mapping[str, Metadata]  # metadata of each method's controller
    skipped: Mapping[str, str]  # methods that were not run, and why
    extras: Extras = field(default_factory=Extras)
    resamples: int = 5000
    seed: int = RESAMPLING_SEED
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    source = "m0"  # the name of the method that never adapts

    @classmethod
    def of(
        cls, evaluation: Archive, calibration: Archive, policy: Policy, *, extras: Extras | None = None,
        resamples: int = 5000, seed: int = RESAMPLING_SEED, progress: Progress = lambda _: None,
    ) -> Study:  # fmt: skip
        """Check that the three belong together, read the outcomes, and replay every method.

        A policy that reads several ladders is replayed on all of them, every other method on the one in view.
        """
        evaluation, calibration = evaluation.marked(EVALUATION), calibration.marked(CALIBRATION)
        check_disjoint(clusters_of(calibration.entries.values()), clusters_of(evaluation.entries.values()))
        for archive in (evaluation, calibration):
            if not any(entry.labelled for entry in archive.entries.values()):
                raise BadInput(f"{archive.path} has no labelled case; a study needs labels in both archives")
        check_names(extras.measures if extras else (), label_names(evaluation))
        evaluation = unlocked(evaluation, policy)
        progress("outcomes of the evaluation cases")
        scored = _with_coordinate(outcomes(evaluation), policy)
        progress("outcomes of the calibration cases")
        holdout = _with_coordinate(outcomes(calibration), policy)
        controller = controller_of(policy)
        progress("replaying every method")
        decisions: dict[str, tuple[Decision, ...]] = {}
        built: dict[str, Controller] = {}
        kinds: dict[str, Metadata] = {}
        skipped: dict[str, str] = {}
        needed = {cls.source, _own_name(controller), f"fixed-{evaluation.steps}"}
        for name, kind, build in _methods(controller, evaluation, calibration):
            kinds[name] = kind
            try:
                built[name] = build()
                decides = judge_of(policy) if built[name] is controller else built[name]  # with cleanup and flag
                decisions[name] = tuple(replay(evaluation, decides))
            except CasewiseError as error:
                if name in needed:
                    raise
                skipped[name] = str(error)
        methods = {
            name: deployed_rows(evaluation, made, built[name])
            if name == _own_name(controller) and policy.ladders
            else deployed(scored, made, archive=evaluation, controller=built[name])
            for name, made in decisions.items()
        }
        given = (extras or Extras()).unlocked()
        if given.substitute and given.substitute not in {*methods} - {cls.source, _own_name(controller)}:
            known = ", ".join(name for name in methods if name not in (cls.source, _own_name(controller)))
            raise BadInput(f"substitute arms need a method of this study ({known}), got {given.substitute!r}")
        methods |= dict(_others(evaluation, given))
        return cls(
            evaluation, calibration, policy, controller, scored, holdout, decisions, methods, kinds, skipped, given,
            resamples, seed,
        )  # fmt: skip

    @property
    def metric(self) -> str:
        """Name of the metric: Dice or mIoU."""
        return self.scored_by.title

    @property
    def scored_by(self) -> Metric:
        """The metric of the archives."""
        return METRICS[str(self.configuration.get("metric", "dice"))]

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Configuration of the evaluation archive."""
        return self.evaluation.configuration

    @property
    def classes(self) -> Classes:
        """Names of the classes ("class 1" if none were recorded), and whether 0 is the background."""
        made = self.configuration
        numbers = [*([] if made.get("foreground", True) else [0]), *(made.get("classes") or ())]
        known = {int(value): str(name) for value, name in (made.get("names") or {}).items()}
        return Classes(known or {value: f"class {value}" for value in numbers}, bool(made.get("foreground", True)))

    @property
    def measure(self) -> dict[str, Any]:
        """Options of the measurement of regions."""
        return region_options(self.evaluation)

    @property
    def ours(self) -> str:
        """The name of the policy's own method."""
        return _own_name(self.controller)

    @property
    def is_router(self) -> bool:
        """True if the policy puts cases into buckets."""
        return metadata_of(self.controller).is_router

    @property
    def policy_rows(self) -> pd.DataFrame:
        """Masks that the policy deployed, one row per case."""
        return self.methods[self.ours]

    @property
    def budgets(self) -> frozenset[str]:
        """The names of the fixed budgets, fixed-1 to fixed-K."""
        return frozenset(f"fixed-{step}" for step in range(1, self.evaluation.steps + 1))

    @property
    def reference(self) -> str:
        """The fixed budget at the full horizon, which runs without control."""
        return f"fixed-{self.evaluation.steps}"

    @cached_property
    def rungs(self) -> tuple[str, ...]:
        """Names of the candidates after M0 if they come from views, members or tuned weights; () for updates."""
        return self.evaluation.entry(self.evaluation.ids[0]).rungs if self.evaluation.ids else ()

    @property
    def everywhere(self) -> str:
        """The reference as a page calls it: ``fixed-4``, ``consensus everywhere`` or ``average everywhere``."""
        if not self.rungs:
            return self.reference
        name = self.rungs[-1].split("(")[0]
        is_consensus = name in CONSENSUS_NAMES and name != "average"  # the average of M0 and the tuned prediction
        return f"{'consensus' if is_consensus else self.rungs[-1]} everywhere"

    @property
    def uncontrolled(self) -> pd.DataFrame:
        """Masks of the full horizon, one row per case."""
        return self.methods[self.reference]

    @cached_property
    def deployable(self) -> str:
        """The budget of lowest HA on the labelled calibration cases, which could have been chosen in advance."""
        return f"fixed-{least_harm(self.holdout)}"

    @cached_property
    def retrospective(self) -> str:
        """The budget of lowest HA on the evaluation cases, known only in hindsight."""
        return f"fixed-{least_harm(self.outcomes)}"

    @property
    def paper_methods(self) -> list[str]:
        """Methods of the paper, and the policy."""
        return [name for name in self.methods if name == self.ours or (name in self.kinds and self.kinds[name].is_ours)]

    @property
    def marked(self) -> frozenset[str]:
        """Titles of the paper's methods, which figures show in color; the others are baselines."""
        return frozenset(self.title(name) for name in self.methods if name in self.kinds and self.kinds[name].is_ours)

    @property
    def groups(self) -> list[str]:
        """The groups of the evaluation cases, when there is more than one."""
        found = sorted({entry.group for entry in self.evaluation.entries.values() if entry.group is not None})
        return found if len(found) > 1 else []

    def title(self, name: str) -> str:
        """Name of a method in tables; other objectives keep the name that the user gave."""
        return self.kinds[name].title if name in self.kinds else name

    def of_group(self, group: str) -> dict[str, pd.DataFrame]:
        """Every method on the cases of one group."""
        return {name: frame[frame["group"] == group].reset_index(drop=True) for name, frame in self.methods.items()}

    @cached_property
    def arms(self) -> Frames:
        """The mask of every case in each bucket."""
        return arms_of(self.evaluation, self.controller, self.outcomes)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Every selector's score of every case."""
        return selector_scores(self.outcomes, coordinate=self.coordinate)

    @property
    def coordinate(self) -> str:
        """The signal that the router reads."""
        return str(self.policy.options.get("coordinate", "delta"))

    @property
    def routers(self) -> dict[str, Any]:
        """The router, or the router of each group, which differ in cut-points only."""
        by_group = getattr(self.controller, "controllers", None)
        return dict(by_group) if by_group else {self.policy.name: self.controller}

    @property
    def percentiles(self) -> tuple[float, float]:
        """The convention that the policy's cut-points were fitted with."""
        return CONVENTIONS[str(self.policy.preflight.get("convention", "medical"))]

    @property
    def calibration_size(self) -> int:
        """The number of cases that the policy was fitted on."""
        return len(self.policy.calibration_cases) or len(self.calibration.ids)

    @property
    def bootstrap(self) -> dict[str, Any]:
        """Options of every resampling of the study."""
        return {"resamples": self.resamples, "seed": self.seed}


def unlocked(evaluation: Archive, policy: Policy) -> Archive:
    """Unlock the labels of the evaluation cases for a study of a policy."""
    shown = [on_ladders("consensus", policy.ladders or (policy.ladder,))] if has_consensus(evaluation, None) else []
    note = partial(unlock, purpose="study", policy=policy, compared=shown)
    if not policy.ladders:
        return note(evaluation)
    together = note(evaluation.join(policy.ladders))
    return together.ladder(evaluation.ladder_name or next(iter(policy.ladders)))


def label_names(archive: Archive) -> dict[int, str]:
    """Names of the labels of the archive; empty where it does not say."""
    return {int(number): str(name) for number, name in (archive.configuration.get("names") or {}).items()}


def region_options(archive: Archive) -> dict[str, Any]:
    """Options of the measurement of regions, as the archive was recorded."""
    options = scoring_options(archive)
    return {name: options[name] for name in ("min_area", "foreground", "ignore")}


def once(make: Callable[[Study], Found]) -> Callable[[Study], Found]:
    """Compute a finding of a study once and keep it with the study."""

    @wraps(make)
    def asked(study: Study) -> Found:
        if make not in study.kept:
            study.kept[make] = make(study)
        found: Found = study.kept[make]
        return found

    return asked


def _own_name(controller: Controller) -> str:
    """The name of the policy among the methods: "router" for routers of every kind."""
    if controller.name == Study.source:
        return DEPLOYED_M0  # a policy may clean M0, but the method M0 is never cleaned
    return "router" if metadata_of(controller).is_router else controller.name


def _methods(
    controller: Controller, evaluation: Archive, calibration: Archive
) -> Iterator[tuple[str, Metadata, Callable[[], Controller]]]:
    """Methods in the order of the paper's tables: M0, fixed budgets, the rules that are always compared, the policy."""
    yield Study.source, metadata_of(CONTROLLERS["m0"]), partial(CONTROLLERS.build, "m0")
    for step in range(1, evaluation.steps + 1):
        name = f"fixed-{step}"
        yield (
            name,
            replace(metadata_of(CONTROLLERS["fixed-k"]), title=name),
            partial(CONTROLLERS.build, "fixed-k", step=step),
        )
    for name, made in CONTROLLERS.items():
        kind = metadata_of(made)
        if kind.is_compared and name != controller.name:
            yield name, kind, partial(_compared, name, kind, evaluation, calibration)
    own, kind = _own_name(controller), metadata_of(controller)
    yield own, replace(kind, title=own) if own == DEPLOYED_M0 else kind, lambda: controller


def _compared(name: str, kind: Metadata, evaluation: Archive, calibration: Archive) -> Controller:
    """A rule, fitted on the calibration archive if it has parameters."""
    fitted = calibrate(calibration, name) if kind.fitted_by else ready_policy(name, evaluation.steps)
    return controller_of(fitted)


def _others(evaluation: Archive, extras: Extras) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the masks of other objectives after their last update, on the same cases."""
    for name, archive in extras.others.items():
        shared = unlock(archive.select(ids=evaluation.ids), purpose=f"study of {evaluation.path.name}")
        yield name, deployed(outcomes(shared), replay(shared, CONTROLLERS.build("fixed-k", step=archive.steps)))


def _with_coordinate(frame: pd.DataFrame, policy: Policy) -> pd.DataFrame:
    """Outcomes with the coordinate of the router as a column, also if it is made of signals (risk, -msp)."""
    coordinate = policy.options.get("coordinate")
    if coordinate is None or coordinate in frame.columns:
        return frame
    adapted = frame["step"] > 0
    values = pd.Series(coordinate_values(frame[adapted], coordinate, policy.options), index=frame.index[adapted])
    return frame.assign(**{coordinate: values})


@dataclass(frozen=True, eq=False)
class CaseMasks:
    """The masks of one labelled case for pictures."""

    case_id: str
    label: Mask
    source: Mask
    reference: Mask
    deployed: Mask
    reference_edits: Edits


def case_masks(
    study: Study, case_id: str, *, reference: Decision, deployed: Decision | None = None
) -> CaseMasks | None:
    """Read the masks of a case; None if it has no label."""
    archive = study.evaluation
    if not archive.entries[case_id].labelled:
        return None
    masks, label = archive.masks(case_id), archive.label(case_id)
    source, adapted = masks[SOURCE], masks[reference.state.on("")]  # the archive shows one ladder
    output = source if deployed is None else deployed_mask(archive, study.controller, deployed)
    change = edits(source, adapted, label, measure=study.measure)
    return CaseMasks(case_id, label, source, adapted, output, change)

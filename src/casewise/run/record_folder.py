"""Record every candidate of every case in an archive, and measure an archive against its labels on an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, appearance_inputs, pipeline_of
from casewise.adapt.model import Model, loaded
from casewise.adapt.proposers import method_of
from casewise.adapt.proposers.imported import counted
from casewise.adapt.proposers.live import prepare, record_case, unread_notes
from casewise.adapt.stream import CaseStream
from casewise.archive.layout import image_sha256, mask_sha256
from casewise.archive.store import Archive, create_archive, describe_cases, open_archive
from casewise.core.errors import BadInput, CasewiseError, Mismatch, in_one_line
from casewise.core.formats import as_shaped
from casewise.core.records import CALIBRATION, EVALUATION, Case, Mask, State, Trajectory
from casewise.core.text import UNIT, pluralize
from casewise.data.folders import CaseFiles
from casewise.data.nifti import check_same_place
from casewise.data.splits import check_disjoint, clusters_of
from casewise.judge.appearance import appearance_numbers
from casewise.judge.calibration.cuts import first_step_statistics
from casewise.judge.outcomes import Rows, case_outcomes, outcomes
from casewise.measure.metrics import METRICS
from casewise.measure.signals.risk import RiskStatistics
from casewise.run.local import Engine, LocalEngine, Result


@dataclass(frozen=True)
class RecordCase:
    """Makes every candidate of one case; never reads a label."""

    model: Model | Backbone
    proposers: Mapping[str, Adaptation]  # by ladder
    cases: Mapping[str, CaseFiles | Case]
    labels: Mapping[str, Mask] = field(default_factory=dict, repr=False)  # labels of the cases in memory
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ladders that a case lacks; all by default
    ignore_geometry: bool = False  # pair labels with images whose affines differ
    streams: Mapping[str, CaseStream] = field(default_factory=dict, repr=False)  # ladders with reset="stream"

    def prepare(self) -> None:
        """Load the model before the clock of a case starts."""
        _ = self.backbone

    @property
    def backbone(self) -> Backbone:
        """The model, loaded."""
        return loaded(self.model)

    def read(self, case_id: str) -> Case:
        """The case, read from its files where it is not in memory."""
        given = self.cases[case_id]
        read = given if isinstance(given, Case) else self.backbone.read(given.checked()).case
        return replace(read, modality=given.modality)

    def __call__(self, case_id: str) -> tuple[Case, dict[str, Trajectory]]:
        """The case and its trajectory on each ladder."""
        case = self.read(case_id)
        wanted = self.missing.get(case_id, tuple(self.proposers))
        hows = {name: self.proposers[name] for name in wanted}
        ready = prepare(case, self.backbone)
        made = record_case(case, self.backbone, hows, ready, self.streams)
        source = next(iter(made.values())).masks[0]
        look = appearance_numbers(**appearance_inputs(case, ready, source, self.backbone))
        return case, {name: replace(one, appearance=look) for name, one in made.items()}


def record_folder(
    work: RecordCase, engine: Engine, path: Path, *, metric: str = "dice", dataset: str = "", notice: str = "",
    on_warning: Callable[[str], None] | None = None,
) -> tuple[Archive, Iterator[Result]]:  # fmt: skip
    """Open or resume the archive at ``path``, and stream the results of the cases that it does not hold yet.

    A case waits for every ladder that it lacks, so a proposer can be added to an existing archive. The iterator
    adds each ladder of a case atomically before it yields, and seals the archive at its end. The archive
    that is returned shows the first ladder.
    """
    METRICS[metric]  # refused before the first case, not when somebody calibrates
    backbone = work.backbone
    work = replace(work, proposers=_counted(work))
    more = {"notice": notice} if notice else {}
    asked: dict[str, dict[str, Any]] = {  # checked before any ladder is made
        ladder: {
            "binding": how.binding(backbone),
            "steps": how.horizon(backbone),
            "configuration": {**_configuration(how, backbone, metric, dataset), **more, **_order(how, work.cases)},
        }
        for ladder, how in work.proposers.items()
    }
    on_warning = on_warning or (lambda note: None)
    described = describe_cases(path, work.cases.values())
    if described:
        on_warning(f"group, {UNIT[0]} or split was filled in for {pluralize(len(described), 'case')} recorded before")
    archives = {ladder: create_archive(path, ladder=ladder, **facts) for ladder, facts in asked.items()}
    missing = {
        case_id: tuple(ladder for ladder, archive in archives.items() if case_id not in archive.entries)
        for case_id in work.cases
    }
    _check_unchanged(work, next(iter(archives.values())), backbone)
    if any(how.reset == "stream" for how in work.proposers.values()) and any(missing.values()):
        _check_stream(work, engine)
        missing = dict.fromkeys(missing, tuple(work.proposers))  # a stream needs the cases before, recorded or not
    work = replace(work, missing={case_id: ladders for case_id, ladders in missing.items() if ladders})
    first = next(iter(archives.values()))
    return first, _recorded(work, engine, archives, backbone, on_warning)


def record_all(
    work: RecordCase, engine: Engine, path: Path, *, on_case: Callable[[int], object] = bool, **options: Any
) -> Archive:
    """Record every case and return the archive; if some cases could not be recorded, raise an error after the others.

    ``on_case`` is called with the number of recorded cases; ``options`` are those of :func:`record_folder`.
    """
    archive, results = record_folder(work, engine, path, **options)
    done, failed = sum(case_id in archive.entries for case_id in work.cases), []
    for result in results:
        done += 1
        failed += [] if result.error is None else [result]
        on_case(done)
    if failed:
        said = {str(one.error).replace(one.case_id, ""): f"{one.case_id}: {one.error}" for one in failed[::-1]}
        raise BadInput(
            f"{pluralize(len(failed), 'case')} could not be recorded ({'; '.join([*said.values()][:-4:-1])}); correct "
            "or remove them and repeat the command"
        )
    return open_archive(path)


def _counted(work: RecordCase) -> Mapping[str, Adaptation]:
    """Return the proposers; a function of the user's own has as many steps as masks of the first readable case."""
    if all(method_of(how.objective) is None for how in work.proposers.values()):
        return work.proposers
    for case_id in work.cases:
        with suppress(CasewiseError, OSError):  # a case that cannot be read is reported when its turn comes
            ready = prepare(work.read(case_id), work.backbone)
            break
    else:
        return work.proposers
    network, whole = work.backbone.network, pipeline_of(ready, work.backbone).whole
    return {name: counted(how, network, whole, case_id) for name, how in work.proposers.items()}


def _label(files: CaseFiles | Case, known: Mask | None, backbone: Backbone, ignore_geometry: bool) -> Mask | None:
    """Read the label of one case; a bad label fails this case only."""
    if isinstance(files, Case) or files.label is None:
        return known
    path = files.label
    try:
        if not ignore_geometry:
            check_same_place(files.images[0], path, reorients=backbone.expects.reorients)
        return backbone.read_label(path)
    except (CasewiseError, OSError, RuntimeError) as error:
        raise BadInput(f"label {path.name} cannot be used: {in_one_line(error)}") from error


def _check_unchanged(work: RecordCase, archive: Archive, backbone: Backbone) -> None:
    """Refuse a recorded case whose image or label has other content now: its old candidates and label would count."""
    recorded = archive.cases or archive.entries
    for name in sorted(work.cases.keys() & recorded.keys()):
        given, known = work.cases[name], recorded[name]
        try:
            image = (given if isinstance(given, Case) else backbone.read(given.checked()).case).image
            label = _label(given, work.labels.get(name), backbone, work.ignore_geometry)
        except (CasewiseError, OSError, RuntimeError):
            continue  # a file that went away changes nothing that was recorded
        now = None if label is None else mask_sha256(as_shaped(label, np.empty(known.shape, np.uint8)))
        changed = ["image"] * (known.input_sha256 not in (None, image_sha256(image)))
        changed += ["label"] * (now is not None and known.labelled and known.label_sha256 != now)
        if changed:
            raise Mismatch(
                f"the {' and the '.join(changed)} of case {name} changed after it was recorded in {archive.path}; "
                "record into another folder"
            )


def foreign_values(label: Mask, backbone: Backbone) -> list[int]:
    """Values of a label that are no class of the model."""
    known = {0, backbone.ignore, *(backbone.labels or range(backbone.classes + (backbone.head == "sigmoid")))}
    return [int(value) for value in np.unique(label) if value not in known]


def _recorded(
    work: RecordCase, engine: Engine, archives: Mapping[str, Archive], backbone: Backbone,
    on_warning: Callable[[str], None],
) -> Iterator[Result]:  # fmt: skip
    with ExitStack() as stack:
        streams = {
            name: stack.enter_context(CaseStream(backbone, how))
            for name, how in work.proposers.items()
            if how.reset == "stream"
        }
        proposes = replace(work, labels={}, streams=streams)  # proposers cannot read labels
        for result in engine.map(proposes, list(work.missing)):
            if result.error is None:
                case, trajectories = result.value
                try:
                    _add(work, case, trajectories, archives, backbone, on_warning)
                except ValueError as error:
                    result = replace(result, error=str(error), kind=type(error).__name__)
            yield replace(result, value=None)
    for archive in archives.values():
        archive.seal()


def _order(how: Adaptation, cases: Iterable[str]) -> dict[str, list[str]]:
    """Return the order of the cases, where weights are carried from one to the next."""
    return {"order": list(cases)} if how.reset == "stream" else {}


def _check_stream(work: RecordCase, engine: Engine) -> None:
    if len(work.proposers) > 1:
        raise BadInput(
            "a stream changes the network until its last case, so it must be recorded alone; record the other "
            "ladders with a second command into the same archive"
        )
    if not isinstance(engine, LocalEngine) or engine.jobs > 1 or engine.timeout_s is not None:
        raise BadInput("a stream must run in one process; use -j 1 on this machine, without a timeout")


def _add(
    work: RecordCase, case: Case, trajectories: Mapping[str, Trajectory], archives: Mapping[str, Archive],
    backbone: Backbone, on_warning: Callable[[str], None],
) -> None:  # fmt: skip
    """Add one case, with its label where there is one, to each of its ladders."""
    label = _label(work.cases[case.id], work.labels.get(case.id), backbone, work.ignore_geometry)
    if label is not None:
        label = as_shaped(label, next(iter(trajectories.values())).masks[0])
        if foreign := foreign_values(label, backbone):
            on_warning(
                f"{case.id}: its label holds {', '.join(map(str, foreign))}, which is not a class of the model; "
                "those voxels can only count as wrong"
            )
    for note in unread_notes(trajectories.values()):
        on_warning(f"{case.id}: {note}")
    for ladder, trajectory in trajectories.items():
        if case.id not in archives[ladder].entries:
            archives[ladder].add(case, trajectory, label)


def _configuration(how: Adaptation, backbone: Backbone, metric: str, dataset: str) -> dict[str, Any]:
    return {
        "objective": repr(how.built()) if how.is_gradient else how.as_plain()["objective"],
        "learning_rate": how.learning_rate,
        "parameters": how.parameters,
        "seed": how.seed,
        "metric": metric,
        "min_area": how.min_area,
        "foreground": how.foreground,
        "ignore": backbone.ignore,
        "classes": sorted(value for value in backbone.labels if value > 0) or None,
        "names": {str(value): name for value, name in sorted(backbone.labels.items())},
        "dataset": dataset,
        "model": backbone.name,
        "shrink": [str(state) for state in how.shrink],
        "adaptation": how.as_plain(),
        **({"signals": [str(name) for name in how.signals]} if how.signals else {}),
    }


def parsed_states(text: str) -> tuple[State, ...]:
    """Interpolated states from "2:0.5,3:0.25"; none from an empty text.

    >>> parsed_states("2:0.5")
    (State(step=2, shrink=0.5, ladder=''),)
    """
    try:
        pairs = [part.split(":") for part in text.split(",") if part.strip()]
        return tuple(State(int(step), float(alpha)) for step, alpha in pairs)
    except ValueError as error:
        raise BadInput(f"an interpolated state must be step:alpha, such as 2:0.5, got {text!r}") from error


def risk_statistics(path: Path, model: Model, plain: Adaptation) -> RiskStatistics:
    """Return the statistics for the risk of a modulation: step 1 of calibration cases that were recorded without it
    (C6).

    No label is read. Trajectories of another model or objective have other edits, so they are refused.
    """
    archive, wanted = open_archive(path), plain.binding(model.load())
    differing = [
        f"{name} {archive.binding.facts.get(name)!r} instead of {wanted.facts.get(name)!r}"
        for name in archive.binding.differences(wanted)
    ]
    if differing:
        raise Mismatch(
            f"the statistics of {path} do not fit, it was recorded with {'; '.join(differing)}; record the calibration "
            "cases with the same options, but without modulation"
        )
    holdout, rest = archive.marked(CALIBRATION), archive.select(split=EVALUATION)
    check_disjoint(clusters_of(holdout.entries.values()), clusters_of(rest.entries.values()))
    return first_step_statistics(holdout.signals())


@dataclass(frozen=True)
class ScoreCase:
    """Measures one case; opens the archive where it runs."""

    path: Path
    options: dict[str, Any]
    unlocked_by: str = ""  # the ledger's line, where these are evaluation cases (F12)
    ladder: str = ""

    def __call__(self, case_id: str) -> Rows:
        """The rows of the case."""
        return case_outcomes(_opened(self.path, self.unlocked_by, self.ladder), self.options, case_id)


@functools.lru_cache(maxsize=2)
def _opened(path: Path, unlocked_by: str, ladder: str) -> Archive:
    return replace(open_archive(path, ladder=ladder), unlocked_by=unlocked_by)


def scored(archive: Archive, engine: Engine) -> pd.DataFrame:
    """The outcomes of an archive, kept beside it, so that a study finds them."""

    def measured(archive: Archive, options: dict[str, Any]) -> Iterable[Rows]:
        work = ScoreCase(archive.path.resolve(), options, archive.unlocked_by, archive.ladder_name or "")
        found = {result.case_id: result for result in engine.map(work, archive.ids)}
        for result in found.values():
            if result.error is not None:
                raise CasewiseError(f"case {result.case_id} cannot be scored: {result.error}")
        return [found[case_id].value for case_id in archive.ids]

    return outcomes(archive, measured=measured)

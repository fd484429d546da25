"""Record trajectories: every candidate of every case into an archive, for all that is done without a network.

Measure every candidate of an archive against its labels, spread over an engine; the table is the same as without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone
from casewise.adapt.proposers import Views
from casewise.archive.store import Archive, create_archive, open_archive
from casewise.core.errors import BadInput, CasewiseError, Mismatch, in_one_line
from casewise.core.records import CALIBRATION, EVALUATION, Case, Mask, State, Trajectory
from casewise.data.folders import CaseFiles
from casewise.data.splits import check_disjoint, clusters_of
from casewise.deployment import Deployment, Model, unread_of
from casewise.judge.calibration.cuts import statistics
from casewise.judge.outcomes import Rows, case_outcomes, outcomes
from casewise.measure.metrics import METRICS
from casewise.measure.signals.risk import RiskStatistics
from casewise.run.local import Engine, Result


@dataclass(frozen=True)
class RecordCase:
    """Adapts one case, whole horizon; never sees a label."""

    deployment: Deployment
    cases: Mapping[str, CaseFiles]
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ladders that a case lacks; all by default

    def prepare(self) -> None:
        """Load the model before the clock of a case starts."""
        self.deployment.model.load()

    def __call__(self, case_id: str) -> tuple[Case, dict[str, Trajectory]]:
        """The case and its trajectory on each ladder."""
        case = self.deployment.backbone.read(self.cases[case_id].checked()).case
        return case, self.deployment.record_ladders(case, self.missing.get(case_id))


def record_folder(
    work: RecordCase,
    engine: Engine,
    path: Path,
    *,
    metric: str = "dice",
    dataset: str = "",
    notice: str = "",
    told: Callable[[str], None] | None = None,  # what a person should know of a case that is recorded all the same
) -> tuple[Archive, Iterator[Result]]:
    """Open or resume the archive at ``path``, and stream the results of the cases that it does not hold yet.

    A case waits for every ladder that it lacks, so a proposer can be added to an archive that is there. The iterator
    adds each ladder of a case (whole or not at all) before it yields, and seals the archive at its end. The archive
    that is returned shows the first ladder.
    """
    METRICS[metric]  # refused before the first case, not when somebody calibrates
    backbone, deployment = work.deployment.backbone, work.deployment
    more = {"notice": notice} if notice else {}
    asked: dict[str, dict[str, Any]] = {  # of every ladder before the first is made: a wrong name leaves nothing behind
        ladder: {
            "binding": how.binding(backbone),
            "steps": how.horizon(backbone),
            "configuration": {**_configuration(how, backbone, metric, dataset), **more},
        }
        for ladder, how in zip(deployment.ladders, deployment.proposers, strict=True)
    }
    archives = {ladder: create_archive(path, ladder=ladder, **facts) for ladder, facts in asked.items()}
    missing = {
        case_id: tuple(ladder for ladder, archive in archives.items() if case_id not in archive.entries)
        for case_id in work.cases
    }
    work = replace(work, missing={case_id: ladders for case_id, ladders in missing.items() if ladders})
    first = next(iter(archives.values()))
    return first, _recorded(work, engine, archives, backbone, told)


def _label(path: Path, backbone: Backbone) -> Mask:
    """A label; whatever is wrong with it is wrong with its case alone."""
    try:
        return backbone.read_label(path)
    except (CasewiseError, OSError, RuntimeError) as error:
        raise BadInput(f"label {path.name} cannot be used: {in_one_line(error)}") from error


def _foreign(label: Mask, backbone: Backbone) -> list[int]:
    """Values of a label that are no class of the model, where the model names its classes."""
    known = {0, *backbone.labels, backbone.ignore}
    return [int(value) for value in np.unique(label) if value not in known] if backbone.labels else []


def _recorded(
    work: RecordCase,
    engine: Engine,
    archives: Mapping[str, Archive],
    backbone: Backbone,
    told: Callable[[str], None] | None,
) -> Iterator[Result]:
    for result in engine.map(work, list(work.missing)):
        if result.error is None:
            case, trajectories = result.value
            path = work.cases[case.id].label
            try:
                label = None if path is None else _label(path, backbone)
                foreign = [] if label is None else _foreign(label, backbone)
                if foreign and told is not None:
                    told(
                        f"{case.id}: its label holds {', '.join(map(str, foreign))}, which is no class of the model "
                        f"({', '.join(map(str, sorted(backbone.labels)))}); those voxels can only count as wrong"
                    )
                if told is not None:
                    for note in unread_of(trajectories.values()):
                        told(f"{case.id}: {note}")
                for ladder, trajectory in trajectories.items():
                    archives[ladder].add(case, trajectory, label)
            except ValueError as error:
                result = replace(result, error=str(error), kind=type(error).__name__)
        yield replace(result, value=None)
    for archive in archives.values():
        archive.seal()


def _configuration(how: Adaptation, backbone: Backbone, metric: str, dataset: str) -> dict[str, Any]:
    return {
        "objective": repr(how.built()) if how.forward_only is None else str(how.objective),
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
        **_weight_of_source(how, backbone),
        **({"signals": [str(name) for name in how.signals]} if how.signals else {}),
    }


def _weight_of_source(how: Adaptation, backbone: Backbone) -> dict[str, int]:
    """How often M0 counts in the mean of views, for whoever forms another mean of them later; usually once."""
    readings = how.forward_only
    often = readings.source_weight(backbone) if isinstance(readings, Views) else 1
    return {"source_weight": often} if often > 1 else {}


def parsed_states(text: str) -> tuple[State, ...]:
    """Interpolated states from "2:0.5,3:0.25"; none from an empty text.

    >>> parsed_states("2:0.5")
    (State(step=2, shrink=0.5, ladder=''),)
    """
    try:
        pairs = [part.split(":") for part in text.split(",") if part.strip()]
        return tuple(State(int(step), float(alpha)) for step, alpha in pairs)
    except ValueError as error:
        raise BadInput(f"a shrunk state is step:alpha, such as 2:0.5, got {text!r}") from error


def risk_statistics(path: Path, model: Model, plain: Adaptation) -> RiskStatistics:
    """What the risk of a modulation is measured with: step 1 of calibration cases that were recorded without it (C6).

    No label is read. Trajectories of another model or objective have other edits, so they are refused.
    """
    archive, wanted = open_archive(path), plain.binding(model.load())
    differing = [
        f"{name} {getattr(archive.binding, name)!r} instead of {getattr(wanted, name)!r}"
        for name in archive.binding.differences(wanted)
    ]
    if differing:
        raise Mismatch(
            f"the statistics of {path} do not fit, it was recorded with {'; '.join(differing)}; record the calibration "
            "cases with the same options, but without --modulation"
        )
    holdout, rest = archive.marked(CALIBRATION), archive.select(split=EVALUATION)
    check_disjoint(clusters_of(holdout.entries.values()), clusters_of(rest.entries.values()))
    signals = holdout.signals()
    first = signals[(signals["step"] == 1) & (signals["shrink"] == 0)]
    return statistics(*(first[name].to_numpy(float) for name in ("regions", "delta")))


@dataclass(frozen=True)
class ScoreCase:
    """Measures one case; opens the archive where it runs."""

    path: Path
    options: tuple[tuple[str, Any], ...]
    unlocked_by: str = ""  # the ledger's line, where these are evaluation cases (F12)
    ladder: str = ""

    def __call__(self, case_id: str) -> Rows:
        """The rows of the case."""
        return case_outcomes(_opened(self.path, self.unlocked_by, self.ladder), dict(self.options), case_id)


@functools.lru_cache(maxsize=2)
def _opened(path: Path, unlocked_by: str, ladder: str) -> Archive:
    return replace(open_archive(path, ladder=ladder), unlocked_by=unlocked_by)


def scored(archive: Archive, engine: Engine) -> pd.DataFrame:
    """The outcomes of an archive, kept beside it, so that a study finds them."""

    def measured(archive: Archive, options: dict[str, Any]) -> Iterable[Rows]:
        settings = tuple((k, _hashable(v)) for k, v in options.items())
        work = ScoreCase(archive.path.resolve(), settings, archive.unlocked_by, archive.ladder_name or "")
        found = {result.case_id: result for result in engine.map(work, archive.ids)}
        for result in found.values():
            if result.error is not None:
                raise CasewiseError(f"case {result.case_id} cannot be scored: {result.error}")
        return [found[case_id].value for case_id in archive.ids]

    return outcomes(archive, measured=measured)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

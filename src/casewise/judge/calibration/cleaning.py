"""Cleanup as part of a design: after any candidate, keep the largest component of the labels for which that helps.

The mean class Dice is a mean over labels, and cleaning one label changes that label only. So the change of the metric
is the sum of the changes of the cleaned labels, and each label is chosen by itself, on the patients that a design is
fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from casewise.archive.store import Archive
from casewise.core.records import Controller, Mask, State
from casewise.judge.calibration.designs import Deployed, Design, Known, answer
from casewise.judge.decide import Setting, candidate_masks
from casewise.judge.outcomes import POINT, scoring_options
from casewise.measure.cleanup import Cleanup
from casewise.measure.metrics import METRICS

SUFFIX = "+largest"
MOST_LABELS = 10  # with more classes a cleanup of each is not worth its time


@dataclass(frozen=True, eq=False)
class CleanupGains:
    """Change of the metric when the largest component of one label is kept, by case, state and label; cached.

    Args:
        archive: The labelled cases.
        ladders: Ladders that are read together.
    """

    archive: Archive
    ladders: tuple[str, ...]
    known: dict[tuple[str, State], Mapping[int, float]] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[int, ...]:
        """Foreground labels; none where the metric is no mean of class Dice or where there are too many."""
        views = [self.archive.ladder(name) for name in self.ladders] or [self.archive.only_ladder()]
        options = scoring_options(views[0])
        named = tuple(int(value) for value in options["classes"] or () if value > 0)
        return named if options["metric"] == "dice" and len(named) <= MOST_LABELS else ()

    def of(self, case_id: str, state: State) -> Mapping[int, float]:
        """Return the change of the metric for each label that has more than one component."""
        key = case_id, state
        if key not in self.known:
            mask = candidate_masks(self.archive, case_id, self.ladders)[state]
            self.known[key] = self._changes(case_id, mask)
        return self.known[key]

    def _changes(self, case_id: str, mask: Mask) -> dict[int, float]:
        view = self.archive.ladder(self.ladders[0]) if self.ladders else self.archive.only_ladder()
        options, label = scoring_options(view), self.archive.label(case_id)
        score = METRICS[options["metric"]].of
        before = float(score(mask, label, ignore=options["ignore"], spacing_mm=None))
        found = {}
        for value in self.labels:
            cleaned = Cleanup.parse(f"largest({value})").apply(mask)
            if (cleaned != mask).any():
                found[value] = float(score(cleaned, label, ignore=options["ignore"], spacing_mm=None)) - before
        return found


@dataclass(frozen=True)
class Cleaned:
    """A fitted design and the labels that are cleaned after it."""

    controller: Controller
    labels: tuple[int, ...]
    gains: CleanupGains

    @property
    def name(self) -> str:
        """Name of the controller."""
        return self.controller.name

    @property
    def cleanup(self) -> str:
        """The cleanup as text; "" where no label is cleaned."""
        return f"largest({','.join(map(str, self.labels))})" if self.labels else ""

    def answer(self, one: Known) -> Deployed:
        """Return what is deployed for a gathered case, and its metric after cleanup."""
        found = answer(one, self.controller)
        if found.gated or not self.labels:
            return found
        state = next(state for state in one.metric if str(state) == found.state)
        changes = self.gains.of(one.case_id, state)
        metric = found.metric + sum(changes.get(label, 0.0) for label in self.labels)
        return replace(found, metric=metric, cleanup=self.cleanup)


def cleaned(design: Design, gains: CleanupGains) -> Design:
    """Return a design whose masks are cleaned where that helps the patients that it is fitted on.

    A label is cleaned if that raises the mean metric of these patients and lowers no patient's by more than a point.
    """

    def fit(known: Sequence[Known], setting: Setting) -> Cleaned:
        controller = design(known, setting)
        taken = [answer(one, controller) for one in known]
        chosen = []
        for label in gains.labels:
            change = np.array([_change(gains, one, found, label) for one, found in zip(known, taken, strict=True)])
            _, patient = np.unique([one.cluster for one in known], return_inverse=True)
            means = np.bincount(patient, change) / np.bincount(patient)
            if means.mean() > 0 and means.min() >= -POINT:
                chosen.append(label)
        return Cleaned(controller, tuple(chosen), gains)

    return fit  # type: ignore[return-value]


def _change(gains: CleanupGains, one: Known, found: Deployed, label: int) -> float:
    if found.gated:
        return 0.0
    state = next(state for state in one.metric if str(state) == found.state)
    return float(gains.of(one.case_id, state).get(label, 0.0))

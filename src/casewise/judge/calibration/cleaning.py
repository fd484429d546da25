"""Cleanup as part of a design: after any candidate, keep the largest component of the labels for which that helps.

The mean class Dice is a mean over labels, and cleaning one label changes that label only. So the change of the metric
is the sum of the changes of the cleaned labels, and each label is chosen separately, on the patients that a design is
fitted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from casewise.archive.store import Archive
from casewise.core.records import Controller, Mask, State
from casewise.judge.calibration.designs import Deployed, Design, Known, answer
from casewise.judge.controllers.choose import state_of
from casewise.judge.decide import Setting, candidate_masks, ladder_views
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

    @cached_property
    def options(self) -> dict[str, Any]:
        """Metric and its options."""
        return scoring_options(next(iter(ladder_views(self.archive, self.ladders).values())))

    @property
    def labels(self) -> tuple[int, ...]:
        """Foreground labels; none if the metric is not the mean of class Dice, or if there are too many."""
        named = tuple(int(value) for value in self.options["classes"] or () if value > 0)
        return named if self.options["metric"] == "dice" and len(named) <= MOST_LABELS else ()

    def change(self, found: Deployed, labels: Iterable[int]) -> float:
        """Return the change of the metric if these labels of a deployed mask are cleaned; merged masks are not."""
        changes = {} if found.gated else self.of(found.case_id, state_of(found.state))
        return float(sum(changes.get(label, 0.0) for label in labels))

    def of(self, case_id: str, state: State) -> Mapping[int, float]:
        """Return the change of the metric for each label that has more than one component."""
        key = case_id, state
        if key not in self.known:
            mask = candidate_masks(self.archive, case_id, self.ladders)[state]
            self.known[key] = self._changes(case_id, mask)
        return self.known[key]

    def _changes(self, case_id: str, mask: Mask) -> dict[int, float]:
        label, ignore = self.archive.label(case_id), self.options["ignore"]
        score = METRICS[self.options["metric"]].of
        before = score(mask, label, ignore=ignore, spacing_mm=None)
        found = {}
        for value in self.labels:
            cleaned = Cleanup.parse(f"largest({value})").apply(mask)
            if (cleaned != mask).any():
                found[value] = float(score(cleaned, label, ignore=ignore, spacing_mm=None) - before)
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
        """Return the deployed state of a gathered case, and its metric after cleanup."""
        found = answer(one, self.controller)
        if found.gated or not set(self.labels) & set(self.gains.of(found.case_id, state_of(found.state))):
            return found
        return replace(found, metric=found.metric + self.gains.change(found, self.labels), cleanup=self.cleanup)


def cleaned(design: Design, gains: CleanupGains) -> Design:
    """Return a design whose masks are cleaned where that helps the patients that it is fitted on.

    A label is cleaned if that raises the mean metric of these patients and lowers no patient's by more than a point.
    """

    def fit(known: Sequence[Known], setting: Setting) -> Cleaned:
        controller = design(known, setting)
        taken = [answer(one, controller) for one in known]
        chosen = []
        for label in gains.labels:
            change = np.array([gains.change(found, (label,)) for found in taken])
            _, patient = np.unique([one.cluster for one in known], return_inverse=True)
            means = np.bincount(patient, change) / np.bincount(patient)
            if means.mean() > 0 and means.min() >= -POINT:
                chosen.append(label)
        return Cleaned(controller, tuple(chosen), gains)

    return fit  # type: ignore[return-value]

"""Choose a learning rate without labels, from the share of voxels that the steps change.

A rate is too small if nothing changes, and too large if later steps change more than the first. In the cohorts of the
paper, the first step changes 5e-4 to 1e-3 of the voxels; the rate nearest to that is recommended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from casewise.adapt.backbones import Backbone
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Case
from casewise.core.text import pluralize

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
COVERAGE = 7e-4
"""The geometric middle of the paper's first steps."""
FAR = 10.0
"""A first step that changes ten times more or less than wanted is not recommended at all."""


@dataclass(frozen=True)
class RateRow:
    """Changes of a few cases at one rate, without labels."""

    rate: float
    cases: int
    moved: float  # share of the cases in which the first step changed anything
    coverage: tuple[float, ...]  # mean share of voxels that differ from M0, after steps 1 to K
    fresh: tuple[float, ...]  # mean share of voxels that differ from the step before
    failed: int = 0  # cases whose logits or loss became NaN or infinite

    @property
    def settles(self) -> bool:
        """True if the last step changed no more than the first."""
        return not self.failed and (len(self.fresh) < 2 or self.fresh[-1] <= self.fresh[0])


@dataclass(frozen=True)
class RateChoice:
    """Rows of a sweep, the recommended rate (None if no rate fits) and the reason."""

    rows: tuple[RateRow, ...]
    rate: float | None
    reason: str


def sweep_rates(
    backbone: Backbone,
    cases: Sequence[Case],
    objective: Any,
    *,
    rates: Iterable[float] = RATES,
    steps: int = 4,
    coverage: float = COVERAGE,
    seen: Callable[[RateRow], None] | None = None,  # told after each rate
    done: Callable[[], None] | None = None,  # told after each case at each rate
    **options: Any,  # of adapt.episode.Episode
) -> RateChoice:
    """Adapt the cases at every rate, from the smallest on, and recommend one; the network comes back as it was.

    Rates beyond one whose first step already changes ten times too much, or ends in NaN in every case, are left out:
    larger ones change more.
    """
    asked = sorted(set(rates))
    if not asked or asked[0] <= 0 or not all(map(math.isfinite, asked)):
        raise BadInput(f"rates are positive numbers, got {asked}")
    if not cases or steps < 1:
        got = f"{pluralize(len(cases), 'case')} and {pluralize(steps, 'step')}"
        raise BadInput(f"a sweep needs cases and at least one step, got {got}")
    rows = []
    for rate in asked:
        rows.append(_row(backbone, cases, objective, rate, done, steps=steps, **options))
        if seen is not None:
            seen(rows[-1])
        if rows[-1].failed == len(cases) or rows[-1].coverage[0] > coverage * FAR:
            break
    return recommended(rows, coverage=coverage)


def _row(
    backbone: Backbone,
    cases: Sequence[Case],
    objective: Any,
    rate: float,
    done: Callable[[], None] | None,
    **options: Any,
) -> RateRow:
    far, fresh = [], []  # by case and step: share of voxels that differ from M0, and from the step before
    for case in cases:
        prepared = backbone.prepare(case)
        with suppress(NotFinite):
            masks = run_episode(
                backbone.network, prepared.inputs, objective, learning_rate=rate, case_id=case.id, head=backbone.head,
                forward=prepared.forward, predict=prepared.predict, **options,
            ).masks  # fmt: skip
            far.append([float(np.mean(mask != masks[0])) for mask in masks[1:]])
            fresh.append([float(np.mean(after != before)) for before, after in itertools.pairwise(masks)])
        if done is not None:
            done()
    moved = float(np.mean([row[0] > 0 for row in far])) if far else 0.0
    return RateRow(rate, len(cases), moved, _means(far), _means(fresh), failed=len(cases) - len(far))


def _means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.mean(rows, axis=0)) if rows else ()


def recommended(rows: Sequence[RateRow], *, coverage: float = COVERAGE) -> RateChoice:
    """Recommend the rate whose first step is nearest to ``coverage``, if most cases change and later steps change less.

    >>> still = RateRow(1e-4, 4, 0.0, (0.0, 0.0), (0.0, 0.0))
    >>> good = RateRow(1e-3, 4, 1.0, (8e-4, 1e-3), (8e-4, 3e-4))
    >>> wild = RateRow(1e-2, 4, 1.0, (2e-2, 9e-2), (2e-2, 8e-2))
    >>> recommended([still, good, wild]).rate
    0.001
    """
    moving = [row for row in rows if row.moved >= 0.5]
    calm = [row for row in moving if row.settles]
    fit = [row for row in calm if coverage / FAR <= row.coverage[0] <= coverage * FAR]
    if fit:
        best = min(fit, key=lambda row: abs(math.log(row.coverage[0] / coverage)))
        share = f"{best.coverage[0]:.2g} of the voxels (wanted {coverage:.2g})"
        return RateChoice(tuple(rows), best.rate, f"its first step changes {share}, and later steps come to rest")
    return RateChoice(tuple(rows), None, _why_none(rows, moving, calm, coverage))


def _why_none(rows: Sequence[RateRow], moving: Sequence[RateRow], calm: Sequence[RateRow], coverage: float) -> str:
    rates = f"rate from {rows[0].rate:g} to {rows[-1].rate:g}"
    if not moving and any(row.failed for row in rows):
        return f"every {rates} that moves the masks ends in NaN; try smaller rates"
    if not moving:
        return f"no {rates} moves the masks of most cases; try larger ones, or views instead of updates"
    if not calm:
        return f"no {rates} comes to rest, later steps change more than the first; try smaller ones"
    nearest = min(calm, key=lambda row: abs(math.log(max(row.coverage[0], 1e-12) / coverage)))
    side = "larger" if nearest.coverage[0] < coverage else "smaller"
    share = f"{nearest.coverage[0]:.2g} of the voxels, wanted {coverage:.2g}"
    return f"the nearest first step, at {nearest.rate:g}, changes {share}; try {side} rates"

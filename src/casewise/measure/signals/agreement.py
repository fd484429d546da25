"""Agreement among the candidates of one case: pairwise Dice, and support of edits.

It only needs masks, so it works live, in replay and on masks of other software (views, folds, raters, models).
Everything is counted on the voxels at which any candidate differs from M0; outside of them all candidates are M0.
Choosing, merging, flagging and the consensus of views use this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from casewise.core.errors import BadInput
from casewise.core.text import pluralize
from casewise.measure.masks import Floats, Integers, checked_masks, on_host


@dataclass(frozen=True, eq=False)
class Candidates:
    """M0 and the other candidates of one case, on the voxels that any of them changes."""

    shape: tuple[int, ...]
    voxels: Integers  # flat positions (C order) at which any candidate differs from M0
    labels: NDArray[Any]  # (candidate, voxel); row 0 is M0
    outside: Mapping[int, int]  # voxels of each class elsewhere, where all candidates agree
    voters: tuple[int, ...]  # candidates that have a vote; a consensus of the others has none
    background: bool = False  # whether class 0 is a class like any other (driving scenes)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Classes that any candidate holds, without background unless it counts."""
        held = {*self.outside, *_values(self.labels).tolist()}
        return tuple(sorted(c for c in held if c or self.background))

    @cached_property
    def dice_by_class(self) -> dict[int, Floats]:
        """Dice of every pair of candidates, (candidate, candidate) for each class; NaN where neither holds it."""
        found = {}
        for c in self.classes:
            held = (self.labels == c).astype(np.float32)  # counts stay exact below 2^24 changed voxels
            shared = (held @ held.T).astype(np.float64) + self.outside.get(c, 0)
            sizes = np.diag(shared)
            total = sizes[:, None] + sizes[None, :]
            found[c] = _share(2 * shared, total)
        return found

    @cached_property
    def dice(self) -> Floats:
        """Mean over the classes that either of a pair holds; 1 where both hold none."""
        total = known = np.zeros((len(self.labels),) * 2)
        for table in self.dice_by_class.values():
            total, known = total + np.nan_to_num(table), known + np.isfinite(table)
        return np.asarray(np.divide(total, known, out=np.ones_like(total), where=known > 0))

    @cached_property
    def drawn(self) -> Floats:
        """Mean class Dice of every pair, NaN where both masks are empty, which says nothing about quality."""
        known = np.any([np.isfinite(table) for table in self.dice_by_class.values()], axis=0)
        return np.where(known, self.dice, np.nan)

    @cached_property
    def votes(self) -> tuple[Integers, NDArray[np.int32]]:
        """The labels that occur on the voxels, and how many voters hold each: (label,), (label, voxel)."""
        ballots = self.labels[list(self.voters)]
        names = _values(ballots)
        counts = np.zeros((len(names), ballots.shape[1]), np.int32)
        for row, name in enumerate(names):
            counts[row] = (ballots == name).sum(axis=0)
        return names, counts

    @cached_property
    def certainty(self) -> float:
        r"""Certainty of the votes over the foreground, 1 where all voters agree.

        .. math:: 1 - \frac{1}{|F| \ln C} \sum_{x \in F} H(v_x), \qquad H(v) = -\sum_c v_c \ln v_c

        with F the voxels that any voter calls foreground, :math:`v_x` the shares of the votes at x, and C the number of
        classes, background included. Outside of the changed voxels all voters agree and the entropy is 0.
        """
        names, counts = self.votes
        inside = sum(size for c, size in self.outside.items() if c or self.background)
        if self.voxels.size:
            drawn = np.any(self.labels[list(self.voters)] > 0, axis=0) | self.background
            shares = counts[:, drawn] / len(self.voters)
            entropy = float(special.entr(shares).sum())
            total = inside + int(np.count_nonzero(drawn))
        else:
            entropy, total = 0.0, inside
        classes = len({0, *self.outside, *names.tolist()})
        return float(1.0 - entropy / (max(total, 1) * np.log(max(classes, 2))))

    @cached_property
    def majority(self) -> NDArray[Any]:
        """The label that most voters hold at each voxel; among equals M0's own, then the smallest."""
        if not self.voxels.size:
            return np.asarray(self.labels[0])
        most = np.full(self.voxels.size, -1, np.int32)
        label = np.zeros_like(self.labels[0])
        for name, count in zip(*self.votes, strict=True):
            count = count * 2 + (self.labels[0] == name)  # M0 decides ties only
            more = count > most
            label[more], most[more] = name, count[more]
        return np.asarray(label)

    def support(self, labels: NDArray[Any], *, besides: int | None = None) -> Floats:
        """Share of the voters that hold these labels, voxel by voxel; ``besides`` one candidate's own vote."""
        voters = [k for k in self.voters if k != besides]
        return np.asarray((self.labels[voters] == labels).mean(axis=0), np.float64)

    def mask(self, labels: NDArray[Any], source: NDArray[Any]) -> NDArray[Any]:
        """M0 with these labels at the voxels."""
        made = np.array(source, copy=True)
        made.reshape(-1)[self.voxels] = labels
        return made

    def signals(self) -> list[dict[str, float | None]]:
        """The signals of every candidate by name; undefined shares are None."""
        everyone = self._mean_pair()
        return [
            {
                "agreement": _or_none(self._agreement(self.drawn, k)),
                "likeness": _or_none(self._agreement(self.dice, k)),
                "agreement_source": float(self.dice[k, 0]),
                "agreement_all": everyone,
                "weighted_agreement": None if everyone is None else everyone * self.certainty,
                "support": self._support(k),
            }
            for k in range(len(self.labels))
        ]

    def _others(self, k: int) -> list[int]:
        return [j for j in self.voters if j != k]

    def _agreement(self, table: Floats, k: int) -> float:
        known = table[k, self._others(k)]
        known = known[np.isfinite(known)]
        return float(known.mean()) if known.size else float("nan")

    def _mean_pair(self) -> float | None:
        if len(self.voters) < 2:
            return None
        upper = np.triu_indices(len(self.voters), 1)
        pairs = self.drawn[np.ix_(self.voters, self.voters)][upper]
        pairs = pairs[np.isfinite(pairs)]
        return float(pairs.mean()) if pairs.size else None

    def _support(self, k: int) -> float | None:
        changed = self.labels[k] != self.labels[0]
        if not changed.any() or not self._others(k):
            return None
        return float(self.support(self.labels[k], besides=k)[changed].mean())


def candidates_of(masks: Sequence[Any], *, voters: Sequence[int] | None = None, background: bool = False) -> Candidates:
    r"""Compare the candidates of one case, ``masks[0]`` being M0; ``voters`` are all of them by default.

    Agreement of candidate k: the mean over the other voters j of the mean class Dice,

    .. math:: a_k = \frac{1}{|V \setminus k|} \sum_{j \in V \setminus k} \frac{1}{|C_{kj}|}
              \sum_{c \in C_{kj}} \frac{2 |m_k^c \cap m_j^c|}{|m_k^c| + |m_j^c|}

    with :math:`C_{kj}` the foreground classes that either holds; pairs that hold none are left out, and None is the
    agreement of a mask that has no other pair: agreement on an empty mask says nothing about its quality. ``likeness``
    is the same with 1 for two empty masks; it selects the most central mask. Support:
    the share of the other voters that hold the new label of an edit, mean over its voxels.

    >>> views = [np.array([[1, 1, 0, 0]]), np.array([[1, 1, 1, 0]]), np.array([[1, 1, 1, 1]])]
    >>> found = candidates_of(views)
    >>> [round(signals["agreement"], 3) for signals in found.signals()]
    [0.733, 0.829, 0.762]
    >>> found.mask(found.majority, views[0])
    array([[1, 1, 1, 0]])
    """
    if len(masks) < 2:
        raise BadInput(f"disagreement needs M0 and at least one other candidate, got {pluralize(len(masks), 'mask')}")
    usable = checked_masks(**{f"candidate {k}": mask for k, mask in enumerate(masks)})
    flat = [np.ascontiguousarray(on_host(mask)).reshape(-1) for mask in usable]
    changed = np.zeros(flat[0].size, bool)
    for mask in flat[1:]:
        changed |= mask != flat[0]
    voxels = np.flatnonzero(changed)
    rest = flat[0][~changed]
    names = _values(rest)
    counts = [int((rest == name).sum()) for name in names]
    held = tuple(range(len(masks)) if voters is None else voters)
    if not held or min(held) < 0 or max(held) >= len(masks):
        raise BadInput(f"voters must be numbers of the {len(masks)} candidates, got {list(held)}")
    return Candidates(
        shape=tuple(usable[0].shape),
        voxels=voxels,
        labels=np.stack([mask[voxels] for mask in flat]),
        outside={int(name): int(count) for name, count in zip(names, counts, strict=True)},
        voters=held,
        background=background,
    )


def _values(labels: NDArray[Any]) -> Integers:
    """The labels that occur, in ascending order."""
    if labels.dtype == np.uint8 and labels.size:  # faster than sorting
        return np.array([c for c in range(int(labels.max(initial=0)) + 1) if (labels == c).any()], np.int64)
    return np.unique(labels).astype(np.int64)


def agreement(one: Any, other: Any) -> float:
    """Mean Dice of the foreground classes that either of two masks has; 1 where neither has any. Symmetric.

    >>> agreement(np.array([[1, 1, 0, 2]]), np.array([[1, 0, 0, 0]]))
    0.3333333333333333
    """
    return float(candidates_of([one, other]).dice[0, 1])


def agreements(masks: Sequence[Any]) -> Floats:
    """(mask, mask): the agreement of every pair; 1 on the diagonal."""
    return candidates_of(masks).dice if len(masks) > 1 else np.ones((len(masks), len(masks)))


def mean_agreement(table: NDArray[Any]) -> Floats:
    """The mean agreement of each mask with the others; 1 where it is alone."""
    others = len(table) - 1
    return (np.asarray(table, np.float64).sum(axis=1) - 1) / others if others else np.ones(len(table))


def _share(part: Floats, whole: Floats) -> Floats:
    """part / whole, NaN where the whole is 0."""
    return np.asarray(np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0))


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None

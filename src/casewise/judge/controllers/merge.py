"""Deploy M0 with the accepted pieces of a candidate's edit.

A piece is a connected component of one class pair (from, to) of the edit from M0 to a candidate, of any size. Its score
is the chance that it made the mask right, by a logistic model of a few label-free features. Pieces above one threshold
are deployed, the rest goes back to M0. The paper's gate by entropy drop is in region_gate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Decision, Mask, Observation, State, Verdict
from casewise.judge.controllers.choose import _AmongAll, added, candidate_signals, non_voting, state_of
from casewise.measure.regions import components
from casewise.measure.signals.agreement import Candidates, candidates_of

PIECE = "piece."
"""Prefix of the scores of pieces among the signals of the edit."""

PIECE_FEATURES = ("support", "log_size", "slices", "adds", "removes")
"""Mean support of the new label by the other candidates; ln of the size; share of the voxels just before and after
along the first axis of a volume that M0 gives the new label; whether the piece adds or removes foreground."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EditPieces:
    """The components of an edit, class pair by class pair, numbered by class pair and then in C order."""

    voxels: NDArray[np.int64]  # flat positions at which the edit differs from M0
    number: NDArray[np.int64]  # piece of each of them
    sizes: NDArray[np.int64]
    before: NDArray[np.int64]  # class of each piece in M0
    after: NDArray[np.int64]  # class of each piece in the edit


def pieces_of(source: Mask, edit: Mask) -> EditPieces:
    """Split an edit into pieces; an edit from one class to two others is two pieces.

    >>> found = pieces_of(np.array([[1, 1, 0, 0]]), np.array([[2, 0, 0, 3]]))
    >>> found.before.tolist(), found.after.tolist(), found.sizes.tolist()
    ([0, 1, 1], [3, 0, 2], [1, 1, 1])
    """
    old, new = np.ascontiguousarray(source).reshape(-1), np.ascontiguousarray(edit).reshape(-1)
    voxels = np.flatnonzero(old != new)
    before, after = old[voxels].astype(np.int64), new[voxels].astype(np.int64)
    base = int(after.max(initial=0)) + 1
    code = before * base + after
    code = code.astype(np.uint16) if code.max(initial=0) < 2**16 else code  # sorted by radix
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.diff(code[order], prepend=-1)) if code.size else np.zeros(0, np.int64)
    number = np.zeros(len(voxels), np.int64)
    sizes: list[NDArray[np.int64]] = []
    classes: list[NDArray[np.int64]] = []
    total = 0
    for own in np.split(order, starts[1:]) if code.size else ():
        found = components(voxels[own], tuple(source.shape))
        number[own] = found.number + total
        total += found.sizes.size
        sizes.append(found.sizes)
        classes.append(np.tile([before[own[0]], after[own[0]]], (len(found.sizes), 1)))
    every = np.concatenate(classes) if classes else np.zeros((0, 2), np.int64)
    return EditPieces(voxels, number, np.concatenate([np.zeros(0, np.int64), *sizes]), every[:, 0], every[:, 1])


def piece_features(
    masks: Mapping[State, Mask], edit: State, silent: tuple[str, ...], found: Candidates | None = None
) -> tuple[EditPieces, Floats]:
    """The pieces of a candidate's edit and their features, one row per piece; ``found`` are :func:`opinions`."""
    source = masks[SOURCE]
    pieces = pieces_of(source, masks[edit])
    if not len(pieces.sizes):
        return pieces, np.zeros((0, len(PIECE_FEATURES)))
    found = found or opinions(masks, silent)
    place = list(masks).index(edit)
    support = found.support(found.labels[place], besides=place)[np.searchsorted(found.voxels, pieces.voxels)]
    beside = _beside(source, pieces)
    columns = [
        _mean(support, pieces),
        np.log(pieces.sizes),
        _mean(beside, pieces),
        ((pieces.before == 0) & (pieces.after > 0)).astype(np.float64),
        ((pieces.before > 0) & (pieces.after == 0)).astype(np.float64),
    ]
    return pieces, np.column_stack(columns)


def opinions(masks: Mapping[State, Mask], silent: tuple[str, ...]) -> Candidates:
    """Compare all candidates of a case; the silent ones have no vote."""
    voters = [k for k, state in enumerate(masks) if str(state) not in silent]
    return candidates_of(list(masks.values()), voters=voters)


def piece_scores(features: Floats, weights: Any, center: Any, scale: Any) -> Floats:
    """Return the chance that each piece is right: 1 / (1 + exp(-w_0 - w . (x - center) / scale))."""
    z = (features - np.asarray(center)) / np.asarray(scale)
    return np.asarray(1 / (1 + np.exp(-np.clip(weights[0] + z @ np.asarray(weights[1:]), -35, 35))))


def merged(source: Mask, edit: Mask, accepted: tuple[int, ...]) -> Mask:
    """Return M0 with the accepted pieces of an edit."""
    pieces = pieces_of(source, edit)
    passes = np.zeros(len(pieces.sizes), bool)
    passes[list(accepted)] = True
    chosen = pieces.voxels[passes[pieces.number]]
    made: Mask = np.array(source, copy=True)
    made.reshape(-1)[chosen] = np.ascontiguousarray(edit).reshape(-1)[chosen]
    return made


@dataclass(frozen=True)
class Merge(_AmongAll):
    """Accept a piece of the edit iff its score is above the threshold."""

    edit: str = ""  # the candidate whose edit is judged; default: the consensus
    weights: tuple[float, ...] = ()  # weights of the features, the intercept first
    center: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    threshold: float = 0.5

    name = "merge"
    needs = frozenset({"pieces", "piece", "agreement_source"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "center", "scale"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.weights) != len(PIECE_FEATURES) + 1 or len(self.center) != len(self.scale):
            raise BadInput(f"merge needs {len(PIECE_FEATURES) + 1} weights, got {len(self.weights)}; calibrate it")
        if np.isnan(self.threshold):
            raise BadInput("a threshold must be a number, or infinite to reject everything; got NaN")

    @property
    def edited(self) -> State:
        """The candidate whose edit is judged."""
        return state_of(self.edit or self.consensus)

    def scored(self, seen: Observation, features: Floats) -> Observation:
        """Return the observation with the number of pieces of the edit and the chance of each to be right."""
        chances = piece_scores(features, self.weights, self.center, self.scale)
        scores = {f"{PIECE}{number}": float(chance) for number, chance in enumerate(chances)}
        return added(seen, {self.edited: {"pieces": float(len(scores)), **scores}})

    def compared(self, seen: Observation, masks: Mapping[State, Mask]) -> Observation:
        """Return the observation with the agreement signals and the score of every piece of the edit."""
        silent = non_voting(seen, (*self.silent, self.consensus))
        shown = {state: masks[state] for state in candidate_signals(seen)}
        return self.scored(super().compared(seen, masks), piece_features(shown, self.edited, silent)[1])

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the accepted pieces, or a rollback if there are none; None until all candidates are known."""
        if not self.complete(seen):
            return None
        signals = candidate_signals(seen)[self.edited]
        if signals.get("pieces") is None:
            raise BadInput(f"case {seen.case_id} has no scores of pieces; show the masks of all candidates (compared)")
        scores = [signals[f"{PIECE}{number}"] for number in range(int(signals["pieces"] or 0))]
        accepted = tuple(number for number, score in enumerate(scores) if score is not None and score > self.threshold)
        called = seen.called(self.edited)
        reason = f"{len(accepted)} of {len(scores)} pieces of {called} have a score > {self.threshold:.3g}"
        if not accepted:
            return self._verdict(seen, SOURCE, reason)
        return self._verdict(seen, self.edited, reason, action=Action.GATE, accepted=accepted)

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """Return M0 with the pieces that a decision accepted; M0 itself after a rollback."""
        source = mask(SOURCE)
        return source if decision.rolled_back else merged(source, mask(decision.state), decision.accepted or ())


def _mean(values: Any, pieces: EditPieces) -> Floats:
    return np.asarray(np.bincount(pieces.number, values, minlength=len(pieces.sizes)) / pieces.sizes)


def _beside(source: Mask, pieces: EditPieces) -> Floats:
    """For each voxel of the edit: the share of its two neighbors along the first axis that M0 gives the new label."""
    if source.ndim < 3 or source.shape[0] < 2:
        return np.zeros(len(pieces.voxels))
    flat, layer = np.ascontiguousarray(source).reshape(-1), int(np.prod(source.shape[1:]))
    new = pieces.after[pieces.number]
    held, known = np.zeros(len(new)), np.zeros(len(new))
    for shift in (-layer, layer):
        place = pieces.voxels + shift
        inside = (place >= 0) & (place < flat.size)
        held[inside] += flat[place[inside]] == new[inside]
        known += inside
    return np.asarray(held / known)

"""Consensus of several predictions of one case: mean, weighted mean, vote, medoid and InTEnt.

Probabilities are averaged in place, so memory holds two volumes for any number of predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.measure.masks import FULL
from casewise.measure.signals.agreement import agreements, candidates_of, mean_agreement

KINDS = ("mean", "weighted", "vote", "medoid", "intent")


@dataclass
class Mean:
    """The weighted mean of probabilities, updated in place; the first tensor is taken over, not copied."""

    so_far: Tensor | None = None
    weight: float = 0.0

    @torch.inference_mode()
    def add(self, probabilities: Tensor, weight: float = 1.0) -> None:
        """Add one prediction."""
        if not weight > 0:
            return
        self.weight += weight
        if self.so_far is None:
            self.so_far = probabilities
        else:
            self.so_far.lerp_(probabilities, weight / self.weight)

    @property
    def value(self) -> Tensor:
        """The mean so far; do not write to it."""
        if self.so_far is None:
            raise BadInput("a consensus needs at least one prediction with a weight above 0")
        return self.so_far


@dataclass
class Ballots:
    """Probabilities of every prediction in 255ths, stored only where they are neither 0 nor 1; see :meth:`on`."""

    head: str
    kept: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)

    def add(self, probabilities: Tensor, mask: Mask) -> None:
        """Add one prediction, (n, classes, *space), and its mask."""
        shares = probabilities.detach().transpose(0, 1).flatten(1).mul(FULL).round_().to(torch.uint8).cpu().numpy()
        unsure = shares.max(0) < FULL if self.head == "softmax" else shares.max(0) > 0
        at = np.flatnonzero(unsure)
        self.kept.append((at, np.ascontiguousarray(shares[:, at])))
        self.masks.append(mask)

    def on(self, voxels: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the shares at sorted flat positions of the mask, (prediction, class, voxel)."""
        classes = self.kept[0][1].shape[0]
        found = np.zeros((len(self.kept), classes, len(voxels)), np.uint8)
        for reading, ((at, shares), mask) in enumerate(zip(self.kept, self.masks, strict=True)):
            place = np.searchsorted(at, voxels)
            there = (place < len(at)) & (at[np.minimum(place, len(at) - 1)] == voxels) if len(at) else place < 0
            found[reading][:, there] = shares[:, place[there]]
            if self.head == "softmax":  # surely one class, which is the label
                sure = np.flatnonzero(~there)
                found[reading][mask.reshape(-1)[voxels[sure]].astype(int), sure] = FULL
        return found


def vote(masks: Sequence[Mask]) -> Mask:
    """Return the most frequent label at each voxel; ties go to the label of the first mask, then to the smallest.

    >>> vote([np.array([[1, 1, 2]]), np.array([[1, 0, 0]]), np.array([[0, 0, 1]])]).tolist()
    [[1, 0, 2]]
    """
    if len(masks) == 1:
        return masks[0]
    found = candidates_of(masks)
    return found.mask(found.majority, masks[0])


def medoid(masks: Sequence[Mask]) -> int:
    """Return the index of the mask with the largest mean Dice to the others; the first of ties."""
    return int(np.argmax(np.round(mean_agreement(agreements(masks)), 12)))


def intent_weights(entropies: Sequence[float]) -> NDArray[np.float64]:
    r"""Return InTEnt's weights: softmax of :math:`-b` scaled to 0..1, b being the balanced entropy of a prediction."""
    balanced = -np.asarray(entropies, float)
    spread = balanced.max() - balanced.min()
    scaled = (balanced - balanced.min()) / spread if spread > 0 else np.zeros_like(balanced)
    weights: NDArray[np.float64] = np.exp(scaled) / np.exp(scaled).sum()
    return weights


def balanced_entropy(entropy: NDArray[Any], mask: Mask) -> float:
    """Return (mean entropy of the foreground + mean entropy of the background) / 2; one alone if the other is empty."""
    foreground = mask > 0
    parts = [entropy[side] for side in (foreground, ~foreground) if side.any()]
    return float(np.mean([part.mean(dtype=np.float64) for part in parts]))


def checked_weights(kind: str, weights: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the weight of every prediction by name, default 1; refuse unknown names and negative weights."""
    if kind not in KINDS:
        raise BadInput(f"a consensus must be one of {', '.join(KINDS)}, got {kind!r}")
    if unknown := sorted(set(weights) - set(names)):
        raise BadInput(f"weights are given for {', '.join(unknown[:3])}, the readings are {', '.join(names)}")
    if any(not 0 <= value < float("inf") for value in weights.values()):
        raise BadInput(f"weights must be 0 or more, got {dict(weights)}")
    if weights and kind != "weighted":
        raise BadInput(f"consensus {kind!r} takes no weights; choose consensus 'weighted'")
    return {name: float(weights.get(name, 1.0)) for name in names}

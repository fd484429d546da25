"""Consensus of several predictions of one case: mean, vote and medoid.

Probabilities are averaged in place, so memory holds two volumes for any number of predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.measure.signals.agreement import agreements, candidates_of, mean_agreement


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

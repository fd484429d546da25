"""Ballots: the probabilities of several readings of one case, in 255ths, and what a mean of some of them says."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FULL = 255  # a probability of 1 in a ballot


def weighted_labels(ballots: NDArray[np.uint8], weights: NDArray[np.float64], head: str) -> NDArray[np.int64]:
    """The label of each voxel under a weighted mean of ballots, (reading, class, voxel); channels count as labels.

    Softmax: the first class with the largest mean. Sigmoid: 1 + the last channel above one half, else 0.
    """
    return labels_of(np.tensordot(weights / weights.sum(), ballots.astype(np.float32), axes=1), head)


def labels_of(mean: NDArray[Any], head: str) -> NDArray[np.int64]:
    """The label of each voxel under a mean ballot, (class, voxel)."""
    if head == "softmax":
        return np.asarray(mean.argmax(0), np.int64)
    numbers = np.arange(1, mean.shape[0] + 1)[:, None]
    return np.asarray(((mean > FULL / 2) * numbers).max(0), np.int64)

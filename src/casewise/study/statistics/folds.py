"""Cross-fitting folds that keep the cases of one cluster together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import TooFewCases

Integers = NDArray[np.int64]


def folds_of(units: Integers, folds: int, seed: int) -> Integers:
    """A fold number for every row; rows of one unit share it, and folds differ by at most one unit.

    >>> folds_of(np.array([0, 0, 1, 2, 2, 3]), 2, seed=0).tolist()
    [1, 1, 0, 0, 0, 1]
    """
    names = np.unique(units)
    if len(names) < folds or folds < 2:
        raise TooFewCases(f"{folds} folds need at least two folds and as many clusters, got {len(names)} clusters")
    order = np.random.default_rng(seed).permutation(len(names))
    number = np.empty(len(names), np.int64)
    number[order] = np.arange(len(names)) % folds
    return np.asarray(number[np.searchsorted(names, units)])

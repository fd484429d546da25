"""Is what a policy keeps evidently hurt? A one-sided sign test over patients, on holdout labels or reviews (M3).

Go or no-go by a majority of a dozen cases is a coin toss when adaptation does little, so the guard of a design acts on
evidence only: clusters (patients, sequences) that were hurt against clusters that were helped, p <= 0.05.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike

EVIDENT = 0.05


def hurt_p(changes: ArrayLike, clusters: Sequence[str]) -> float:
    """P(so many clusters hurt | helped and hurt are equally likely); a cluster counts by the sign of its mean change.

    >>> round(hurt_p([-0.1, -0.2, -0.1, -0.3, -0.1], list("abcde")), 5)
    0.03125
    >>> hurt_p([], [])
    1.0
    """
    values = np.asarray(changes, dtype=np.float64)
    _, units = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    means = np.bincount(units, weights=values) / np.bincount(units)
    hurt, moved = int((means < 0).sum()), int((means != 0).sum())
    return float(sum(comb(moved, more) for more in range(hurt, moved + 1)) / 2**moved)

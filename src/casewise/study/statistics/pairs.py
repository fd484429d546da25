"""Two methods on the same cases: wins, the signed-rank test, and Holm's correction of a declared family (H3-H5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from casewise.core.errors import BadInput

_EXACT_UP_TO = 25  # nonzero differences; beyond it, or with ties, the normal approximation with tie correction


def wins(method: ArrayLike, reference: ArrayLike, *, lower_is_better: bool = True) -> tuple[int, int, int]:
    """Strict wins, exact ties and losses of a method (H3).

    >>> wins([0.1, 0.2, 0.3], [0.2, 0.2, 0.1])
    (1, 1, 1)
    """
    difference = np.asarray(method, float) - np.asarray(reference, float)
    signed = difference if lower_is_better else -difference
    return int((signed < 0).sum()), int((signed == 0).sum()), int((signed > 0).sum())


@dataclass(frozen=True)
class SignedRank:
    """Wilcoxon's signed-rank test; ``p`` is NaN with a reason when no difference is left."""

    statistic: float
    p: float
    n: int  # nonzero differences
    zeros: int
    method: str  # "exact" or "asymptotic"
    reason: str = ""


def wilcoxon(method: ArrayLike, reference: ArrayLike) -> SignedRank:
    """Two-sided, zeros dropped; differences are rounded to 12 decimals so that float noise makes no ties (H4)."""
    difference = np.round(np.asarray(method, float) - np.asarray(reference, float), 12)
    nonzero = difference[difference != 0]
    zeros = len(difference) - len(nonzero)
    if not len(nonzero):
        return SignedRank(float("nan"), float("nan"), 0, zeros, "none", "every difference is zero")
    tied = len(np.unique(np.abs(nonzero))) < len(nonzero)
    how = "exact" if len(nonzero) <= _EXACT_UP_TO and not tied else "asymptotic"
    found = stats.wilcoxon(nonzero, method="exact" if how == "exact" else "approx", correction=False)
    return SignedRank(float(found.statistic), float(found.pvalue), len(nonzero), zeros, how)


def holm(p_values: Sequence[float], *, family: int | None = None) -> NDArray[np.float64]:
    r"""Holm's step-down adjustment, :math:`\tilde p_{(i)} = \max_{j \le i} \min(1, (m - j + 1) p_{(j)})` (H5).

    ``family`` is the declared size m when not every member is at hand.

    >>> holm([0.01625, 0.5], family=4).round(6).tolist()
    [0.065, 1.0]
    """
    p = np.asarray(p_values, dtype=np.float64)
    size = len(p) if family is None else family
    if size < len(p) or ((p < 0) | (p > 1)).any() or np.isnan(p).any():
        raise BadInput(f"Holm needs p-values in [0, 1] and a family of at least {len(p)}, got {p.tolist()} and {size}")
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(1.0, (size - np.arange(len(p))) * p[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(stepped)
    return adjusted

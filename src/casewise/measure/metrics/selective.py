"""Quality of a label-free confidence for finding poor cases: risk-coverage curve, AURC, AUROC.

The risk of a case is 1 - Dice. Cases are kept in order of their confidence; cases of equal confidence share their mean
risk, so their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from casewise.core.errors import BadInput

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Risk-coverage curve (coverage i/n, mean risk of the i most confident cases) and its summaries."""

    coverage: Floats
    risk: Floats
    aurc: float  # area under the curve over coverage 1/n to 1, by the width of that range
    optimum: float  # the same for the best possible order
    mean_risk: float  # average of a confidence without information

    @property
    def excess(self) -> float:
        """e-AURC: the cost of the order above that of the best one."""
        return self.aurc - self.optimum

    @property
    def normalized(self) -> float:
        """(mean risk - AURC) / (mean risk - optimum): 1 is the best order, 0 says nothing, NaN if risks are equal."""
        room = self.mean_risk - self.optimum
        return (self.mean_risk - self.aurc) / room if room > 1e-15 else float("nan")


def risk_coverage(confidence: ArrayLike, risk: ArrayLike) -> RiskCoverage:
    r"""Risk-coverage curve of a confidence (higher: surer) against the risk of each case.

    .. math:: r_i = \frac{1}{i} \sum_{j \le i} \rho_{(j)}, \qquad
              \mathrm{AURC} = \frac{1}{n - 1} \sum_{i=1}^{n-1} \frac{r_i + r_{i+1}}{2}

    with :math:`\rho_{(1)}, \rho_{(2)}, \dots` the risks in falling order of confidence: drop the lowest one by one,
    trapezoid over the selective risk. A confidence that says nothing has the mean risk on average.

    >>> found = risk_coverage([.9, .8, .1], [.1, .2, .9])
    >>> round(found.aurc, 4), found.excess, found.normalized
    (0.2, 0.0, 1.0)
    """
    sure, cost = _paired(confidence, risk)
    if len(sure) < 2:
        raise BadInput(f"a risk-coverage curve needs at least two cases, got {len(sure)}")
    curve = _selective(sure, cost)
    best = _selective(-cost, cost)
    coverage = np.arange(1, len(cost) + 1) / len(cost)
    return RiskCoverage(coverage, curve, _area(curve), _area(best), float(cost.mean()))


def auroc(score: ArrayLike, positive: ArrayLike) -> float:
    """Chance that a positive case has the higher score than another one, ties counting half; NaN without both kinds.

    >>> auroc([.9, .2, .4], [True, False, False])
    1.0
    """
    values, yes = np.asarray(score, np.float64), np.asarray(positive, bool)
    if not yes.any() or yes.all():
        return float("nan")
    ranks = stats.rankdata(values)
    return float((ranks[yes].mean() - (yes.sum() + 1) / 2) / (~yes).sum())


def _paired(confidence: ArrayLike, risk: ArrayLike) -> tuple[Floats, Floats]:
    sure, cost = np.asarray(confidence, np.float64), np.asarray(risk, np.float64)
    if sure.shape != cost.shape or sure.ndim != 1:
        raise BadInput(f"one confidence and one risk per case are needed, got shapes {sure.shape} and {cost.shape}")
    if not (np.isfinite(sure).all() and np.isfinite(cost).all()):
        raise BadInput("confidences and risks must be finite; leave out cases without a label and count them")
    return sure, cost


def _selective(sure: Floats, cost: Floats) -> Floats:
    _, which = np.unique(-sure, return_inverse=True)  # falling confidence; ties share a number
    shared: Any = np.bincount(which, cost) / np.bincount(which)
    order = np.argsort(which, kind="stable")
    return np.asarray(np.cumsum(shared[which[order]]) / np.arange(1, len(cost) + 1))


def _area(curve: Floats) -> float:
    return float(((curve[1:] + curve[:-1]) / 2).mean())

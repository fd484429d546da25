"""Conditions under which a design may replace M0: tests, harm and estimates that hold with few patients.

A patient (or sequence) is the unit everywhere. The designs that were compared must answer three questions:

* Could the gain of the best one be chance? :func:`chance_of_best` tests all designs together.
* How many patients are hurt, and how many may be? :func:`hurt_share` counts and bounds them.
* How large is the gain of the chosen design? Nested cross-fitting
  (:func:`casewise.judge.calibration.design_comparison.nested_gains`) answers with an estimate. It has no interval:
  in simulations none holds with ten patients where losses are rare or skewed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.judge.certificates.risk_control import clopper_pearson_upper, ltt_cases
from casewise.judge.outcomes import POINT

Floats = NDArray[np.float64]
ALLOWED_HURT = 0.1  # share of patients, and of cases, that a design may hurt by more than a point
LEVEL = 0.9  # confidence of one-sided bounds
CHANCE = 0.05
"""Largest p of an adopted design. Fitted designs depend on the patients that they are not scored on: in simulated
worlds without any gain a design was adopted in up to 9 % of calibrations at .05, and in up to 17 % at .1."""
_ALL_SIGNS = 12  # clusters up to which every sign pattern is gone through


def mean_low(
    values: Any, clusters: Sequence[Any] | NDArray[Any], *, level: float = LEVEL
) -> tuple[float, float, float]:
    """Mean over cases with one-sided bounds at ``level`` on either side, by Student's t over patients.

    Args:
        values: One number per case.
        clusters: The patient or sequence of each case.
        level: Confidence of each bound.

    Returns:
        (mean, lower bound, upper bound); the bounds are infinite with fewer than two patients.
    """
    numbers = np.asarray(values, np.float64)
    _, number = np.unique(np.asarray(clusters), return_inverse=True)
    amount = int(number.max()) + 1
    mean = float(numbers.mean())
    if amount < 2:
        return mean, -np.inf, np.inf
    rest = np.bincount(number, numbers - mean) / len(numbers)  # contribution of each cluster to the error of the mean
    error = float(np.sqrt(amount / (amount - 1) * (rest**2).sum())) * float(stdtrit(amount - 1, level))
    return mean, mean - error, mean + error


NO_INTERVAL = (
    "no interval is given, because with so few patients none holds where a few cases lose much (simulated: the widest "
    "one that was tried missed in 21 % of the calibrations with skewed losses and in 75 % with rare disasters)"
)
"""Why the estimated gain of a chosen design has no interval; the figures are those of 10 patients."""

SMALL = f"too large on average if the gains of single {UNIT[1]} vary by more than this gain"
"""M0 is kept where the tests fail or the estimate is not above 0, so the small ones that are printed are the lucky."""


def chance_of_best(gains: Floats, clusters: Sequence[str], *, draws: int = 1999) -> Floats:
    r"""p of each design (column): the chance that the best of all designs reaches its t if none of them gains.

    The signs of whole patients are flipped, in all columns together, and each t is compared with the largest t of any
    column (max-T, Westfall and Young 1993), which corrects for the number of designs:

    .. math:: p_j = P\big(\max_k T_k(\epsilon) \ge T_j(1)\big), \qquad
              T_k(\epsilon) = \frac{\sum_c \epsilon_c S_{ck}}{\sqrt{\sum_c S_{ck}^2}}, \quad \epsilon_c = \pm 1

    With up to 12 patients all :math:`2^n` patterns are tried. No p is below :math:`2^{-n}`: three patients
    cannot reach 0.1 and four cannot reach 0.05, however large the gain is.

    Args:
        gains: (case, design).
        clusters: The patient or sequence of each case.
        draws: Random sign patterns where there are too many to go through.

    Returns:
        One p-value per design.
    """
    _, number = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.stack([np.bincount(number, column) for column in gains.T], axis=1)
    size = np.sqrt((sums**2).sum(axis=0))
    t = np.divide(sums, size, out=np.zeros_like(sums), where=size > 0)
    signs = _signs(len(sums), draws)
    largest = (signs @ t).max(axis=1)
    reached = (largest[:, None] >= t.sum(axis=0) - 1e-9).sum(axis=0)
    every = len(sums) <= _ALL_SIGNS  # True: all patterns are tried, the observed one included
    return np.asarray(reached / len(signs) if every else (1 + reached) / (1 + len(signs)))


@lru_cache(maxsize=32)
def _signs(units: int, draws: int) -> Floats:
    if units <= _ALL_SIGNS:
        bits = np.arange(2**units)[:, None] >> np.arange(units) & 1
        return np.asarray(1.0 - 2.0 * bits)
    return np.random.default_rng(RESAMPLING_SEED).choice([-1.0, 1.0], (draws, units))


def patients_for_chance(chance: float = CHANCE) -> int:
    """The fewest patients with which :func:`chance_of_best` can reach a p: 2^-n <= p.

    >>> patients_for_chance(0.1), patients_for_chance(0.05)
    (4, 5)
    """
    return int(np.ceil(-np.log2(chance) - 1e-12))


@dataclass(frozen=True)
class HurtShare:
    """The number of hurt patients and an upper bound of their share."""

    patients: int
    hurt: int  # patients whose mean change is below minus the margin
    cases: int
    cases_hurt: int
    limit: float  # share that is allowed
    upper: float  # Clopper-Pearson's bound of the share of patients at ``confidence``
    needed: int  # patients, none of them hurt, with which the bound meets the limit
    margin: float = POINT
    confidence: float = LEVEL

    @property
    def within(self) -> bool:
        """True if the shares of hurt patients and cases are within the limit; not their upper bounds."""
        allowed = self.limit + 1e-9
        return self.hurt <= allowed * self.patients and self.cases_hurt <= allowed * self.cases

    def sentence(self) -> str:
        """For a person."""
        said = (
            f"{self.hurt} of {self.patients} {UNIT[1]} were hurt by more than {self.margin:g}; up to {self.upper:.0%} "
            f"may be (confidence {self.confidence:g})"
        )
        if self.upper <= self.limit or not 0 < self.limit < 1:
            return said
        return f"{said}; to show at most {self.limit:.0%}, {self.needed} {UNIT[1]} without harm are needed"

    def excess(self) -> str:
        """Say which count is above the limit: patients (by the mean over their cases) or cases.

        >>> hurt_share([0.05, -0.02, 0.05, -0.02], ["a", "a", "b", "b"]).excess()
        '2 of 4 cases lost more than 0.01, and at most 10% may'
        """
        counts = ((self.hurt, self.patients, UNIT[1]), (self.cases_hurt, self.cases, "cases"))
        above = [f"{hurt} of {n} {unit}" for hurt, n, unit in counts if hurt > (self.limit + 1e-9) * n]
        return f"{' and '.join(above)} lost more than {self.margin:g}, and at most {self.limit:.0%} may"


def hurt_share(change: ArrayLike, clusters: Sequence[str], *, limit: float = ALLOWED_HURT) -> HurtShare:
    """Count the patients that are hurt, with an exact upper bound of their share.

    A patient is hurt by losing more than a point: the mean change over the patient's cases is below minus 0.01.

    Args:
        change: Change of the metric against M0, one per case.
        clusters: The patient or sequence of each case.
        limit: The share that is allowed.

    Returns:
        The counts, the bound, and how many patients without harm the limit needs.

    Example:
        >>> hurt_share([0.02] * 10, list("abcdefghij")).sentence()[:63]
        '0 of 10 patients were hurt by more than 0.01; up to 21% may be '
        >>> hurt_share([0.02] * 10, list("abcdefghij")).needed
        22
    """
    values = np.asarray(change, np.float64)
    _, number = np.unique(np.asarray(clusters).astype(str), return_inverse=True)
    means = np.bincount(number, values) / np.bincount(number)
    hurt, patients = int((means < -POINT).sum()), len(means)
    upper = clopper_pearson_upper(hurt, patients, LEVEL)
    needed = ltt_cases(limit, 1 - LEVEL) if 0 < limit < 1 else 1
    cases_hurt = int((values < -POINT).sum())
    return HurtShare(patients, hurt, len(values), cases_hurt, limit, upper, needed)


def unpromised(found: Mapping[str, Any]) -> str:
    """Say how many labelled patients the chosen design hurt; empty if M0 is kept or no designs were compared.

    Args:
        found: ``preflight`` of a policy.

    Returns:
        A sentence.
    """
    compared = found.get("comparison") or {"rows": (), "chosen": "m0"}
    harm = [row["harm"] for row in compared["rows"] if row["design"] == compared["chosen"] != "m0"]
    return f"Nothing is promised. On the labelled cases, {HurtShare(**harm[0]).sentence()}." if harm else ""


def unseen_sentence(patients: int) -> str:
    """Say which losses so few patients cannot show: the largest share of disasters that they are compatible with.

    Args:
        patients: Number of patients in the estimate.

    Returns:
        One sentence.
    """
    share = clopper_pearson_upper(0, patients, LEVEL)
    return (
        f"rare large losses may be missed: up to {share:.0%} of new {UNIT[1]} may lose more than any of these "
        f"{patients} did (confidence {LEVEL:g}), and no estimate here includes them"
    )

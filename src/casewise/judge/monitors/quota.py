r"""Does the share of patients in each bucket of a batch differ from calibration? Then cut-points do not fit new data.

From fog and night to rain and snow a rollback share of 32 % fell to 0 %; from day to dusk it rose to 68 %. Patients (or
sequences) are counted, by their first case. The distance is

.. math:: \chi^2 = \sum_b \frac{(c_b - n q_b)^2}{n q_b} + \frac{(d_b - m q_b)^2}{m q_b},
          \quad q_b = \frac{c_b + d_b}{n + m}

and its p-value comes from permuting the n + m patients, so it is valid for any n and m. A
stream of single cases is watched by the monitors of :mod:`casewise.judge.monitors.exchangeability`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from casewise.core.records import Decision, Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT

BUCKETS = ("low", "mid", "hard")
EVIDENT = 0.05
_DEALS = 4999


def quota_p(calibrated: Mapping[str, int], deployed: Mapping[str, int]) -> float:
    """Permutation p-value of the chi-square distance between two quotas.

    >>> quota_p({"low": 7, "mid": 6, "hard": 7}, {"low": 6, "mid": 7, "hard": 7}) > 0.8
    True
    >>> quota_p({"low": 7, "mid": 6, "hard": 7}, {"low": 0, "mid": 0, "hard": 20}) < 0.001
    True
    """
    before, now = (np.array([found.get(name, 0) for name in BUCKETS]) for found in (calibrated, deployed))
    pooled, m = before + now, int(now.sum())
    if not before.sum() or not m:
        return 1.0
    drawn = np.random.default_rng(RESAMPLING_SEED).multivariate_hypergeometric(pooled, m, size=_DEALS)
    far = _distance(now[None], pooled)[0]
    return float((1 + (_distance(drawn, pooled) >= far - 1e-9).sum()) / (1 + _DEALS))


def quota_of(decisions: Iterable[Decision]) -> dict[str, int]:
    """Count the patients in each bucket by their first decision; decisions without a bucket do not count."""
    counts = dict.fromkeys(BUCKETS, 0)
    patients = set()
    for one in decisions:
        patient = one.cluster or one.case_id
        if one.bucket in counts and patient not in patients:
            patients.add(patient)
            counts[str(one.bucket)] += 1
    return counts


def quota_drift(policy: Policy, deployed: Mapping[str, int]) -> str | None:
    """Return a sentence if the bucket shares of deployed patients differ from calibration; None if not significant."""
    calibrated = policy.preflight.get("quota")
    if not calibrated or not sum(deployed.values()):
        return None
    p = quota_p(calibrated, deployed)
    if p > EVIDENT:
        return None
    said = ", ".join(
        f"{name} {calibrated.get(name, 0) / sum(calibrated.values()):.0%} -> "
        f"{deployed.get(name, 0) / sum(deployed.values()):.0%}"
        for name in BUCKETS
    )
    return f"QUOTA: the buckets differ from calibration: {said} of the {UNIT[1]} (p = {p:.3f}); recalibrate"


def _distance(drawn: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """Chi-square distance of each row (bucket counts of m patients) from the rest of the pool."""
    m, whole = drawn.sum(axis=1, keepdims=True), pooled.sum()
    n = whole - m
    share = np.where(pooled > 0, pooled, 1) / whole
    rest = pooled - drawn
    return np.asarray(((drawn - m * share) ** 2 / (m * share) + (rest - n * share) ** 2 / (n * share)).sum(axis=1))

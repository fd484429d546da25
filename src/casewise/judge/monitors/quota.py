r"""Alarm when the share of patients in each bucket differs from calibration: cut-points that do not fit new data.

From fog and night to rain and snow a rollback share of 32 % fell to 0 %; from day to dusk it rose to 68 %. Patients (or
sequences) are counted, by their first case. The distance is

.. math:: \chi^2 = \sum_b \frac{(c_b - n q_b)^2}{n q_b} + \frac{(d_b - m q_b)^2}{m q_b},
          \quad q_b = \frac{c_b + d_b}{n + m}

and its p-value comes from permuting the n + m patients, so it is valid for any n and m. A stream is looked at when
it has 10, 20, 40, 80, ... patients; the k-th look spends delta / (k (k + 1)), which adds up to delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Decision, Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.judge.certificates.evidence import check_level

BUCKETS = ("low", "mid", "hard")
EVIDENT = 0.05
_FIRST_LOOK, _DEALS = 10, 4999


@dataclass(frozen=True)
class Quota:
    """Alarm when the buckets of a stream are not those of calibration."""

    calibrated: Mapping[str, int]  # patients in each bucket
    delta: float = 0.05
    seen_in: Mapping[str, int] = field(default_factory=dict)
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)
        if not sum(self.calibrated.values()):
            raise BadInput("a quota alarm needs the buckets of the calibration cases; calibrate a router again")

    @property
    def alarm(self) -> bool:
        """True once the alarm was raised; it stays raised."""
        return self.alarm_at is not None

    def seen(self, bucket: str) -> Quota:
        """Return the monitor after the first case of one more patient."""
        counts = {**self.seen_in, bucket: self.seen_in.get(bucket, 0) + 1}
        patients = sum(counts.values())
        after = replace(self, seen_in=counts)
        look = int(np.log2(patients / _FIRST_LOOK)) + 1 if patients >= _FIRST_LOOK else 0
        if self.alarm or not look or patients != _FIRST_LOOK * 2 ** (look - 1):
            return after
        rings = quota_p(self.calibrated, counts) <= self.delta / (look * (look + 1))
        return replace(after, alarm_at=patients) if rings else after


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


def quota_drift(policy: Policy, deployed: Mapping[str, int], *, level: float = EVIDENT) -> str | None:
    """Return a sentence if the bucket shares of deployed patients differ from calibration; None if not significant.

    For one look at a whole batch; a stream has the monitor.
    """
    calibrated = policy.preflight.get("quota")
    if not calibrated or not sum(deployed.values()):
        return None
    p = quota_p(calibrated, deployed)
    if p > level:
        return None
    said = ", ".join(
        f"{name} {calibrated.get(name, 0) / sum(calibrated.values()):.0%} -> "
        f"{deployed.get(name, 0) / sum(deployed.values()):.0%}"
        for name in BUCKETS
    )
    return (
        f"QUOTA: the cut-points do not travel: calibrated -> deployed {said} of the {UNIT[1]} (p = {p:.3f}); "
        "recalibrate"
    )


def _distance(drawn: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """Chi-square distance of each row (bucket counts of m patients) from the rest of the pool."""
    m, whole = drawn.sum(axis=1, keepdims=True), pooled.sum()
    n = whole - m
    share = np.where(pooled > 0, pooled, 1) / whole
    rest = pooled - drawn
    return np.asarray(((drawn - m * share) ** 2 / (m * share) + (rest - n * share) ** 2 / (n * share)).sum(axis=1))

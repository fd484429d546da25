"""Streams of known health: the share on which each monitor raises an alarm, for the validity tests and the docs.

All repetitions run at once, (stream, time), on the bets that the monitors themselves place; tests/validity compares the
paths with the monitors case by case.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from casewise.judge.certificates.evidence import Floats, rollback_table
from casewise.judge.certificates.risk_control import conformal_setting, crc_budget, loss_sum_bound
from casewise.judge.monitors.audits import agrapa_stakes
from casewise.judge.monitors.exchangeability import log_gains, mean_log_wealth, two_sample_p

_RISK = 0.15  # mean loss of a healthy case: 0.3 harmed, who lose a half on average
_SICK = 0.45
_AT_ONCE = 100  # streams whose ranks are counted together: memory, not time
Draw = np.random.Generator


def losses(rng: Draw, shape: tuple[int, ...], risk: float, severity: str = "continuous") -> Floats:
    """Many zeros; a harmed case loses U(0, 1) ('continuous') or 0.25, 0.5, 0.75 ('discrete'): mean ``risk``."""
    harmed = rng.random(shape) < 2 * risk
    lost = rng.random(shape) if severity == "continuous" else rng.choice([0.25, 0.5, 0.75], shape)
    return np.asarray(harmed * lost)


def audit_alarms(
    *, n: int, length: int, repetitions: int, delta: float, sick: bool = False, severity: str = "continuous"
) -> float:
    """Audits against a promise that holds with equality, the hardest healthy case; n plays no part."""
    rng = np.random.default_rng(1000 + n)
    found = losses(rng, (repetitions, length), _SICK if sick else _RISK, severity)
    return float((audit_wealth(found, _RISK).max(axis=-1) >= np.log(1 / delta)).mean())


def audit_wealth(found: Floats, limit: float) -> Floats:
    """Log wealth of the audit e-process after each loss of each stream."""
    stakes = agrapa_stakes(found, limit)[..., :-1]
    return np.asarray(np.cumsum(np.log1p(stakes * (found - limit)), axis=-1))


def exchangeability_alarms(
    *, n: int, length: int, repetitions: int, delta: float, sick: bool = False, severity: str = "discrete"
) -> float:
    """Coordinates with ties ('discrete') or without; sick streams are shifted."""
    rng = np.random.default_rng(1000)
    values = rng.exponential(4, (repetitions, n + length))
    values[:, n:] += 6 if sick else 0
    values = np.floor(values) if severity == "discrete" else values
    p = growing_p_values(values, n, 1.0 - rng.random((repetitions, length)))
    return float((exchangeability_wealth(p).max(axis=-1) >= np.log(1 / delta)).mean())


def growing_p_values(values: Floats, n: int, luck: Floats) -> Floats:
    """Conformal p-value of every coordinate after the first n against all before it."""
    earlier = np.tri(values.shape[1], k=-1, dtype=bool)[n:]  # (time, before)
    found = np.empty(luck.shape)
    for start in range(0, len(values), _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        now, pool = part[:, n:, None], part[:, None, :]
        larger, equal = ((pool > now) & earlier).sum(axis=2), ((pool == now) & earlier).sum(axis=2)
        found[start : start + _AT_ONCE] = larger + luck[start : start + _AT_ONCE] * (equal + 1)
    return found / (n + 1 + np.arange(luck.shape[1]))


def exchangeability_wealth(p: Floats) -> Floats:
    """Log wealth of the martingale after each p-value of each stream."""
    return mean_log_wealth(np.cumsum(log_gains(p), axis=-2))


def fixed_pool_alarms(*, n: int, length: int, repetitions: int, delta: float) -> float:
    """The naive alternative: the same bets, but the pool never grows."""
    rng = np.random.default_rng(1000)
    pool, arriving = rng.random((repetitions, n)), rng.random((repetitions, length))
    larger = (pool[:, None, :] > arriving[:, :, None]).sum(axis=2)
    p = (larger + 1.0 - rng.random((repetitions, length))) / (n + 1)
    return float((exchangeability_wealth(p).max(axis=-1) >= np.log(1 / delta)).mean())


def alike(draw: Callable[[tuple[int, ...]], Floats], shape: tuple[int, ...], icc: float, rng: Draw) -> Floats:
    """Draws (stream, patient, case) of which two of one patient correlate by ``icc``: some copy the patient's own."""
    shared, own = draw((*shape[:-1], 1)), draw(shape)
    return np.where(rng.random(shape) < np.sqrt(icc), shared, own)


def clustered_alarms(
    monitor: str,
    *,
    icc: float,
    each: int,
    patients: int = 60,
    calibration: int = 20,
    repetitions: int = 500,
    delta: float = 0.05,
    counting: str = "patients",
) -> float:
    """False alarms on healthy streams with ``each`` correlated cases per patient, by patient or (naive) by case."""
    rng = np.random.default_rng(1000)
    by_patient = counting == "patients"
    pool_shape, shape = (repetitions, calibration, each), (repetitions, patients, each)
    if monitor == "audit":

        def drawn(of: tuple[int, ...]) -> Floats:
            found = alike(lambda s: losses(rng, s, _RISK), of, icc, rng)
            return found.mean(axis=2) if by_patient else found.reshape(repetitions, -1)

        return float((audit_wealth(drawn(shape), _RISK).max(axis=-1) >= np.log(1 / delta)).mean())

    def coordinates(of: tuple[int, ...]) -> Floats:
        found = alike(lambda s: rng.exponential(4, s), of, icc, rng)
        return found[:, :, 0] if by_patient else found.reshape(repetitions, -1)

    pool, stream = coordinates(pool_shape), coordinates(shape)
    if monitor == "go-live":
        first = stream[:, : 20 if by_patient else 20 * each]
        return float(np.mean([two_sample_p(a, b, shuffles=499) <= delta for a, b in zip(pool, first, strict=True)]))
    luck = 1.0 - rng.random(stream.shape)
    p = growing_p_values(np.concatenate([pool, stream], axis=1), pool.shape[1], luck)
    return float((exchangeability_wealth(p).max(axis=-1) >= np.log(1 / delta)).mean())


def shifted_from_the_start(
    *, n: int, length: int, shift: float, repetitions: int, first: int = 20, delta: float = 0.05
) -> tuple[float, float]:
    """Shares of streams, shifted from their first case on, that the growing pool and the go-live test find."""
    rng = np.random.default_rng(1000)
    values = rng.normal(size=(repetitions, n + length))
    values[:, n:] += shift
    p = growing_p_values(values, n, 1.0 - rng.random((repetitions, length)))
    grown = exchangeability_wealth(p).max(axis=-1) >= np.log(1 / delta)
    live = [two_sample_p(row[:n], row[n : n + first], shuffles=499) <= delta for row in values]
    return float(grown.mean()), float(np.mean(live))


def certified_alarms(
    *, patients: int, alpha: float, icc: float, naive: bool = False, length: int = 400, repetitions: int = 300
) -> float:
    """False alarms of audits on healthy streams after certification by conformal risk control, two scans a patient.

    ``naive`` holds the audits against alpha itself. The chance of a false alarm, delta, is 0.05.
    """
    rng = np.random.default_rng([patients, int(100 * alpha), int(10 * icc)])
    alarms = 0
    for _ in range(repetitions):
        shared, own = rng.normal(size=(patients + length, 1)), rng.normal(size=(patients + length, 2))
        values = np.sqrt(icc) * shared + np.sqrt(1 - icc) * own
        harmed = (values + rng.normal(size=values.shape) > 0.6).astype(float)
        names = np.repeat(np.arange(patients), 2).tolist()
        table = rollback_table(values[:patients].ravel(), harmed[:patients].ravel(), clusters=names)
        at = conformal_setting(table, alpha)
        if at is None:
            continue
        losses = (harmed[patients:] * (values[patients:] < table.settings[at])).mean(axis=1)
        limit, level = alpha, 0.05
        if not naive:
            limit = loss_sum_bound(crc_budget(patients, alpha) or 0.0, patients, 0.975, binary=False)
            level = 0.025
        alarms += bool(audit_wealth(losses[None], limit).max() >= np.log(1 / level))
    return alarms / repetitions

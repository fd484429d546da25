"""Streams whose health is known: the share of them that each monitor accuses, for the validity tests and the docs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from casewise.judge.monitors.audit import Audit
from casewise.judge.monitors.exchangeability import Exchangeability
from casewise.judge.monitors.proxy import Proxy
from casewise.judge.monitors.reference import Reference

_RISK = 0.15  # mean loss of a healthy case: 0.3 harmed, who lose a half on average
_SICK = 0.45


def losses(rng: np.random.Generator, n: int, risk: float) -> list[float]:
    """Many zeros, the rest uniform on (0, 1): mean ``risk``."""
    return [float(x) for x in (rng.random(n) < 2 * risk) * rng.random(n)]


def _share(stream: Callable[[np.random.Generator], bool], repetitions: int, seed: int = 1000) -> float:
    rng = np.random.default_rng(seed)
    return float(np.mean([stream(rng) for _ in range(repetitions)]))


def audit_alarms(*, n: int, length: int, repetitions: int, delta: float, sick: bool = False) -> float:
    """Audits against a promise that holds with equality, the hardest healthy case; n plays no part."""

    def stream(rng: np.random.Generator) -> bool:
        monitor = Audit(_RISK, delta)
        for loss in losses(rng, length, _SICK if sick else _RISK):
            monitor = monitor.seen(loss)
            if monitor.alarm:
                return True
        return False

    return _share(stream, repetitions, seed=1000 + n)


def reference_alarms(*, n: int, length: int, repetitions: int, delta: float, sick: bool = False) -> float:
    """Audits against n calibration losses of the same distribution."""

    def stream(rng: np.random.Generator) -> bool:
        monitor = Reference.of(losses(rng, n, _RISK), delta=delta)
        for loss in losses(rng, length, _SICK if sick else _RISK):
            monitor = monitor.seen(loss)
            if monitor.alarm:
                return True
        return False

    return _share(stream, repetitions)


def proxy_alarms(*, n: int, length: int, repetitions: int, delta: float, sick: bool = False) -> float:
    """A coordinate that ranks harm; sick streams have larger ones."""

    def stream(rng: np.random.Generator) -> bool:
        values = rng.random(n)
        monitor = Proxy.of(values.tolist(), (rng.random(n) < values**3).tolist(), delta=delta)
        for value in rng.random(length) + (1.0 if sick else 0.0):
            monitor = monitor.seen(float(value))
            if monitor.alarm:
                return True
        return False

    return _share(stream, repetitions)


def exchangeability_alarms(*, n: int, length: int, repetitions: int, delta: float, sick: bool = False) -> float:
    """Coordinates with ties; sick streams are shifted."""

    def stream(rng: np.random.Generator) -> bool:
        run = int(rng.integers(2**31))
        monitor = Exchangeability(tuple(np.floor(rng.exponential(4, n))), delta, seed=run)
        for t, value in enumerate(np.floor(rng.exponential(4, length)) + (6 if sick else 0)):
            monitor = monitor.seen(f"c{t}", float(value))
            if monitor.alarm:
                return True
        return False

    return _share(stream, repetitions)


def fixed_pool_alarms(*, n: int, length: int, repetitions: int, delta: float) -> float:
    """The naive alternative: the same bets, but the pool never grows."""
    powers = np.arange(1, 10) / 10

    def stream(rng: np.random.Generator) -> bool:
        pool, arriving = np.sort(rng.random(n)), rng.random(length)
        larger = n - np.searchsorted(pool, arriving, side="right")
        p = (larger + 1.0 - rng.random(length)) / (n + 1)
        sides = np.stack([p, np.maximum(1 - p, 1e-12)])[:, None, :]
        logs = np.cumsum(np.log(powers)[None, :, None] + (powers - 1)[None, :, None] * np.log(sides), axis=2)
        return bool((np.exp(logs).mean(axis=(0, 1)) >= 1 / delta).any())

    return _share(stream, repetitions)

"""False alarms of the monitors on healthy streams: at most delta, for all time, within three sigma."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.judge.monitors.simulated import (
    audit_alarms,
    exchangeability_alarms,
    fixed_pool_alarms,
    proxy_alarms,
    reference_alarms,
)

DELTA = 0.1


def within(share, repetitions, delta=DELTA):
    return share <= delta + 3 * np.sqrt(delta * (1 - delta) / repetitions)


@pytest.mark.parametrize("monitor", [audit_alarms, reference_alarms, proxy_alarms, exchangeability_alarms])
def test_a_healthy_stream_is_seldom_accused(monitor):
    assert within(monitor(n=20, length=40, repetitions=100, delta=DELTA), 100)


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, 20, 50])
@pytest.mark.parametrize("monitor", [audit_alarms, reference_alarms, proxy_alarms, exchangeability_alarms])
def test_healthy_streams_are_seldom_accused_however_long(monitor, n):
    assert within(monitor(n=n, length=200, repetitions=2000, delta=DELTA), 2000)


@pytest.mark.parametrize("monitor", [audit_alarms, reference_alarms, proxy_alarms, exchangeability_alarms])
def test_a_sick_stream_is_found(monitor):
    assert monitor(n=50, length=80, repetitions=15, delta=DELTA, sick=True) > 0.8


def test_a_pool_that_does_not_grow_accuses_healthy_streams():
    # the formula with a fixed pool: p-values share the pool's luck, and the promise is broken
    assert not within(fixed_pool_alarms(n=20, length=200, repetitions=100, delta=DELTA), 100)

"""Hybrid cut-points follow the stream only as long as it looks like calibration; then everything is M0."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.cohorts import synthetic_archive

import casewise
from casewise.core.errors import BadInput, Refused
from casewise.core.records import Policy
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.cuts import Stream, stream_of
from casewise.judge.monitors.exchangeability import SUSPENDED
from casewise.judge.monitors.watch import Watch, active_policy, read_watch, start_watch, write_watch
from casewise.judge.policy import controller_of

FEW = 200


def hybrid_policy(pool, *, convention="medical", window=None, delta=0.05) -> Policy:
    """A router whose cut-points begin at the tertiles of the pool."""
    low, high = np.percentile(pool, [33.33, 66.67])
    settings = {"pool": list(pool), "convention": convention, "window": window, "warm_up": 15, "delta": delta}
    actions = {"low": {"action": "depth", "depth": 1}, "mid": {"action": "depth", "depth": 1}}
    options = {"coordinate": "delta", "cut_low": low, "cut_high": high, **actions, "hybrid": settings}
    return Policy("made-up", "router", options, 4, calibration_id="made-up")


def driven(stream: Stream, values, prefix: str = "case") -> Stream:
    for t, value in enumerate(values):
        stream = stream.after(f"{prefix}-{t}", float(value))
    return stream


def test_a_drifted_stream_alarms_and_falls_back_to_m0():
    rng = np.random.default_rng(0)
    stream = driven(stream_of(hybrid_policy(rng.random(30))), rng.random(40) + 0.8)
    assert stream.monitor.alarm
    assert stream.policy.controller == "m0"
    assert stream.controller.decide(None).reason == SUSPENDED


def test_an_alarm_is_for_good():
    rng = np.random.default_rng(1)
    stream = driven(stream_of(hybrid_policy(rng.random(30))), rng.random(40) + 0.8)
    assert driven(stream, rng.random(200), "calm").policy.controller == "m0"


def false_alarms(n: int, delta: float, repetitions: int, length: int = 60) -> float:
    rng = np.random.default_rng(n)
    alarms = 0
    for run in range(repetitions):
        values = np.floor(rng.exponential(4, n + length))  # ties on purpose
        alarms += driven(stream_of(hybrid_policy(values[:n], delta=delta)), values[n:], f"run{run}").monitor.alarm
    return alarms / repetitions


@pytest.mark.parametrize("n", [10, 20, 50])
def test_an_exchangeable_stream_seldom_loses_its_cut_points(n):
    assert false_alarms(n, 0.1, FEW) <= 0.1 + 3 * np.sqrt(0.09 / FEW)


def test_cut_points_come_from_the_pool_of_the_alarm():
    rng = np.random.default_rng(3)
    stream = driven(stream_of(hybrid_policy(rng.random(30))), rng.random(14))
    assert stream.controller.cut_high == stream.hybrid.options["cut_high"]  # warm-up
    stream = stream.after("fifteenth", 0.5)
    expected = np.percentile(stream.monitor.pool, [33.33, 66.67])
    assert (stream.controller.cut_low, stream.controller.cut_high) == pytest.approx(tuple(expected))


def test_a_hybrid_policy_needs_its_alarm(tmp_path):
    archive = synthetic_archive(tmp_path / "site", cases=30)
    policy = calibrate(archive, "cardiac", hybrid=True)
    with pytest.raises(BadInput, match="replay it as a stream, give a watch"):
        controller_of(policy)
    with pytest.raises(Refused, match="needs the monitor exchangeability"):
        start_watch(archive, policy, ("audit",), limit=0.1)
    with pytest.raises(Refused, match="has no exchangeability alarm"):
        active_policy(policy, Watch(policy.calibration_id))
    with pytest.raises(BadInput, match="is not hybrid"):
        stream_of(calibrate(archive, "cardiac"))


def test_live_and_replay_are_one_object(tmp_path):
    """A watch from its file, case by case, gives the cut-points that replay gives."""
    archive = synthetic_archive(tmp_path / "site", cases=30)
    fresh = synthetic_archive(tmp_path / "new", cases=36, prefix="new", split="evaluation", seed=7)
    policy = calibrate(archive, "cardiac", hybrid=True)
    file = write_watch(tmp_path / "watch.json", start_watch(archive, policy, ("exchangeability",)))
    for replayed in casewise.replay(fresh, policy):
        watch = read_watch(file)  # a restart after every case
        (live,) = casewise.replay(fresh.select(ids=[replayed.case_id]), active_policy(policy, watch))
        assert live == replayed
        write_watch(file, watch.decision(live.case_id, {"value": live.value}, live.cluster))
    assert len({one.cut_high for one in casewise.replay(fresh, policy)}) > 1


def test_a_drifted_archive_is_replayed_as_m0_after_the_alarm(tmp_path):
    archive = synthetic_archive(tmp_path / "site", cases=40, harmful=0.0)
    drifted = synthetic_archive(tmp_path / "new", cases=40, prefix="new", split="evaluation", harmful=1.0, seed=5)
    decisions = casewise.replay(drifted, calibrate(archive, "cardiac", hybrid=True))
    fallen = [one.reason == SUSPENDED for one in decisions]
    first = fallen.index(True)
    assert first > 0
    assert all(fallen[first:])
    assert all(one.rolled_back and one.executed == 0 for one in decisions[first:])

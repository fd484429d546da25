"""Predictions under watch: decided in order, suspended at the alarm, and the same after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from casewise.core.errors import BadInput, Mismatch
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import SOURCE, Action, Decision, Policy
from casewise.judge.calibration.cuts import stream_of
from casewise.judge.monitors.exchangeability import SUSPENDED, Exchangeability
from casewise.judge.monitors.watch import Watch, Watching, read_watch, write_watch
from casewise.run.local import LocalEngine, Result
from casewise.run.predict_case import PredictCase
from casewise.run.predict_folder import predict_folder, watched_results

Maker = Callable[..., PredictCase]


def router(pool, **hybrid) -> Policy:
    low, high = (float(cut) for cut in np.percentile(pool, [33.33, 66.67]))
    actions = {"low": {"action": "depth", "depth": 1}, "mid": {"action": "depth", "depth": 1}}
    options = {"coordinate": "delta", "cut_low": low, "cut_high": high, **actions}
    if hybrid:
        options["hybrid"] = {"pool": list(pool), "convention": "medical", "window": None, "delta": 0.05, **hybrid}
    return Policy("made-up", "router", options, 1, calibration_id="made-up")


def watch_file(path: Path, pool, delta: float = 0.05) -> Path:
    return write_watch(path, Watch("made-up", {"exchangeability": Exchangeability(tuple(pool), delta)}))


FAR = [10.0 + 0.1 * k for k in range(30)]  # no delta is ever that large: every case of the stream looks strange
TOUCHY = 0.5  # alarms at once on strange cases


def entries(work: PredictCase, watch: Path, **options) -> list[PredictedCase]:
    return list(predict_folder(watched(work, watch), LocalEngine(), **options))


def watched(work: PredictCase, watch: Path) -> PredictCase:
    return replace(work, deployment=replace(work.deployment, watch=Watching(watch)))


def test_an_alarm_within_a_run_suspends_the_rest_of_it(work: Maker, tmp_path: Path) -> None:
    made = work(policy=router(FAR))
    found = entries(made, watch_file(tmp_path / "w.json", FAR, TOUCHY))
    reasons = [entry.decision.reason for entry in found]
    assert read_watch(tmp_path / "w.json").suspended
    assert SUSPENDED not in reasons[0]
    assert reasons[-1] == SUSPENDED
    assert found[-1].policy["name"] == "made-up-suspended"
    assert found[-1].decision.executed == 0


def test_a_run_that_is_killed_continues_as_if_it_had_not_been(work: Maker, tmp_path: Path) -> None:
    policy = router(np.linspace(0, 0.5, 30), warm_up=1)
    pool = policy.options["hybrid"]["pool"]
    part, other = (watch_file(tmp_path / name, pool) for name in ("part.json", "whole.json"))
    whole = entries(work(policy=policy, out="whole", watch=Watching(other)), other)
    cut_off = predict_folder(watched(work(policy=policy, watch=Watching(part)), part), LocalEngine())
    next(cut_off)
    cut_off.close()  # what a kill leaves: one case is there, two are not
    gone_on = entries(work(policy=policy, watch=Watching(part)), part, resume=True)
    assert [entry.decision for entry in gone_on] == [entry.decision for entry in whole]
    assert read_watch(part) == read_watch(tmp_path / "whole.json")


def test_a_hybrid_run_decides_as_its_stream_does(work: Maker, tmp_path: Path) -> None:
    policy = router(np.linspace(0, 0.5, 30), warm_up=1)
    file = watch_file(tmp_path / "w.json", policy.options["hybrid"]["pool"])
    found = entries(work(policy=policy, watch=Watching(file)), file)
    stream = stream_of(policy)
    for entry in found:
        assert entry.decision.cut_high == stream.controller.cut_high
        stream = stream.after(entry.case, entry.decision.value)
    assert len({entry.decision.cut_high for entry in found}) > 1
    assert stream.monitor == read_watch(tmp_path / "w.json").monitors["exchangeability"]


def test_a_hybrid_policy_without_a_watch_is_refused(work: Maker, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give a watch"):
        work(policy=router([0.1, 0.2, 0.3], warm_up=15))
    another = Watching(write_watch(tmp_path / "w.json", Watch("another")))
    with pytest.raises(Mismatch, match="start a new watch"):
        work(policy=router([0.1, 0.2, 0.3]), watch=another)


class Backwards:
    """An engine whose last case ends first."""

    def map(self, work, case_ids):
        yield from (Result(case_id, work(case_id)) for case_id in reversed(case_ids))


def test_what_ran_ahead_of_an_alarm_is_done_again_as_m0(work: Maker, tmp_path: Path) -> None:
    made = work(policy=router(FAR))
    made.layout.out.mkdir()
    watch = Watching(watch_file(tmp_path / "w.json", FAR, TOUCHY))
    found = list(watched_results(made, Backwards(), list(made.cases), watch))
    assert [one.case_id for one in found[:1]] == list(made.cases)[:1]
    assert {one.case_id for one in found} == set(made.cases)
    assert watch.state.decided == tuple(made.cases)[: watch.state.alarms["exchangeability"]]
    assert json.loads(made.layout.entry("case_2").read_text())["decision"]["reason"] == SUSPENDED


def test_entries_without_a_decision_do_not_count(tmp_path: Path) -> None:
    watch = Watching(watch_file(tmp_path / "w.json", FAR))
    watch.show(None)
    watch.show(Decision("a", Action.ROLLBACK, SOURCE, 0, "m0"))
    assert watch.state.decided == ()

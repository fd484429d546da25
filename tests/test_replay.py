"""The same decisions from disk; what cannot be replayed says why."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from worlds.cohorts import synthetic_archive

import casewise
from casewise.archive.layout import mask_sha256
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import State
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.controllers.depth import FixedK
from casewise.judge.controllers.region_gate import RegionGate
from casewise.judge.controllers.router import Bucket, Router
from casewise.judge.decide import deployed_mask


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("a") / "a", cases=9)


def test_one_decision_a_case_in_order_with_its_own_mask(archive):
    controller = Router("delta", 0.016, 0.025, Bucket("depth", 3), Bucket("depth", 2, shrink=0.5))
    decisions = casewise.replay(archive, controller)
    assert [one.case_id for one in decisions] == list(archive.ids)
    assert {one.bucket for one in decisions} == {"low", "mid", "hard"}
    for one in decisions:
        assert one.state_hash == mask_sha256(deployed_mask(archive, controller, one))


def test_rollback_is_the_archived_m0(archive):
    decision = casewise.replay(archive, Router("delta", 0, 0, Bucket("depth", 1), Bucket("depth", 1)))[0]
    assert (decision.deployed, decision.executed, decision.rolled_back) == (0, 1, True)
    assert decision.state_hash == mask_sha256(archive.mask(decision.case_id, State(0)))


@pytest.mark.parametrize("keep_small", [False, True])
@pytest.mark.parametrize("threshold", [-9.0, 0.0, 9.0])
def test_a_gate_names_the_very_mask_that_it_deploys(archive, threshold, keep_small):
    gate = RegionGate(threshold, keep_small=keep_small)
    for one in casewise.replay(archive, gate):
        assert one.state_hash == mask_sha256(deployed_mask(archive, gate, one))


def test_a_gate_that_accepts_the_whole_edit_deploys_the_recorded_step(archive):
    for one in casewise.replay(archive, RegionGate(-9.0, keep_small=True)):
        assert one.state_hash == archive.entries[one.case_id].mask_sha256["1"]


def test_a_policy_signs_its_decisions(archive):
    policy = calibrate(archive, "cardiac")
    assert {one.calibration_id for one in casewise.replay(archive, policy)} == {policy.calibration_id}


def test_a_policy_of_another_model_is_refused(archive):
    policy = calibrate(archive, "cardiac")
    with pytest.raises(Mismatch, match="another model"):
        casewise.replay(archive, replace(policy, binding=replace(archive.binding, model="other")))


def test_a_step_or_a_state_that_was_not_recorded_is_named(archive):
    with pytest.raises(BadInput, match="fixed-k asked for step 5 of case case-0000, which has 4"):
        casewise.replay(archive, FixedK(9))
    quarter = Router("delta", -1, 9, Bucket("depth", 1), Bucket("depth", 2, shrink=0.25))
    with pytest.raises(BadInput, match=r"state 2~0\.25 of case case-0000 was not recorded"):
        casewise.replay(archive, quarter)


def test_replay_needs_no_torch(archive):
    program = (
        "import sys, casewise\n"
        f"archive = casewise.open_archive({str(archive.path)!r})\n"
        "from casewise.judge.controllers import CONTROLLERS\n"
        "casewise.replay(archive, CONTROLLERS.build('frag-stop', cap=4))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

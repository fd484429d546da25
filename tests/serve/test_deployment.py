"""Behind the service: the time limit during an adaptation, certificates of other policies, and memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import Mismatch, Refused
from casewise.core.records import Action, Case, Policy
from casewise.deployment import Deployment
from casewise.judge.certificates.certificate import Certificate, policy_digest

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=3, min_area=4)
DEEP = Policy("fixed-k", "fixed-k", {"step": 3}, 3)


def certificate(policy: Policy, **changes: Any) -> Certificate:
    plain: dict[str, Any] = {
        "kind": "T1", "statement": "on average at most 10 % of an edit is harmful", "loss": "ha", "method": "crc",
        "alpha": 0.1, "delta": None, "population": "cases", "units": 50, "cases": 50, "floor": 0.02, "needed": 9,
        "cut": 0.3, "bound": 0.09, "kept": 0.5, "deployed": {}, "policy": policy_digest(policy),
    }  # fmt: skip
    return Certificate(**{**plain, **changes})


def test_a_deadline_in_the_middle_gives_m0_and_the_network_back(volumes_model: Model, scans: Any) -> None:
    deployment = Deployment(volumes_model, DEEP, {"": HOW})
    deployment.predict(Case("warm", scans[0]))  # lazy imports are done before the clock starts
    network = deployment.backbone.network
    before, deadline, calls = fingerprint(network), time.monotonic() + 2, []

    def sleepy(module: nn.Module, inputs: Any) -> None:
        calls.append(module)
        if len(calls) == 3:  # in the middle of adapting
            time.sleep(max(0.0, deadline - time.monotonic()) + 0.05)

    hook = network.register_forward_pre_hook(sleepy)
    answer = deployment.predict(Case("slow", scans[0]), deadline=deadline)
    hook.remove()
    assert len(calls) == 3, "M0 and one step in time, and the one that slept; M0 is not predicted again"
    assert answer.executed == 3
    assert (answer.status, answer.decision.action) == ("fallback", Action.ROLLBACK)
    assert "time limit" in answer.decision.reason
    plain = Deployment(volumes_model).predict(Case("slow", scans[0]))
    np.testing.assert_array_equal(answer.mask, plain.mask)
    assert fingerprint(network) == before


def test_a_certificate_is_shown_and_must_be_this_policys_and_feasible(volumes_model: Model) -> None:
    shown = Deployment(volumes_model, DEEP, {"": HOW}, certificate(DEEP)).promise
    assert shown is not None
    assert (shown["kind"], shown["alpha"], shown["void"]) == ("T1", 0.1, False)
    with pytest.raises(Mismatch, match="the certificate is for policy"):
        Deployment(volumes_model, DEEP, {"": HOW}, certificate(replace(DEEP, steps=4))).check()
    with pytest.raises(Refused, match="nothing is certified"):
        Deployment(volumes_model, DEEP, {"": HOW}, certificate(DEEP, cut=None)).check()


def test_an_image_that_needs_more_memory_than_allowed_is_refused_before_a_forward(
    volumes_model: Model, scans: Any
) -> None:
    with pytest.raises(Refused, match=r"max-ram allows 0\.0 GiB"):
        Deployment(volumes_model, DEEP, {"": HOW}, max_ram=1000).predict(Case("large", scans[0]))


def test_an_image_that_the_network_cannot_take_is_refused_and_not_an_error_of_ours(volumes_model: Model) -> None:
    tiny = np.arange(9, dtype=np.float32).reshape(1, 3, 3)
    with pytest.raises(Refused, match=r"cannot segment an image of shape \(1, 3, 3\)"):
        Deployment(volumes_model, DEEP, {"": HOW}).predict(Case("tiny", tiny))

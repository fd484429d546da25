"""The same object decides live and in replay: field by field, on a real network, with no superfluous step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import casewise
from casewise.adapt.objectives import OBJECTIVES
from casewise.adapt.proposers.live import prepare, run_episode
from casewise.archive.store import create_archive
from casewise.core.records import Binding, Case, State
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.flag import Flag, Quality
from casewise.judge.controllers.router import Bucket, ByGroup, Router
from casewise.judge.decide import Judge, deployed_mask
from casewise.measure.signals.risk import RiskStatistics
from casewise.replay import replay

STEPS, MIN_AREA, RATE = 4, 4, 0.1
SHRUNK = tuple(State(step, 0.5) for step in (1, 2, 3))


def a_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Conv2d(8, 3, 1),
    ).eval()


def the_cases():
    rng = np.random.default_rng(3)
    return [
        Case(f"case-{n}", rng.normal(0, 1 + n, (1, 16, 16)).astype(np.float32), group="AB"[n % 2]) for n in range(5)
    ]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Cases, network, and an archive of complete ladders."""
    network, cases = a_network(), the_cases()
    binding = Binding("tiny", "tent", "array", "measure")
    archive = create_archive(
        tmp_path_factory.mktemp("live") / "a", binding=binding, steps=STEPS, configuration={"min_area": MIN_AREA}
    )
    for case in cases:
        trajectory = run_episode(
            network,
            prepare(case, network).inputs,
            OBJECTIVES.build("tent"),
            steps=STEPS,
            learning_rate=RATE,
            case_id=case.id,
            min_area=MIN_AREA,
            signals=("drop",),
            shrink=SHRUNK,
        )
        archive.add(case, trajectory)
    return cases, network, archive


def median(archive, name):
    signals = archive.signals()
    return float(signals.loc[(signals["step"] == 1) & (signals["shrink"] == 0), name].median())


def every_controller(archive):
    delta, regions = median(archive, "delta"), median(archive, "regions")
    router = {"coordinate": "delta", "cut_low": 0.8 * delta, "cut_high": 1.2 * delta}
    statistics = RiskStatistics(regions, 1.0, delta, delta)
    mid = Bucket("depth", 2, shrink=0.5)
    narrow = Router(**{**router, "cut_high": delta}, low=Bucket("depth", 3), mid=mid)
    wide = Router(**router, low=Bucket("depth", 3), mid=mid)
    signals = archive.signals()
    flag = Flag(Quality(1.0, 2.0, 0.9), below=0.7, steps=STEPS)
    return {
        "m0": CONTROLLERS.build("m0"),
        "fixed-0": CONTROLLERS.build("fixed-k", step=0),
        "fixed-3": CONTROLLERS.build("fixed-k", step=3),
        "frag-stop": CONTROLLERS.build("frag-stop", cap=4),
        "entropy-stop": CONTROLLERS.build("entropy-stop", cap=4),
        "msp-stop": CONTROLLERS.build("msp-stop", cap=4),
        "gradient-stop": CONTROLLERS.build("gradient-stop", cap=4),
        "tau-stop": CONTROLLERS.build("tau-stop", mean=regions, sigma=1.0, tau=0.5, cap=4),
        "cardiac": wide,
        "prostate": Router("regions", regions - 1, regions + 1, Bucket("depth", 1), Bucket("depth", 1)),
        "driving": Router(**router, low=Bucket("stop", 4), mid=Bucket("stop", 2)),
        "risk": Router("risk", -0.2, 0.2, Bucket("depth", 3), mid, statistics=statistics),
        "msp": Router("-msp", -1.0, -median(archive, "msp"), Bucket("depth", 3), mid),
        "stop-router": CONTROLLERS.build("stop-router", **router, low_cap=4, mid_cap=3),
        "stop-router-shrunk": CONTROLLERS.build("stop-router", **router, low_cap=4, mid_cap=3, mid_shrink=0.5),
        "region-gate": CONTROLLERS.build("region-gate", threshold=0.0, min_area=MIN_AREA),
        "region-gate-median": CONTROLLERS.build(
            "region-gate", threshold=float(signals["drop.0"].median()), min_area=MIN_AREA, keep_small=True
        ),
        "by-group": ByGroup({"A": narrow, "B": wide}),
        "flagged": Judge(wide, flag=flag),
        "flagged-by-group": Judge(ByGroup({"A": narrow, "B": wide}), flag=flag),
        "flagged-m0": Judge(CONTROLLERS.build("m0"), flag=flag),
        "cleaned": Judge(CONTROLLERS.build("fixed-k", step=3), cleanup="largest(1,2)"),
    }


NAMES = [
    *("m0", "fixed-0", "fixed-3", "frag-stop", "entropy-stop", "msp-stop", "gradient-stop", "tau-stop"),
    *("cardiac", "prostate", "driving", "risk", "msp", "stop-router", "stop-router-shrunk"),
    *(
        "region-gate",
        "region-gate-median",
        "by-group",
        "flagged",
        "flagged-by-group",
        "flagged-m0",
        "cleaned",
    ),
]


SEEN = []  # not in the network, so that giving the network back does not take it back


class Counting(nn.Module):
    """Counts the updates: how often an optimizer stepped, seen as distinct parameter values at a forward."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, image):
        values = torch.cat([p.detach().reshape(-1) for p in self.network.parameters()])
        if not any(torch.equal(values, old) for old in SEEN):
            SEEN.append(values)
        return self.network(image)


@pytest.mark.parametrize("name", NAMES)
def test_live_and_replayed_decisions_are_equal_field_by_field(recorded, name):
    cases, network, archive = recorded
    controller = every_controller(archive)[name]
    replayed = {decision.case_id: decision for decision in replay(archive, controller)}
    for case in cases:
        SEEN.clear()
        live = casewise.guard(
            case, Counting(network), controller, "tent", steps=STEPS, learning_rate=RATE, min_area=MIN_AREA
        )
        assert live.decision == replayed[case.id]
        assert np.array_equal(
            live.mask, deployed_mask(archive, getattr(controller, "controller", controller), live.decision)
        )
        assert live.trajectory.steps == live.decision.executed
        shrunk = bool(live.decision.state.shrink)
        assert len(SEEN) == 1 + live.decision.executed + shrunk


def test_these_ladders_exercise_every_kind_of_action(recorded):
    _, _, archive = recorded
    decisions = [one for controller in every_controller(archive).values() for one in replay(archive, controller)]
    assert {one.action.value for one in decisions} == {"rollback", "keep", "shrink", "gate"}
    assert {one.executed for one in decisions} == {0, 1, 2, 3, 4}
    assert {one.bucket for one in decisions} == {None, "low", "mid", "hard", "unscored"}


def test_every_controller_is_listed(recorded):
    _, _, archive = recorded
    assert list(every_controller(archive)) == NAMES

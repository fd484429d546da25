"""Contract of every controller: frozen data, deterministic, no label, no superfluous step."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from worlds.cohorts import synthetic_archive

import casewise
from casewise.core.records import Action, Controller, Decision, Observation
from casewise.judge import controllers
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.router import Bucket
from casewise.judge.decide import candidate_masks

OPTIONS = {  # those without a default
    "fixed-k": {"step": 2},
    "settled": {"cap": 3},
    "frag-stop": {"cap": 4},
    "entropy-stop": {"cap": 4},
    "msp-stop": {"cap": 4},
    "gradient-stop": {"cap": 4},
    "tau-stop": {"mean": 2.0, "sigma": 1.0, "tau": 0.5, "cap": 4},
    "router": {
        "coordinate": "delta",
        "cut_low": 0.016,
        "cut_high": 0.025,
        "low": Bucket("stop", 3),
        "mid": Bucket("depth", 2, shrink=0.5),
    },
    "stop-router": {"coordinate": "delta", "cut_low": 0.016, "cut_high": 0.025, "low_cap": 4, "mid_cap": 2},
    "region-gate": {"threshold": 0.0},
    "consensus": {"steps": 4, "consensus": "4"},
    "consensus-where-low": {"steps": 4, "consensus": "4", "threshold": 0.9},
    "highest-agreement": {"steps": 4, "consensus": "4"},
    "fixed-candidate": {"steps": 4, "consensus": "4", "candidate": "2"},
    "medoid": {"steps": 4, "consensus": "4"},
    "choose": {"steps": 4, "consensus": "4", "weights": [1.0, 0.1, 0.1], "own": [["3", 0.01]]},
    "merge": {
        "steps": 4,
        "consensus": "4",
        "weights": [0, 1, 0, 0, 0, 0],
        "center": [0.5, 0, 0, 0, 0],
        "scale": [1] * 5,
    },
}


def built(name):
    return CONTROLLERS.build(name, **OPTIONS.get(name, {}))


@pytest.fixture(params=sorted(CONTROLLERS))
def controller(request):
    return built(request.param)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("a") / "a", cases=16)


def test_a_controller_has_its_registered_name(controller):
    assert isinstance(controller, Controller)
    assert controller.name in CONTROLLERS


def test_a_controller_is_frozen_equal_to_its_copy_and_hashable(controller):
    twin = built(controller.name)
    assert controller == twin
    assert hash(controller) == hash(twin)
    with pytest.raises(FrozenInstanceError):
        controller.step = controller.cap = controller.threshold = controller.cut_low = controller.tau = 3


def test_a_controller_decides_the_same_twice_and_in_any_order(controller, archive):
    first = casewise.replay(archive, controller)
    assert casewise.replay(archive, controller) == first
    alone = [casewise.replay(archive.select(ids=[one.case_id]), controller)[0] for one in reversed(first)]
    assert alone == list(reversed(first))


def test_a_controller_reads_only_the_signals_in_its_needs(controller, archive):
    for case_id in archive.ids:
        shown = archive.observation(case_id, archive.steps)
        if hasattr(controller, "compared"):
            shown = controller.compared(shown, candidate_masks(archive, case_id))
        rows = [
            {name: value for name, value in signals.items() if name.split(".")[0] in controller.needs}
            for signals in shown.signals
        ]
        found = next(
            verdict
            for step in range(archive.steps + 1)
            if (verdict := controller.decide(Observation(case_id, None, rows[: step + 1]))) is not None
        )
        assert found.state == casewise.replay(archive.select(ids=[case_id]), controller)[0].state


def test_a_decision_does_not_depend_on_later_steps(controller, archive):
    for decision in casewise.replay(archive, controller):
        before = [controller.decide(archive.observation(decision.case_id, step)) for step in range(decision.executed)]
        assert before == [None] * decision.executed


def test_a_decision_goes_to_json_and_back(controller, archive):
    for decision in casewise.replay(archive, controller):
        assert Decision.from_dict(decision.as_dict()) == decision
        assert decision.deployed <= decision.executed
        assert decision.rolled_back == (decision.action is Action.ROLLBACK)
        assert len(decision.state_hash) == 64
        assert decision.reason


def test_no_controller_can_import_a_label():
    for file in Path(controllers.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = getattr(node, "module", None) or ""
            names = [alias.name for alias in getattr(node, "names", [])]
            for name in [module, *names, *(f"{module}.{one}" for one in names)]:
                assert not name.startswith(("casewise.measure.metrics", "casewise.judge.outcomes", "casewise.data"))

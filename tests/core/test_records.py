"""Records are checked when built and survive the way to JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from casewise.core.errors import BadInput, UnknownName
from casewise.core.records import Action, Binding, Case, Decision, Observation, State, Trajectory, Verdict
from casewise.core.registry import Registry
from casewise.core.seeds import seed_of


@pytest.mark.parametrize("bad", ["", "../x", ".hidden", "a/b", "a b", "-rf", "x" * 129, "<script>"])
def test_an_id_that_could_leave_its_folder_is_refused(bad: str) -> None:
    with pytest.raises(BadInput, match="a case id must have"):
        Case(bad, np.zeros((1, 2, 2)))


def test_a_case_has_no_place_for_a_label() -> None:
    assert "label" not in Case.__dataclass_fields__


@pytest.mark.parametrize(("step", "shrink"), [(-1, 0.0), (1, 1.0), (1, -0.1), (0, 0.5)])
def test_a_state_off_the_ladder_is_refused(step: int, shrink: float) -> None:
    with pytest.raises(BadInput):
        State(step, shrink)


def test_a_trajectory_needs_signals_for_each_mask() -> None:
    with pytest.raises(BadInput, match="2 masks and 1 sets"):
        Trajectory("a", (np.zeros((2, 2)), np.zeros((2, 2))), ({},))


def test_masks_of_one_case_share_a_shape() -> None:
    with pytest.raises(BadInput, match="share one shape"):
        Trajectory("a", (np.zeros((2, 2)), np.zeros((2, 3))), ({}, {}))


def test_a_state_that_was_not_recorded_is_named() -> None:
    ladder = Trajectory("a", (np.zeros((2, 2)),), ({},))
    with pytest.raises(BadInput, match="steps 0 to 0, got step 3"):
        ladder.mask(State(3))
    with pytest.raises(BadInput, match=r"2~0\.5 of case a was not recorded"):
        ladder.mask(State(2, 0.5))


def test_rolling_back_executes_one_step_and_deploys_none() -> None:
    seen = Observation("a", "B", ({}, {"delta": 0.1}))
    verdict = Verdict(State(0), Action.ROLLBACK, "hard", "delta", 0.1, 0.01, 0.02)
    decision = Decision.of(seen, verdict, "router")
    assert (decision.executed, decision.deployed, decision.rolled_back) == (1, 0, True)  # A12


def test_a_decision_survives_json() -> None:
    decision = Decision("a", Action.SHRINK, State(2, 0.5), 2, "router", value=0.25, accepted=(1, 2))
    assert Decision.from_dict(json.loads(json.dumps(decision.as_dict()))) == decision


def test_a_binding_names_what_differs() -> None:
    one = Binding("m", "o", "l", "16")
    assert one.differences(Binding("m", "o2", "l", "8")) == ["objective", "measure"]


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'tent'\? Known: tent, eata"):
        Registry("objective", {"tent": 1, "eata": 2})["tnt"]


def test_seeds_depend_on_run_case_and_step() -> None:
    seeds = {seed_of(run, case, step) for run in (0, 1) for case in ("a", "b") for step in (1, 2)}
    assert len(seeds) == 8
    assert seed_of(0, "a", 1) == seed_of("0", "a", 1) >= 0

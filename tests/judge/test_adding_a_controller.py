"""A controller is one file and one line: calibration, replay, the policy's file and the report take it from there."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from worlds.studies import sources

from casewise.core.errors import UnknownName
from casewise.core.records import Action, Observation, State, Verdict
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.metadata import Metadata, metadata_of, value_at
from casewise.judge.policy import controller_of, read_policy, write_policy
from casewise.report.study_report import build

__all__ = ["sources"]


@dataclass(frozen=True)
class ShrinkingEdit:
    """Run until the edit no longer grows, and deploy the step before."""

    cap: int

    name = "shrinking-edit"
    metadata = Metadata("shrinking edit", is_compared=True)
    needs = frozenset({"delta"})
    states = frozenset[State]()

    def decide(self, seen: Observation) -> Verdict | None:
        """The step before the share of changed voxels first falls."""
        for step in range(2, min(seen.step, self.cap) + 1):
            if value_at(seen, step, "delta") < value_at(seen, step - 1, "delta"):
                return Verdict(State(step - 1), Action.KEEP, reason=f"delta fell at step {step}")
        return Verdict(State(self.cap), Action.KEEP, reason="delta never fell") if seen.step >= self.cap else None


@pytest.fixture
def registered(monkeypatch):
    """Add the line to the registry."""
    monkeypatch.setitem(CONTROLLERS, ShrinkingEdit.name, ShrinkingEdit)


def test_a_new_controller_is_calibrated_by_name_and_its_policy_goes_through_a_file(registered, sources, tmp_path):
    policy = calibrate(sources.calibration, "shrinking-edit")
    assert controller_of(policy) == ShrinkingEdit(cap=4)
    assert read_policy(write_policy(tmp_path / "policy.json", policy)) == policy


def test_every_study_compares_it_under_its_title(registered, sources, tmp_path):
    page = build(
        sources.evaluation, sources.calibration, sources.policy, tmp_path / "report", only=["deployment"], pictures=0,
        resamples=100, progress=False,
    )  # fmt: skip
    found = json.loads((page.parent / "results.json").read_text())["findings"]
    assert "shrinking-edit" in [row["method"] for row in found["deployment.methods"]["rows"]]
    assert "shrinking-edit" in [row["reference"] for row in found["deployment.intervals"]["rows"]]
    assert "shrinking edit" in (page.parent / "tables" / "methods.csv").read_text()


def test_a_study_of_its_own_policy_needs_no_list_of_names(registered, sources, tmp_path):
    policy = calibrate(sources.calibration, "shrinking-edit")
    page = build(
        sources.evaluation, sources.calibration, policy, tmp_path / "report", only=["deployment", "routing"],
        pictures=0, resamples=100, progress=False,
    )  # fmt: skip
    results = json.loads((page.parent / "results.json").read_text())
    assert "Policy shrinking edit kept the original mask (M0) in 0 of 26 cases" in results["summary"]["second"]
    assert "shrinking-edit, not a router" in results["not_run"]["routing tables"]


def test_a_controller_that_is_not_registered_has_no_name(sources):
    with pytest.raises(UnknownName, match="no policy is called 'shrinking-edit'"):
        calibrate(sources.calibration, "shrinking-edit")


def test_a_controller_that_says_nothing_is_known_by_its_name():
    class Mine:
        name = "mine"

    assert metadata_of(Mine()) == Metadata("mine")
    assert not metadata_of(Mine()).is_compared


def test_every_registered_controller_has_a_title_of_its_own():
    listed = [
        metadata_of(kind) for name, kind in CONTROLLERS.items() if hasattr(getattr(kind, "func", kind), "metadata")
    ]
    assert len({one.title for one in listed}) == len(listed) >= 10

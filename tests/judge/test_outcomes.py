"""The table in which signals and labels meet, and what a decision cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds.cohorts import SYNTHETIC, synthetic_archive

from casewise.archive.store import create_archive, open_archive
from casewise.core.errors import BadInput
from casewise.core.records import Action, Case, Decision, State, Trajectory
from casewise.judge.controllers.region_gate import RegionGate
from casewise.judge.decide import replay_case
from casewise.judge.outcomes import deployed, outcomes
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.overlap import dice


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return synthetic_archive(tmp_path_factory.mktemp("archive") / "a", cases=6)


def kept(step, case_id="case-0000", shrink=0.0):
    action = Action.ROLLBACK if not step else Action.SHRINK if shrink else Action.KEEP
    return Decision(case_id, action, State(step, shrink), max(step, 1), "test")


def test_every_state_has_a_row_that_agrees_with_the_measures(archive):
    frame = outcomes(archive)
    assert len(frame) == 6 * 6
    row = frame.set_index(["case", "step", "shrink"]).loc[("case-0001", 3, 0.0)]
    masks, label = archive.masks("case-0001"), archive.label("case-0001")
    judged = harm(masks[State(0)], masks[State(3)], label)
    assert (row["ha"], row["ba"], row["regions"], row["area"]) == (judged.ha, judged.ba, judged.regions, judged.area)
    assert row["metric"] == dice(masks[State(3)], label)
    assert row["entropy"] == archive.signals_of("case-0001")[State(3)]["entropy"]


def test_the_source_harms_nothing(archive):
    frame = outcomes(archive)
    source = frame.loc[frame["step"] == 0]
    assert (source[["ha", "ba", "neutral_scored", "unscored", "regions", "delta", "area"]] == 0).all().all()


def test_another_min_area_gives_other_regions_and_never_more_harm(archive):
    small, large = (
        outcomes(
            replace(
                archive, manifest={**archive.manifest, "configuration": {**archive.configuration, "min_area": area}}
            )
        )
        for area in (1, 64)
    )
    assert (large["ha"] <= small["ha"]).all()
    assert (large["regions"] <= small["regions"]).all()
    assert (large["regions"] < small["regions"]).any()


def test_a_second_reading_is_the_same_and_comes_from_the_cache(tmp_path):
    archive = synthetic_archive(tmp_path, cases=2)
    first = outcomes(archive)
    for name in archive.ids:
        (tmp_path / "cases" / name / "masks.npz").unlink()
    assert outcomes(open_archive(tmp_path)).equals(first)


def test_a_case_that_is_added_makes_the_cached_table_stale(tmp_path):
    archive = synthetic_archive(tmp_path, cases=2)
    assert outcomes(archive)["case"].nunique() == 2
    assert outcomes(synthetic_archive(tmp_path, cases=3))["case"].nunique() == 3


def test_without_labels_metrics_are_nan_and_signals_stay(tmp_path):
    frame = outcomes(synthetic_archive(tmp_path, cases=2, labelled=False))
    assert frame[["metric", "ha", "ba"]].isna().all().all()
    assert frame[["regions", "delta", "area", "entropy"]].notna().all().all()


def test_a_rollback_costs_and_brings_nothing(archive):
    row = deployed(outcomes(archive), [kept(0)]).iloc[0]
    assert (row["ha"], row["ba"], row["change"], row["deployed"], row["executed"]) == (0, 0, 0, 0, 1)
    assert row["rolled_back"]
    assert row["metric"] == row["metric_source"]


def test_a_shrunk_state_is_scored_as_itself_and_counts_the_step_it_came_from(archive):
    frame = outcomes(archive)
    row = deployed(frame, [kept(2, shrink=0.5)]).iloc[0]
    expected = frame.set_index(["case", "step", "shrink"]).loc[("case-0000", 2, 0.5), "metric"]
    assert (row["metric"], row["deployed"]) == (expected, 2)


def test_a_state_that_no_outcome_knows_is_named(archive):
    with pytest.raises(BadInput, match="deployed state of case case-0000 is not among the outcomes"):
        deployed(outcomes(archive), [kept(3, shrink=0.25)])


def test_a_gated_mask_is_measured_itself(archive):
    gate = RegionGate(0.0)
    decisions = [replay_case(archive, gate, case_id) for case_id in archive.ids]
    frame = outcomes(archive)
    with pytest.raises(BadInput, match="archive="):
        deployed(frame, decisions)
    with pytest.raises(BadInput, match="region-gate makes masks that were not recorded"):
        deployed(frame, decisions, archive=archive)
    rows = deployed(frame, decisions, archive=archive, controller=gate).set_index("case")
    one = next(decision for decision in decisions if decision.action is Action.GATE)
    masks, label = archive.masks(one.case_id), archive.label(one.case_id)
    output = gate.output(masks.__getitem__, one)
    assert rows.loc[one.case_id, "ha"] == harm(masks[State(0)], output, label).ha
    assert rows.loc[one.case_id, "metric"] == dice(output, label)


def test_mean_iou_is_used_where_the_archive_says_so(tmp_path):
    masks = (np.array([[0, 1], [1, 2]]), np.array([[0, 1], [2, 2]]))
    label = np.array([[0, 1], [2, 255]])
    configuration = {"metric": "miou", "foreground": False, "ignore": 255, "min_area": 1}
    archive = create_archive(tmp_path, binding=SYNTHETIC, steps=1, configuration=configuration)
    archive.add(Case("one", np.empty((1, 0))), Trajectory("one", masks, ({}, {})), label)
    frame = outcomes(archive).set_index("step")
    assert frame.loc[1, "metric"] == 1.0
    assert frame.loc[0, "metric"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert frame.loc[1, "ba"] == 1.0


def test_voxels_that_a_label_ignores_are_no_class_of_its_dice(tmp_path):
    masks = (np.array([[0, 1], [1, 1]]), np.array([[0, 1], [0, 1]]))
    label = np.array([[0, 1], [0, 255]])
    configuration = {"metric": "dice", "ignore": 255, "min_area": 1}
    archive = create_archive(tmp_path, binding=SYNTHETIC, steps=1, configuration=configuration)
    archive.add(Case("one", np.empty((1, 0))), Trajectory("one", masks, ({}, {})), label)
    frame = outcomes(archive).set_index("step")
    assert frame.loc[0, "metric"] == pytest.approx(2 / 3)
    assert frame.loc[1, "metric"] == 1.0

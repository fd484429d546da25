"""The design that casewise ships: its coordinate, its fallback, and its guard."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from worlds.cohorts import SYNTHETIC, synthetic_archive

import casewise
from casewise.archive.store import create_archive
from casewise.core.records import Action, Case, Trajectory
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.preflight import hurt_p, in_words
from casewise.judge.policy import READY, read_policy, write_policy


def hurting(path, *, largest, cases=8, worse=True):
    """Every case gains a line of false voxels (or loses one), a longer line in every next case."""
    archive = create_archive(path, binding=SYNTHETIC, steps=2, configuration={})
    label = np.zeros((20, 20), np.uint8)
    label[4:16, 4:16] = 1
    wrong = label.copy()
    wrong[0, :] = 1
    for number in range(cases):
        edited = label.copy()
        edited[0, : number + 1] = 1
        masks = (label, edited, edited) if worse else (wrong, edited, edited)
        signals = tuple({"delta": (number + 1) * step / 400, "largest": float(largest(number))} for step in (0, 1, 2))
        archive.add(Case(f"c{number}", np.empty((1, 0))), Trajectory(f"c{number}", masks, signals), label)
    return archive


def test_the_default_routes_on_the_largest_changed_piece(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=12, harmful=0.0)
    policy = calibrate(archive)
    assert policy.options["coordinate"] == "largest"
    assert {"fallback", "guard"}.isdisjoint(policy.options)
    assert [policy.options[name] for name in ("low", "mid", "hard")] == [
        READY["default"].options[name] for name in ("low", "mid", "hard")
    ]
    assert {line["design"] for line in policy.exposures} == {"default"}


def test_evident_harm_closes_the_guard_and_every_case_rolls_back(tmp_path):
    """M3: eight of eight retained cases are hurt, p = 2^-5 of the five that would be kept."""
    archive = hurting(tmp_path / "a", largest=lambda number: number)
    policy = calibrate(archive)
    kept = policy.preflight["retained"]
    assert (kept["helped"], kept["hurt_p"]) == (0, 0.5 ** kept["hurt"])
    assert policy.preflight["concerns"][0].startswith("GUARD: of the retained cases 0 were helped")
    again = read_policy(write_policy(tmp_path / "policy.json", policy))
    assert {decision.action for decision in casewise.replay(archive, again)} == {Action.ROLLBACK}
    assert any("-inf" in line for line in in_words(policy))


def test_the_guard_stays_open_where_cases_are_helped(tmp_path):
    archive = hurting(tmp_path / "a", largest=lambda number: number, worse=False)
    policy = calibrate(archive)
    assert "guard" not in policy.preflight
    assert any(decision.action is not Action.ROLLBACK for decision in casewise.replay(archive, policy))


def test_designs_of_the_paper_have_no_guard(tmp_path):
    policy = calibrate(hurting(tmp_path / "a", largest=lambda number: number), "prostate", coordinate="delta")
    assert policy.preflight["concerns"][0].startswith("NO-GO")
    assert np.isfinite(policy.options["cut_high"])


def test_where_thirds_are_no_thirds_the_fallback_is_routed_on(tmp_path):
    """One size for all but one case."""
    archive = hurting(tmp_path / "a", largest=lambda number: 1 + (number == 7), worse=False)
    policy = calibrate(archive)
    assert policy.options["coordinate"] == "delta"
    assert any("largest are uneven here; the router uses delta" in line for line in policy.preflight["concerns"])


def test_where_nothing_changes_every_case_keeps_m0_and_the_policy_says_so(tmp_path):
    """Neither the coordinate nor its fallback has any spread."""
    archive = create_archive(tmp_path / "a", binding=SYNTHETIC, steps=2, configuration={})
    mask = np.eye(8, dtype=np.uint8)
    for number in range(8):
        signals = ({"delta": 0.0, "largest": 0.0},) * 3
        archive.add(Case(f"c{number}", np.empty((1, 0))), Trajectory(f"c{number}", (mask,) * 3, signals), mask)
    policy = calibrate(archive)
    assert (policy.name, policy.controller) == ("default", "m0")
    again = read_policy(write_policy(tmp_path / "policy.json", policy))
    assert {decision.state.step for decision in casewise.replay(archive, again)} == {0}
    said = "\n".join(in_words(policy))
    assert "every case keeps M0: delta is 0 on all 8 calibration cases" in said
    assert "no labels" not in said
    assert "unknown" not in said
    with pytest.raises(casewise.core.errors.DegenerateStatistic, match="delta is 0"):
        calibrate(archive, coordinate="delta")


def test_a_coordinate_that_the_user_names_has_no_fallback(tmp_path):
    archive = hurting(tmp_path / "a", largest=lambda number: 1 + (number == 7), worse=False)
    with pytest.raises(casewise.core.errors.DegenerateStatistic, match="largest"):
        calibrate(archive, coordinate="largest")


@pytest.mark.parametrize("seed", range(5))
def test_the_sign_test_is_the_binomial_test_over_clusters(seed):
    rng = np.random.default_rng(seed)
    changes, clusters = rng.normal(-0.2, 1, 40), [f"p{n // 2}" for n in range(40)]
    means = changes.reshape(20, 2).mean(axis=1)
    expected = stats.binomtest(int((means < 0).sum()), 20, 0.5, alternative="greater").pvalue
    assert hurt_p(changes, clusters) == pytest.approx(expected)


def test_unchanged_cases_say_nothing_about_harm():
    assert hurt_p([0.0, 0.0], ["a", "b"]) == 1.0

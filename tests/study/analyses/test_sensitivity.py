"""Cut-points refitted on fewer or resampled calibration cases."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.core.errors import TooFewCases
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.cuts import CONVENTIONS
from casewise.study.analyses import ANALYSES
from casewise.study.analyses.cut_points import calibration_sensitivity, cut_stability, stability_of
from casewise.study.assignment import buckets_at
from casewise.study.study import Study


@pytest.fixture
def values(outcomes):
    return outcomes[outcomes["step"] == 1].set_index("case")["delta"].sort_index()


def test_cut_points_are_non_strict_above_and_strict_below():
    assert buckets_at(np.array([0.0, 1.0, 1.5, 2.0]), 1.0, 2.0).tolist() == [[2, 2, 1, 0]]


def test_equal_cut_points_empty_the_middle_and_roll_back_the_tie():
    assert buckets_at(np.array([0.0, 1.0, 2.0]), 1.0, 1.0).tolist() == [[2, 0, 0]]


def test_the_full_calibration_reproduces_the_deployed_router(values, arms, router, methods):
    found = calibration_sensitivity(values, values, arms, reference=methods["fixed-3"], sizes=(5,), draws=20)
    first = found.table.iloc[0]
    assert first["cases"] == 60
    assert first["ha"] == pytest.approx(router["ha"].mean())
    assert first["metric"] == pytest.approx(router["metric"].mean())


def test_a_subsample_of_everything_is_the_full_calibration(values, arms, methods):
    found = calibration_sensitivity(values, values, arms, reference=methods["fixed-3"], sizes=(60,), draws=5).table
    assert found["ha"].iloc[1] == pytest.approx(found["ha"].iloc[0])
    assert found["ha_low"].iloc[1] == pytest.approx(found["ha_high"].iloc[1])


def test_fewer_cases_spread_more_and_the_worst_draw_is_the_largest(values, arms, methods):
    found = calibration_sensitivity(values, values, arms, reference=methods["fixed-3"], sizes=(5, 30), draws=200).table
    spread = found["ha_high"] - found["ha_low"]
    assert spread.iloc[1] > spread.iloc[2] > 0
    assert (found["ha_worst"] >= found["ha_high"]).all()


def test_beating_the_reference_is_strict(values, arms, router):
    found = calibration_sensitivity(values, values, arms, reference=router, sizes=(60,), draws=5).table
    assert found["beats_reference"].tolist() == [0, 0]


def test_a_subsample_larger_than_the_pool_is_refused(values, arms, methods):
    with pytest.raises(TooFewCases, match="subsample of 15 needs at least as many calibration cases, got 10"):
        calibration_sensitivity(values.iloc[:10], values, arms, reference=methods["fixed-3"], sizes=(15,))


def test_the_two_percentile_conventions_are_told_apart():
    pool = np.arange(100.0)
    medical, driving = (
        cut_stability(pool, pool, percentiles=p, resamples=10).table["estimate"] for p in CONVENTIONS.values()
    )
    assert medical.tolist() == pytest.approx(np.percentile(pool, [33.33, 66.67]).tolist())
    assert driving.tolist() == pytest.approx(np.percentile(pool, [33, 66]).tolist())


def test_the_papers_twenty_region_counts_have_tertiles_zero_and_one():
    pool = [0] * 10 + [1] * 6 + [2] * 4
    found = cut_stability(pool, pool, resamples=200).table
    assert found["estimate"].tolist() == [0, 1]


def test_a_calibration_without_spread_moves_nobody():
    found = cut_stability([1.0] * 20, [0.5, 1.0, 1.5], resamples=50)
    assert (found.made["changed_median"], found.made["changed_high"]) == (0, 0)


def test_cut_intervals_hold_their_estimates(values):
    found = cut_stability(values.iloc[:20], values, resamples=500)
    assert ((found.table["low"] <= found.table["estimate"]) & (found.table["estimate"] <= found.table["high"])).all()
    assert 0 < found.made["changed_median"] <= found.made["changed_high"] < 1


def test_a_policy_by_group_has_the_stability_of_each_groups_cuts(sources):
    per_group = calibrate(sources.calibration, "cardiac", mode="per-group")
    study = Study.of(sources.evaluation, sources.calibration, per_group, resamples=100)
    found = stability_of(study)
    for group, cuts in per_group.groups.items():
        rows = found.table[found.table["group"] == group].set_index("cut")["estimate"]
        assert rows.to_dict() == pytest.approx({name: cuts[name] for name in ("cut_low", "cut_high")})
    section = ANALYSES["routing"](study)
    assert any(column.key == "group" for one in section.tables if one.id == "cut-stability" for column in one.columns)


def test_patients_are_redrawn_with_all_of_their_cases():
    pool = np.repeat(np.linspace(0, 1, 8), 5)
    plain = cut_stability(pool, pool).row(cut="cut_high")
    by_patient = cut_stability(pool, pool, clusters=np.repeat(range(8), 5).tolist()).row(cut="cut_high")
    assert by_patient["high"] - by_patient["low"] > 1.5 * (plain["high"] - plain["low"])


def test_patients_are_left_out_with_all_of_their_cases(values, arms, methods):
    options = {"reference": methods["fixed-3"], "sizes": (10,), "draws": 200}
    pool = np.repeat(np.linspace(values.min(), values.max(), 20), 5)  # twenty patients with five equal scans
    by_patient = calibration_sensitivity(pool, values, arms, clusters=np.repeat(np.arange(20), 5), **options).table
    assert by_patient["cases"].tolist() == [20, 10]
    plain = calibration_sensitivity(pool, values, arms, **{**options, "sizes": (50,)}).table  # as many cases
    spread = [one["ha_high"].iloc[1] - one["ha_low"].iloc[1] for one in (by_patient, plain)]
    assert spread[0] > spread[1]  # fifty cases of ten patients say less than fifty drawn from all

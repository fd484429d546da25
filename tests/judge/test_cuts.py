"""Cut-points, z-statistics, stability: the numbers that the paper prints, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from casewise.core.errors import DegenerateStatistic, DegenerateTertiles, NotFinite, TooFewCases, UnknownName
from casewise.judge.calibration.cuts import (
    bucket_counts,
    cut_points,
    judged,
    mean_and_sigma,
    stability,
    stability_by_group,
    statistics,
    warn_if_degenerate,
)

CARDIAC = np.array([0.0] * 10 + [1.0] * 6 + [2.0] * 4)


def test_the_papers_cardiac_counts_give_its_tertiles_and_statistics():
    """Q21, Q22."""
    assert cut_points(CARDIAC) == (0.0, 1.0)
    mean, sigma = mean_and_sigma(CARDIAC, "regions")
    assert (round(mean, 2), round(sigma, 3)) == (0.70, 0.781)
    assert bucket_counts(CARDIAC, 0.0, 1.0) == {"low": 10, "mid": 0, "hard": 10}


def test_conventions_are_named_and_differ():
    values = np.arange(100.0) ** 2
    assert cut_points(values, "medical") == tuple(np.percentile(values, [33.33, 66.67]))
    assert cut_points(values, "driving") == tuple(np.percentile(values, [33, 66]))
    assert cut_points(values, "medical") != cut_points(values, "driving")
    with pytest.raises(UnknownName, match="Known: medical, driving"):
        cut_points(values, "guess")


def test_twenty_three_whole_scores_reach_10_7_only_by_the_medical_convention():
    """F1 [INF]: rank 0.6667 * 22 = 14.667 lies two thirds of the way between the 15th and the 16th score."""
    scores = np.array([4.0] * 9 + [10.0] * 6 + [11.0] * 8)
    assert round(cut_points(scores, "medical")[1], 1) == 10.7
    assert round(cut_points(scores, "driving")[1], 1) == 10.5


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0, 3.0, 4.0]])
def test_too_few_cases_are_refused_with_the_number_needed(values):
    with pytest.raises(TooFewCases, match=rf"at least 5 calibration cases, got {len(values)}"):
        cut_points(values)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(NotFinite, match="1 of 5"):
        cut_points([1, 2, 3, 4, np.nan])


def test_a_statistic_without_spread_is_refused():
    with pytest.raises(DegenerateStatistic, match="delta is 0 on all 6"):
        statistics(np.arange(6.0), np.zeros(6))


def test_degenerate_tertiles_warn_and_name_a_coordinate_that_does_not():
    with pytest.warns(DegenerateTertiles, match="leave mid empty on 20 calibration cases; 'delta' does not degenerate"):
        warn_if_degenerate("regions", CARDIAC, 0.0, 1.0, "delta")


def test_cut_points_that_would_roll_everything_back_are_refused():
    mostly_zero = np.array([0.0] * 15 + [1.0] * 5)
    with pytest.raises(DegenerateStatistic, match="all 20 calibration cases would roll back"):
        warn_if_degenerate("regions", mostly_zero, *cut_points(mostly_zero), None)
    with pytest.raises(DegenerateStatistic, match="is 1 on all 5"):
        warn_if_degenerate("regions", np.ones(5), 1.0, 1.0, None)


def test_the_coordinate_rule_rejects_the_papers_cardiac_counts_and_takes_distinct_values():
    """S11: n_reg is unfit on its twenty cardiac cases, twenty distinct values are fit."""
    unfit = judged(CARDIAC, "medical")
    assert unfit["unfit"] == ["mid holds 0 of 20", "3 distinct values of 20"]
    assert judged(np.linspace(0.0001, 0.0005, 20), "medical")["unfit"] == []


def test_stability_gives_intervals_around_the_cuts_and_records_its_stream():
    values = np.linspace(0, 1, 30)
    found = stability(values, resamples=500)
    low, high = cut_points(values)
    assert found["cut_low"][0] < low < found["cut_low"][1]
    assert found["cut_high"][0] < high < found["cut_high"][1]
    assert 0 < found["changed_median"] < found["changed_upper"] < 1
    first = np.random.default_rng(1000).integers(0, 30, size=(500, 30))
    assert found["stream"] == {"first_row": first[0, :5].tolist(), "sum": int(first.sum())}


def test_wide_gaps_between_buckets_leave_nothing_to_change():
    values = np.repeat([0.0, 10.0, 20.0], 20) + np.tile(np.linspace(0, 1e-6, 20), 3)
    assert stability(values, resamples=200)["changed_median"] < 0.2


def test_patients_are_drawn_with_all_of_their_cases():
    values = np.repeat(np.linspace(0, 1, 10), 6)  # ten patients with six equal scans
    by_case, by_patient = stability(values), stability(values, clusters=[f"p{n}" for n in np.repeat(range(10), 6)])
    width = {name: found["cut_high"][1] - found["cut_high"][0] for name, found in (("c", by_case), ("p", by_patient))}
    assert width["p"] > 1.5 * width["c"]  # sixty cases with the information of ten
    assert by_patient["patients"] == 10
    ragged = stability(values[:-1], clusters=[f"p{n}" for n in np.repeat(range(10), 6)][:-1])  # one has fewer scans
    assert ragged["cut_high"] == pytest.approx(by_patient["cut_high"], abs=0.02)
    alone = stability(np.linspace(0, 1, 10))  # the same patients with one scan each
    assert by_patient["cut_high"] == pytest.approx(alone["cut_high"], abs=0.12)


def test_each_group_has_the_stability_of_its_own_cut_points():
    steady, wild = np.repeat([0.0, 10.0, 20.0], 10), np.linspace(100, 900, 30)
    frame = pd.DataFrame({"group": ["a"] * 30 + ["b"] * 30, "cluster": [f"p{n}" for n in range(60)]})
    values = np.concatenate([steady, wild])
    found = stability_by_group(frame, values, "medical")
    assert found["groups"]["b"] == stability(wild, clusters=frame["cluster"][30:].tolist())
    assert found["groups"]["a"]["cut_high"][1] <= 20  # the union's high cut lies far beyond anything in a
    mixed = (found["groups"]["a"]["changed_median"] + found["groups"]["b"]["changed_median"]) / 2
    assert found["changed_median"] == pytest.approx(mixed)

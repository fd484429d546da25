"""The bootstrap's stream, its clusters and its refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from casewise.core.errors import BadInput
from casewise.data.splits import Member, clusters_of, count_patients
from casewise.judge.outcomes import patients_of
from casewise.study.statistics.resample import (
    cluster_numbers,
    draws,
    gain_fields,
    interval_of,
    mean_interval,
    paired_interval,
)


def test_the_index_matrix_is_the_stated_stream_and_says_so():
    found = draws(7, 50, 1000)
    expected = np.random.default_rng(1000).integers(0, 7, size=(50, 7))
    assert (found.index == expected).all()
    assert found.proof["first_row"] == expected[0].tolist()
    assert found.proof["sum"] == int(expected.sum())


def test_counts_say_how_often_a_unit_was_drawn():
    found = draws(5, 40, 3)
    assert (found.counts.sum(axis=1) == 5).all()
    assert found.counts[0].tolist() == np.bincount(found.index[0], minlength=5).tolist()


def test_patients_are_counted_in_tables_as_everywhere_else():
    """A case without a patient is its own; one that is called like a patient is a case of that patient."""
    clusters = ["p1", "p1", None, "c", ""]
    frame = pd.DataFrame({"case": list("abcde"), "cluster": clusters})
    assert cluster_numbers(frame).tolist() == [0, 0, 1, 1, 2]
    members = [Member(case, cluster=cluster) for case, cluster in zip("abcde", clusters, strict=True)]
    assert patients_of(frame) == list(clusters_of(members).values())
    assert count_patients(members) == 3
    assert cluster_numbers(frame[["case"]]).tolist() == [0, 1, 2, 3, 4]


def test_clusters_of_one_case_give_the_very_same_interval_as_cases():
    values = np.random.default_rng(0).normal(size=30)
    assert mean_interval(values, clusters=np.arange(30)) == mean_interval(values)


def test_identical_cases_in_a_cluster_widen_the_interval():
    values = np.random.default_rng(0).normal(size=40)
    plain, twice = (
        mean_interval(np.repeat(values, 4)),
        mean_interval(np.repeat(values, 4), clusters=np.repeat(np.arange(40), 4)),
    )
    assert twice.high - twice.low > 1.7 * (plain.high - plain.low)


def test_p_below_counts_strictly_negative_draws():
    found = mean_interval(np.arange(10.0))
    assert (found.p_below, found.separated, found.holds_zero) == (0.0, True, False)


def test_draws_without_a_value_are_dropped_and_counted():
    found = interval_of(0.5, np.array([np.nan, 0.4, 0.6, np.nan]), n=9, clusters=9)
    assert (found.skipped, found.resamples, found.low >= 0.4) == (2, 4, True)


def test_no_draw_with_a_value_is_undefined_with_a_reason():
    found = interval_of(0.5, np.array([np.nan]), n=9, clusters=9)
    assert np.isnan(found.low)
    assert found.reason == "no bootstrap draw has a value"


def test_no_case_is_undefined_with_n():
    assert (mean_interval([]).n, mean_interval([]).reason) == (0, "no case")


def test_values_of_other_cases_are_refused():
    with pytest.raises(BadInput, match=r"same cases, got \(2,\) and \(3,\); join"):
        paired_interval([1, 2], [1, 2, 3])


def test_undefined_values_are_refused_not_skipped():
    with pytest.raises(BadInput, match="drop undefined cases first"):
        mean_interval([1.0, np.nan])


def test_an_unknown_interval_method_is_refused():
    with pytest.raises(BadInput, match="got 'normal'"):
        mean_interval([1.0, 2.0], method="normal")


def test_few_clusters_get_students_t_and_one_gets_none():
    values, units = np.array([0.1, 0.3, -0.1, 0.2, 0.4, 0.1]), np.array([0, 0, 1, 1, 2, 2])
    found = mean_interval(values, clusters=units)
    means = values.reshape(3, 2).mean(axis=1)
    error = stats.t.ppf(0.975, 2) * means.std(ddof=1) / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((means.mean() - error, means.mean() + error))
    assert found.method == "t"
    alone = mean_interval([0.1, 0.2, 0.3], clusters=np.zeros(3, int))
    assert np.isnan([alone.low, alone.high]).all()
    assert "one patient" in alone.reason
    assert mean_interval(np.random.default_rng(0).normal(size=200)).method == "percentile"


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("method", ["t", "percentile"])
def test_equal_values_are_no_certainty_so_they_have_no_interval(value, method):
    found = mean_interval(np.full(6, value), clusters=np.array([0, 0, 0, 1, 1, 2]), method=method)
    assert found.estimate == pytest.approx(value)
    assert np.isnan([found.low, found.high]).all()
    assert "every value is equal" in found.reason


def test_an_interval_of_shares_ends_where_no_share_can_be():
    two = paired_interval([0.9, 0.1], [0.0, 0.2])
    assert (two.low, two.high) == (-1.0, 1.0)
    assert (gain_fields(np.array([0.9, -0.1]), np.array([0, 1]))["low"]) == -1.0
    assert mean_interval([9.0, -1.0]).low < -10  # a volume has no such end
    assert paired_interval([9.0, -1.0], [0.0, 0.2]).low < -10


@pytest.mark.parametrize("patients", [5, 10, 20])
def test_the_interval_covers_as_often_as_stated_with_few_patients(patients):
    rng, covered = np.random.default_rng(patients), 0
    units = np.repeat(np.arange(patients), 2)
    for _ in range(400):
        values = np.repeat(rng.normal(size=patients), 2) + rng.normal(size=2 * patients)
        found = mean_interval(values, clusters=units, resamples=50)
        covered += found.low <= 0 <= found.high
    assert covered / 400 >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 400)

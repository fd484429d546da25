"""The bootstrap's stream, its clusters and its refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from casewise.core.errors import BadInput
from casewise.study.statistics.resample import clusters_of, draws, interval_of, mean_interval, paired_interval


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


def test_cases_without_a_cluster_are_their_own_and_never_collide_with_a_cluster_name():
    frame = pd.DataFrame({"case": ["a", "b", "c", "d"], "cluster": ["p1", "p1", None, "c"]})
    assert clusters_of(frame).tolist() == [0, 0, 1, 2]


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
    found = mean_interval(np.zeros(10))
    assert (found.p_below, found.separated, found.holds_zero) == (0.0, False, True)


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
    with pytest.raises(BadInput, match=r"same cases, got \(2,\) and \(3,\); join them by case"):
        paired_interval([1, 2], [1, 2, 3])


def test_undefined_values_are_refused_not_skipped():
    with pytest.raises(BadInput, match="drop undefined cases first"):
        mean_interval([1.0, np.nan])


def test_an_unknown_interval_method_is_refused():
    with pytest.raises(BadInput, match="'percentile' or 'bca', got 'normal'"):
        mean_interval([1.0, 2.0], method="normal")

"""Correlations and rankings on cohorts in which the answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from casewise.study.analyses.association import (
    association,
    auroc_table,
    per_step,
    signal_signal,
    signal_summary,
    top_tertile,
)
from casewise.study.statistics.ranks import auroc_interval


def test_a_planted_signal_is_found_and_noise_is_not(outcomes):
    found = association(outcomes, signals=["delta", "msp"], differences=False, resamples=300)
    delta, msp = found.row(signal="delta"), found.row(signal="msp")
    assert delta["low"] > 0.5
    assert msp["low"] < 0 < msp["high"]
    assert (delta["rows"], delta["n"], delta["clusters"]) == (240, 60, 60)


def test_differences_begin_at_the_second_step_unless_told(outcomes):
    plain = association(outcomes, signals=["delta"], resamples=20)
    more = association(outcomes, signals=["delta"], include_first=True, resamples=20)
    assert plain.row(kind="difference")["rows"] == 180
    assert more.row(kind="difference")["rows"] == 240


def test_groups_are_reported_beside_the_pool(outcomes):
    found = association(outcomes, signals=["delta"], by_group=True, differences=False, resamples=20)
    assert found.table["scope"].tolist() == ["all", "site-0", "site-1"]
    assert found.table["n"].tolist() == [60, 30, 30]


def test_a_constant_signal_is_undefined_with_a_reason(outcomes):
    found = association(outcomes.assign(delta=1.0), signals=["delta"], differences=False, resamples=20)
    row = found.row(signal="delta")
    assert np.isnan(row["rho"])
    assert row["reason"] == "the signal is constant"


def test_a_missing_value_costs_its_rows_and_no_others(outcomes):
    frame = outcomes.copy()
    frame.loc[frame["case"] == "c001", "entropy"] = np.nan
    found = association(frame, signals=["delta", "entropy"], differences=False, resamples=20).table.set_index("signal")
    assert (found.loc["delta", "n"], found.loc["entropy", "n"]) == (60, 59)


def test_a_signal_that_points_the_other_way_is_called_out(outcomes):
    found = association(outcomes.assign(delta=-outcomes["delta"]), signals=["delta"], differences=False, resamples=200)
    assert found.row(signal="delta")["against"]
    assert found.notes[0].startswith("delta has a negative correlation with HA in all")


def test_msp_is_expected_to_fall_as_harm_rises(outcomes):
    frame = outcomes.assign(msp=-outcomes["ha"])
    found = association(frame, signals=["msp"], differences=False, resamples=50)
    assert found.row(signal="msp")["rho"] == pytest.approx(-1)
    assert not found.row(signal="msp")["against"]


def test_clusters_widen_an_interval_of_copied_cases(outcomes):
    copies = [outcomes.assign(case=outcomes["case"] + f"-{number}", cluster=outcomes["case"]) for number in range(3)]
    together = pd.concat(copies)
    apart = association(together.assign(cluster=None), signals=["msp"], differences=False, resamples=300).row(
        signal="msp"
    )
    kept = association(together, signals=["msp"], differences=False, resamples=300).row(signal="msp")
    assert kept["clusters"] == 60
    assert kept["high"] - kept["low"] > 1.4 * (apart["high"] - apart["low"])


def test_each_step_has_its_own_correlation(outcomes):
    found = per_step(outcomes, resamples=20).table
    found = found[found["signal"] == "delta"]
    assert found["step"].tolist() == ["1", "2", "3", "4", "pooled"]
    assert found["rows"].tolist() == [60, 60, 60, 60, 240]


def test_a_signal_and_its_double_say_the_same(outcomes):
    found = signal_signal(outcomes.assign(entropy=2 * outcomes["delta"]))
    assert found.number("rho", first="delta", second="entropy") == pytest.approx(1)


def test_the_summary_has_one_row_per_signal_with_its_cost(outcomes):
    found = signal_summary(association(outcomes, signals=["delta", "gradient_norm"], resamples=20))
    assert found.table["signal"].tolist() == ["delta", "gradient_norm"]
    assert found.number("backwards", signal="gradient_norm") == 1


def test_the_top_tertile_of_mostly_zeros_is_everything_above_zero():
    flags, threshold = top_tertile(np.array([0.0] * 8 + [0.1, 0.2]))
    assert (int(flags.sum()), threshold) == (2, 0.0)


@pytest.mark.parametrize(("patients", "has_interval"), [(2, False), (4, False), (5, True)])
def test_a_correlation_of_fewer_than_five_patients_has_no_interval(patients, has_interval):
    """With four the bootstrap gives intervals that end at the estimate, such as 0.736 [0.400, 0.736]."""
    rng, rows = np.random.default_rng(0), 4 * patients
    frame = pd.DataFrame({"case": np.repeat(np.arange(patients), 4), "cluster": None, "step": 1, "shrink": 0.0})
    frame["case"] = frame["case"].map(str)
    frame = frame.assign(ha=rng.random(rows), delta=rng.random(rows), regions=1.0, metric=0.5)
    row = association(frame, signals=["delta"], differences=False, resamples=300).table.iloc[0]
    assert np.isfinite([row["low"], row["high"]]).all() == has_interval
    assert np.isfinite([row["rho"], row["p_shuffled"]]).all()
    assert ("fewer than 5" in row["reason"]) != has_interval


def test_a_perfect_order_of_few_cases_has_no_interval_and_its_auroc_a_wide_one():
    """A bootstrap gives [1.000, 1.000] for both."""
    frame = pd.DataFrame({"case": list("abcdefgh"), "cluster": None, "step": 1, "shrink": 0.0})
    frame = frame.assign(ha=np.arange(8) / 10, delta=np.arange(8.0), regions=1.0, metric=1 - np.arange(8) / 10)
    row = association(frame, signals=["delta"], differences=False, resamples=300).table.iloc[0]
    assert row["rho"] == pytest.approx(1)
    assert np.isnan([row["low"], row["high"]]).all()
    assert "perfect in every draw of 8 patients" in row["reason"]
    low, high = auroc_interval(1.0, 4, 4)
    assert low < 0.65
    assert high == 1


def test_a_planted_signal_ranks_harm_and_a_coin_does_not(outcomes):
    found = auroc_table(outcomes)
    assert found.number("low", signal="delta", target="harm") > 0.8
    coin = found.row(signal="msp", target="harm")
    assert coin["low"] < 0.5 < coin["high"]


def test_scores_are_not_turned_so_msp_appears_inverted(outcomes):
    frame = outcomes.assign(msp=-outcomes["delta"])
    found = auroc_table(frame).table
    found = found[found["signal"].isin(["delta", "msp"])]
    sums = found.pivot(index="target", columns="signal", values="auroc").sum(axis=1)
    assert sums.tolist() == pytest.approx([1, 1])


def test_one_class_is_undefined_with_a_reason(outcomes):
    frame = outcomes.assign(metric=0.8)
    row = auroc_table(frame).row(signal="delta", target="worse")
    assert np.isnan(row["auroc"])
    assert row["reason"] == "all 60 cases are on one side"

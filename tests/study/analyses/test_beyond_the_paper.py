"""Reruns, frozen designs, criteria, backbones, scales, early segments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from casewise.core.errors import BadInput, TooFewCases
from casewise.core.records import Policy
from casewise.data.splits import fold_of
from casewise.study.analyses.budget import early_segment
from casewise.study.analyses.criteria import reconcile
from casewise.study.analyses.elsewhere import (
    alignment,
    coherence,
    frozen_design,
    frozen_differences,
    harm_moves,
    scale_probe,
    shared_signals,
)
from casewise.study.statistics.resample import Interval

# reruns


def test_a_run_is_aligned_with_itself(outcomes):
    found = alignment(outcomes, outcomes)
    assert found.made["aligned"]
    assert found.table["difference"].max() == 0


def test_a_gradient_that_moved_fails_its_layer_and_only_its_layer(outcomes):
    moved = outcomes.copy()
    moved.loc[moved["step"] == 1, "gradient_norm"] += 1e-5
    found = alignment(outcomes, moved)
    failed = found.table[~found.table["passed"]]
    assert failed["layer"].tolist() == ["step-1 gradient norm"]


def test_case_metrics_are_shown_but_not_gated(outcomes):
    moved = outcomes.copy()
    moved.loc[0, "metric"] += 0.0015
    found = alignment(outcomes, moved)
    assert found.made["aligned"]
    assert found.row(layer="case metric", step=0)["difference"] == pytest.approx(0.0015)


def test_archives_of_other_cases_cannot_be_aligned(outcomes):
    with pytest.raises(BadInput, match="have no"):
        alignment(outcomes, outcomes.assign(case="z" + outcomes["case"]))


def test_harm_that_moved_is_listed_with_its_cause_and_the_cohort_without_it(outcomes):
    moved = outcomes.copy()
    row = moved.index[(moved["case"] == "c005") & (moved["step"] == 3)][0]
    moved.loc[row, "ha"] -= 0.2
    found = harm_moves(outcomes, moved)
    assert found.table["cause"].tolist() == ["region changed side"]
    assert found.made["difference"] == pytest.approx(-0.2 / 300)
    assert found.made["difference_without"] == 0
    moved.loc[row, "regions"] += 1
    assert harm_moves(outcomes, moved).table["cause"].tolist() == ["region count changed"]


def test_signals_of_two_runs_are_flagged_where_they_differ(outcomes, make_cohort):
    assert shared_signals(outcomes, outcomes).table["agrees"].all()
    found = shared_signals(outcomes, make_cohort(seed=9))
    assert any("differs between the runs" in note for note in found.notes)


# frozen designs


def test_only_cut_points_may_change():
    options = {"coordinate": "delta", "cut_low": 1.0, "cut_high": 2.0, "low": {"action": "depth", "depth": 3}}
    original = Policy("cardiac", "router", options, 4)
    assert frozen_differences(original, replace(original, options={**options, "cut_low": 0.1})) == []
    changed = replace(original, options={**options, "coordinate": "regions"}, steps=8)
    assert frozen_differences(original, changed) == ["steps", "options.coordinate"]


def test_the_relative_cut_is_one_minus_the_ratio_of_means(methods):
    found = frozen_design(methods, router="router", reference="fixed-4", resamples=50)
    expected = 1 - methods["router"]["ha"].mean() / methods["fixed-4"]["ha"].mean()
    assert found.number("relative", method="router") == pytest.approx(expected)
    assert np.isnan(found.number("relative", method="fixed-4"))


# criteria


def interval(estimate, low, high):
    return Interval(estimate, low, high, 0.5, 93, 93, 5000)


def test_every_verdict_is_given_where_it_is_due():
    facts = {
        "rho.delta": 0.595,
        "rho.regions": 0.7,
        "ladder.non_monotone": True,
        "ladder.last_minus_best": 0.0052,
        "ha.router_minus_default": interval(-0.1, -0.15, -0.05),
        "metric.default_minus_router": interval(0.002, -0.002, 0.006),
        "share.random": 0.6,
        "metric.first_minus_source": -0.0015,
    }
    found = reconcile(facts).table.set_index("id")["verdict"]
    assert found[["V0a", "V0b", "V1a", "V1b", "V2a", "V2b", "V3a", "V3b", "V4"]].tolist() == [
        *("not run", "held", "held", "failed", "held", "unresolved", "held", "failed", "reported")
    ]


def test_an_undefined_fact_is_not_a_failure():
    found = reconcile({"rho.delta": float("nan")})
    assert found.row(id="V1a")["verdict"] == "not run"
    assert found.row(id="V1a")["reason"] == "rho.delta is undefined"


# backbones, scale, early segment


def test_coherence_is_read_inside_the_band_of_source_quality(outcomes):
    solid = outcomes.assign(largest=345.0, singleton_share=0.33)
    crumbs = outcomes.assign(largest=3.5, singleton_share=0.83, metric=outcomes["metric"] - 0.1)
    found = coherence({"cnn": solid, "transformer": crumbs})
    assert found.notes == ("the largest component of cnn is 98.6 times that of transformer",)
    assert found.row(backbone="cnn")["meets"]


def test_an_empty_band_is_reported(outcomes):
    row = coherence({"x": outcomes.assign(largest=1.0, metric=0.95)}).row(backbone="x")
    assert row["reason"] == "no case has M0 in [0.6, 0.8]"
    assert np.isnan(row["largest"])


def test_a_cut_ported_to_a_larger_scale_rolls_back_almost_everybody(outcomes):
    away = outcomes.assign(delta=40 * outcomes["delta"])
    found = scale_probe(outcomes, away, coordinate="delta", cut_high=None)
    assert found.number("ratio_mean", cohort="away") == pytest.approx(40)
    assert found.number("rolled_back", cohort="home") == pytest.approx(1 / 3, abs=0.02)
    assert found.number("rolled_back", cohort="away") == 1.0


def test_a_ladder_below_its_source_has_nothing_to_keep(outcomes, methods):
    worse = outcomes.copy()
    worse.loc[worse["step"] > 0, "metric"] -= 0.2
    found = early_segment(worse, methods, stop="fixed-1", reference="fixed-4", resamples=50)
    assert not found.made["worth_keeping"]
    assert "no step has a higher mean" in found.notes[0]


def test_a_step_above_the_source_is_worth_keeping(outcomes, methods):
    better = outcomes.copy()
    better.loc[better["step"] == 2, "metric"] += 0.2
    found = early_segment(better, methods, stop="fixed-1", reference="fixed-4", resamples=50)
    assert found.made["worth_keeping"]
    assert "fixed-2" in found.notes[0]


def test_the_oracle_stop_bounds_every_step_in_the_metric(outcomes, methods):
    table = early_segment(outcomes, methods, stop="fixed-1", reference="fixed-4", resamples=50).table.set_index("row")
    assert (table.loc["oracle stop", "metric"] >= table.loc[["fixed-1", "fixed-4"], "metric"]).all()
    assert 1 <= table.loc["oracle stop", "steps"] <= 4


def test_folds_keep_clusters_together_and_even():
    units = np.repeat(np.arange(10), 3)
    fold = fold_of(units, 5, seed=0)
    assert all(len(set(fold[units == unit])) == 1 for unit in range(10))
    assert np.bincount(fold).tolist() == [6] * 5
    with pytest.raises(TooFewCases, match="got 3 clusters"):
        fold_of(np.array([0, 1, 2]), 5, seed=0)

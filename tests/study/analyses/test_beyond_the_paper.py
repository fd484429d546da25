"""Reruns, frozen designs, declared criteria, backbones, scales, early segments, search, learning, balance."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest

from casewise.core.errors import BadInput, Overlap, Refused, TooFewCases, UnknownName
from casewise.core.records import Policy, State
from casewise.study.analyses.backbones import coherence
from casewise.study.analyses.balance import label_free_balance
from casewise.study.analyses.early import early_segment
from casewise.study.analyses.frozen import frozen_design, frozen_differences
from casewise.study.analyses.learned import learned_policy
from casewise.study.analyses.rerun import alignment, harm_moves, shared_signals
from casewise.study.analyses.scale import scale_probe
from casewise.study.analyses.search import Design, default_designs, design_search
from casewise.study.preregistration import PAPER_CRITERIA, Criterion, Declaration, declare, read_criteria, reconcile
from casewise.study.statistics.resample import Interval, folds_of

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


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
    with pytest.raises(BadInput, match="share no"):
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
    found = shared_signals(outcomes, make_cohort(seed=9), runs=("march", "april"))
    assert any("differs between march and april" in note for note in found.notes)


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


# declared criteria


def test_a_declaration_is_written_once_and_read_back_with_its_hash(tmp_path):
    path = tmp_path / "criteria.json"
    written = declare(path, declared_at=NOW)
    assert written == read_criteria(path)
    assert written.criteria == PAPER_CRITERIA
    assert len(written.sha256) == 64
    with pytest.raises(Refused, match="already holds a declaration"):
        declare(path, declared_at=NOW)


def test_a_declaration_without_time_zone_is_refused(tmp_path):
    with pytest.raises(BadInput, match="needs a time zone"):
        declare(tmp_path / "x.json", declared_at=datetime(2026, 1, 1))


def test_a_file_that_is_no_declaration_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(BadInput, match="is not a declaration"):
        read_criteria(tmp_path / "x.json")
    with pytest.raises(BadInput, match="there is no declaration"):
        read_criteria(tmp_path / "y.json")


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
    found = reconcile(Declaration(PAPER_CRITERIA, NOW.isoformat()), facts).table.set_index("id")["verdict"]
    assert found[["V0a", "V0b", "V1a", "V1b", "V2a", "V2b", "V3a", "V3b", "V4"]].tolist() == [
        *("not run", "held", "held", "failed", "held", "unresolved", "held", "failed", "reported")
    ]


def test_an_undefined_fact_is_not_a_failure():
    found = reconcile(Declaration(PAPER_CRITERIA, NOW.isoformat()), {"rho.delta": float("nan")})
    assert found.row(id="V1a")["verdict"] == "not run"
    assert found.row(id="V1a")["reason"] == "rho.delta is undefined"


def test_criteria_declared_after_the_results_are_marked():
    found = reconcile(
        Declaration(PAPER_CRITERIA, NOW.isoformat()), {"rho.delta": 0.5}, results_at=NOW - timedelta(days=1)
    )
    assert not found.made["in_time"]
    assert found.row(id="V1a")["reason"] == "declared too late: after the results"


def test_a_criterion_asks_what_is_known():
    with pytest.raises(UnknownName, match="Did you mean 'at least'"):
        Criterion("X", "x", "x", "at leest", 0.0)
    with pytest.raises(BadInput, match="'between' takes two bounds"):
        Criterion("X", "x", "x", "between", 0.0)


# backbones, scale, early segment


def test_coherence_is_read_inside_the_band_of_source_quality(outcomes):
    solid = outcomes.assign(largest=345.0, singleton_share=0.33)
    crumbs = outcomes.assign(largest=3.5, singleton_share=0.83, metric=outcomes["metric"] - 0.1)
    found = coherence({"cnn": solid, "transformer": crumbs}, source_metric=0.82, band=(0.6, 0.8))
    assert found.row(backbone="cnn")["usable"]
    assert not found.row(backbone="transformer")["usable"]
    assert found.notes == ("the largest component of cnn is 98.6 times that of transformer",)
    assert found.row(backbone="cnn")["meets"]


def test_an_empty_band_is_said(outcomes):
    row = coherence({"x": outcomes.assign(largest=1.0)}, band=(0.0, 0.01)).row(backbone="x")
    assert row["reason"] == "no case has M0 in [0.0, 0.01]"
    assert np.isnan(row["largest"])


def test_a_cut_ported_to_a_larger_scale_rolls_back_almost_everybody(outcomes):
    away = outcomes.assign(delta=40 * outcomes["delta"])
    found = scale_probe(outcomes, away)
    assert found.number("ratio_mean", cohort="away") == pytest.approx(40)
    assert found.number("rolled_back", cohort="home") == pytest.approx(1 / 3, abs=0.02)
    assert found.number("rolled_back", cohort="away") == 1.0


def test_a_ladder_below_its_source_has_nothing_to_keep(outcomes, methods):
    worse = outcomes.copy()
    worse.loc[worse["step"] > 0, "metric"] -= 0.2
    found = early_segment(worse, methods, stop="fixed-1", reference="fixed-4", resamples=50)
    assert not found.made["worth_keeping"]
    assert "nothing to keep" in found.notes[0]


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


# search, learning, balance


def test_twelve_designs_when_every_state_was_recorded(outcomes):
    assert len(default_designs(outcomes)) == 12
    assert len(default_designs(outcomes[outcomes["shrink"] == 0])) == 8


def test_a_search_finds_the_coordinate_that_knows(make_cohort):
    splits = [make_cohort(60, seed=seed, prefix=name) for seed, name in ((1, "d"), (2, "k"), (3, "e"))]
    designs = [Design(name, State(3), State(2, 0.5)) for name in ("msp", "entropy", "delta")]
    found = design_search(*splits, designs=designs, resamples=200)
    assert found.made["best"].startswith("delta")
    assert found.made["null_p"] < 0.05
    chosen = found.table[found.table["chosen"]].iloc[0]
    chance = found.row(design="random at the chosen quota")
    assert chosen["score_evaluation"] < chance["score_evaluation"]
    assert found.table["score_evaluation"].notna().sum() == 2


def test_splits_that_share_cases_are_refused(outcomes):
    with pytest.raises(Overlap, match=r"design and calibration share 60 cases \(c000, "):
        design_search(outcomes, outcomes, outcomes)


def test_a_search_over_one_design_is_no_search(make_cohort):
    splits = [make_cohort(20, seed=seed, prefix=name) for seed, name in ((1, "d"), (2, "k"), (3, "e"))]
    with pytest.raises(BadInput, match="at least two designs"):
        design_search(*splits, designs=[Design("delta", State(1), State(2))])


def test_a_learned_policy_uses_a_signal_that_knows(make_cohort, make_router):
    frame = make_cohort(120, seed=4)
    found = learned_policy(frame, router=make_router(frame), weight=25.0, resamples=200)
    assert found.made["constant"] is None
    assert found.made["p_chance"] < 0.01
    assert found.number("loss", policy="learned") < found.number("loss", policy="random at its quota")


def test_a_policy_that_gives_everybody_the_same_is_called_degenerate(outcomes, router):
    found = learned_policy(outcomes, router=router, weight=0.0, resamples=50)
    assert found.made["constant"] == "0"
    assert found.made["verdict"].startswith("degenerate: everybody gets state 0")


def test_folds_keep_clusters_together_and_even():
    units = np.repeat(np.arange(10), 3)
    fold = folds_of(units, 5, seed=0)
    assert all(len(set(fold[units == unit])) == 1 for unit in range(10))
    assert np.bincount(fold).tolist() == [6] * 5
    with pytest.raises(TooFewCases, match="got 3 clusters"):
        folds_of(np.array([0, 1, 2]), 5, seed=0)


def test_a_known_hurt_share_is_recovered_without_the_streams_labels(make_cohort):
    holdout, stream = make_cohort(120, seed=5, prefix="h"), make_cohort(200, seed=6, prefix="s")
    wide = stream[stream["shrink"] == 0].pivot(index="case", columns="step", values="metric")
    truth = float((wide[4] < wide[0]).mean())
    found = label_free_balance(holdout, stream.drop(columns=["metric", "ha", "ba"]), resamples=300)
    assert found.made["identifiable"]
    for quantity in ("prediction-powered", "quantified"):
        assert found.number("low", quantity=quantity) <= truth <= found.number("high", quantity=quantity)


def test_signals_that_know_nothing_are_not_identifiable(make_cohort):
    found = label_free_balance(make_cohort(80, effect=0.0, seed=7), make_cohort(80, effect=0.0, seed=8), resamples=300)
    row = found.row(quantity="quantified")
    assert np.isnan(row["estimate"])
    assert row["reason"].startswith("not identifiable from these signals")


def test_a_holdout_of_one_kind_is_too_small(outcomes):
    with pytest.raises(TooFewCases, match="hurt and 4 other cases, got 0 of 60"):
        label_free_balance(outcomes.assign(metric=0.8), outcomes)

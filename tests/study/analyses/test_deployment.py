"""Method table, tiers and the interval list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from casewise.core.errors import BadInput
from casewise.study.analyses.deployed_methods import (
    MethodPair,
    bucket_decomposition,
    intervals,
    method_table,
    methods_table,
    section,
    tiers,
)
from casewise.study.statistics.resample import wilcoxon, wins


def test_the_source_harms_nobody_and_takes_no_step(methods):
    row = method_table(methods).row(method="m0")
    assert (row["ha"], row["steps"], row["rolled_back"]) == (0, 0, 60)


def test_steps_are_those_of_the_deployed_state_and_executed_counts_the_probe(methods, router):
    row = method_table(methods).row(method="router")
    sizes = router["bucket"].value_counts()
    assert row["steps"] == pytest.approx((3 * sizes["low"] + 2 * sizes["mid"]) / 60)
    assert row["executed"] == pytest.approx((3 * sizes["low"] + 2 * sizes["mid"] + sizes["hard"]) / 60)


def test_an_undefined_metric_is_counted_and_left_out(methods):
    frame = methods["fixed-1"].copy()
    frame.loc[0, "metric"] = np.nan
    row = method_table({"x": frame}).row(method="x")
    assert (row["undefined"], row["n"]) == (1, 60)
    assert row["metric"] == pytest.approx(frame["metric"].mean())


def test_budgets_that_coincide_are_compared_once_and_said(methods):
    asked = tiers(["router"], {"A": "fixed-1", "A'": "fixed-4", "B": "fixed-1", "C": "m0"})
    assert [(one.reference, one.tier) for one in asked] == [("fixed-1", "A+B"), ("fixed-4", "A'"), ("m0", "C")]
    found = intervals(methods, asked, resamples=100)
    assert "tiers A and B are equal: both are fixed-1" in found.notes
    assert found.table["id"].is_unique


def test_a_planted_cut_is_separated_and_nothing_against_itself_is_not(methods):
    found = intervals(methods, [MethodPair("router", "fixed-4"), MethodPair("fixed-4", "fixed-4")], resamples=500)
    cut = found.row(id="router~fixed-4:ha")
    assert cut["separated"]
    assert cut["estimate"] < 0
    assert cut["p_below"] == 1.0
    same = found.row(id="fixed-4~fixed-4:ha")
    assert (same["estimate"], same["matched"], same["ties"]) == (0, True, 60)
    assert same["reason"] == "every difference is zero"
    assert same["below_scale"]


def test_the_estimate_is_the_difference_of_the_table(methods):
    table = method_table(methods)
    found = intervals(methods, [MethodPair("router", "fixed-3")], resamples=50)
    for quantity in ("ha", "metric"):
        gap = table.number(quantity, method="router") - table.number(quantity, method="fixed-3")
        assert found.number("estimate", id=f"router~fixed-3:{quantity}") == pytest.approx(gap, abs=1e-12)


def test_clusters_are_resampled_together(methods):
    shared = {
        name: frame.assign(cluster=[f"p{number // 3}" for number in range(60)]) for name, frame in methods.items()
    }
    asked = [MethodPair("router", "fixed-4")]
    assert intervals(shared, asked, resamples=50).table["clusters"].tolist() == [20, 20]


def test_methods_of_other_cases_are_refused(methods):
    with pytest.raises(BadInput, match="same cases, 1 are in one only, such as"):
        intervals({**methods, "short": methods["m0"].iloc[1:]}, [MethodPair("short", "m0")])


def test_the_finding_says_that_nothing_is_corrected(methods):
    found = intervals(methods, [MethodPair("fixed-1", "fixed-2"), MethodPair("router", "fixed-4")], resamples=50)
    assert "the 4 intervals are not corrected for multiplicity" in found.notes


def test_the_bootstrap_stream_is_recorded(methods):
    stream = intervals(methods, [MethodPair("router", "m0")], resamples=20).made["stream"]
    assert stream["sum"] == int(np.random.default_rng(1000).integers(0, 60, size=(20, 60)).sum())


def test_bucket_parts_add_up_to_the_whole_change(router):
    found = bucket_decomposition(router)
    parts = found.table[found.table["bucket"] != "all"]
    assert parts["contribution"].sum() == pytest.approx(router["change"].mean(), abs=1e-15)
    assert parts.set_index("bucket").loc["hard", "contribution"] == 0


def test_bucket_means_are_refused_when_a_bucket_is_empty(router):
    found = bucket_decomposition(router[router["bucket"] != "low"])
    assert found.table[found.table["bucket"] != "all"]["mean_change"].isna().all()
    assert found.reason == "bucket low is empty, so bucket means are not reported"


def test_wins_are_strict_and_ties_apart():
    assert wins([0.1, 0.2, 0.2], [0.2, 0.2, 0.1]) == (1, 1, 1)
    assert wins([0.9, 0.8], [0.8, 0.9], lower_is_better=False) == (1, 0, 1)


def test_float_noise_makes_no_signed_rank():
    p, how = wilcoxon([0.1 + 0.2, 1.0], [0.3, 1.0])
    assert np.isnan(p)
    assert how == "none"


def test_beside_ha_stands_the_share_of_the_edit_that_it_judged(methods):
    found = method_table(methods)
    frame = methods["fixed-2"]
    judged = sum((1 - row.unscored) * row.area for row in frame.itertuples()) / sum(frame["area"])
    assert found.number("judged", method="fixed-2") == pytest.approx(judged)
    assert found.number("worse_voxels", method="fixed-2") == pytest.approx(frame["worse_voxels"].mean())
    assert np.isnan(found.number("judged", method="m0"))  # nothing was changed


def test_the_section_says_where_ha_says_little(study):
    columns = [column.key for column in methods_table(study).columns]
    assert columns[columns.index("ha") + 1 : columns.index("ha") + 3] == ["judged", "worse_voxels"]
    assert "HA judged" in section(study).lead
    for unscored, little in ((0.9, True), (0.1, False)):
        frames = {name: frame.assign(unscored=unscored) for name, frame in study.methods.items()}
        lead = section(replace(study, methods=frames)).lead
        assert ("use worse-voxels" in lead) == little

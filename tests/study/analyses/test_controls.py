"""Matched-quota controls: the licence, the quota, chance, and what is attributed to what."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from casewise.core.errors import BadInput, Refused
from casewise.study.analyses.controls import (
    attribution,
    check_licence,
    matched_controls,
    overlap,
    random_control,
    selector_intervals,
    substitution,
    substitutions_of,
)
from casewise.study.assignment import buckets_at, selector_scores
from casewise.study.trajectories import step_one


@pytest.fixture
def scores(outcomes):
    return selector_scores(outcomes, coordinate="delta")


def test_the_arms_reproduce_the_deployed_row_or_are_refused(arms, router):
    assert check_licence(arms, router)["ha"] == pytest.approx(router["ha"].mean())
    wrong = {**arms, "low": arms["low"].assign(ha=0.5)}
    with pytest.raises(Refused, match="do not reproduce the deployed router"):
        matched_controls(wrong, router, pd.DataFrame())


def test_a_substitute_is_allowed_when_it_is_labelled(arms, router, scores):
    wrong = {**arms, "low": arms["mid"].assign(bucket="low")}
    found = matched_controls(wrong, router, scores, substitute=True, draws=50)
    assert found.notes[0].startswith("does not reproduce the deployed router")


def test_the_routers_own_coordinate_reproduces_its_hard_bucket(arms, router, scores):
    found = matched_controls(arms, router, scores, draws=50)
    own = found.row(selector="router (delta)")
    assert own["faithful"]
    assert own["ha"] == pytest.approx(found.number("ha", selector="deployed"))


def test_every_selector_keeps_the_quota(arms, router, scores):
    found = matched_controls(arms, router, scores, draws=50)
    kept = found.table[found.table["selector"] != "m0"]
    assert (kept[["hard", "mid", "low"]] == kept[["hard", "mid", "low"]].iloc[0]).all(axis=None)
    assert kept["steps"].tolist() == pytest.approx([router["deployed"].mean()] * len(kept))


def test_the_ha_oracle_rolls_back_the_highest_step_one_harm(arms, router, outcomes, scores):
    first = outcomes[outcomes["step"] == 1].set_index("case")["ha"]
    hard = int((router["bucket"] == "hard").sum())
    worst = set(first.sort_values(ascending=False).index[:hard])
    own = set(router.loc[router["bucket"] == "hard", "case"])
    shared = matched_controls(arms, router, scores, draws=50).row(selector="oracle HA")["overlap_hard"]
    assert shared == len(worst & own)


def test_msp_is_turned_so_that_low_confidence_is_risky(outcomes, scores):
    first = outcomes[outcomes["step"] == 1].set_index("case")["msp"]
    assert scores["msp"].idxmax() == first.idxmin()


def test_a_planted_router_beats_chance_and_a_random_one_does_not(arms, router, scores, outcomes, make_router):
    found = random_control(arms, router, draws=500).row(scope="all", quantity="ha")
    assert found["p_draws"] == 0
    assert found["p_draws_corrected"] == pytest.approx(1 / 501)
    assert found["p_normal"] < 1e-4
    coin = make_router(outcomes, "msp")
    null = random_control(arms, coin, draws=500).row(scope="all", quantity="ha")
    assert 0.01 < null["p_draws"] < 0.99


def test_draws_agree_with_the_closed_form(arms, router):
    found = random_control(arms, router, draws=2000).row(scope="all", quantity="ha")
    assert found["mean_draws"] == pytest.approx(found["mean_exact"], abs=4 * found["sd_chance"] / np.sqrt(2000))
    assert found["low"] < found["mean_exact"] < found["high"]


def test_groups_are_matched_inside_and_pooled_plainly(arms, router, scores):
    uneven = router[(router["group"] == "site-0") | (router["case"] < "c030")]
    plain = matched_controls(arms, uneven, scores, by_group=True, draws=20).table
    groups = plain[plain["scope"].str.startswith("site") & (plain["selector"] == "deployed")]
    assert groups["n"].tolist() == [30, 15]
    pooled = plain[(plain["scope"] == "pooled") & (plain["selector"] == "deployed")]["ha"].iloc[0]
    assert pooled == pytest.approx(groups["ha"].mean())


def test_a_selector_against_itself_differs_by_nothing(arms, router, scores):
    both = scores[["router (delta)"]].assign(copy=scores["router (delta)"])
    found = selector_intervals(arms, router, both, against="router (delta)", resamples=50)
    assert found.table["estimate"].tolist() == [0, 0]


def test_overlap_counts_shared_rollbacks(arms, router, scores):
    both = pd.DataFrame({"up": scores["router (delta)"], "down": -scores["router (delta)"]})
    assert overlap(arms, router, both).row(first="up", second="down")["shared"] == 0


def test_the_attribution_line_is_the_quotas_share_of_the_cut(arms, router, methods):
    found = attribution(arms, router, methods["fixed-4"])
    row = found.row(control="random")
    assert row["share"] == pytest.approx(
        (row["ha_reference"] - row["ha_control"]) / (row["ha_reference"] - row["ha_router"])
    )
    assert 0 < row["share"] < 1
    assert "of the HA reduction" in row["sentence"]
    assert "comes from the number of rollbacks alone" in row["sentence"]


def test_no_cut_leaves_nothing_to_attribute(arms, router, methods):
    row = attribution(arms, router, methods["m0"]).row(control="random")
    assert np.isnan(row["share"])
    assert row["reason"].startswith("the router does not reduce HA")


def test_a_substituted_coordinate_at_its_own_cuts_may_empty_the_middle(arms, router, scores):
    found = substitution(arms, router, scores["regions"], cut_low=1, cut_high=1)
    native = found.row(kind="native")
    assert native["mid"] == 0
    assert native["hard"] == int((scores["regions"] >= 1).sum())


def test_a_selector_without_a_value_is_refused(arms, router, scores):
    gap = pd.DataFrame({"gap": scores["router (delta)"].iloc[1:]})
    with pytest.raises(BadInput, match="selector 'gap' has no value"):
        matched_controls(arms, router, gap, draws=10)


def test_a_method_without_buckets_is_refused(arms, methods):
    with pytest.raises(BadInput, match="need a router with buckets"):
        random_control(arms, methods["fixed-4"])


def test_another_coordinate_gets_cut_points_of_its_own(study):
    found = substitutions_of(study)
    native = found.row(coordinate="regions", kind="native")
    values = step_one(study.outcomes, "regions").to_numpy()
    rolled_back = int((buckets_at(values, native["cut_low"], native["cut_high"])[0] == 0).sum())
    assert native["hard"] == rolled_back
    assert native["cut_high"] == np.percentile(step_one(study.holdout, "regions"), 66.67)
    assert "delta" not in set(found.table["coordinate"])  # the router's own

"""The budget axis on ladders that were written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from casewise.core.errors import BadInput
from casewise.study.analyses.budget import (
    group_agreement,
    ladder,
    ladder_shape,
    learning_rate_sweep,
    section,
    selection,
    selection_agreement,
    selection_stability,
)


def ladders(
    harm: dict[str, list[float]], metric: dict[str, list[float]] | None = None, group: str = "A"
) -> pd.DataFrame:
    """Cases with the given HA at steps 1..K (step 0 is zero), metric 0.8 everywhere unless given."""
    rows = []
    for case, values in harm.items():
        dice = [0.8] * (len(values) + 1) if metric is None else metric[case]
        for step, ha in enumerate([0.0, *values]):
            rows.append(
                {
                    "case": case,
                    "group": group,
                    "step": step,
                    "shrink": 0.0,
                    "metric": dice[step],
                    "ha": ha,
                    "ba": 0.0,
                    "unscored": 0.0,
                    "area": 100 * step,
                    "worse_voxels": ha,
                    "delta": 0.01 * step,
                    "regions": int(ha > 0),
                }
            )
    return pd.DataFrame(rows)


def test_a_ladder_holds_the_unweighted_mean_of_every_step():
    found = ladder(ladders({"a": [0.2, 0.4], "b": [0.0, 0.6]}))
    assert found.number("ha", step=1) == pytest.approx(0.1)
    assert found.number("ha", step=2) == pytest.approx(0.5)
    assert found.row(step=1)["scored"] == 1
    assert found.table["is_best"].tolist() == [False, True, False]


def test_the_four_rules_choose_as_defined_and_ties_go_to_the_smallest_step():
    holdout = ladders({"a": [0.3, 0.2, 0.2]}, {"a": [0.8, 0.80, 0.70, 0.95]})
    evaluation = ladders({"a": [0.1, 0.4, 0.3]})
    found = selection(holdout, evaluation).table.set_index("rule")
    assert found["k_holdout"].to_dict() == {"lowest HA": 2, "highest metric": 3, "HA - 0.5 metric": 3, "HA - metric": 3}
    assert found.loc["lowest HA", "regret"] == pytest.approx(0.3)
    assert found.loc["lowest HA", "k_best"] == 1


def test_the_papers_regret_is_the_difference_to_the_best_budget():
    evaluation = ladders({"a": [0.312, 0.30, 0.277, 0.29]})
    holdout = ladders({"a": [0.1, 0.2, 0.3, 0.4]})
    assert selection(holdout, evaluation).number("regret", rule="lowest HA") == pytest.approx(0.035)


def test_a_holdout_that_cannot_disagree_always_chooses_the_same_step():
    certain = ladders({name: [0.1, 0.3] for name in "abcd"})
    found = selection_stability(certain, certain, resamples=200)
    assert found.number("probability", rule="lowest HA", kind="joint") == 1.0
    assert selection_agreement(found).number("agree", rule="lowest HA") == 1.0


def test_probabilities_of_the_holdout_bootstrap_add_up_to_one():
    torn = ladders({"a": [0.0, 0.3], "b": [0.3, 0.0], "c": [0.1, 0.2]})
    found = selection_stability(torn, torn, resamples=500).table
    chances = found[(found["rule"] == "lowest HA") & (found["kind"] == "holdout")]["probability"]
    assert chances.sum() == pytest.approx(1.0)
    assert 0.2 < chances.iloc[0] < 0.95


def test_holdout_and_evaluation_are_resampled_from_different_streams():
    torn = ladders({name: [0.1 * number, 0.25] for number, name in enumerate("abcdef")})
    found = selection_stability(torn, torn, resamples=400).table
    joint = found[(found["rule"] == "lowest HA") & (found["kind"] == "joint")]
    assert (joint["k_holdout"] != joint["k_eval"]).any()


def test_groups_agree_where_their_own_holdout_finds_their_own_best_step():
    holdout = pd.concat([ladders({"a": [0.1, 0.2]}, group="A"), ladders({"b": [0.2, 0.1]}, group="B")])
    evaluation = pd.concat([ladders({"c": [0.1, 0.2]}, group="A"), ladders({"d": [0.1, 0.2]}, group="B")])
    found = group_agreement(holdout, evaluation)
    assert found.table["agree"].tolist() == [True, False]
    assert found.notes == ("1 of 2 groups agree",)


def test_no_shared_group_is_reported():
    found = group_agreement(ladders({"a": [0.1]}, group="A"), ladders({"b": [0.1]}, group="B"))
    assert found.reason == "no group is in both holdout and evaluation"


@pytest.mark.parametrize(
    ("harm", "non_monotone", "dips"),
    [
        ([0.1, 0.2, 0.3, 0.4], False, False),
        ([0.3, 0.2, 0.1, 0.05], False, False),
        ([0.3, 0.2, 0.25, 0.4], True, True),
        ([0.2405, 0.2954, 0.3090, 0.3038], True, False),
    ],
)
def test_a_ladder_dips_only_when_it_falls_first_and_rises_later(harm, non_monotone, dips):
    row = ladder_shape(ladders({"a": harm})).row(group="all")
    assert (row["non_monotone"], row["dips"]) == (non_monotone, dips)


def test_the_spread_of_the_metric_is_largest_minus_smallest_adapted_step():
    frame = ladders({"a": [0.1, 0.1, 0.1]}, {"a": [0.5, 0.80, 0.81, 0.795]})
    assert ladder_shape(frame).number("metric_spread", group="all") == pytest.approx(0.015)


def test_a_learning_rate_sweep_reports_the_cut_at_each_rate(methods):
    found = learning_rate_sweep({1e-4: (methods["fixed-1"], methods["fixed-4"])})
    row = found.row(learning_rate=1e-4)
    assert row["ha_cut"] == pytest.approx(row["fixed_ha"] - row["stop_ha"])
    assert row["steps"] == 1


def test_a_case_that_lacks_a_step_is_named():
    frame = ladders({"a": [0.1, 0.2], "b": [0.1, 0.2]})
    with pytest.raises(BadInput, match=r"cases \['b'\] have fewer"):
        ladder_shape(frame[~((frame["case"] == "b") & (frame["step"] == 2))])


def test_unlabelled_cases_do_not_count(outcomes):
    more = outcomes.copy()
    more.loc[more["case"] == "c000", ["ha", "metric"]] = float("nan")
    assert ladder_shape(more).row(group="all")["n"] == 59


def test_the_ladder_says_how_much_of_the_edit_ha_judged(outcomes, study):
    found = ladder(outcomes)
    part = outcomes[(outcomes["step"] == 3) & (outcomes["shrink"] == 0)]
    judged = sum((1 - row.unscored) * row.area for row in part.itertuples()) / sum(part["area"])
    assert found.number("judged", step=3) == pytest.approx(judged)
    assert np.isnan(found.number("judged", step=0))
    few = replace(study, outcomes=study.outcomes.assign(unscored=0.8))
    tables = {one.id: one for one in section(few).tables}
    assert "use worse-voxels" in tables["budget-sweep"].caption

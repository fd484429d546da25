"""The summary says no more than its intervals."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.study import summary_text as told
from casewise.study.analyses.controls import attribution_of
from casewise.study.analyses.deployed_methods import verdict


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"shown": False, "estimate": 0.0001}, "did not measurably move"),
        ({"shown": True, "estimate": -0.012}, "fell by 0.012"),
        ({"shown": True, "estimate": 0.023}, "rose by 0.023"),
    ],
)
def test_the_mean_moves_only_when_a_difference_is_shown(row, words):
    assert told._moved(row) == words


@pytest.mark.parametrize(
    ("separated", "shown", "high", "words"),
    [
        (True, True, 0.2, "an interval that excludes zero (sign-flip p = 0.060)"),
        (True, False, 0.2, "but sign-flip p = 0.060 does not reject chance at 0.05, so no difference is shown"),
        (False, False, 0.2, "an interval that contains zero (sign-flip p = 0.060), so no difference is shown"),
        (False, False, 0.0, "sign-flip p = 0.060, so no difference is shown"),
    ],
)
def test_the_verdict_needs_the_interval_and_the_test(separated, shown, high, words):
    assert words in verdict({"separated": separated, "shown": shown, "low": 0.0, "high": high, "p_flip": 0.06})


def test_the_first_screen_answers_in_the_order_in_which_people_ask(study):
    said = told.report_summary(study)
    change = study.policy_rows["change"]
    assert f"{len(study.policy_rows)} cases of 13 patients" in said.headline
    assert list(said.answers) == ["hurt", "flagged", "promised"]
    worst = study.policy_rows["case"][change.idxmin()]
    hurt, by_a_point = int((change < 0).sum()), int((change < -0.01).sum())
    assert said.answers["hurt"].startswith(
        f"They hurt {hurt} of {len(change)} cases, {by_a_point} by more than a point (0.01), the worst ({worst}) by "
        f"{-change.min():.3f}; they helped {int((change > 0).sum())}."
    )
    assert said.answers["flagged"] == "No case was flagged: this policy flags no cases."
    assert said.answers["promised"].startswith("Nothing is promised: there is no certificate")


def test_the_first_three_key_figures_are_of_the_deployed_masks(study):
    gain, sides, flagged = told.keys(study)[:3]
    change = study.policy_rows["change"]
    assert float(gain.value.replace("−", "-")) == pytest.approx(change.mean(), abs=1e-4)
    assert sides.value == f"{int((change > 0).sum())} : {int((change < 0).sum())}"
    assert flagged.value == "0"


def test_the_second_paragraph_counts_the_cases_made_worse_without_control(study):
    worse = int((study.uncontrolled["change"] < 0).sum())
    assert worse > 0
    assert told.report_summary(study).second.startswith(
        f"Without control, adaptation made {worse} of {len(study.uncontrolled)} cases worse"
    )


def test_the_attribution_line_is_part_of_the_summary(study):
    share = attribution_of(study).row(control="random")["share"]
    assert f"{100 * share:.0f} % of this reduction" in told.report_summary(study).second


def test_where_the_first_screen_says_ha_it_says_how_much_of_the_edit_was_judged(study):
    (harm,) = (key for key in told.keys(study) if key.what.startswith("HA of"))
    assert judged_sentence(judged_share(study.policy_rows)) in harm.more


def test_key_figures_carry_n_or_an_interval(study):
    for key in told.keys(study):
        assert any(letter.isdigit() for letter in key.more), key


def test_cases_are_counted_from_one():
    frame = pd.DataFrame({"case": ["a", "b", "c"], "change": [0.1, -0.2, 0.0], "rolled_back": [False, False, True]})
    figure = told.draw_changes([("all", frame)], metric="Dice", flagged={"b"})
    axis = figure.axes[0]
    assert [tick for tick in axis.get_xticks() if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]] == [1, 2, 3]
    assert [list(line.get_xdata()) for line in axis.lines if line.get_marker() == "D"] == [[1]]


@pytest.mark.parametrize(
    ("rungs", "words"),
    [
        ((), "fixed-4"),
        (("flip(2)", "mean"), "consensus everywhere"),
        (("tuned(0.5)", "tuned(1)", "average"), "average everywhere"),
        (("tuned(0.5)", "tuned(1)"), "tuned(1) everywhere"),
    ],
)
def test_the_last_candidate_is_called_by_what_it_is(study, rungs, words):
    other = replace(study)
    other.__dict__["rungs"] = rungs  # the cached names of the candidates
    assert other.everywhere == words

"""The story says no more than its intervals."""

from __future__ import annotations

import pytest

from casewise.study import story as told
from casewise.study.analyses.controls import attribution_of
from casewise.study.analyses.deployment import verdict


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
    ("separated", "shown", "words"),
    [
        (True, True, "an interval that excludes zero (sign-flip p = 0.060)"),
        (True, False, "but sign-flip p = 0.060 does not tell it from chance at 0.05, so nothing is shown"),
        (False, False, "an interval that contains zero (sign-flip p = 0.060), so no difference is shown"),
    ],
)
def test_the_verdict_needs_the_interval_and_the_test(separated, shown, words):
    assert words in verdict({"separated": separated, "shown": shown, "p_flip": 0.06})


def test_the_headline_counts_the_cases_made_worse(study):
    worse = int((study.uncontrolled["change"] < 0).sum())
    assert worse > 0
    assert told.story(study).headline.startswith(
        f"Adaptation made {worse} of {len(study.uncontrolled)} cases individually worse"
    )


def test_the_attribution_line_is_part_of_the_story(study):
    share = attribution_of(study).row(control="random")["share"]
    assert (
        f"Of that cut, {100 * share:.0f} % is due to its quotas alone (as many cases for each action"
        in told.story(study).second
    )


def test_key_figures_carry_n_or_an_interval(study):
    for key in told.keys(study):
        assert any(letter.isdigit() for letter in key.more), key

"""The story says no more than its intervals."""

from __future__ import annotations

import pytest

from casewise.report import story as told


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"matched": True, "estimate": 0.0001}, "did not measurably move"),
        ({"matched": False, "estimate": -0.012}, "fell by 0.012"),
        ({"matched": False, "estimate": 0.023}, "rose by 0.023"),
    ],
)
def test_the_mean_moves_only_when_its_interval_says_so(row, words):
    assert told._moved(row) == words


def test_the_headline_counts_the_cases_made_worse(material):
    worse = int((material.uncontrolled["change"] < 0).sum())
    assert worse > 0
    assert told.story(material, material.attribution).headline.startswith(
        f"Adaptation made {worse} of {len(material.uncontrolled)} cases individually worse"
    )


def test_the_attribution_line_is_part_of_the_story(material):
    share = material.attribution.row(control="random")["share"]
    assert (
        f"Of that cut, {100 * share:.0f} % is due to the number of rollbacks alone"
        in told.story(material, material.attribution).second
    )


def test_key_figures_carry_n_or_an_interval(material):
    for key in told.keys(material):
        assert any(letter.isdigit() for letter in key.more), key

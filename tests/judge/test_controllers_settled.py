"""The sequential rule on ladders that a person can read."""

from __future__ import annotations

import pytest

from casewise.core.errors import BadInput
from casewise.core.records import Observation, State
from casewise.judge.controllers.depth import Settled


def seen(*settled):
    return Observation("one", None, ({}, *({"settled": value} for value in settled)))


def test_two_quiet_views_in_a_row_end_the_case():
    rule = Settled(cap=5, agreement=0.99)
    assert rule.decide(seen()) is None
    assert rule.decide(seen(0.995)) is None
    assert rule.decide(seen(0.995, 0.9)) is None
    assert rule.decide(seen(0.995, 0.9, 0.99)) is None
    assert rule.decide(seen(0.995, 0.9, 0.99, 0.992)).state == State(4)


def test_at_the_cap_the_consensus_of_all_views_is_deployed():
    verdict = Settled(cap=2).decide(seen(0.5, None))
    assert verdict.state == State(2)
    assert "all " in verdict.reason


def test_nonsense_is_refused():
    with pytest.raises(BadInput, match="cap and patience of at least 1"):
        Settled(cap=0)

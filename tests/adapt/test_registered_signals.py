"""What is recorded has a line in SIGNALS, or is a function that the user passed on purpose; analyses show both."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from casewise.adapt.probes import PROBES, probed
from casewise.adapt.recording import Recording
from casewise.core.errors import UnknownName
from casewise.measure.signals import SIGNALS, check_registered
from casewise.study.trajectories import signals_in

EPISODE = SimpleNamespace(record=Recording(16, True))


def test_a_signal_without_its_line_is_an_error():
    with pytest.raises(UnknownName, match=r"'novelty' .* is not registered; add a line to SIGNALS"):
        check_registered(["delta", "novelty"])
    with pytest.raises(UnknownName, match=r"'novelty' .* is not registered"):
        probed({"dropout_disagreement": lambda episode: {"dropout_disagreement": 0.1, "novelty": 0.2}}, EPISODE)


def test_a_function_of_your_own_counts_as_registered():
    assert probed({"novelty": lambda episode: 0.2}, EPISODE) == {"novelty": 0.2}
    assert len(EPISODE.record.spent["novelty"]) == 1  # the cost is recorded, too


def test_every_named_probe_and_the_region_scores_are_known():
    check_registered(name for name in PROBES if name != "drop")
    check_registered(["drop", "drop.0", "drop.17"])


def test_analyses_show_your_own_signals_after_the_registered_ones():
    frame = pd.DataFrame(
        {"case": ["a", "a"], "step": [0, 1], "shrink": 0.0, "ha": 0.0, "novelty": [None, 0.2], "delta": [0.0, 0.1]}
    ).assign(risk=0.3, **{"-msp": -0.9})
    assert signals_in(frame) == ["delta", "novelty"]
    assert "novelty" not in SIGNALS

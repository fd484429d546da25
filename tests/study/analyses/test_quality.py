"""The first thing a report says: gained, hurt, flagged, promised; and what the quality signals are worth."""

from __future__ import annotations

import pandas as pd
import pytest
from worlds.candidates import views_archive

from casewise.judge.calibration.fit import calibrate
from casewise.study.analyses.quality import captured, section, signal_worth
from casewise.study.study import Study


@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> Study:
    """A consensus with flags, scored on other patients."""
    home = tmp_path_factory.mktemp("views")
    calibration = views_archive(home / "calibration", cases=20, prefix="old")
    evaluation = views_archive(home / "evaluation", cases=20, prefix="new", seed=1, split="evaluation")
    policy = calibrate(calibration, "consensus", flag_below=0.7, at=0.8)
    return Study.of(evaluation, calibration, policy, resamples=200)


def test_gain_and_share_of_the_oracle_said_twice(chosen: Study) -> None:
    frame = chosen.outcomes
    table = captured(chosen).table.set_index("method")
    row = table.loc[chosen.title(chosen.ours)]
    by_case = frame.pivot(index="case", columns="step", values="metric")
    gain = (by_case[6] - by_case[0]).mean()
    assert row["gain"] == pytest.approx(gain)
    assert row["captured"] == pytest.approx(gain / (by_case.max(axis=1) - by_case[0]).mean())
    assert row["hurt"] == int((by_case[6] < by_case[0]).sum())
    assert row["flagged"] == sum(decision.flagged for decision in chosen.decisions[chosen.ours])
    assert row["flagged"] > 0


def test_the_sentences_come_in_the_order_in_which_people_ask(chosen: Study) -> None:
    lead = section(chosen).lead
    places = [lead.index(word) for word in ("gained", "hurt", "flagged", "promised")]
    assert places == sorted(places)
    assert "Nothing is promised" in lead


def test_every_signal_of_agreement_is_scored(chosen: Study) -> None:
    table = signal_worth(chosen).table
    assert set(table["signal"]) >= {"agreement", "agreement_all"}
    assert (table["optimum"] <= table["aurc"] + 1e-12).all()
    assert (table["low"] <= table["high"]).all()
    assert isinstance(table, pd.DataFrame)


def test_a_study_of_one_gradient_ladder_has_it_too(study: Study) -> None:
    found = section(study)
    assert found.id == "quality"
    assert len(found.findings) == 2

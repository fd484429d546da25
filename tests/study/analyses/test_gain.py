"""The first thing a report says: gained, hurt, flagged, promised; and what the quality signals are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from worlds.candidates import views_archive

from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.study.analyses import promise
from casewise.study.analyses.deployed_methods import interval_between
from casewise.study.analyses.gain import _gained as gained
from casewise.study.analyses.gain import answers, captured, section, signal_worth
from casewise.study.study import Extras, Study


@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> Study:
    """A consensus with flags, scored on other patients."""
    home = tmp_path_factory.mktemp("views")
    calibration = views_archive(home / "calibration", cases=20, prefix="old")
    evaluation = views_archive(home / "evaluation", cases=20, prefix="new", seed=1, split="evaluation")
    policy = calibrate(calibration, "consensus", flag_below=0.7, confidence=0.8)
    return Study.of(evaluation, calibration, policy, resamples=200)


def test_gain_and_share_of_the_oracle_agree_with_a_second_computation(chosen: Study) -> None:
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


def test_the_interval_is_the_one_of_the_single_list(study: Study) -> None:
    row = captured(study).row(method=study.title(study.ours))
    listed = interval_between(study, study.ours, study.source, "metric")
    assert listed is not None
    assert [row["gain"], row["low"], row["high"]] == pytest.approx([listed[k] for k in ("estimate", "low", "high")])
    assert bool(row["shown"]) == bool(listed["shown"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gain": 0.02, "low": 0.01, "high": 0.03, "shown": True}, "gained 0.0200 Dice over M0 [+0.0100, +0.0300]"),
        (
            {"gain": -0.02, "low": -0.03, "high": -0.01, "shown": True},
            "lost Dice against M0: −0.0200 [−0.0300, −0.0100]",
        ),
        ({"gain": 0.02, "low": -0.01, "high": 0.03, "shown": False}, "neither gained nor lost measurably against M0"),
        ({"helped": 0, "hurt": 0, "shown": False}, "did not change the Dice of any of 9 cases"),
    ],
)
def test_a_gain_is_said_only_where_it_is_shown(chosen: Study, change: dict[str, Any], words: str) -> None:
    row = {"gain": 0.0, "low": 0.0, "high": 0.0, "helped": 5, "hurt": 4, "n": 9, "clusters": 9} | change
    assert words in gained(chosen, pd.Series(row, dtype=object))


def test_the_flagged_are_named_and_compared_with_the_others(chosen: Study) -> None:
    flagged = [decision.case_id for decision in chosen.decisions[chosen.ours] if decision.flagged]
    metric = chosen.policy_rows.set_index("case")["metric"]
    said = answers(chosen)["flagged"]
    assert said.startswith(f"{len(flagged)} of 20 cases w")
    assert flagged[0] in said
    assert f"mean Dice {metric[flagged].mean():.3f}, of the others {metric.drop(flagged).mean():.3f}" in said


def certified(study: Study, **more: Any) -> Study:
    values: dict[str, Any] = {
        "kind": "T2", "statement": "Mean HA is at most 0.10.", "loss": "HA", "method": "crc", "alpha": 0.1,
        "delta": None, "population": "all", "units": 16, "cases": 16, "floor": 1 / 17, "needed": 9, "cut": 0.02,
        "bound": 0.08, "kept": 0.5, "deployed": {}, "policy": policy_digest(study.policy),
    }  # fmt: skip
    return replace(study, extras=Extras(certificate=Certificate(**(values | more))))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "Mean HA is at most 0.10."),
        ({"groups": ("A",)}, "Mean HA is at most 0.10 (it does not cover 13 of 26 cases)."),
        ({"cut": None}, "Nothing is promised: nothing could be certified at 0.1"),
        ({"policy": "another"}, "Nothing is promised: the certificate is for policy another"),
    ],
)
def test_a_promise_is_printed_only_where_it_holds(study: Study, more: dict[str, Any], words: str) -> None:
    assert answers(certified(study, **more))["promised"].startswith(words)


@pytest.mark.parametrize(
    ("preflight", "words"),
    [
        (
            {"retained": {"go": False, "helped": 2, "hurt": 9}},
            "Nothing is promised: the certificate is void: its policy",
        ),
        ({"quota": {"low": 0, "mid": 0, "hard": 4000}}, "Nothing is promised: the certificate is void: the buckets"),
    ],
)
def test_a_promise_is_void_after_a_no_go_or_with_other_bucket_shares(
    study: Study, preflight: dict[str, Any], words: str
) -> None:
    advised = replace(
        study, policy=replace(study.policy, preflight={**study.policy.preflight, "guard": "", **preflight})
    )
    assert answers(certified(advised))["promised"].startswith(words)
    assert promise.section(certified(advised)).lead.startswith(words)


def test_a_promise_does_not_hold_for_the_policy_before_certification(study: Study) -> None:
    other = certified(study, policy="another", policy_before=policy_digest(study.policy))
    assert "the certified form of this policy" in answers(other)["promised"]
    assert promise.section(other).lead.startswith("Nothing is promised")


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

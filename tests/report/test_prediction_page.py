"""The page of a prediction folder: what stands beside HA."""

from __future__ import annotations

from typing import Any

import pytest

from casewise.core.predicted import PredictedCase
from casewise.core.records import Action, Decision, State
from casewise.report.certificate_page import _listed
from casewise.report.prediction_page import prediction_page

FACTS: dict[str, Any] = {"model": "m", "policy": "p", "calibration_id": "", "scores": {}, "versions": {}}
SCORES = {"Dice": 0.8, "source_Dice": 0.7, "ha": 0.0, "worse_voxels": 0.625}


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (0.13, "HA judged only 13% of the edit and says little here: read worse-voxels"),
        (0.9, "HA judged 90% of the edit"),
        (None, "nothing was changed, so HA judged nothing"),
    ],
)
def test_ha_is_printed_with_the_share_of_the_edit_that_it_judged(judged: float | None, said: str) -> None:
    page = prediction_page([], {**FACTS, "scores": {**SCORES, "judged": judged}})
    assert said in page
    assert "0.625 became wrong" in page
    assert "HA judged" not in prediction_page([], FACTS)


def test_a_street_is_scored_by_miou_and_nothing_is_listed_twice() -> None:
    scores = {**SCORES, "IoU": 0.41, "source_IoU": 0.4}
    page = prediction_page([], {**FACTS, "scores": scores, "background": False})
    assert "Mean mIoU of the deployed masks 0.410, of M0 0.400" in page
    assert "Mean Dice of the deployed masks 0.800, of M0 0.700" in prediction_page([], {**FACTS, "scores": scores})
    decision = Decision("a", Action.KEEP, State(1), 1, "router", coordinate="delta", value=0.25)
    entry = PredictedCase("a", "done", decision, signals={"1": {"delta": 0.25, "regions": 3.0}})
    page = prediction_page([entry], FACTS)
    assert page.count("<dt>delta</dt>") == 1
    assert "<dt>regions</dt><dd>3</dd>" in page
    assert "candidate 1; made: 1 candidate beside M0</dd>" in page
    assert '<p class="lead">1 case, m' in page


def test_flagged_cases_come_first_and_are_counted() -> None:
    entries = [
        PredictedCase(name, "done", Decision(name, Action.KEEP, State(1), 1, "consensus", flagged=name == "z"))
        for name in ("a", "z")
    ]
    page = prediction_page(entries, FACTS)
    assert "<b>1</b> flagged for a person to look at" in page
    assert "To decide on the flagged cases: casewise review." in page
    assert page.index('id="z"') < page.index('id="a"')
    assert page.count('<span class="flag">flagged</span>') == 1
    assert "flagged" not in prediction_page(entries[:1], FACTS)


def test_a_list_on_a_certificate_is_written_as_words() -> None:
    assert _listed(["consensus", "merge"]) == "consensus, merge"
    assert _listed(3) == "3"

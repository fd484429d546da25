"""The page of a prediction folder: what stands beside HA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from casewise.core.prediction_record import OUTSIDE, PredictedCase
from casewise.core.records import Action, Decision, State
from casewise.report.prediction_page import prediction_page

FACTS: dict[str, Any] = {"model": "m", "policy": "p", "calibration_id": "", "scores": {}, "versions": {}}
SCORES = {"Dice": 0.8, "source_Dice": 0.7, "ha": 0.0, "worse_voxels": 0.625}


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (0.13, "HA judged only 13% of the edit, so use worse-voxels"),
        (0.9, "HA judged 90% of the edit"),
        (None, "no voxel changed, so HA judged nothing"),
    ],
)
def test_ha_is_printed_with_the_share_of_the_edit_that_it_judged(judged: float | None, said: str) -> None:
    page = prediction_page([], {**FACTS, "scores": {**SCORES, "judged": judged}})
    assert said in page
    assert "0.625 became wrong" in page
    assert "HA judged" not in prediction_page([], FACTS)


def test_a_street_is_scored_by_miou() -> None:
    scores = {**SCORES, "IoU": 0.41, "source_IoU": 0.4}
    page = prediction_page([], {**FACTS, "scores": scores, "background": False})
    assert "Mean mIoU 0.410, original masks 0.400" in page
    assert "Mean Dice 0.800, original masks 0.700" in prediction_page([], {**FACTS, "scores": scores})


def test_a_case_says_how_much_changed_and_hides_signals_behind_details() -> None:
    decision = Decision("a", Action.KEEP, State(1), 1, "router", coordinate="delta", value=0.25, cut_low=0.1)
    signals = {"1": {"delta": 0.25, "delta_foreground": 0.5, "regions": 3.0}}
    entry = PredictedCase(
        "a", "done", decision, candidate="mean", signals=signals, changed=0.4, regions=({"voxels": 9},)
    )
    page = prediction_page([entry], FACTS)
    before, details = page.split("<details><summary>Details", 1)
    assert "40.0% of the original segmentation, in 1 place" in before
    assert "delta" not in before
    assert "<dt>delta</dt><dd>0.25 (cut-points 0.1)</dd>" in details
    assert "mean; 1 candidate made" in details
    assert "1 case: 1 new mask" in page
    tiny = replace(entry, regions=({"voxels": 9, "counts": True}, {"voxels": 2, "counts": False}))
    assert "40.0% of the original segmentation, in 1 place and tiny ones" in prediction_page([tiny], FACTS)


def entry(name: str, **more: Any) -> PredictedCase:
    return PredictedCase(name, "done", Decision(name, Action.KEEP, State(1), 1, "consensus", **more))


def test_cases_to_check_come_first_with_the_reason() -> None:
    poor = entry("z", flagged=True, quality=0.7, quality_low=0.57)
    page = prediction_page([entry("a"), poor], FACTS)
    assert "Please check 1 case:" in page
    assert page.count("the estimated Dice may be as low as 0.57") == 2
    assert "Dice about 0.70, at least 0.57" in page
    assert page.index('id="z"') < page.index('id="a"')
    plain = prediction_page([entry("a")], FACTS)
    assert "Please check" not in plain
    assert "The quality of these masks is not estimated" in plain
    assert "No case is flagged for a check." in prediction_page([entry("a", quality=0.9, quality_low=0.8)], FACTS)
    unlike = PredictedCase(
        "u", "done", Decision("u", Action.ROLLBACK, State(0), 1, "m0", flagged=True),
        notes=(f"{OUTSIDE}: the image is darker",),
    )  # fmt: skip
    assert 'Check because</dt><dd class="flag">the image is darker</dd>' in prediction_page([unlike], FACTS)
    failed = prediction_page([PredictedCase("f", "failed", error="<b>no file</b>")], FACTS)
    assert "no mask: &lt;b&gt;no file&lt;/b&gt;" in failed


def test_the_poorest_estimate_is_checked_first() -> None:
    lows = {"a": 0.6, "b": 0.2, "c": None}
    entries = [entry(name, flagged=True, quality=0.7, quality_low=low) for name, low in lows.items()]
    page = prediction_page(entries, FACTS)
    places = [page.index(f'<li><a href="#{name}">') for name in ("c", "b", "a")]
    assert places == sorted(places)


def test_a_reason_names_classes_not_their_numbers() -> None:
    said = f"{OUTSIDE}: the masks of this case are unlike those of the labelled ones: brightness of label 3 is -0.8"
    one = replace(entry("a", flagged=True), notes=(said,))
    page = prediction_page([one], {**FACTS, "classes": {3: "right ventricle"}})
    assert "brightness of right ventricle is -0.8" in page
    assert "label 3" not in page

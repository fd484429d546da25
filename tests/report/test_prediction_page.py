"""The page of a prediction folder: what stands beside HA."""

from __future__ import annotations

from typing import Any

import pytest

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

"""fit.html says what its bounds are, what so few patients cannot show, and how many poor masks were seen."""

from __future__ import annotations

from typing import Any

import pytest
from worlds.candidates import views_archive

from casewise.judge.calibration.calibrate import calibrate
from casewise.report.fit_page import fit_page, summary_lines


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``fit`` would write about ten patients of two scans."""
    archive = views_archive(tmp_path_factory.mktemp("fit") / "archive", cases=20)
    policy = calibrate(archive, "default", flag_below=0.05)  # no mask is that poor
    return {
        "model": "made-up", "cases": 20, "patients": 10, "ladders": ["views"], "metric": "dice",
        "preflight": dict(policy.preflight), "flagged": True, "promise": None, "certified": None, "learned": None,
        "notes": [], "seconds": 1.0, "steps_s": {}, "case_s": 1.0, "next": "",
    }  # fmt: skip


def test_the_bounds_are_not_called_a_95_percent_interval(facts: dict[str, Any]) -> None:
    page = fit_page(facts, ())
    assert "95 % interval</th>" not in page
    assert "one-sided 90 % bounds" in page
    assert "contained the true value in 55 % of simulations" in page


def test_the_page_says_in_the_open_what_so_few_patients_cannot_show(facts: dict[str, Any]) -> None:
    visible = fit_page(facts, ()).split("<details")[0]
    assert "Rare large losses may be missed: up to 21% of new patients" in visible


def test_the_page_says_why_the_expected_change_is_not_that_of_the_table(facts: dict[str, Any]) -> None:
    compared = facts["preflight"]["comparison"]
    (gain,) = (row["gain"] for row in compared["rows"] if row["design"] == compared["chosen"])
    visible = fit_page(facts, ()).split("<details")[0]
    assert "with the choice repeated without each of them" in visible
    nested = f"the expected change ({compared['nested']['gain']:+.4f}) repeats the choice without each patient"
    assert f"so its {gain:+.4f} may be too high; {nested}" in visible


@pytest.mark.parametrize(
    ("poor", "said"),
    [
        (0, "no labelled mask is poor, so the flag could not be tested; expect it to miss most poor masks"),
        (3, "poor masks seen: 3, of which 2 were flagged"),
    ],
)
def test_page_and_summary_say_how_many_poor_masks_were_seen(poor: int, said: str, facts: dict[str, Any]) -> None:
    quality = {**facts["preflight"]["quality"], "poor": poor, "poor_flagged": 2 if poor else 0}
    facts = {**facts, "preflight": {**facts["preflight"], "quality": quality}}
    assert any(said in line for line in summary_lines(facts))
    assert said in fit_page(facts, ()).split("<details")[0]


def test_patients_and_cases_that_are_hurt_are_counted_apart_and_the_choice_is_not_called_blind(
    facts: dict[str, Any],
) -> None:
    page = fit_page(facts, ())
    harm = facts["preflight"]["comparison"]["rows"][4]["harm"]  # of medoid, which is chosen
    assert f"{harm['hurt']} of {harm['patients']} patients on average; up to 34 % may" in page
    assert "the gain is at least" not in page
    assert "which does not allow for the choice" in page
    rows = [{"case": "a", "patient": "p", "source": 0.5, "metric": 0.6, "state": "1"}]
    assert "the design was chosen with all labels" in fit_page(facts, rows)
    kept = {**facts["preflight"]["comparison"], "chosen": "m0"}
    page = fit_page({**facts, "preflight": {**facts["preflight"], "comparison": kept}}, ())
    assert "up to 21 % may" not in page  # the masks in use hurt nobody


def test_a_deployed_design_that_worsens_a_measure_is_named_at_the_top_of_the_page(facts: dict[str, Any]) -> None:
    chosen = facts["preflight"]["comparison"]["chosen"]
    warnings = [f"{name} improves the metric by +0.0100, but ef moves away" for name in (chosen, "consensus")]
    page = fit_page({**facts, "measures": {"rows": [], "warnings": warnings, "intervals": []}}, ())
    top, below = page.split("<h2>Compared designs")
    assert warnings[0] in top
    assert warnings[1] not in top
    assert all(said in below for said in warnings)
    assert "Caution" not in fit_page(facts, ())


def test_a_page_without_new_masks_shows_none(facts: dict[str, Any]) -> None:
    rows = [{"case": "a", "patient": "p", "source": 0.5, "metric": 0.5, "state": "0"}]
    pictures = [{**rows[0], "pictures": ["data:,", "data:,"]}]
    assert "new mask</figcaption>" in fit_page(facts, rows, pictures)
    kept = {**facts["preflight"]["comparison"], "chosen": "m0"}
    page = fit_page({**facts, "preflight": {**facts["preflight"], "comparison": kept}}, rows, pictures)
    assert "Dice of the model’s own masks" in page
    assert "new mask" not in page.split("Compared designs")[0].lower()

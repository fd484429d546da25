"""The decision map of the case table: candidates side by side, the deployed one and the flag marked."""

from __future__ import annotations

import pytest
from worlds.candidates import views_archive

from casewise.judge.calibration.calibrate import calibrate
from casewise.measure.signals.agreement import candidates_of
from casewise.report.cases import candidate_map, case_frame, columns, shown_cases
from casewise.study.study import Study


@pytest.fixture(scope="module")
def views(tmp_path_factory) -> Study:
    """A consensus of five views that flags, on other patients."""
    home = tmp_path_factory.mktemp("map")
    calibration = views_archive(home / "calibration", cases=20, prefix="old")
    evaluation = views_archive(home / "evaluation", cases=20, prefix="new", seed=1, split="evaluation")
    return Study.of(
        evaluation, calibration, calibrate(calibration, "consensus", flag_below=0.7, confidence=0.8), resamples=50
    )


def test_candidates_stand_side_by_side_with_the_deployed_one_marked(views):
    decision = views.decisions[views.ours][0]
    found = candidate_map(views, decision)
    assert [one["name"] for one in found] == ["M0", *(f"view-{k}" for k in range(1, 6)), "consensus (vote)"]
    assert [one["name"] for one in found if one["chosen"]] == ["consensus (vote)"]
    masks = [mask for state, mask in views.evaluation.masks(decision.case_id).items() if not state.shrink]
    signals = candidates_of(masks, voters=range(6)).signals()  # the vote is not a separate candidate
    assert [float(one["agreement"]) for one in found] == pytest.approx([s["agreement"] for s in signals], abs=6e-4)


def test_the_table_names_the_candidate_and_who_was_flagged(views):
    assert columns(views)[2].key == "flagged"  # in the place of the bucket, which only routers have
    frame = case_frame(views).set_index("case")
    assert set(frame["state"]) == {"consensus (vote)"}
    flagged = {one.case_id for one in views.decisions[views.ours] if one.flagged}
    assert flagged
    assert set(frame.index[frame["flagged"] == "yes"]) == flagged


def test_only_pictured_cases_carry_their_candidates(views):
    shown = list(shown_cases(views, case_frame(views), pictures=2))
    assert [bool(one["facts"]["candidates"]) for one in shown[:3]] == [True, True, False]


def test_a_policy_that_asks_nobody_has_no_such_column(study):
    assert "flagged" not in [column.key for column in columns(study)]
    for decision in study.decisions[study.ours]:
        marked = [one for one in candidate_map(study, decision) if one["chosen"]]
        assert len(marked) == 1
        assert (marked[0]["name"] == "M0") == decision.rolled_back

"""The selection rule of the pictures (sec:supp-qual-select)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from casewise.measure.cleanup import Cleanup
from casewise.study.analyses import ANALYSES
from casewise.study.analyses.qualitative import DESIDERATA, chosen, wanted
from casewise.study.study import case_masks


def slices(*rows):
    columns = ["case", "slice", "ha", "change", "source", "worse", "better", "area"]
    frame = pd.DataFrame(list(rows), columns=columns)
    return frame.assign(**wanted(frame))


def test_harm_with_a_flat_metric_comes_before_everything_else():
    judged = slices(
        ("a", 0, 0.95, -0.20, 0.95, 9, 1, 10),  # much harm, but Dice shows it
        ("b", 1, 0.60, 0.01, 0.50, 6, 0, 10),  # harm that Dice does not show
        ("c", 2, 0.10, 0.00, 0.99, 1, 5, 10),
    )
    assert chosen(judged)[0]["case"] == "b"


def test_both_kinds_of_region_decide_between_equals():
    judged = slices(("a", 0, 0.9, 0.0, 0.5, 9, 0, 10), ("b", 0, 0.6, 0.0, 0.5, 6, 2, 10))
    assert chosen(judged)[0]["case"] == "b"


def test_the_second_picture_is_another_case_with_a_good_source():
    judged = slices(
        ("a", 0, 0.9, 0.0, 0.5, 9, 1, 10), ("a", 1, 0.8, 0.0, 0.95, 8, 1, 10), ("b", 0, 0.6, 0.0, 0.93, 6, 1, 10)
    )
    assert [pick["case"] for pick in chosen(judged)] == ["a", "b"]


def test_one_case_gives_one_picture():
    assert len(chosen(slices(("a", 0, 0.9, 0.0, 0.5, 9, 1, 10)))) == 1


def test_the_section_prints_how_many_slices_met_each_desideratum(study):
    section = ANALYSES["qualitative"](study)
    shown = {row["what"]: row["met"] for row in section.tables[0].rows}
    finding = section.findings[0]
    for name, words in DESIDERATA.items():
        assert shown[words] == finding.made[name]
    assert shown["all four"] == finding.made["all"]


def test_pictures_show_the_mask_after_cleanup(study):
    references = {one.case_id: one for one in study.decisions[study.reference]}
    cleaned = 0
    for decision in (one for one in study.decisions[study.ours] if not one.rolled_back):
        case = decision.case_id
        shown = case_masks(study, case, reference=references[case], deployed=replace(decision, cleanup="largest(1)"))
        plain = study.evaluation.mask(case, decision.state)
        after = Cleanup.parse("largest(1)").apply(plain)
        assert np.array_equal(shown.deployed, after)
        cleaned += bool((after != plain).any())
    assert cleaned

"""Clinical measures of old, new and label: agreement by patient, decisions that change, criteria on measures."""

from __future__ import annotations

import numpy as np
import pytest
from worlds.updates import write

import casewise
from casewise.core.errors import BadInput
from casewise.measure.measures import measure
from casewise.study.clinical import MeasuredCase, agreement, mask_measures, worsened_sentence

AFFINE = np.diag([1.0, 1.0, 10.0, 1.0])


def ball(voxels):
    """So many voxels of label 1, 10 mm3 each."""
    mask = np.zeros((4, 20, 20), np.uint8)
    mask.reshape(-1)[: int(voxels)] = 1
    return mask


def hearts(root, rows):
    """ROOT/{old,new,labels} from (patient, ED of old, ES of old, ED of new, ES of new, ED and ES of the label)."""
    table = ["case,patient,phase"]
    for patient, *voxels in rows:
        for at, phase in enumerate(("ED", "ES")):
            table.append(f"{patient}-{phase.lower()},{patient},{phase}")
            for folder, offset in (("old", 0), ("new", 2), ("labels", 4)):
                write(root / folder, f"{patient}-{phase.lower()}", ball(voxels[offset + at]), AFFINE)
    (root / "cases.csv").write_text("\n".join(table))
    (root / "measures.toml").write_text(
        '[measures.ef]\nformula = "100 * (volume(LV, ED) - volume(LV, ES)) / volume(LV, ED)"\ndecision = "< 40"\n'
    )
    return {
        "labels": root / "labels",
        "cases": root / "cases.csv",
        "label_names": "1=LV",
        "measures": root / "measures.toml",
    }


def test_the_ejection_fraction_and_its_decisions_are_those_of_a_pocket_calculator(tmp_path):
    options = hearts(
        tmp_path,
        [("p0", 100, 50, 100, 70, 100, 50), ("p1", 100, 60, 100, 60, 100, 55), ("p2", 100, 70, 100, 55, 100, 50)],
    )
    found = casewise.compare(tmp_path / "old", tmp_path / "new", **options)
    ef, volume = found.measures
    assert (volume.name, volume.unit, volume.units, volume.change.patients) == ("volume LV (1)", "ml", 6, 3)
    assert volume.change.bias == pytest.approx((0.1 + 0 - 0.075) / 3)  # 20 voxels of 10 mm3, halved over two scans
    assert ef.change.bias == pytest.approx((-20 + 0 + 15) / 3)
    assert ef.error_new.bias == pytest.approx((-20 - 5 - 5) / 3)
    assert (ef.closer, ef.farther) == (1, 1)
    assert [(one.unit, one.right) for one in ef.crossings] == [("p0", "old"), ("p2", "new")]
    assert found.first_shown[:2] == ["p0-ed", "p0-es"]  # decisions that changed are shown first


def test_criteria_on_measures_name_the_patients_that_broke_them(tmp_path):
    options = hearts(tmp_path, [(f"p{at}", 100, 50, 100, 50 + 2 * at, 100, 50) for at in range(12)])
    declared = options.pop("measures").read_text()
    plan = tmp_path / "plan.toml"
    criteria = "[protocol.criteria.measures.ef]\nmax_error_rise = 3\nmax_crossed_share = 0.9\n"
    plan.write_text(criteria + declared)
    found = casewise.compare(tmp_path / "old", tmp_path / "new", plan=plan, **options)
    rise, crossed = found.checks
    assert (rise.verdict, rise.value, rise.worst[0]) == ("broken", pytest.approx(11.0), "p11")
    assert crossed.value == pytest.approx(6 / 12)  # 50 + 2 * at > 60 from the sixth on
    assert found.verdict == "rejected"


def test_what_cannot_be_computed_is_counted_and_is_no_error(tmp_path):
    options = hearts(tmp_path, [("p0", 0, 50, 100, 50, 100, 50), ("p1", 100, 50, 100, 50, 100, 50)])
    (tmp_path / "cases.csv").write_text("case,patient,phase\np0-ed,p0,ED\np0-es,p0,ES\np1-ed,p1,ED\np1-es,p1,ED\n")
    ef = casewise.compare(tmp_path / "old", tmp_path / "new", **options).measures[0]
    assert (ef.units, ef.not_computable, ef.change) == (0, 2, None)


def test_a_formula_of_an_unknown_label_is_one_line(tmp_path):
    options = hearts(tmp_path, [("p0", 100, 50, 100, 50, 100, 50)])
    with pytest.raises(BadInput, match="measure ef: no label is called 'LV'; known: heart"):
        casewise.compare(tmp_path / "old", tmp_path / "new", **{**options, "label_names": "1=heart"})


def test_limits_of_agreement_count_a_patient_once():
    differences, patients = np.array([0.0, 2.0, 3.0, 3.0, 5.0]), np.array([0, 0, 1, 1, 2])
    found = agreement(differences, patients)
    means = np.array([1.0, 3.0, 5.0])
    assert (found.bias, found.patients) == (3.0, 3)
    assert found.limit_high == pytest.approx(3 + 1.96 * means.std(ddof=1))
    assert agreement(differences[:2], patients[:2]).limit_low is None


def test_a_measure_that_moves_away_from_the_labels_is_named():
    lv = [measure("lv", "volume(1)")]
    cases = [
        MeasuredCase.of(f"p{at}", {"old": ball(100), "new": ball(90 + at % 2 * 15), "label": ball(101)})
        for at in range(10)
    ]
    (result,) = mask_measures(cases, lv)
    assert (result.closer, result.farther) == (0, 10)
    assert worsened_sentence(result).startswith("lv moves away from the label in 10 and toward it in 0 of 10 patients")
    assert ", by 6.5 on average (mean error" in worsened_sentence(result)


def test_a_measure_that_is_nearer_on_average_is_not_called_worse_for_small_losses():
    sizes = (89, 89, 89, 101, 101)  # three patients lose one voxel, two gain eleven
    cases = [
        MeasuredCase.of(f"p{at}", {"old": ball(90), "new": ball(size), "label": ball(101)})
        for at, size in enumerate(sizes)
    ]
    (result,) = mask_measures(cases, [measure("lv", "volume(1)")])
    assert (result.closer, result.farther) == (2, 3)
    assert worsened_sentence(result) is None

"""Who calibrates and who evaluates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from worlds.datasets import write_data

from casewise.core.errors import BadInput
from casewise.study.benchmark.sides import sides_of


def test_sides_are_drawn_by_patient_where_nothing_says_who_calibrates(tmp_path: Path) -> None:
    write_data(tmp_path / "data", 12, split=False, per_patient=2)
    sides = sides_of(tmp_path / "data", share=0.5)
    patients = [{member.cluster for member in side.members.values()} for side in (sides.calibration, sides.evaluation)]
    assert [len(one) for one in patients] == [3, 3]
    assert not patients[0] & patients[1]
    assert sides.how["share"] == 0.5
    assert all(files.label is None for files in sides.files("evaluation", tmp_path))
    assert all(files.label is not None for files in sides.files("calibration", tmp_path))


def test_a_dataset_of_another_layout_is_copied_without_evaluation_labels(tmp_path: Path) -> None:
    write_data(tmp_path / "data", 4)
    sides = replace(sides_of(tmp_path / "data"), layouts=("mnms", "mnms"))
    known, unseen = (sides.files(split, tmp_path / "copies") for split in ("calibration", "evaluation"))
    assert [(one.id, one.cluster, one.split) for one in unseen] == [
        ("case_02", "case-p2", "evaluation"), ("case_03", "case-p3", "evaluation"),
    ]  # fmt: skip
    assert not (tmp_path / "copies" / "evaluation" / "labels").exists()
    assert [one.label.name for one in known if one.label] == ["case_00.nii.gz", "case_01.nii.gz"]
    (tmp_path / "copies" / "evaluation" / "cases.csv").unlink()  # cut short
    assert sides.files("evaluation", tmp_path / "copies") == unseen


def test_a_column_that_marks_one_side_only_is_refused(tmp_path: Path) -> None:
    table = write_data(tmp_path, 4) / "cases.csv"
    table.write_text(table.read_text().replace("calibration", "evaluation"))
    with pytest.raises(BadInput, match="marks evaluation cases only; mark calibration and evaluation in the column"):
        sides_of(tmp_path)

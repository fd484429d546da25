"""The split and the summary of a benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from worlds.datasets import write_data

from casewise.core.errors import BadInput
from casewise.study.benchmark import split_cohort, summary


def test_undefined_cases_are_counted_and_few_patients_have_no_interval() -> None:
    rows = pd.DataFrame(
        {"case": ["a", "b", "c"], "cluster": ["p", "p", "q"], "change": [0.02, -0.04, np.nan],
         "metric": [0.9, 0.5, np.nan],
         "ha": [0.5, 0.25, 0.0], "ba": 0.0, "unscored": [0.0, 0.5, 0.0], "area": [10.0, 30.0, 0.0], "worse_voxels": 0.1}
    )  # fmt: skip
    found = summary(rows, oracle=0.02)
    assert found["gain"] == pytest.approx(-0.01)
    assert found["captured"] == pytest.approx(-0.5)
    assert (found["undefined"], found["helped"], found["hurt"], found["hurt_by_a_point"]) == (1, 1, 1, 1)
    assert found["judged"] == pytest.approx((10 + 15) / 40)
    assert found["low"] is None


def test_patients_are_drawn_where_nothing_says_who_calibrates(tmp_path: Path) -> None:
    write_data(tmp_path / "data", 12, split=False, per_patient=2)
    split = split_cohort(tmp_path / "data", share=0.5)
    patients = [
        {member.cluster for member in split.of(side).members.values()} for side in ("calibration", "evaluation")
    ]
    assert [len(one) for one in patients] == [3, 3]
    assert not patients[0] & patients[1]
    assert split.how["share"] == 0.5
    assert all(
        files.label is not None for side in ("calibration", "evaluation") for files in split.files(side, tmp_path)
    )


def test_a_dataset_of_another_layout_is_copied_once(tmp_path: Path) -> None:
    write_data(tmp_path / "data", 4)
    split = replace(split_cohort(tmp_path / "data"), layouts={"calibration": "mnms", "evaluation": "mnms"})
    files = split.files("evaluation", tmp_path / "copies")
    assert [(one.id, one.cluster, one.split) for one in files] == [
        ("case_02", "case-p2", "evaluation"), ("case_03", "case-p3", "evaluation"),
    ]  # fmt: skip
    assert files[0].label == tmp_path / "copies" / "evaluation" / "labels" / "case_02.nii.gz"
    (tmp_path / "copies" / "evaluation" / "cases.csv").unlink()  # an incomplete copy is made again
    assert split.files("evaluation", tmp_path / "copies") == files


def test_a_column_that_marks_one_side_only_is_refused(tmp_path: Path) -> None:
    table = write_data(tmp_path, 4) / "cases.csv"
    table.write_text(table.read_text().replace("calibration", "evaluation"))
    with pytest.raises(BadInput, match="marks evaluation cases only"):
        split_cohort(tmp_path)

"""A cohort written as files comes back as it was."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from worlds.streets import driving_cohort

from casewise.data.datasets.plain import write_cohort
from casewise.data.nifti import read_label, read_volume
from casewise.data.phantom import cardiac_cohort
from casewise.data.pictures import read_label_picture, read_picture


def test_volumes_come_back_voxel_by_voxel(tmp_path: Path) -> None:
    cohort = cardiac_cohort("B", 1, split="files")
    folder, case = write_cohort(cohort, tmp_path), cohort.case("files_B_000")
    assert np.array_equal(read_volume(folder / "images" / "files_B_000.nii.gz").voxels, case.image[0])
    assert np.array_equal(read_label(folder / "labels" / "files_B_000.nii.gz"), cohort.label(case.id))


def test_pictures_come_back_pixel_by_pixel(tmp_path: Path) -> None:
    cohort = driving_cohort("night", 1, split="files")
    folder, case = write_cohort(cohort, tmp_path), next(iter(cohort))
    assert np.array_equal(read_picture(folder / "images" / f"{case.id}.png"), case.image)
    assert np.array_equal(read_label_picture(folder / "labels" / f"{case.id}.png"), cohort.label(case.id))


def test_the_table_names_group_cluster_and_split(tmp_path: Path) -> None:
    write_cohort(driving_cohort("fog", 2, split="calibration"), tmp_path)
    rows = list(csv.DictReader((tmp_path / "cases.csv").read_text().splitlines()))
    assert [row["cluster"] for row in rows] == ["calibration_fog_s00"] * 2
    assert {(row["group"], row["split"]) for row in rows} == {("fog", "calibration")}

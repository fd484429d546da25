"""What a folder holds, and which problems it has."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.data.datasets import load_dataset, recognize
from casewise.data.inspection import SAMPLE, Inspection, grid_of, inspect_cohort

Write = Callable[..., Path]
SHEARED = np.array([[1.2, 0.4, 0, 0], [0.0, 1.3, 0, 0], [0, 0, 9.6, 0], [0, 0, 0, 1.0]])
TURNED = np.array([[0, -0.5, 0, 0], [0.5, 0, 0, 0], [0, 0, 3.0, 0], [0, 0, 0, 1.0]])


def inspect_folder(path: Path, sample: int | None = SAMPLE) -> Inspection:
    return inspect_cohort(load_dataset(path, None), layout=recognize(path) or "plain", sample=sample)


def image() -> NDArray[np.float32]:
    return np.random.default_rng(0).random((6, 5, 4)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, volume: Write) -> Path:
    for case in ("a", "b"):
        volume(tmp_path / "images" / f"{case}.nii.gz", image())
        volume(tmp_path / "labels" / f"{case}.nii.gz", (image() > 0.5).astype(np.uint8))
    (tmp_path / "cases.csv").write_text("case,group,cluster,split\na,x,1,s\nb,y,2,t\n")
    return tmp_path


def test_a_clean_folder_has_no_problem(folder: Path) -> None:
    seen = inspect_folder(folder)
    assert (seen.layout, seen.cases, seen.labelled, seen.clusters) == ("plain", 2, 2, 2)
    assert (seen.groups, seen.splits) == ({"x": 1, "y": 1}, {"s": 1, "t": 1})
    assert seen.labels_seen == {0: 2, 1: 2}
    assert seen.geometry == {
        "shape": {"6 x 5 x 4": 2},
        "dtype": {"float32": 2},
        "spacing_mm": {"0.5 x 0.75 x 3": 2},
        "orientation": {"RAS": 2},
    }
    assert seen.problems == ()
    json.dumps(asdict(seen))


@pytest.mark.parametrize(
    ("affine", "problem"),
    [(SHEARED, "not at right angles"), (np.eye(4), "spacing was probably lost"), (TURNED, "orientations are mixed")],
)
def test_affines_that_cause_problems_are_named(
    folder: Path, volume: Write, affine: NDArray[np.float64], problem: str
) -> None:
    volume(folder / "images" / "b.nii.gz", image(), affine)
    volume(folder / "labels" / "b.nii.gz", (image() > 0.5).astype(np.uint8), affine)
    assert [text for text in inspect_folder(folder).problems if problem in text]


def test_a_turned_volume_is_not_a_sheared_one(folder: Path, volume: Write) -> None:
    angle = np.deg2rad(17)
    turned = np.diag([0.5, 0.75, 3.0, 1.0])
    turned[:2, :2] = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ turned[:2, :2]
    assert not grid_of(volume(folder / "t.nii.gz", image(), turned)).is_sheared
    assert grid_of(volume(folder / "s.nii.gz", image(), SHEARED)).is_sheared


def test_a_header_without_orientation_is_named(folder: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(image(), None), folder / "images" / "b.nii.gz")
    assert [text for text in inspect_folder(folder).problems if "neither qform nor sform" in text]


@pytest.mark.parametrize(
    ("name", "voxels", "problem"),
    [
        ("images/b.nii.gz", np.stack([image()] * 3, axis=-1), "has a time axis"),
        ("images/b.nii.gz", np.full((6, 5, 4), np.nan, np.float32), "NaN or infinite"),
        ("images/b.nii.gz", np.full((6, 5, 4), 7, np.int16), "every voxel of the image is 7"),
        ("labels/b.nii.gz", np.zeros((6, 5, 4), np.uint8), "b: the label is empty"),
        ("labels/b.nii.gz", image(), "not whole numbers"),
        ("labels/b.nii.gz", np.ones((6, 5, 3), np.uint8), "share one grid"),
        ("labels/b.nii.gz", np.full((6, 5, 4), 255, np.uint8), "255 is seen"),
    ],
)
def test_files_that_cause_problems_are_named(
    folder: Path, volume: Write, name: str, voxels: NDArray[np.generic], problem: str
) -> None:
    volume(folder / name, voxels)
    assert [text for text in inspect_folder(folder).problems if problem in text]


def test_a_label_at_another_place_is_named(folder: Path, volume: Write) -> None:
    volume(folder / "labels" / "b.nii.gz", np.ones((6, 5, 4), np.uint8), np.diag([0.5, 0.75, 2.0, 1.0]))
    assert [text for text in inspect_folder(folder).problems if "lie at different places" in text]


def test_a_damaged_file_does_not_end_the_inspection(folder: Path) -> None:
    (folder / "images" / "b.nii.gz").write_bytes(b"\x1f\x8b damaged")
    seen = inspect_folder(folder)
    assert seen.cases == 2
    assert [text for text in seen.problems if text.startswith("b: ")]


@pytest.mark.parametrize(
    ("offset", "form", "values", "problem"),
    [
        (70, "<h", [9999], "9999 is not a datatype"),
        (280, "<12f", [0.0] * 12, "places no volume"),
        (280, "<12f", 2 * [1.0, 2.0, 0.0, 0.0] + [0.0, 0.0, 1.0, 0.0], "places no volume"),  # parallel axes
        (280, "<f", [np.nan], "no volume"),
    ],
)
def test_a_damaged_header_does_not_either(
    folder: Path, volume: Write, offset: int, form: str, values: list[float], problem: str
) -> None:
    (folder / "images" / "b.nii.gz").unlink()
    content = bytearray(volume(folder / "images" / "b.nii", image()).read_bytes())
    struct.pack_into(form, content, offset, *values)
    (folder / "images" / "b.nii").write_bytes(content)
    assert [text for text in inspect_folder(folder).problems if text.startswith("b: ") and problem in text]


def test_missing_labels_and_clusters_and_split_patients_are_named(folder: Path) -> None:
    (folder / "labels" / "b.nii.gz").unlink()
    (folder / "cases.csv").write_text("case,cluster,split\na,p,s\nb,p,t\n")
    problems = " ".join(inspect_folder(folder).problems)
    assert "1 of 2 cases have no label" in problems
    assert "1 cluster in several splits, such as p" in problems
    (folder / "cases.csv").unlink()
    assert "every case will count as one" in " ".join(inspect_folder(folder).problems)


def test_a_folder_of_images_alone_names_the_folder_that_has_the_labels(folder: Path) -> None:
    hint = "to read labels, name the folder that holds images/ and labels/"
    assert hint in " ".join(inspect_folder(folder / "images").problems)
    (folder / "labels" / "b.nii.gz").unlink()  # the labels were found, and one of them is missing
    assert hint not in " ".join(inspect_folder(folder).problems)


def test_a_table_one_level_up_that_is_about_other_cases_is_not_used(folder: Path) -> None:
    """A user keeps the labelled images, their cases.csv and the folder of new images side by side."""
    assert inspect_folder(folder / "images").clusters == 2
    (folder / "cases.csv").write_text("case,cluster\nother,p\n")
    seen = inspect_folder(folder / "images")
    assert (seen.cases, seen.clusters) == (2, None)
    assert "every case will count as one" in " ".join(seen.problems)


def test_only_a_sample_is_opened_but_every_header_is_read(folder: Path) -> None:
    seen = inspect_folder(folder, sample=1)
    assert seen.labels_read == 1
    assert seen.geometry["shape"] == {"6 x 5 x 4": 2}


def test_labels_among_the_images_are_noticed(tmp_path: Path, volume: Write) -> None:
    for name in ("Case05", "Case05_Segmentation"):
        volume(tmp_path / f"{name}.nii.gz", image())
    assert [text for text in inspect_folder(tmp_path).problems if "look like labels among the images" in text]

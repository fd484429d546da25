"""RIM-ONE DL, REFUGE in its spellings, and the DoFE layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.data.datasets import recognize
from casewise.data.datasets.fundus import dofe, refuge, rimone_dl

Write = Callable[..., Path]
LABEL = np.zeros((6, 8), np.uint8)
LABEL[1:5, 1:7] = 1
LABEL[2:4, 3:5] = 2
GREY = np.array([255, 128, 0], np.uint8)[LABEL]


@pytest.fixture
def rimone(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> Path:
    images, truths = tmp_path / "RIM-ONE_DL_images", tmp_path / "RIM-ONE_DL_reference_segmentations"
    for diagnosis, stem, part in (
        ("glaucoma", "r2_Im001", "training_set"),
        ("normal", "r1_Im001", "test_set"),
        ("normal", "r2_Im001", "test_set"),
    ):
        for partition in ("partitioned_by_hospital", "partitioned_randomly"):
            picture(images / partition / part / diagnosis / f"{stem}.png", photo)
        picture(truths / diagnosis / f"{stem}-1-Disc-T.png", (LABEL > 0).astype(np.uint8) * 255, "1")
        cup = (LABEL == 2).astype(np.uint8) * 255
        cup[0, 0] = 255  # a speck outside the disc is no cup
        picture(truths / diagnosis / f"{stem}-1-Cup-T.png", cup, "RGB")
        (truths / diagnosis / f"{stem}-1-DCSeg-T.txt").write_text("1 2 3")
    return tmp_path


def test_disc_and_cup_are_joined(rimone: Path) -> None:
    assert np.array_equal(rimone_dl(rimone).label("normal_r1_Im001"), LABEL)


def test_one_stem_in_both_diagnoses_is_two_cases(rimone: Path) -> None:
    cohort = rimone_dl(rimone)
    assert cohort.ids == ("glaucoma_r2_Im001", "normal_r1_Im001", "normal_r2_Im001")
    assert [member.group for member in cohort.members.values()] == ["HUC", "HUMS+HCSC", "HUMS+HCSC"]
    assert [member.split for member in cohort.members.values()] == ["training", "test", "test"]
    assert recognize(rimone) == "rimone_dl"


def test_the_random_partition_says_no_hospital(rimone: Path) -> None:
    assert {member.group for member in rimone_dl(rimone, partition="randomly").members.values()} == {None}
    with pytest.raises(BadInput, match="by-hospital or randomly"):
        rimone_dl(rimone, partition="by-age")


def test_a_disc_without_a_cup_is_named(rimone: Path) -> None:
    next(rimone.rglob("r1_Im001-1-Cup-T.png")).unlink()
    with pytest.raises(BadInput, match=r"r1_Im001-1-Disc-T.png has no partner"):
        rimone_dl(rimone)


SPELLINGS = {
    "first": (
        "Training400/Glaucoma/g0001.jpg",
        "Annotation-Training400/Annotation-Training400/Disc_Cup_Masks/Glaucoma/g0001.bmp",
        "Test400/T0001.jpg",
        "REFUGE-Test-GT/Disc_Cup_Masks/G/T0001.bmp",
    ),
    "hyphens": (
        "Training400-images/Non-Glaucoma/n0001.jpg",
        "Annotation-Training400/Disc_Cup_Masks/Non-Glaucoma/n0001.bmp",
        "REFUGE-Validation400/V0001.jpg",
        "REFUGE-Validation400-GT/Disc_Cup_Masks/V0001.bmp",
    ),
    "second drop": (
        "REFUGE1-Train-400/Images/g0001.jpg",
        "REFUGE1-Train-400/Annotation/Disc_Cup_Masks/g0001.bmp",
        "REFUGE1-Test-400/Images/G0001.jpg",
        "REFUGE1-Test-400/Annotation/Disc_Cup_Masks/G0001.bmp",
    ),
    "prefix": (
        "REFUGE-Training400/Training400/Glaucoma/g0001.jpg",
        "REFUGE-Training400/Annotation-Training400/Disc_Cup_Masks/Glaucoma/g0001.bmp",
        "Test400/T0002.jpg",
        "REFUGE-Test-GT/Disc_Cup_Masks/N/t0002.bmp",
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_refuge_is_paired_in_every_spelling(
    tmp_path: Path, picture: Write, photo: NDArray[np.uint8], spelling: str
) -> None:
    for name in SPELLINGS[spelling]:
        picture(tmp_path / name, photo if name.endswith("jpg") else GREY)
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "._g0001.jpg").write_bytes(b"macOS")
    cohort = refuge(tmp_path)
    assert recognize(tmp_path) == "refuge"
    assert [member.labelled for member in cohort.members.values()] == [True, True]
    assert {member.split for member in cohort.members.values()} == {
        "training", "validation" if spelling == "hyphens" else "test",
    }  # fmt: skip
    assert {member.group for member in cohort.members.values()} == {"Zeiss", "Canon"}
    for case_id in cohort.ids:
        assert np.array_equal(cohort.label(case_id), LABEL)
        assert cohort.case(case_id).image.shape == (3, 6, 8)


def test_a_name_is_not_paired_across_splits(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    for name in ("Training400/Glaucoma/G0001.jpg", "Test400/G0001.jpg"):
        picture(tmp_path / name, photo)
    picture(tmp_path / "REFUGE-Test-GT/Disc_Cup_Masks/G/G0001.bmp", GREY)
    cohort = refuge(tmp_path)
    assert {case_id: m.labelled for case_id, m in cohort.members.items()} == {
        "test_G0001": True,
        "training_G0001": False,
    }


def test_two_copies_of_one_photograph_are_refused(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    for name in ("Training400/Glaucoma/g0001.jpg", "Training400-images/g0001.jpg"):
        picture(tmp_path / name, photo)
    with pytest.raises(BadInput, match="remove one copy"):
        refuge(tmp_path)


def test_a_colored_mask_is_refused(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    picture(tmp_path / "Test400/T0001.jpg", photo)
    picture(tmp_path / "REFUGE-Test-GT/Disc_Cup_Masks/T0001.bmp", photo)
    with pytest.raises(BadInput, match="is colored"):
        refuge(tmp_path).label("test_T0001")


def test_dofe_domains_are_the_original_datasets(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    for domain, split in (("Domain1", "train"), ("Domain1", "test"), ("Domain4", "test")):
        rois = tmp_path / "Fundus" / domain / split / "ROIs"
        picture(rois / "image" / "gdrishtiGS_001.png", photo)
        picture(rois / "mask" / "gdrishtiGS_001.png", GREY)
    cohort = dofe(tmp_path)
    assert recognize(tmp_path / "Fundus") == "dofe"
    assert {case_id: member.group for case_id, member in cohort.members.items()} == {
        "Domain1_train_gdrishtiGS_001": "Drishti-GS",
        "Domain1_test_gdrishtiGS_001": "Drishti-GS",
        "Domain4_test_gdrishtiGS_001": "REFUGE-val",
    }
    assert np.array_equal(cohort.label("Domain4_test_gdrishtiGS_001"), LABEL)

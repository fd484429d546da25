"""Cityscapes and ACDC: two codes of labels, prefix folders, invalid pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.data.datasets import recognize
from casewise.data.datasets.driving import acdc_driving, cityscapes, train_ids

Write = Callable[..., Path]
IDS = np.array([[7, 8, 11, 0, 33, 26, 4, 34]] * 6, np.uint8)
TRAIN_IDS = np.array([[0, 1, 2, 255, 18, 13, 255, 255]] * 6, np.uint8)


@pytest.fixture
def city(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> Path:
    for split, name in (
        ("train", "aachen_000000_000019"),
        ("val", "frankfurt_000001_000019"),
        ("val", "frankfurt_000001_000576"),
        ("test", "berlin_000000_000019"),
    ):
        place = name.split("_")[0]
        picture(tmp_path / "leftImg8bit" / split / place / f"{name}_leftImg8bit.png", photo)
        picture(tmp_path / "gtFine" / split / place / f"{name}_gtFine_labelIds.png", IDS)
        picture(tmp_path / "gtFine" / split / place / f"{name}_gtFine_instanceIds.png", IDS.astype(np.uint16) * 1000)
    return tmp_path


def test_label_ids_become_train_ids(city: Path) -> None:
    cohort = cityscapes(city)
    assert np.array_equal(cohort.label("aachen_000000_000019"), TRAIN_IDS)
    assert cohort.ignore == 255
    assert cohort.classes[13] == "car"


def test_all_other_ids_are_ignored_the_license_plate_too() -> None:
    assert np.unique(train_ids(np.array([-1, 0, 5, 9, 10, 14, 15, 16, 18, 29, 30, 45, 255, 300]))).tolist() == [255]


def test_frames_of_a_sequence_are_one_cluster(city: Path) -> None:
    cohort = cityscapes(city)
    members = [cohort.members[f"frankfurt_000001_{frame}"] for frame in ("000019", "000576")]
    assert {(member.cluster, member.group, member.split) for member in members} == {
        ("frankfurt_000001", "frankfurt", "validation")
    }
    assert cohort.case("frankfurt_000001_000019").image.shape == (3, 6, 8)


def test_placeholders_of_the_test_split_are_not_labels(city: Path) -> None:
    assert not cityscapes(city).members["berlin_000000_000019"].labelled


def test_generated_train_ids_do_when_nothing_else_is_there(city: Path, picture: Write) -> None:
    stem = city / "gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png"
    stem.unlink()
    picture(stem.with_name("aachen_000000_000019_gtFine_labelTrainIds.png"), TRAIN_IDS)
    assert np.array_equal(cityscapes(city).label("aachen_000000_000019"), TRAIN_IDS)


@pytest.fixture(params=[("", ""), ("rgb_anon_trainvaltest", "gt_trainval")], ids=["bare", "as unpacked"])
def acdc(request: pytest.FixtureRequest, tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> Path:
    images, truths = (tmp_path / prefix for prefix in request.param)
    for condition, split, sequence in (
        ("fog", "train", "GOPR0475"),
        ("night", "val", "GP010376"),
        ("snow", "test", "GP1"),
    ):
        for frame in ("000041", "000161"):
            name = f"{sequence}_frame_{frame}"
            picture(images / "rgb_anon" / condition / split / sequence / f"{name}_rgb_anon.png", photo)
            if split == "test":
                continue
            stem = truths / "gt" / condition / split / sequence
            picture(images / "rgb_anon" / condition / f"{split}_ref" / sequence / f"{name}_rgb_ref_anon.png", photo)
            picture(stem / f"{name}_gt_labelTrainIds.png", TRAIN_IDS)
            picture(stem / f"{name}_gt_labelIds.png", IDS)
            picture(stem / f"{name}_gt_invIds.png", (np.arange(48).reshape(6, 8) < 8).astype(np.uint8))
    return tmp_path


def test_conditions_sequences_and_splits_are_read(acdc: Path) -> None:
    cohort = acdc_driving(acdc)
    assert len(cohort) == 6  # no *_ref among them
    member = cohort.members["night_GP010376_frame_000041"]
    assert (member.group, member.cluster, member.split, member.labelled) == ("night", "GP010376", "validation", True)
    assert not cohort.members["snow_GP1_frame_000041"].labelled
    assert recognize(acdc) == "acdc_driving"


def test_invalid_pixels_are_ignored_or_kept(acdc: Path) -> None:
    case_id = "fog_GOPR0475_frame_000161"
    label = acdc_driving(acdc).label(case_id)
    assert (label[0] == 255).all()
    assert np.array_equal(label[1:], TRAIN_IDS[1:])
    kept = acdc_driving(acdc, ambiguous="keep")
    assert np.array_equal(kept.label(case_id), TRAIN_IDS)
    with pytest.raises(BadInput, match="ignore or keep"):
        acdc_driving(acdc, ambiguous="drop")


def test_label_ids_do_where_train_ids_are_missing(acdc: Path) -> None:
    for path in acdc.rglob("*_labelTrainIds.png"):
        path.unlink()
    assert np.array_equal(acdc_driving(acdc, ambiguous="keep").label("fog_GOPR0475_frame_000041"), TRAIN_IDS)

"""RIM-ONE DL, REFUGE in its spellings, and the DoFE layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.data.datasets import recognize
from casewise.data.datasets.fundus import rimone_dl

Write = Callable[..., Path]
LABEL = np.zeros((6, 8), np.uint8)
LABEL[1:5, 1:7] = 1
LABEL[2:4, 3:5] = 2


@pytest.fixture
def rimone(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> Path:
    images, truths = tmp_path / "RIM-ONE_DL_images", tmp_path / "RIM-ONE_DL_reference_segmentations"
    for diagnosis, stem, part in (
        ("glaucoma", "r2_Im001", "training_set"),
        ("normal", "r1_Im001", "test_set"),
        ("normal", "r2_Im001", "test_set"),
    ):
        picture(images / "partitioned_by_hospital" / part / diagnosis / f"{stem}.png", photo)
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


def test_a_disc_without_a_cup_is_named(rimone: Path) -> None:
    next(rimone.rglob("r1_Im001-1-Cup-T.png")).unlink()
    with pytest.raises(BadInput, match=r"r1_Im001-1-Disc-T.png lacks its disc or cup"):
        rimone_dl(rimone)

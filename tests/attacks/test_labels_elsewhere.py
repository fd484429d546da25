"""A label whose affine puts it elsewhere than its image is never scored without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.discs import disc

from casewise.cli import app
from casewise.core.errors import BadInput

AFFINE = np.diag([1.5, 1.5, 5.0, 1.0])


def volume(path: Path, voxels: Any, affine: Any = AFFINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(voxels, affine)
    image.set_qform(affine, 1)
    image.set_sform(affine, 1)
    nibabel.save(image, path)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.parametrize("moved", [np.eye(4) + 50 * np.eye(4, k=3), np.diag([-1.0, 1, 1, 1]), np.diag([2.0, 2, 2, 1])])
def test_neither_predict_nor_import_pairs_it(moved: Any, tmp_path: Path) -> None:
    for number in range(2):
        image, label = disc(number, 2, 24)
        volume(tmp_path / "images" / f"c{number}.nii.gz", image[0][..., None])
        volume(tmp_path / "labels" / f"c{number}.nii.gz", label[..., None], moved @ AFFINE if number else AFFINE)
    words = ("predict", "-m", "worlds.discs:eroding_model", "--policy", "m0", "-i", tmp_path / "images")
    done = call(*words, "-l", tmp_path / "labels", "-o", tmp_path / "out")
    assert done.exit_code == 3
    assert "c1 is not scored" in done.output
    assert list(json.loads((tmp_path / "out" / "summary.json").read_text())["adapt"]["cases"]) == ["c0"]
    with pytest.raises(BadInput, match="Its affine is"):
        call("import", "--old", tmp_path / "out", "--new", tmp_path / "out", "--labels", tmp_path / "labels", "-o",
             tmp_path / "archive")  # fmt: skip

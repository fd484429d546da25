"""Miniature files for dataset trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

Write = Callable[..., Path]


def _volume(path: Path, voxels: NDArray[Any], affine: NDArray[Any] | None = None) -> Path:
    """Write voxels in file order (x, y, z[, t])."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spaced = np.diag([0.5, 0.75, 3.0, 1.0])
    image = nibabel.Nifti1Image(voxels, spaced if affine is None else affine)
    image.header.set_data_dtype(voxels.dtype)
    nibabel.save(image, path)
    return path


def _picture(path: Path, values: NDArray[Any], mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    (image if mode is None else image.convert(mode)).save(path)
    return path


@pytest.fixture
def volume() -> Write:
    return _volume


@pytest.fixture
def picture() -> Write:
    return _picture


@pytest.fixture
def photo() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)

"""NIfTI volumes and pictures in and out, for every backbone that brings no reader of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.adapt.backbones import Reading
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.data import nifti, pictures
from casewise.data.folders import CaseFiles


def read_files(files: CaseFiles) -> Reading:
    """Read the channels of a case: NIfTI as (channel, slices, rows, columns), pictures as (channel, rows, columns)."""
    if _is_picture(files.images[0]):
        channels = [pictures.read_picture(path) for path in files.images]
        return Reading(_case(files, np.concatenate(channels), None), None)
    volumes = [nifti.read_volume(path) for path in files.images]
    shapes = {volume.voxels.shape for volume in volumes}
    if len(shapes) > 1:
        raise BadInput(f"the channels of case {files.id} have different shapes {sorted(shapes)}; resample them")
    image = np.stack([volume.voxels for volume in volumes]).astype(np.float32)
    return Reading(_case(files, image, volumes[0].spacing_mm), volumes[0].geometry)


def _case(files: CaseFiles, image: NDArray[Any], spacing_mm: tuple[float, ...] | None) -> Case:
    return Case(files.id, image, spacing_mm, files.group, files.cluster, files.split)


def read_label_file(path: Path) -> Mask:
    """A label as (slices, rows, columns) or (rows, columns)."""
    return pictures.read_label_picture(path) if _is_picture(path) else nifti.read_label(path)


def write_mask_file(mask: Mask, reading: Reading, path: Path) -> None:
    """Write a mask next to what it was read from: NIfTI with the image's geometry, or a PNG of label numbers."""
    if reading.place is None:
        pictures.write_label_picture(path, mask)
    else:
        nifti.write_mask(path, mask.reshape(reading.place.shape[::-1]), reading.place)


def _is_picture(path: Path) -> bool:
    return path.name.lower().endswith(pictures.ENDINGS)


Intensity = Callable[[NDArray[Any]], NDArray[Any]]


def zscore(image: NDArray[Any]) -> NDArray[Any]:
    """Each channel to mean 0 and standard deviation 1 over the whole case."""
    axes = tuple(range(1, image.ndim))
    spread = image.std(axis=axes, keepdims=True)
    return np.asarray((image - image.mean(axis=axes, keepdims=True)) / np.maximum(spread, 1e-8))


def imagenet(image: NDArray[Any]) -> NDArray[Any]:
    """RGB from 0..255 with the ImageNet mean and standard deviation."""
    shape = (3, *[1] * (image.ndim - 1))
    mean, spread = np.array([0.485, 0.456, 0.406]).reshape(shape), np.array([0.229, 0.224, 0.225]).reshape(shape)
    return np.asarray((image / 255.0 - mean) / spread)


def unit(image: NDArray[Any]) -> NDArray[Any]:
    """0..255 to 0..1."""
    return image / 255.0


def as_is(image: NDArray[Any]) -> NDArray[Any]:
    """Unchanged."""
    return image


INTENSITIES = {"zscore": zscore, "imagenet": imagenet, "unit": unit, "as-is": as_is}

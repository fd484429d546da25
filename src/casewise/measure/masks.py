"""Checks of masks: integer or bool arrays over 2-D or 3-D space, in NumPy or on a torch device.

torch is never imported here. A tensor is recognized by its ``detach``; operations on every voxel run on its device, and
only changed voxels are copied to NumPy. Ballots are the probabilities of several views of one case, in 255ths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput

Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def is_tensor(mask: Any) -> bool:
    """Return True for a torch tensor, recognized by its methods so that torch is not imported."""
    return hasattr(mask, "detach") and hasattr(mask, "device")


def checked_masks(**masks: Any) -> tuple[Any, ...]:
    """Return the masks as arrays or tensors; an error names the mask that cannot be used.

    >>> checked_masks(source=np.zeros((2, 2), bool), adapted=np.zeros(3, bool))
    Traceback (most recent call last):
    casewise.core.errors.BadInput: masks must be (rows, columns) or (slices, rows, columns), got adapted of shape ...
    """
    usable = tuple(_checked(name, mask) for name, mask in masks.items())
    shapes = {name: tuple(mask.shape) for name, mask in zip(masks, usable, strict=True)}
    if len(set(shapes.values())) > 1:
        came = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise BadInput(f"masks of one case must share one shape, got {came}; resample before comparing")
    return usable


def _checked(name: str, mask: Any) -> Any:
    if mask is None:
        raise BadInput(f"{name} must be an integer or bool mask, got None; pass the {name} of this case")
    array = mask if is_tensor(mask) else np.asarray(mask)
    if array.ndim not in (2, 3):
        raise BadInput(
            f"masks must be (rows, columns) or (slices, rows, columns), got {name} of shape {tuple(array.shape)}; "
            f"{'add an axis' if array.ndim < 2 else 'pass one case at a time, without batch or channel axis'}"
        )
    if 0 in array.shape:
        raise BadInput(f"a mask must have at least one voxel, got {name} of shape {tuple(array.shape)}; check its file")
    _check_values(name, array)
    return array


def _check_values(name: str, array: Any) -> None:
    if is_tensor(array):
        if array.is_floating_point() or array.is_complex():
            _refuse_dtype(name, array.dtype, bool((array != array).any()))
        signed = array.dtype.is_signed
    else:
        if array.dtype.kind not in "biu":
            _refuse_dtype(name, array.dtype, array.dtype.kind in "fc" and bool(np.isnan(array).any()))
        signed = array.dtype.kind == "i"
    if signed and array.min() < 0:
        raise BadInput(
            f"labels must be 0 (background) or more, got {int(array.min())} in {name}; "
            f"map it to a class, or to an unsigned value such as 255 and pass ignore=255"
        )


def _refuse_dtype(name: str, dtype: Any, holds_nan: bool) -> None:
    raise BadInput(
        f"masks must be integer or bool, got {name} of type {dtype}{' with NaN in it' if holds_nan else ''}; "
        f"take the argmax of probabilities, or cast labels with .astype('uint8')"
    )


def flat_values(mask: Any, voxels: Integers) -> NDArray[Any]:
    """Return the labels at flat indices (C order); of a tensor only these leave the device."""
    if not is_tensor(mask):
        array: NDArray[Any] = mask
        if array.flags.c_contiguous:
            return array.reshape(-1)[voxels]
        return array[np.unravel_index(voxels, array.shape)]
    here = mask.detach().reshape(-1)
    there = here[:0].long().new_tensor(voxels)
    picked: NDArray[Any] = here[there].cpu().numpy()
    return picked


def count_foreground(mask: Any) -> int:
    """Return the number of voxels that are not background."""
    return int(mask.count_nonzero() if is_tensor(mask) else np.count_nonzero(mask))


def on_host(mask: Any) -> NDArray[Any]:
    """Return the whole mask as a NumPy array."""
    array: NDArray[Any] = mask.detach().cpu().numpy() if is_tensor(mask) else mask
    return array


def bounding_box(covered: NDArray[Any]) -> tuple[slice, ...]:
    """Return the smallest box around all voxels that are not 0; one voxel if there is none."""
    whole_words = covered.flags.c_contiguous and covered.shape[-1] * covered.itemsize % 8 == 0
    words = covered.view(np.uint64) if whole_words else covered  # eight bytes at a time: faster to reduce
    rows = np.bitwise_or.reduce(words, axis=-1) != 0  # a flag for each row of the volume
    axes = range(rows.ndim)
    sides = [_side(rows.any(axis=tuple(other for other in axes if other != axis))) for axis in axes]
    inner = covered[tuple(sides)].reshape(-1, covered.shape[-1])
    return (*sides, _side(np.bitwise_or.reduce(inner, axis=0) != 0))


def _side(hit: Flags) -> slice:
    where = np.flatnonzero(hit)
    return slice(int(where[0]), int(where[-1]) + 1) if where.size else slice(0, 1)


def checked_spacing(spacing_mm: Sequence[float] | None, axes: int) -> Floats:
    """Return one positive size in millimetres per axis; ones (voxel units) without a spacing."""
    if spacing_mm is None:
        return np.ones(axes)
    spacing = np.asarray(spacing_mm, dtype=np.float64)
    if spacing.shape != (axes,) or not np.all(np.isfinite(spacing)) or not np.all(spacing > 0):
        raise BadInput(
            f"spacing_mm must have {axes} positive numbers, one for each axis of the mask, got {spacing_mm!r}; "
            f"drop the axis that the mask does not have, or reorder"
        )
    return spacing


def least_voxels(
    min_area: int, min_area_mm: float | None = None, spacing_mm: Sequence[float] | None = None, *, axes: int
) -> int:
    """Return the fewest voxels of a region (B4): ``min_area``, or ``min_area_mm`` in mm2 (2-D) or mm3 (3-D) (S26).

    >>> least_voxels(16, 10.0, (2.0, 1.0, 1.0), axes=3)
    5
    """
    if min_area_mm is None:
        if min_area < 1 or min_area != int(min_area):
            raise BadInput(f"min_area must be a whole number of at least 1 voxel, got {min_area!r}; 1 keeps all")
        return int(min_area)
    if spacing_mm is None:
        raise BadInput(f"min_area_mm={min_area_mm} needs spacing_mm to become voxels, got None; give the spacing")
    if not min_area_mm > 0 or not math.isfinite(min_area_mm):
        raise BadInput(f"min_area_mm must be a positive area (2-D) or volume (3-D), got {min_area_mm!r}")
    voxel_mm = float(np.prod(checked_spacing(spacing_mm, axes)))
    return max(1, math.ceil(min_area_mm / voxel_mm * (1 - 1e-12)))


def label_volumes(mask: ArrayLike, spacing_mm: Sequence[float] | None) -> dict[int, float]:
    """Volume of every label of a mask: millilitres for a volume with a spacing, else voxels (pixels).

    Args:
        mask: Label numbers, (slices, rows, columns) or (rows, columns).
        spacing_mm: One number per axis of the mask; None where the header does not say it.

    Returns:
        Volume by label number, without the background.

    Example:
        >>> label_volumes(np.ones((1, 10, 10), np.uint8), (10, 1, 1))
        {1: 1.0}
    """
    voxels = np.asarray(mask)
    unit = 1.0
    if spacing_mm is not None and voxels.ndim == 3:
        unit = float(np.prod(checked_spacing(spacing_mm, 3))) / 1000
    labels, counts = np.unique(voxels, return_counts=True)
    return {
        int(label): int(count) * unit for label, count in zip(labels.tolist(), counts.tolist(), strict=True) if label
    }

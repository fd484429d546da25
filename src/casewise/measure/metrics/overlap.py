"""Overlap of a mask with its label: Dice (A10) and mean IoU, per image and micro (A11).

NaN means undefined: a cohort mean skips it and counts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.measure.masks import Integers, checked_masks, on_host

NAN = float("nan")
VOID = 255  # the label of driving scenes that is never scored (A11)
_FEW = 256  # classes whose pairs fit 16 bits


def dice(mask: Any, label: Any, *, ignore: int | None = None) -> float:
    r"""Mean Dice of the foreground classes that the label holds (A10).

    .. math:: \frac{1}{|C|} \sum_{c \in C} \frac{2 |m_c \cap y_c|}{|m_c| + |y_c|}, \qquad C = \{c > 0 : |y_c| > 0\}

    Args:
        mask: Predicted mask, integer labels of shape ``(*space)``.
        label: True mask, same shape.
        ignore: Label value whose voxels are left out.

    Returns:
        The mean Dice, or NaN if the label has no foreground.

    Raises:
        BadInput: If the shapes differ.

    Example:
        >>> dice(np.array([[1, 1, 2]]), np.array([[1, 0, 0]]))
        0.6666666666666666
    """
    return dice_of_counts(*_counts(mask, label, ignore))


def dice_of_counts(shared: Any, in_mask: Any, in_label: Any) -> float:
    """Return the mean Dice from the voxels of each class in both, in the mask and in the label."""
    held = np.flatnonzero(in_label)
    held = held[held > 0]
    return float(np.mean(2 * shared[held] / (in_mask[held] + in_label[held]))) if held.size else NAN


def miou(mask: Any, label: Any, *, ignore: int | None = VOID) -> float:
    r"""Mean IoU of one image over the classes that mask or label hold (A11); background 0 is a class like any other.

    .. math:: \frac{1}{|C|} \sum_{c \in C} \frac{|m_c \cap y_c|}{|m_c \cup y_c|}, \qquad C = \{c : |m_c \cup y_c| > 0\}

    Args:
        mask: Predicted mask, integer labels of shape ``(*space)``.
        label: True mask, same shape.
        ignore: Label value whose voxels are left out.

    Returns:
        The mean IoU, or NaN if no voxel is left.

    Raises:
        BadInput: If the shapes differ.

    Example:
        >>> miou(np.array([[0, 1, 1]]), np.array([[0, 0, 1]]))
        0.5
    """
    return miou_of_counts(*_counts(mask, label, ignore))


def miou_of_counts(shared: Any, in_mask: Any, in_label: Any) -> float:
    """Return the mean IoU from the voxels of each class in both, in the mask and in the label."""
    union = in_mask + in_label - shared
    held = np.flatnonzero(union)
    return float(np.mean(shared[held] / union[held])) if held.size else NAN


def micro_miou(pairs: Iterable[tuple[Any, Any]], *, ignore: int | None = VOID) -> float:
    """Mean IoU over all voxels of many (mask, label) pairs together: counts are added before they are divided (A11)."""
    total = np.zeros((3, 0), np.int64)
    for mask, label in pairs:
        counts = np.stack(_counts(mask, label, ignore))
        size = max(total.shape[1], counts.shape[1])
        total, counts = (np.pad(part, ((0, 0), (0, size - part.shape[1]))) for part in (total, counts))
        total = total + counts
    return miou_of_counts(*total)


def _counts(mask: Any, label: Any, ignore: int | None) -> tuple[Integers, Integers, Integers]:
    """Voxels of each class that mask and label share, that the mask has, that the label has."""
    mask, label = (on_host(array).reshape(-1) for array in checked_masks(mask=mask, label=label))
    if ignore is not None:
        valid = label != ignore
        mask, label = mask[valid], label[valid]
    held = (mask != 0) | (label != 0)
    background = held.size - np.count_nonzero(held)
    if 2 * background > held.size:  # most of a volume: left out here, added to class 0 below
        mask, label = mask[held], label[held]
    else:
        background = 0
    counts = _tallied(mask, label)
    for count in counts:
        count[0] += background
    return counts


def _tallied(mask: NDArray[Any], label: NDArray[Any]) -> tuple[Integers, Integers, Integers]:
    """Return the three counts of flat arrays; with few classes from one table of (mask, label) pairs."""
    size = int(max(mask.max(initial=0), label.max(initial=0))) + 1
    if size > _FEW:
        return _tally(mask[mask == label], size), _tally(mask, size), _tally(label, size)
    pairs = mask.astype(np.uint16) * np.uint16(size) + label.astype(np.uint16)
    table = np.bincount(pairs, minlength=size * size).reshape(size, size)
    return table.diagonal().copy(), table.sum(axis=1), table.sum(axis=0)


def _tally(values: NDArray[Any], size: int) -> Integers:
    return np.bincount(values.astype(np.intp, copy=False), minlength=size)

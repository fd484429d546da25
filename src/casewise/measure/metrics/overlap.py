"""Overlap of a mask with its label: Dice (A10) and mean IoU, per image and micro (A11).

``EMPTY`` has the value of every metric for empty masks. NaN means undefined: a cohort mean skips it and counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.core.registry import Registry
from casewise.measure.masks import Integers, checked_masks, on_host

NAN = float("nan")


@dataclass(frozen=True)
class Empty:
    """A metric's value where mask, label or both have no foreground; None where the usual formula applies."""

    both: float | None
    mask_only: float | None
    label_only: float | None
    why: str


EMPTY: Registry[Empty] = Registry(
    "metric",
    {
        "dice": Empty(NAN, 0.0, NAN, "classes absent from the label are skipped; undefined if none is left"),
        "miou": Empty(None, None, None, "background is a class; NaN only if every voxel is ignored"),
        "hd95": Empty(NAN, NAN, NAN, "a mask without a surface has no distance; the case is excluded and counted"),
        "assd": Empty(NAN, NAN, NAN, "a mask without a surface has no distance"),
        "surface_dice": Empty(NAN, 0.0, 0.0, "a surface without a counterpart is never within the tolerance"),
        "boundary_iou": Empty(NAN, 0.0, 0.0, "a boundary without a counterpart has no overlap"),
    },
)


def value_if_empty(metric: str, *, mask_empty: bool, label_empty: bool) -> float | None:
    """Return the entry of the table, or None if the formula of the metric applies.

    >>> value_if_empty("surface_dice", mask_empty=True, label_empty=False)
    0.0
    """
    rule = EMPTY[metric]
    if mask_empty and label_empty:
        return rule.both
    if mask_empty:
        return rule.mask_only
    return rule.label_only if label_empty else None


VOID = 255  # the label of driving scenes that is never scored (A11)
_FEW = 256  # classes whose pairs fit 16 bits


def dice(mask: Any, label: Any, *, classes: Sequence[int] | None = None, ignore: int | None = None) -> float:
    r"""Mean Dice of the foreground classes that the label holds (A10).

    .. math:: \frac{1}{|C|} \sum_{c \in C} \frac{2 |m_c \cap y_c|}{|m_c| + |y_c|}, \qquad C = \{c > 0 : |y_c| > 0\}

    Args:
        mask: Predicted mask, integer labels of shape ``(*space)``.
        label: True mask, same shape.
        classes: Score only these classes. A class that the label lacks is skipped.
        ignore: Label value whose voxels are left out.

    Returns:
        The mean Dice, or NaN if no class is left.

    Raises:
        BadInput: If the shapes differ or a class is negative.

    Example:
        >>> dice(np.array([[1, 1, 2]]), np.array([[1, 0, 0]]))
        0.6666666666666666
    """
    values = list(dice_by_class(mask, label, classes=classes, ignore=ignore).values())
    return float(np.mean(values)) if values else NAN


def dice_by_class(
    mask: Any, label: Any, *, classes: Sequence[int] | None = None, ignore: int | None = None
) -> dict[int, float]:
    """Dice of each foreground class that the label holds; absent classes have no entry (A10)."""
    shared, in_mask, in_label = _counts(mask, label, ignore)
    present = np.flatnonzero(in_label)
    wanted = present[present > 0] if classes is None else [c for c in _checked(classes) if c in present]
    return {int(c): float(2 * shared[c] / (in_mask[c] + in_label[c])) for c in wanted}


def dice_of_counts(shared: Any, in_mask: Any, in_label: Any) -> float:
    """Return the mean Dice from the voxels of each class in both, in the mask and in the label."""
    held = np.flatnonzero(in_label)
    held = held[held > 0]
    return float(np.mean(2 * shared[held] / (in_mask[held] + in_label[held]))) if held.size else NAN


def miou(mask: Any, label: Any, *, classes: Sequence[int] | None = None, ignore: int | None = VOID) -> float:
    r"""Mean IoU of one image over the classes that mask or label hold (A11); background 0 is a class like any other.

    .. math:: \frac{1}{|C|} \sum_{c \in C} \frac{|m_c \cap y_c|}{|m_c \cup y_c|}, \qquad C = \{c : |m_c \cup y_c| > 0\}

    Args:
        mask: Predicted mask, integer labels of shape ``(*space)``.
        label: True mask, same shape.
        classes: Score only these classes.
        ignore: Label value whose voxels are left out.

    Returns:
        The mean IoU, or NaN if no voxel is left.

    Raises:
        BadInput: If the shapes differ or a class is negative.

    Example:
        >>> miou(np.array([[0, 1, 1]]), np.array([[0, 0, 1]]))
        0.5
    """
    return _mean_iou(np.stack(_counts(mask, label, ignore)), classes)


def miou_of_counts(shared: Any, in_mask: Any, in_label: Any) -> float:
    """Return the mean IoU from the voxels of each class in both, in the mask and in the label."""
    return _mean_iou(np.stack([shared, in_mask, in_label]), None)


def micro_miou(
    pairs: Iterable[tuple[Any, Any]], *, classes: Sequence[int] | None = None, ignore: int | None = VOID
) -> float:
    """Mean IoU over all voxels of many (mask, label) pairs together: counts are added before they are divided (A11)."""
    total = np.zeros((3, 0), np.int64)
    for mask, label in pairs:
        counts = np.stack(_counts(mask, label, ignore))
        size = max(total.shape[1], counts.shape[1])
        total, counts = (np.pad(part, ((0, 0), (0, size - part.shape[1]))) for part in (total, counts))
        total = total + counts
    return _mean_iou(total, classes)


def _mean_iou(counts: NDArray[Any], classes: Sequence[int] | None) -> float:
    shared, in_mask, in_label = counts
    union = in_mask + in_label - shared
    held = np.flatnonzero(union)
    if classes is not None:
        held = np.intersect1d(held, _checked(classes))
    return float(np.mean(shared[held] / union[held])) if held.size else NAN


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


def _checked(classes: Sequence[int]) -> list[int]:
    if any(c < 0 or c != int(c) for c in classes):
        raise BadInput(f"classes must be whole numbers from 0, got {list(classes)!r}; list the label values to score")
    return [int(c) for c in classes]

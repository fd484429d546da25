"""Agreement of surfaces: 95th percentile and mean distance, surface Dice, boundary IoU (M9). Foreground is binarized.

Each metric takes a mask and a label, or the :class:`~casewise.measure.surfaces.Gaps` that were measured once:

    gaps = surface_gaps(mask, label, spacing_mm=(10.0, 1.25, 1.25))
    hd95(gaps), assd(gaps), surface_dice(gaps, tolerance_mm=2.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy import ndimage

from casewise.core.errors import BadInput
from casewise.measure.masks import Flags, checked_masks, on_host
from casewise.measure.metrics.empty import value_if_empty
from casewise.measure.surfaces import Gaps, surface_gaps

Directed = Literal["pooled", "max"]


def hd95(
    mask: Any, label: Any = None, *, spacing_mm: Sequence[float] | None = None, directed: Directed = "pooled"
) -> float:
    """95th percentile of the distances between surface voxels, in mm (voxels without a spacing) (M9).

    ``directed="pooled"`` takes the percentile of both directions together, as MedPy 0.5.2 does; ``"max"`` the larger
    of the two directions' percentiles, as MONAI does. NaN if mask or label is empty.

    >>> mask, label = np.zeros((3, 9), bool), np.zeros((3, 9), bool)
    >>> mask[1, 1], label[1, 5] = True, True
    >>> hd95(mask, label, spacing_mm=(1.0, 0.5))
    2.0
    """
    if directed not in ("pooled", "max"):
        raise BadInput(f"directed is 'pooled' (MedPy) or 'max' (MONAI), got {directed!r}")
    gaps = _gaps(mask, label, spacing_mm)
    if (value := _if_empty("hd95", gaps)) is not None:
        return value
    there, back = gaps.voxels.from_mask, gaps.voxels.from_label
    if directed == "pooled":
        return float(np.percentile(np.concatenate([there, back]), 95))
    return float(max(np.percentile(there, 95), np.percentile(back, 95)))


def assd(mask: Any, label: Any = None, *, spacing_mm: Sequence[float] | None = None) -> float:
    """Average symmetric surface distance: the mean over both directions' distances together, as MedPy 0.5.2 does."""
    gaps = _gaps(mask, label, spacing_mm)
    if (value := _if_empty("assd", gaps)) is not None:
        return value
    return float(np.concatenate([gaps.voxels.from_mask, gaps.voxels.from_label]).mean())


def surface_dice(
    mask: Any, label: Any = None, *, tolerance_mm: float, spacing_mm: Sequence[float] | None = None
) -> float:
    r"""Share of both surfaces that lies within ``tolerance_mm`` of the other (Nikolov et al. 2018, arXiv 1809.04430).

    .. math:: \frac{|\{s \in S_m : d(s, S_y) \le t\}| + |\{s \in S_y : d(s, S_m) \le t\}|}{|S_m| + |S_y|}

    over surface elements at the corners of the voxel grid, weighted by their area: DeepMind's surface-distance 0.1.
    Without a spacing the tolerance is in voxels.
    """
    if not tolerance_mm >= 0:
        raise BadInput(f"tolerance_mm is zero or more, got {tolerance_mm!r}; give the accepted gap in millimetres")
    gaps = _gaps(mask, label, spacing_mm)
    if (value := _if_empty("surface_dice", gaps)) is not None:
        return value
    found = gaps.surfels
    near_label = found.mask_sizes[found.from_mask <= tolerance_mm].sum()
    near_mask = found.label_sizes[found.from_label <= tolerance_mm].sum()
    return float((near_label + near_mask) / (found.mask_sizes.sum() + found.label_sizes.sum()))


def boundary_iou(mask: Any, label: Any, *, width: int | None = None) -> float:
    """IoU of the inner bands of mask and label (Cheng et al. 2021, arXiv 2103.16562).

    A band holds the foreground voxels within ``width`` steps (diagonal steps count one) of the background, where what
    lies beyond the image is background. Without a width, 2 % of the diagonal as in the paper, at least one.
    """
    mask, label = (on_host(array) > 0 for array in checked_masks(mask=mask, label=label))
    steps = max(1, round(0.02 * math.hypot(*mask.shape))) if width is None else width
    if steps < 1:
        raise BadInput(f"width is a whole number of voxels, at least 1, got {width!r}")
    value = value_if_empty("boundary_iou", mask_empty=not mask.any(), label_empty=not label.any())
    if value is not None:
        return value
    band, label_band = _band(mask, steps), _band(label, steps)
    return float(np.count_nonzero(band & label_band) / np.count_nonzero(band | label_band))


def _band(inside: Flags, steps: int) -> Flags:
    """Foreground within so many steps of the background."""
    core = (slice(1, -1),) * inside.ndim
    depth = ndimage.distance_transform_cdt(np.pad(inside, 1), metric="chessboard")[core]
    return np.asarray(inside & (depth <= steps))


def _gaps(mask: Any, label: Any, spacing_mm: Sequence[float] | None) -> Gaps:
    if not isinstance(mask, Gaps):
        return surface_gaps(mask, label, spacing_mm=spacing_mm)
    if label is not None or spacing_mm is not None:
        raise BadInput("surface gaps already know their label and spacing; pass either gaps alone, or mask and label")
    return mask


def _if_empty(metric: str, gaps: Gaps) -> float | None:
    return value_if_empty(metric, mask_empty=gaps.mask_empty, label_empty=gaps.label_empty)

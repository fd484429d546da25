"""Surface metrics on shapes whose answer is known (M9)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import ndimage

from casewise import BadInput, assd, boundary_iou, hd95, surface_dice, surface_gaps


def square(low: int, high: int, size: int = 20) -> np.ndarray:
    mask = np.zeros((size, size), np.uint8)
    mask[low:high, low:high] = 1
    return mask


def test_equal_masks_have_no_gap():
    gaps = surface_gaps(square(3, 9), square(3, 9))
    assert (hd95(gaps), assd(gaps), surface_dice(gaps, tolerance_mm=0)) == (0, 0, 1)
    assert boundary_iou(square(3, 9), square(3, 9)) == 1


def test_two_voxels_are_as_far_apart_as_their_spacing_says():
    mask, label = np.zeros((4, 3, 3), bool), np.zeros((4, 3, 3), bool)
    mask[0, 1, 1] = label[3, 1, 1] = True
    assert hd95(mask, label) == 3
    assert hd95(mask, label, spacing_mm=(10.0, 1.0, 1.0)) == assd(mask, label, spacing_mm=(10.0, 1.0, 1.0)) == 30


def test_pooled_and_directed_hd95_are_not_the_same():
    label = np.zeros((1, 30), np.uint8)
    label[0, :14] = 1
    mask = label.copy()
    mask[0, 21] = 1  # one of fifteen surface voxels strays by 8: above the 95th percentile of 29, below that of 15
    assert hd95(mask, label) == 0
    assert hd95(mask, label, directed="max") == pytest.approx(0.3 * 8)


def test_an_unknown_direction_is_named():
    with pytest.raises(BadInput, match=r"'pooled' \(MedPy\) or 'max' \(MONAI\), got 'both'"):
        hd95(square(1, 3), square(1, 3), directed="both")


def test_cropping_changes_nothing():
    small = surface_gaps(square(3, 9, 12), square(4, 10, 12))
    large = surface_gaps(square(3, 9, 60), square(4, 10, 60))
    assert hd95(small) == hd95(large)
    assert surface_dice(small, tolerance_mm=1.0) == surface_dice(large, tolerance_mm=1.0)


def test_masks_at_the_border_have_a_surface_there():
    full = np.ones((4, 4), np.uint8)
    assert surface_gaps(full, full).voxels.from_mask.size == 12


def test_surface_elements_of_a_box_add_up_to_its_surface():
    box = np.zeros((12, 12, 12), bool)
    box[2:10, 2:10, 2:10] = True
    total = surface_gaps(box, box, spacing_mm=(1.0, 2.0, 3.0)).surfels.mask_sizes.sum()
    exact = 2 * (8 * 16 + 8 * 24 + 16 * 24)
    assert 0.85 * exact < total < exact  # edges and corners are cut off, faces are exact


def test_surface_dice_grows_with_the_tolerance():
    gaps = surface_gaps(square(3, 12), square(5, 14))
    ladder = [surface_dice(gaps, tolerance_mm=t) for t in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert ladder == sorted(ladder)
    assert ladder[0] < 1
    assert ladder[-1] == 1


def test_a_negative_tolerance_is_refused():
    with pytest.raises(BadInput, match=r"tolerance_mm is zero or more, got -1"):
        surface_dice(square(1, 3), square(1, 3), tolerance_mm=-1)


def test_gaps_come_alone():
    gaps = surface_gaps(square(1, 5), square(2, 6))
    with pytest.raises(BadInput, match="already include label and spacing"):
        hd95(gaps, square(1, 5))
    with pytest.raises(BadInput, match="already include label and spacing"):
        assd(gaps, spacing_mm=(1.0, 1.0))


def test_gaps_and_masks_give_the_same():
    mask, label, spacing = square(1, 5), square(2, 7), (0.5, 2.0)
    gaps = surface_gaps(mask, label, spacing_mm=spacing)
    assert hd95(gaps) == hd95(mask, label, spacing_mm=spacing)
    assert assd(gaps) == assd(mask, label, spacing_mm=spacing)
    assert surface_dice(gaps, tolerance_mm=1) == surface_dice(mask, label, tolerance_mm=1, spacing_mm=spacing)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_boundary_iou_is_that_of_repeated_erosion(width):
    mask, label = square(2, 14), square(4, 15)
    bands = []
    for array in (mask, label):
        inside = np.pad(array > 0, 1)
        bands.append(inside & ~ndimage.binary_erosion(inside, np.ones((3, 3)), iterations=width))
    expected = (bands[0] & bands[1]).sum() / (bands[0] | bands[1]).sum()
    assert boundary_iou(mask, label, width=width) == pytest.approx(expected)


def test_the_band_is_two_percent_of_the_diagonal():
    mask, label = square(20, 180, 200), square(24, 184, 200)
    assert boundary_iou(mask, label) == boundary_iou(mask, label, width=round(0.02 * math.hypot(200, 200)))


def test_a_band_without_width_is_refused():
    with pytest.raises(BadInput, match="at least 1, got 0"):
        boundary_iou(square(1, 3), square(1, 3), width=0)

"""Surface distances on shapes whose answer is known (M9)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy import ndimage

from casewise import assd, hd95
from casewise.measure.metrics.surface import distances_by_label, surface_distances


def square(low: int, high: int, size: int = 20) -> np.ndarray:
    mask = np.zeros((size, size), np.uint8)
    mask[low:high, low:high] = 1
    return mask


def test_equal_masks_have_no_gap():
    assert hd95(square(3, 9), square(3, 9)) == assd(square(3, 9), square(3, 9)) == 0


def test_two_voxels_are_as_far_apart_as_their_spacing_says():
    mask, label = np.zeros((4, 3, 3), bool), np.zeros((4, 3, 3), bool)
    mask[0, 1, 1] = label[3, 1, 1] = True
    assert hd95(mask, label) == 3
    assert hd95(mask, label, spacing_mm=(10.0, 1.0, 1.0)) == assd(mask, label, spacing_mm=(10.0, 1.0, 1.0)) == 30


def test_hd95_takes_both_directions_together():
    label = np.zeros((1, 30), np.uint8)
    label[0, :14] = 1
    mask = label.copy()
    mask[0, 21] = 1  # one of fifteen surface voxels strays by 8: above the 95th percentile of 29, below that of 15
    assert hd95(mask, label) == 0


def test_cropping_changes_nothing():
    small, large = ((square(3, 9, size), square(4, 10, size)) for size in (12, 60))
    assert hd95(*small) == hd95(*large)
    assert assd(*small) == assd(*large)


def test_masks_at_the_border_have_a_surface_there():
    full = np.ones((4, 4), np.uint8)
    assert surface_distances(full, full).tolist() == [0.0] * 24


def test_surfaces_far_from_each_other_need_little_memory():
    """A table of all voxels and all 250 offsets of the ball would take more than 2 kB for each surface voxel."""
    away = np.sqrt(((np.indices((90, 90, 90)) - 45.0) ** 2).sum(axis=0))
    old, new = ((away < radius).view(np.uint8) for radius in (40, 25))
    tracemalloc.start()
    found = distances_by_label(old, new, (1.0, 1.0, 1.0))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[1].min() > 10
    assert most < old.size * 4 + found[1].size * 800


@pytest.mark.parametrize("spacing", [None, (10.0, 1.25, 1.25), (0.1, 9.0, 7.0), (1.0, 0.3, 0.5)])
def test_labels_taken_together_are_as_far_apart_as_each_alone(spacing):
    """Near and far pieces, a label that only one mask has, and borders at the edge of the volume."""
    draw = np.random.default_rng(1)
    old = np.zeros((6, 40, 44), np.uint8)
    old[1:5, 8:20, 6:22], old[0:4, 20:30, 0:12], old[5, 39, 43], old[2, 2, 2] = 1, 2, 3, 4
    new = np.roll(old, (0, 1, -1), axis=(0, 1, 2))
    new[new == 4] = 0
    new[tuple(draw.integers(0, side, 30) for side in old.shape)] = draw.integers(0, 4, 30)
    steps = spacing or (1.0, 1.0, 1.0)
    found = distances_by_label(old, new, steps)
    assert sorted(found) == [1, 2, 3]
    for label, apart in found.items():
        first, second = (mask == label for mask in (old, new))
        edges = [np.argwhere(inside & ~ndimage.binary_erosion(inside)) * steps for inside in (first, second)]
        every = np.linalg.norm(edges[0][:, None] - edges[1][None], axis=-1)
        assert np.allclose(apart, np.concatenate([every.min(axis=1), every.min(axis=0)]))
        assert surface_distances(first, second, spacing_mm=spacing).tolist() == apart.tolist()

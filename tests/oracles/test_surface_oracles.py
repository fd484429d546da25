"""Surface metrics against MedPy 0.5.2, DeepMind's surface-distance 0.1 and MONAI 1.6.1."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import ndimage

from casewise import assd, dice, hd95, surface_dice, surface_gaps
from casewise.measure.metrics.surface import surfel_sizes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning", "ignore::FutureWarning")


def blobs(seed: int, axes: int | None = None) -> tuple[np.ndarray, np.ndarray, tuple[float, ...]]:
    """Two smooth random masks and a spacing; never empty."""
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(6, 16, axes or random.integers(2, 4)))
    fields = [ndimage.gaussian_filter(random.random(shape), 1) for _ in range(2)]
    mask, label = (field > np.median(field) for field in fields)
    return mask, label, tuple(random.uniform(0.5, 3, len(shape)))


def test_hd95_and_assd_are_those_of_medpy():
    binary = pytest.importorskip("medpy.metric.binary")
    for seed in range(100):
        mask, label, spacing = blobs(seed)
        gaps = surface_gaps(mask, label, spacing_mm=spacing)
        assert hd95(gaps) == pytest.approx(binary.hd95(mask, label, spacing), rel=1e-12)
        assert assd(gaps) == pytest.approx(binary.assd(mask, label, spacing), rel=1e-12)


def test_surface_elements_are_those_of_deepmind_for_every_neighborhood():
    tables = pytest.importorskip("surface_distance.lookup_tables")
    for spacing in [(1.0, 1.0, 1.0), (1.3, 0.7, 2.1), (10.0, 1.25, 0.5)]:
        theirs = tables.create_table_neighbour_code_to_surface_area(spacing)
        assert surfel_sizes(spacing) == pytest.approx(theirs[recoded(tables.ENCODE_NEIGHBOURHOOD_3D_KERNEL)])
    for pixel in [(1.0, 1.0), (1.3, 0.7)]:
        theirs = tables.create_table_neighbour_code_to_contour_length(pixel)
        assert surfel_sizes(pixel) == pytest.approx(theirs[recoded(tables.ENCODE_NEIGHBOURHOOD_2D_KERNEL)])


def recoded(kernel: np.ndarray) -> np.ndarray:
    """Their code of each of our codes: the same neighborhoods with bits in another order."""
    weights = kernel.reshape(-1).astype(int)
    return np.array([sum(w for bit, w in enumerate(weights) if code >> bit & 1) for code in range(1 << weights.size)])


def test_surface_dice_is_that_of_deepmind():
    reference = pytest.importorskip("surface_distance")
    for seed in range(60):
        mask, label, spacing = blobs(seed)
        distances = reference.compute_surface_distances(label, mask, spacing)
        gaps = surface_gaps(mask, label, spacing_mm=spacing)
        for tolerance in (0.0, 0.7, 1.5, 3.0):
            expected = reference.compute_surface_dice_at_tolerance(distances, tolerance)
            assert surface_dice(gaps, tolerance_mm=tolerance) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow  # importing MONAI takes seconds
def test_directed_hd95_surface_dice_and_dice_are_those_of_monai():
    torch = pytest.importorskip("torch")
    metrics = pytest.importorskip("monai.metrics")
    for seed in range(15):
        mask, label, spacing = blobs(seed, axes=3)
        y_pred, y = (torch.from_numpy(array)[None, None].float() for array in (mask, label))
        largest = metrics.compute_hausdorff_distance(
            y_pred, y, include_background=True, percentile=95, spacing=list(spacing)
        )
        assert hd95(mask, label, spacing_mm=spacing, directed="max") == pytest.approx(float(largest), rel=1e-5)
        subvoxel = metrics.compute_surface_dice(
            y_pred, y, class_thresholds=[1.5], include_background=True, spacing=list(spacing), use_subvoxels=True
        )
        assert surface_dice(mask, label, tolerance_mm=1.5, spacing_mm=spacing) == pytest.approx(
            float(subvoxel), rel=1e-5
        )
        overlap = metrics.compute_dice(y_pred, y, include_background=True)
        assert dice(mask, label) == pytest.approx(float(overlap), rel=1e-6)


@pytest.mark.slow
def test_dice_of_many_classes_is_that_of_monai_where_the_label_holds_them():
    torch = pytest.importorskip("torch")
    metrics = pytest.importorskip("monai.metrics")
    random = np.random.default_rng(3)
    for _ in range(20):
        mask, label = random.integers(0, 4, (2, 8, 9, 10))
        label[label == random.integers(1, 5)] = 0  # often one class is absent: MONAI gives NaN, A10 skips it
        one_hot = [torch.from_numpy(np.stack([array == c for c in range(4)])[None]).float() for array in (mask, label)]
        theirs = metrics.compute_dice(*one_hot, include_background=False)[0].numpy()
        assert dice(mask, label) == pytest.approx(float(np.nanmean(theirs)), rel=1e-6)
        assert not math.isnan(dice(mask, label))

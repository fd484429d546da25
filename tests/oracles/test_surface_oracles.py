"""Surface distances against MedPy 0.5.2, Dice against MONAI 1.6.1."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import ndimage

from casewise import assd, dice, hd95

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
        assert hd95(mask, label, spacing_mm=spacing) == pytest.approx(binary.hd95(mask, label, spacing), rel=1e-12)
        assert assd(mask, label, spacing_mm=spacing) == pytest.approx(binary.assd(mask, label, spacing), rel=1e-12)


@pytest.mark.slow  # importing MONAI takes seconds
def test_dice_is_that_of_monai():
    torch = pytest.importorskip("torch")
    metrics = pytest.importorskip("monai.metrics")
    for seed in range(15):
        mask, label, _ = blobs(seed, axes=3)
        y_pred, y = (torch.from_numpy(array)[None, None].float() for array in (mask, label))
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

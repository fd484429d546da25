"""The kernel and harm against SciPy, cc3d and scikit-image on thousands of random masks."""

from __future__ import annotations

import cc3d
import numpy as np
import pytest
from scipy import ndimage
from skimage import measure

from casewise import harm
from casewise.measure.regions import regions_of


def random_pair(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two masks of three labels that differ sparsely, densely, smoothly or everywhere."""
    shape = tuple(random.integers(1, 16, random.integers(2, 4)))
    dtype = random.choice(["u1", "u2", "i4", "i8", "?"])
    source = random.integers(0, 3, shape).astype(dtype)
    changed = random.random(shape) < random.random() ** 2
    if random.random() < 0.5:
        changed = ndimage.gaussian_filter(changed.astype(float), 1) > changed.mean()
    return source, np.where(changed, random.integers(0, 3, shape), source).astype(dtype)


def in_order_of_appearance(labels: np.ndarray, voxels: np.ndarray) -> np.ndarray:
    """Numbers from 0 in the order in which components begin."""
    numbers = labels.reshape(-1)[voxels]
    _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place]


@pytest.mark.parametrize("connectivity", ["face", "full"])
def test_regions_are_those_of_scipy(connectivity):
    random = np.random.default_rng(20)
    for _ in range(1000):
        source, adapted = random_pair(random)
        foreground = bool(random.random() < 0.5)
        different = (source > 0) != (adapted > 0) if foreground else source != adapted
        reach = 1 if connectivity == "face" else source.ndim
        labels, amount = ndimage.label(different, ndimage.generate_binary_structure(source.ndim, reach))
        found = regions_of(source, adapted, foreground=foreground, connectivity=connectivity)
        assert np.array_equal(found.voxels, np.flatnonzero(different))
        assert found.sizes.size == amount
        assert np.array_equal(found.number, in_order_of_appearance(labels, found.voxels))


@pytest.mark.parametrize(("connectivity", "in_2d", "in_3d"), [("face", 4, 6), ("full", 8, 26)])
def test_regions_are_those_of_cc3d_and_of_scikit_image(connectivity, in_2d, in_3d):
    random = np.random.default_rng(21)
    for _ in range(200):
        source, adapted = random_pair(random)
        different = source != adapted
        found = regions_of(source, adapted, foreground=False, connectivity=connectivity)
        reach = 1 if connectivity == "face" else source.ndim
        for labels in (
            cc3d.connected_components(different, connectivity=in_2d if source.ndim == 2 else in_3d),
            measure.label(different, connectivity=reach),
        ):
            assert np.array_equal(found.number, in_order_of_appearance(labels, found.voxels))


@pytest.mark.parametrize("foreground", [True, False])
def test_harm_and_its_table_are_those_of_the_textbook(foreground):
    random = np.random.default_rng(22)
    for _ in range(400):
        source, adapted = random_pair(random)
        label = random.choice([0, 1, 2, 255], source.shape).astype(np.uint8)
        least = int(random.integers(1, 7))
        found = harm(source, adapted, label, min_area=least, foreground=foreground, ignore=255)
        shares, rows = textbook(source, adapted, label, least, foreground)
        assert (found.ha, found.ba, found.neutral_scored, found.unscored) == shares
        for row, (verdict, inside) in zip(found.table, rows, strict=True):
            spots = np.argwhere(inside)
            assert row["verdict"] == verdict
            assert row["area"] == len(spots)
            assert np.array_equal(row["box_low"], spots.min(axis=0))
            assert np.array_equal(row["box_high"], spots.max(axis=0) + 1)
            assert row["centroid"] == pytest.approx(spots.mean(axis=0))
            boundary = np.count_nonzero(inside & ~ndimage.binary_erosion(inside))
            assert row["compactness"] == pytest.approx(len(spots) / boundary**2)


def textbook(source, adapted, label, least, foreground):
    """Label the whole volume, then one boolean mask a region."""
    valid = label != 255
    if foreground:
        source, adapted, label = source > 0, adapted > 0, label > 0
    different = source != adapted
    labels, amount = ndimage.label(different)
    whole = max(np.count_nonzero(different), 1)
    areas = {"harmful": 0, "beneficial": 0, "neutral": 0, "unscored": 0}
    rows = []
    first = (
        ndimage.minimum(np.arange(labels.size).reshape(labels.shape), labels, range(1, amount + 1)) if amount else []
    )
    for number in np.argsort(first) + 1:
        inside = labels == number
        before, after = (np.count_nonzero((mask != label) & inside & valid) for mask in (source, adapted))
        verdict = "harmful" if after > before else "beneficial" if after < before else "neutral"
        if np.count_nonzero(inside) >= least:
            rows.append((verdict, inside))
        else:
            verdict = "unscored"
        areas[verdict] += np.count_nonzero(inside)
    return tuple(area / whole for area in areas.values()), rows

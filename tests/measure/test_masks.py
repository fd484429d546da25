"""Input that cannot be measured gives an error that says what was expected, what came, what to do."""

from __future__ import annotations

import numpy as np
import pytest

from casewise import BadInput, dice, fragmentation, harm, hd95, miou
from casewise.measure.masks import checked_spacing, least_voxels

GOOD = np.zeros((3, 4), np.uint8)

BAD = [
    (np.zeros((4, 3), np.uint8), r"must share one shape, got .* \(3, 4\).* \(4, 3\); resample before comparing"),
    (np.zeros((3, 4), np.float32), r"integer or bool, got .* of type float32; take the argmax"),
    (np.full((3, 4), np.nan), r"of type float64 with NaN in it; take the argmax"),
    (np.full((3, 4), -1, np.int16), r"labels must be 0 \(background\) or more, got -1 in .*; map it to a class"),
    (np.zeros(4, np.uint8), r"\(rows, columns\) or \(slices, rows, columns\), got .* of shape \(4,\); add an axis"),
    (np.zeros((1, 2, 3, 4), np.uint8), r"got .* of shape \(1, 2, 3, 4\); pass one case at a time"),
    (np.zeros((0, 4), np.uint8), r"at least one voxel, got .* of shape \(0, 4\)"),
    (np.full((3, 4), "a"), r"of type <U1"),
    (None, r"must be an integer or bool mask, got None"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD)
def test_a_mask_that_cannot_be_used_is_refused_wherever_it_stands(bad, sentence):
    for measure in (fragmentation, dice, miou, hd95):
        with pytest.raises(BadInput, match=sentence):
            measure(GOOD, bad)
        with pytest.raises(BadInput, match=sentence.replace(r".* \(3, 4\).* \(4, 3\)", r".* \(4, 3\).* \(3, 4\)")):
            measure(bad, GOOD)
    with pytest.raises(BadInput, match=sentence):
        harm(GOOD, GOOD, bad)


def test_the_error_names_the_argument():
    with pytest.raises(BadInput, match=r"source \(3, 4\), adapted \(3, 5\); resample"):
        fragmentation(GOOD, np.zeros((3, 5), bool))
    with pytest.raises(BadInput, match="got label of type float64"):
        harm(GOOD, GOOD, np.zeros((3, 4)))


@pytest.mark.parametrize("spacing", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -2.0), (1.0, float("nan"))])
def test_a_spacing_is_one_positive_number_an_axis(spacing):
    with pytest.raises(BadInput, match="spacing_mm must have 2 positive numbers"):
        checked_spacing(spacing, 2)


def test_least_voxels_of_a_volume_are_rounded_up():
    assert least_voxels(16, 16.0, (1.0, 1.0, 1.0), axes=3) == 16
    assert least_voxels(16, 16.1, (1.0, 1.0, 1.0), axes=3) == 17
    assert least_voxels(16, 0.3, (0.1, 1.0, 1.0), axes=3) == 3  # 0.3 / 0.1 is a hair above 3 in floating point


@pytest.mark.parametrize("area", [0.0, -1.0, float("nan"), float("inf")])
def test_an_area_in_millimetres_is_positive(area):
    with pytest.raises(BadInput, match="min_area_mm must be a positive area"):
        least_voxels(16, area, (1.0, 1.0), axes=2)


def test_lists_are_masks_too():
    assert fragmentation([[0, 1]], [[0, 0]], min_area=1).area == 1

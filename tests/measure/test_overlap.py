"""Dice and mean IoU with their conventions (A10, A11)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from casewise import dice, miou
from casewise.measure.metrics.overlap import micro_miou


def test_dice_is_the_mean_over_the_classes_of_the_label():
    mask, label = np.array([[1, 1, 2, 2]]), np.array([[1, 1, 2, 0]])
    assert dice(mask, label) == pytest.approx((1 + 2 / 3) / 2)


def test_a_false_positive_on_an_empty_class_does_not_move_dice():
    label = np.array([[1, 1, 0, 0]])
    assert dice(np.array([[1, 1, 0, 3]]), label) == dice(np.array([[1, 1, 0, 0]]), label) == 1


def test_a_label_without_foreground_is_undefined():
    assert math.isnan(dice(np.array([[1, 1]]), np.array([[0, 0]])))
    assert math.isnan(dice(np.array([[0, 0]]), np.array([[0, 0]])))


def test_a_missed_class_counts_zero():
    assert dice(np.array([[1, 1, 0, 0]]), np.array([[1, 1, 2, 2]])) == 0.5


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
@pytest.mark.parametrize("top", [1, 3, 255, 256, 70000])
@pytest.mark.parametrize("background", [0.0, 0.3, 0.9, 1.0])
def test_counts_are_those_of_looking_at_every_class(dtype, top, background):
    if top > np.iinfo(dtype).max:
        return
    rng = np.random.default_rng(top)
    classes = np.unique([0, 1, top // 2, top])
    mask, label = (np.where(rng.random((9, 40)) < background, 0, rng.choice(classes, (9, 40))) for _ in range(2))
    mask, label = mask.astype(dtype), label.astype(dtype)
    wanted = [
        2 * ((mask == c) & (label == c)).sum() / ((mask == c).sum() + (label == c).sum())
        for c in classes[1:]
        if (label == c).any()
    ]
    assert dice(mask, label) == pytest.approx(np.mean(wanted) if wanted else math.nan, nan_ok=True)
    held = [c for c in classes if (mask == c).any() or (label == c).any()]
    ratios = [((mask == c) & (label == c)).sum() / ((mask == c) | (label == c)).sum() for c in held]
    assert miou(mask, label, ignore=None) == pytest.approx(float(np.mean(ratios)), abs=1e-15)


def test_dice_may_ignore_a_label():
    assert dice(np.array([[1, 1]]), np.array([[1, 9]]), ignore=9) == 1


def test_miou_counts_classes_of_mask_or_label():
    assert miou(np.array([[0, 0, 1, 2]]), np.array([[0, 0, 1, 1]])) == pytest.approx((1 + 1 / 2 + 0) / 3)


def test_miou_leaves_void_out():
    assert miou(np.array([[0, 5, 1]]), np.array([[0, 255, 1]])) == 1
    assert math.isnan(miou(np.array([[0, 5]]), np.array([[255, 255]])))
    assert miou(np.array([[0, 5]]), np.array([[0, 255]]), ignore=None) == pytest.approx(1 / 3)


def test_micro_and_per_image_miou_differ():
    pairs = [
        (np.array([[0, 0, 0, 0]]), np.array([[0, 0, 0, 0]])),
        (np.array([[0, 1, 0, 0]]), np.array([[0, 1, 1, 1]])),
    ]
    per_image = np.mean([miou(*pair) for pair in pairs])
    assert per_image == pytest.approx((1 + (1 / 3 + 1 / 3) / 2) / 2)
    assert micro_miou(pairs) == pytest.approx((5 / 7 + 1 / 3) / 2)


def test_micro_miou_adds_images_with_different_classes():
    pairs = [(np.array([[1, 1]]), np.array([[1, 1]])), (np.array([[4, 4]]), np.array([[4, 0]]))]
    assert micro_miou(pairs) == pytest.approx((0 + 1 + 1 / 2) / 3)
    assert micro_miou(reversed(pairs)) == micro_miou(pairs)
    assert math.isnan(micro_miou([]))

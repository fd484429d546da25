"""Entropies and distances."""

from __future__ import annotations

import math

import pytest
import torch

from casewise.adapt.logits import (
    anchor,
    confidence,
    cross_entropy,
    entropy,
    largest_entropy,
    probabilities,
    slice_means,
)


@pytest.mark.parametrize("classes", [2, 4, 19])
def test_a_uniform_prediction_has_the_largest_entropy(classes):
    assert entropy(torch.zeros(1, classes, 2, 2)).max() == pytest.approx(math.log(classes))
    assert largest_entropy(classes) == pytest.approx(math.log(classes))
    assert entropy(torch.zeros(1, classes, 2, 2), "sigmoid").max() == pytest.approx(largest_entropy(classes, "sigmoid"))


def test_one_sigmoid_is_a_softmax_over_two():
    z = torch.randn(2, 1, 4, 4)
    two = torch.cat([torch.zeros_like(z), z], 1)
    assert torch.allclose(entropy(z, "sigmoid"), entropy(two), atol=1e-6)
    assert torch.allclose(confidence(z, "sigmoid")[1], confidence(two)[1], atol=1e-6)
    assert torch.allclose(cross_entropy(z, torch.ones_like(z), "sigmoid"), -two.log_softmax(1)[:, 1], atol=1e-6)


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
@pytest.mark.parametrize("size", [0.0, 100.0, 1e4, 1e30])
def test_extreme_logits_give_finite_values_and_gradients(head, size):
    logits = torch.tensor([[size, -size, 0.0]]).view(1, 3, 1, 1).requires_grad_(True)
    value = entropy(logits, head).sum()
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_entropy_is_that_of_the_probabilities(head):
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    p = probabilities(logits, head)
    expected = -(p * p.log()).sum(1) if head == "softmax" else -(p * p.log() + (1 - p) * (1 - p).log()).sum(1)
    assert torch.allclose(entropy(logits, head), expected)
    assert torch.allclose(confidence(logits, head)[0], expected)


def test_slices_are_the_last_two_axes():
    voxels = torch.arange(24.0).view(2, 3, 2, 2)
    assert slice_means(voxels).tolist() == [1.5, 5.5, 9.5, 13.5, 17.5, 21.5]
    assert slice_means(voxels[0]).tolist() == [1.5, 5.5, 9.5]


def test_the_anchor_is_a_sum_of_squares():
    now = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    then = {"a": torch.zeros(2), "b": torch.tensor([1.0])}
    assert anchor(now, then).item() == 9.0

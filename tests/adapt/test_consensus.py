"""Kinds of consensus on pictures a person can check, and against independent computations of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.consensus import (
    Mean,
    medoid,
    vote,
)
from casewise.core.errors import BadInput


def test_the_mean_is_the_mean_and_takes_one_volume():
    parts = [torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    weights = [1.0, 0.5, 2.0, 0.0, 1.0]
    mean = Mean()
    first = parts[0].clone()
    expected = sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)
    mean.add(first, weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        mean.add(part, weight)
    assert mean.value is first  # updated in place
    torch.testing.assert_close(mean.value, expected)
    with pytest.raises(BadInput, match="at least one prediction"):
        _ = Mean().value


def test_a_vote_goes_to_the_majority_and_a_tie_to_the_first():
    masks = [np.array([[1, 1, 2, 0]]), np.array([[1, 0, 0, 3]]), np.array([[0, 0, 1, 3]])]
    assert vote(masks).tolist() == [[1, 0, 2, 3]]
    assert vote(masks[:1]).tolist() == [[1, 1, 2, 0]]


def test_the_medoid_is_the_mask_that_the_others_agree_with_most():
    odd, left, right = np.zeros((3, 1, 10), int)
    odd[0, 8:] = left[0, :4] = right[0, 1:5] = 1
    assert medoid([odd, left, right, np.maximum(left, right)]) == 3
    assert medoid([odd]) == 0

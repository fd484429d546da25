"""Kinds of consensus on pictures a person can check, and against second statements of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import softmax

from casewise.adapt.consensus import (
    Ballots,
    Mean,
    balanced_entropy,
    checked_weights,
    intent_weights,
    medoid,
    vote,
)
from casewise.core.errors import BadInput
from casewise.measure.masks import weighted_labels


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


def test_intents_weights_are_a_softmax_of_scaled_entropies():
    entropies = [0.9, 0.1, 0.5]
    np.testing.assert_allclose(intent_weights(entropies), softmax([0, 1, 0.5]))
    np.testing.assert_allclose(intent_weights([0.3, 0.3]), [0.5, 0.5])
    assert balanced_entropy(np.array([1.0, 0, 0, 0]), np.array([1, 0, 0, 0])) == 0.5
    assert balanced_entropy(np.array([1.0, 0, 0, 0]), np.zeros(4, int)) == 0.25


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_ballots_are_the_probabilities_in_255ths_and_their_mean_labels_are_those_of_the_mean(head):
    rng = np.random.default_rng(0)
    logits = torch.as_tensor(rng.normal(0, 4, size=(6, 1, 3, 9, 9)).astype(np.float32))
    shares = logits.softmax(2) if head == "softmax" else logits.sigmoid()
    ballots = Ballots(head)
    numbers = torch.arange(1, 4).view(1, 3, 1, 1)
    for one in shares:
        mask = one.argmax(1) if head == "softmax" else ((one > 0.5) * numbers).amax(1)
        ballots.add(one, mask[0].numpy())
    voxels = np.array([0, 5, 17, 44, 80])
    found = ballots.on(voxels)
    expected = np.round(shares.numpy().reshape(6, 3, -1)[:, :, voxels] * 255)
    assert np.abs(found.astype(int) - expected).max() <= (2 if head == "softmax" else 0)
    weights = np.array([1, 1, 0, 2, 0, 1.0])
    mean = np.tensordot(weights / weights.sum(), shares.numpy().reshape(6, 3, -1)[:, :, voxels], 1)
    sure = np.sort(mean, 0)[-1] - np.sort(mean, 0)[-2] > 0.05 if head == "softmax" else np.abs(mean - 0.5).min(0) > 0.05
    labels = mean.argmax(0) if head == "softmax" else ((mean > 0.5) * np.arange(1, 4)[:, None]).max(0)
    assert weighted_labels(found, weights, head)[sure].tolist() == labels[sure].tolist()


def test_weights_are_checked_by_name():
    assert checked_weights("weighted", {"a": 2}, ["a", "b"]) == {"a": 2.0, "b": 1.0}
    for kind, weights, sentence in (
        ("mean", {"a": 2}, "takes no weights"),
        ("weighted", {"c": 1}, "weights are given for c"),
        ("weighted", {"a": -1}, "from 0 on"),
        ("median", {}, "a consensus is one of mean"),
    ):
        with pytest.raises(BadInput, match=sentence):
            checked_weights(kind, weights, ["a", "b"])

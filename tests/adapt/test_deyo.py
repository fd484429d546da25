from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.objectives.deyo import Deyo, slice_drop
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput


def logits_of(probabilities: list[list[float]]) -> torch.Tensor:
    """One slice of one row: (pixel, class) probabilities -> (1, classes, 1, pixels) logits."""
    return torch.tensor(probabilities).log().T[None, :, None]


PLAIN = logits_of([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.3, 0.7]])
SHUFFLED = logits_of([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4], [0.4, 0.6]])


def test_the_drop_over_foreground_is_that_of_pseudo_labelled_pixels():
    assert slice_drop(PLAIN, SHUFFLED, "softmax").tolist() == [pytest.approx((0.5 + 0.1) / 2)]


def test_the_drop_over_all_pixels_is_diluted_by_background():
    assert slice_drop(PLAIN, SHUFFLED, "softmax", "all").tolist() == [pytest.approx((0 + 0.1 + 0.5 + 0.1) / 4)]


def test_a_slice_without_foreground_drops_nothing():
    empty = logits_of([[0.9, 0.1]] * 4)
    assert slice_drop(empty, SHUFFLED, "softmax").tolist() == [0.0]
    assert slice_drop(empty, SHUFFLED, "softmax", "all").item() > 0


def test_sigmoids_answer_together():
    plain, shuffled = torch.tensor([[0.8], [0.3]]).logit(), torch.tensor([[0.5], [0.4]]).logit()
    drop = slice_drop(plain[None, :, None], shuffled[None, :, None], "sigmoid")
    assert drop.item() == pytest.approx(0.8 * 0.7 - 0.5 * 0.6)


def test_the_slices_of_a_window_are_samples_of_their_own():
    window = torch.cat([PLAIN, logits_of([[0.9, 0.1]] * 4)], 2)[:, :, :, None]
    assert slice_drop(window, window, "softmax").shape == (2,)


def ladder(objective: Deyo, sharpness: float = 10.0):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 3, 1))
    with torch.no_grad():
        network[-1].weight *= sharpness
    image = torch.randn((3, 1, 16, 16), generator=torch.Generator().manual_seed(1))
    return run_episode(network, image, objective, steps=2, keep_parameters=True)


def moved(trajectory) -> float:
    return max(np.abs(trajectory.parameters[-1][n] - v).max() for n, v in trajectory.parameters[0].items())


def test_slices_that_lose_their_labels_are_learned_from():
    trajectory = ladder(Deyo())
    assert trajectory.diagnostics[0]["kept"] == 1.0
    assert moved(trajectory) > 0


def test_no_slice_kept_means_no_step():
    trajectory = ladder(Deyo(drop_margin=1.0))
    assert trajectory.diagnostics[0] == {"kept": 0.0}
    assert moved(trajectory) == 0


def test_unsure_slices_are_left_out():
    assert ladder(Deyo(), sharpness=0.01).diagnostics[0]["kept"] == 0.0


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BadInput, match="'foreground' or 'all', got 'mean'"):
        Deyo(reduction="mean")

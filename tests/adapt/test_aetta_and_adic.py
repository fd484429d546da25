from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.probes.criteria import (
    DROPOUT_SEEDS,
    adic,
    aetta,
    dice_in_context,
    dropped,
    estimated_error,
    smoothed,
)


def network(classes: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, classes, 1))


IMAGE = torch.randn((2, 1, 12, 12), generator=torch.Generator().manual_seed(3))


def test_the_estimate_is_the_disagreement_where_classes_are_balanced():
    assert estimated_error(0.2, [0.25] * 4) == pytest.approx(0.2, rel=1e-4)


def test_the_estimate_grows_where_predictions_collapse_and_stops_at_chance():
    assert estimated_error(0.1, [0.8, 0.2]) > 0.1
    assert estimated_error(0.1, [0.9999, 0.0001]) == 0.5
    assert estimated_error(0.1, [1.0, 0.0, 0.0]) == pytest.approx(2 / 3)
    assert estimated_error(0.0, [1.0, 0.0]) == 0.0


def test_the_moving_average_begins_unscaled():
    assert smoothed(0.1, [0.4]) == [pytest.approx(0.6 * 0.1 + 0.4 * 0.4)]


def test_aetta_of_a_case_is_what_its_formula_says():
    model = network(3)
    with Episode(model, IMAGE, Adaptation(Tent())) as episode, torch.no_grad():
        ours = aetta(episode)
        plain = model(IMAGE).softmax(1)
        passes = []
        for seed in DROPOUT_SEEDS:
            with dropped([model[-1]], torch.Generator().manual_seed(seed)):
                passes.append(model(IMAGE).softmax(1))
    wrong = np.mean([(p.argmax(1) != plain.argmax(1)).float().mean().item() for p in passes])
    mean = torch.stack(passes).mean((0, 1, 3, 4))
    entropy = -(mean * torch.log(mean + 1e-6)).sum().item()
    assert ours == pytest.approx(min(wrong / (entropy / math.log(3)) ** 3, 2 / 3), rel=1e-4)


def test_one_sigmoid_is_two_classes_and_several_are_not_computable():
    with Episode(network(1), IMAGE, Adaptation(Tent())) as episode:
        assert 0 < aetta(episode) <= 0.5
    with Episode(network(3), IMAGE, Adaptation(Tent()), head="sigmoid") as episode:
        assert aetta(episode) is None


def test_passes_that_all_agree_score_one():
    plain = np.zeros((6, 6), int)
    plain[1:4, 1:4] = 1
    plain[4:, 4:] = 2
    assert dice_in_context(plain, [plain] * 10) == 1.0


def test_a_split_vote_lowers_weight_and_dice():
    plain = np.array([[1, 1, 0, 0]])
    wider = np.array([[1, 1, 1, 1]])
    # votes for class 1: 1, 1, .5, .5; h: 0, 0, 1, 1; weight (1 + 1 + 0 + 0) / 4; Dice 1 and 2*2/6
    assert dice_in_context(plain, [plain, wider]) == pytest.approx(0.5 * (1 + 4 / 6) / 2)


def test_classes_are_scored_one_by_one():
    plain, other = np.array([[1, 1, 2, 2]]), np.array([[1, 1, 1, 1]])
    one = dice_in_context(plain, [other] * 2)
    assert one == pytest.approx((4 / 6 + 0) / 2)  # foreground alone would be a perfect 1


def test_no_foreground_anywhere_is_not_computable():
    empty = np.zeros((3, 3), int)
    assert dice_in_context(empty, [empty] * 3) is None


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_adic_of_a_case_is_a_share_and_repeats_itself(head):
    with Episode(network(3), IMAGE, Adaptation(Tent()), head=head) as episode:
        first, second = adic(episode), adic(episode)
    assert first == second
    assert 0 < first < 1

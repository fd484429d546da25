from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.logits import entropy
from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.memo import Memo, marginal_entropy
from casewise.adapt.optimizers import optimizer_of
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput, UnknownName

LOGITS = torch.randn((2, 3, 4, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_views_that_agree_have_the_entropy_of_one_of_them(head):
    assert torch.allclose(marginal_entropy(torch.stack([LOGITS] * 3), head), entropy(LOGITS, head), atol=1e-6)


def test_sure_views_that_disagree_are_as_unsure_as_a_coin():
    sure = torch.tensor([50.0, -50.0]).reshape(1, 2, 1, 1)
    split = marginal_entropy(torch.stack([sure, -sure]))
    assert split.item() == pytest.approx(np.log(2), rel=1e-6)


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_extreme_logits_give_finite_values_and_gradients(head):
    logits = (1e4 * LOGITS[None].repeat(2, 1, 1, 1, 1)).requires_grad_()
    voxels = marginal_entropy(logits, head)
    voxels.sum().backward()
    assert torch.isfinite(voxels).all()
    assert torch.isfinite(logits.grad).all()


def test_the_loss_is_that_of_the_case_and_the_weight_scales_it():
    torch.manual_seed(0)
    network, image = PlainUNet(features=(4, 8), classes=3), torch.randn(2, 1, 16, 16)
    once = run_episode(network, image, Memo(), steps=1).diagnostics[0]["loss"]
    twice = run_episode(network, image, Memo(weight=2.0), steps=1).diagnostics[0]["loss"]
    assert 0 < once < np.log(3)
    assert twice == pytest.approx(2 * once, rel=1e-5)


def test_the_published_form_takes_options():
    assert Memo.published() == Memo(views=32, optimizer="sgd", learning_rate=5e-3)
    assert Memo.published(views=8).views == 8


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BadInput, match="views must be at least 1, got 0"):
        Memo(views=0)
    with pytest.raises(UnknownName, match="no optimizer is called 'adamw'"):
        optimizer_of(None, "adamw")

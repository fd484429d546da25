from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.backbones.module import Module
from casewise.adapt.episode import run_episode
from casewise.adapt.objectives.ttt import Ttt, rotation_losses
from casewise.core.errors import BadInput
from casewise.core.records import Case


class TwoHeaded(nn.Module):
    """A network that brings an auxiliary head, in 2-D or 3-D, and a reconstruction loss."""

    def __init__(self, spatial: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv2d if spatial == 2 else nn.Conv3d
        self.stem, self.norm = conv(1, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.head, self.turns, self.back = conv(6, 2, 1), nn.Linear(6, 4), conv(6, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.stem(x)).relu())

    def auxiliary(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.stem(x)).relu()
        return self.turns((features * torch.linspace(-1, 1, features.shape[-1])).flatten(2).mean(2))

    def reconstruction(self, x: torch.Tensor) -> torch.Tensor:
        return (self.back(self.norm(self.stem(x)).relu()) - x).square().flatten(1).mean(1)

    def wrong(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def ladder(objective: Ttt, spatial: int = 2, **options):
    shape = (3, 1, 8, 12) if spatial == 2 else (1, 1, 4, 8, 8)
    image = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return run_episode(TwoHeaded(spatial), image, objective, steps=4, learning_rate=1e-2, **options)


@pytest.mark.parametrize("spatial", [2, 3])
@pytest.mark.parametrize("objective", [Ttt(), Ttt("reconstruction", "loss")], ids=["rotation", "loss"])
def test_the_auxiliary_loss_falls(objective, spatial):
    losses = [step["loss"] for step in ladder(objective, spatial).diagnostics]
    assert losses[-1] < losses[0]


def test_a_head_that_knows_nothing_loses_ln_4():
    losses = rotation_losses(lambda x: torch.zeros(len(x), 4), torch.randn(3, 1, 8, 12))
    assert losses.tolist() == [pytest.approx(np.log(4))] * 3


def test_a_network_without_an_auxiliary_head_is_told_what_to_bring():
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2))
    with pytest.raises(BadInput, match=r"Sequential has no method 'auxiliary'; give it one that returns \(n, 4\)"):
        run_episode(network, torch.randn(1, 1, 8, 8), Ttt(), steps=1)


def test_answers_of_the_wrong_shape_are_refused():
    with pytest.raises(BadInput, match=r"one number for each sample, \(3,\), got \(\)"):
        ladder(Ttt("wrong", "loss"))
    with pytest.raises(BadInput, match=r"rotation logits are \(n, 4\), here \(3, 4\), got \(3,\)"):
        ladder(Ttt("reconstruction"))
    with pytest.raises(BadInput, match="'rotation' or 'loss', got 'jigsaw'"):
        Ttt(task="jigsaw")


def test_the_auxiliary_head_sees_pictures_padded_as_the_network_does() -> None:
    network, shown = TwoHeaded(), []
    network.stem.register_forward_pre_hook(lambda _, given: shown.append(tuple(given[0].shape[2:])))
    image = np.random.default_rng(0).normal(size=(1, 13, 6)).astype(np.float32)
    prepared = Module(network, classes=2, dimensions=2, multiple=8).prepare(Case("a", image))
    run_episode(network, prepared.inputs, Ttt(), steps=1, forward=prepared.forward)
    assert shown == [(16, 8), *[(16, 8), (8, 16)] * 2, (16, 8)]  # M0, four turns for the update, M1


def test_the_auxiliary_head_runs_in_the_precision_and_layout_of_the_network() -> None:
    network, shown = TwoHeaded(), []
    network.norm = nn.BatchNorm2d(6)
    network.stem.register_forward_hook(
        lambda _, given, out: shown.append((given[0].is_contiguous(memory_format=torch.channels_last), out.dtype))
    )
    image = torch.randn((1, 1, 8, 12), generator=torch.Generator().manual_seed(1))
    run_episode(network, image, Ttt(), steps=1, autocast="bfloat16", channels_last=True)
    assert shown == [(True, torch.bfloat16)] * 6  # M0, four turns for the update, M1

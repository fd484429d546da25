from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.augmentations import IDENTITY, LightView
from casewise.adapt.episode import Episode
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.probes.perturbations import (
    augmentation_agreement,
    augmentation_disagreement,
    dropout_agreement,
    dropout_disagreement,
    dropped,
    segmentation_heads,
)
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput


def network(classes: int = 3, spatial: int = 2) -> nn.Module:
    torch.manual_seed(1)
    conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if spatial == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    model = nn.Sequential(conv(1, 8, 3, padding=1), norm(8, affine=True), nn.ReLU(), conv(8, classes, 1))
    with torch.no_grad():  # no class wins everywhere
        model[-1].bias -= model(image(spatial)).transpose(0, 1).flatten(1).mean(1)
    return model


def image(spatial: int = 2) -> torch.Tensor:
    shape = (3, 1, 16, 16) if spatial == 2 else (1, 1, 4, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


class Pointwise(nn.Module):
    """Labels that depend on the voxel alone, so that geometry cannot matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + 0.0 * self.norm(x), -x], 1)


class Jittery(nn.Module):
    """Random in eval mode, which is what the self-test is there to notice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(x), torch.randn_like(x)], 1)


@pytest.mark.parametrize("spatial", [2, 3])
def test_identity_views_agree_exactly(spatial):
    with Episode(network(spatial=spatial), image(spatial), Adaptation(Tent())) as episode:
        assert augmentation_agreement(episode, views=[IDENTITY] * 3) == 1.0


def test_geometry_is_inverted_before_labels_are_compared():
    with Episode(Pointwise(), image(), Adaptation(Tent())) as episode:
        turns = [LightView(flips=(-1,)), LightView(flips=(-2, -1)), LightView(quarter_turns=1)]
        assert augmentation_agreement(episode, views=turns) == 1.0
        assert augmentation_agreement(episode, views=[LightView(brightness=-1.0)]) == 0.0


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_disagreement_is_a_share_and_repeats_itself(head):
    with Episode(network(), image(), Adaptation(Tent()), head=head) as episode:
        first, second = augmentation_disagreement(episode), augmentation_disagreement(episode)
    assert first == second
    assert 0 < first < 1


def test_a_network_that_is_random_in_eval_mode_is_refused():
    with (
        Episode(Jittery(), image(), Adaptation(Tent())) as episode,
        pytest.raises(BadInput, match="must be equal"),
    ):
        augmentation_agreement(episode)


def test_dropout_is_not_computable_where_no_head_is_found():
    with Episode(Pointwise(), image(), Adaptation(Tent())) as episode:
        assert dropout_agreement(episode) is None
        assert dropout_disagreement(episode) is None


@pytest.mark.parametrize("spatial", [2, 3])
def test_injected_dropout_perturbs_and_leaves_the_network_alone(spatial):
    model = network(spatial=spatial)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Episode(model, image(spatial), Adaptation(Tent())) as episode:
        disagreement = dropout_disagreement(episode)
        assert disagreement == dropout_disagreement(episode)
    assert 0 < disagreement < 1
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not model[-1]._forward_pre_hooks


def test_dropped_channels_vanish_and_the_others_grow():
    head = nn.Conv2d(1000, 1, 1, bias=False)
    seen = []
    head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad(), dropped([head], torch.Generator().manual_seed(0), rate=0.25):
        head(torch.ones(1, 1000, 2, 2))
    channels = seen[0][0]
    assert channels.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert torch.equal(channels[:, 0, 0], channels[:, 1, 1])
    assert (channels[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)


def test_heads_are_the_pointwise_layers_that_end_in_the_classes():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3))
    assert segmentation_heads(model, 4) == [model[1]]
    assert segmentation_heads(nn.Sequential(nn.Conv2d(1, 2, 3)), 2) != []
    assert segmentation_heads(model, 7) == []


def test_an_episode_records_them_by_name_and_its_masks_stay_the_same():
    asked = ["augmentation_disagreement", "dropout_disagreement", "grata_cosine"]
    plain = run_episode(network(), image(), Tent(), steps=2)
    probed = run_episode(network(), image(), Tent(), steps=2, signals=asked)
    for step in range(3):
        assert np.array_equal(plain.masks[step], probed.masks[step])
        assert all(isinstance(probed.signals[step][name], float) for name in asked)
    assert -1 <= probed.signals[1]["grata_cosine"] <= 1

"""Normalization layers and agreement signals, stated again from their formulas: no layer, no view, no code of ours.

LayerNorm, BatchNorm3d and GroupNorm in 3-D are written out as (x - mean) / sqrt(variance + eps) * weight + bias, and
three TENT updates through them are compared with ours. The agreement under augmentations and under dropout is
recomputed from the masks of perturbed inputs; only the drawn numbers of a view are shared.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.augmentations import gaussian_field, light_view
from casewise.adapt.episode import Episode
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.probes.perturbations import augmentation_disagreement, dropout_disagreement
from casewise.adapt.proposers.live import run_episode

torch.set_num_threads(1)
STEPS, RATE = 3, 5e-3
LAYERS = {"layer": lambda: nn.LayerNorm(6), "batch3d": lambda: nn.BatchNorm3d(6), "group3d": lambda: nn.GroupNorm(3, 6)}


class Net(nn.Module):
    """A convolution, a normalization, a head; LayerNorm sees channels last."""

    def __init__(self, kind):
        super().__init__()
        conv = nn.Conv2d if kind == "layer" else nn.Conv3d
        self.kind = kind
        self.first, self.norm, self.head = conv(1, 6, 3, padding=1), LAYERS[kind](), conv(6, 4, 1)

    def forward(self, x):
        x = self.first(x)
        x = self.norm(x.movedim(1, -1)).movedim(-1, 1) if self.kind == "layer" else self.norm(x)
        return self.head(torch.relu(x))


def network(kind):
    torch.manual_seed(11)
    net = Net(kind).double()
    with torch.no_grad():
        net.head.weight.mul_(4)
        net.norm.weight.uniform_(0.7, 1.3)
        net.norm.bias.normal_(0, 0.2)
        if kind == "batch3d":
            net.norm.running_mean.normal_(0, 0.2)
            net.norm.running_var.uniform_(0.5, 2.0)
    return net


def image(kind):
    shape = (3, 1, 12, 12) if kind == "layer" else (1, 1, 4, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def written_out(net, kind, statistics):
    """The network as a function of weight and bias, with the normalization from its formula."""

    def forward(x, weight, bias):
        x = net.first(x)
        column = (1, -1, *[1] * (x.ndim - 2))
        if kind == "layer":  # each voxel over its channels
            mean = x.mean(1, keepdim=True)
            variance = ((x - mean) ** 2).mean(1, keepdim=True)
        elif kind == "group3d":  # each sample and each third of the channels, over space
            parts = x.reshape(len(x), 3, 2, -1)
            mean = parts.mean((2, 3)).repeat_interleave(2, 1).reshape(len(x), 6, 1, 1, 1)
            spread = ((parts - parts.mean((2, 3), keepdim=True)) ** 2).mean((2, 3))
            variance = spread.repeat_interleave(2, 1).reshape(len(x), 6, 1, 1, 1)
        elif statistics == "source":
            mean, variance = net.norm.running_mean.view(column), net.norm.running_var.view(column)
        else:  # each channel over the batch and space, with gradients through both
            mean = x.mean((0, 2, 3, 4), keepdim=True)
            variance = ((x - mean) ** 2).mean((0, 2, 3, 4), keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-5) * weight.view(column) + bias.view(column)
        return net.head(torch.relu(x))

    return forward


@pytest.mark.parametrize(
    ("kind", "statistics"), [("layer", "source"), ("group3d", "source"), ("batch3d", "source"), ("batch3d", "batch")]
)
def test_three_updates_of_tent_through_a_written_out_layer(kind, statistics):
    net, x = network(kind), image(kind)
    made = run_episode(
        net, x, Tent(), steps=STEPS, learning_rate=RATE, keep_parameters=True, batch_statistics=statistics
    )
    forward, x = written_out(copy.deepcopy(net).eval(), kind, statistics), x.double()
    weight, bias = (one.detach().clone().requires_grad_() for one in (net.norm.weight, net.norm.bias))
    first, second = {}, {}
    for step in range(1, STEPS + 1):
        p = torch.softmax(forward(x, weight, bias), 1)
        loss = -(p * torch.log(p)).sum(1).mean()
        gradients = torch.autograd.grad(loss, [weight, bias])
        for name, value, g in zip(("weight", "bias"), (weight, bias), gradients, strict=True):
            first[name] = 0.9 * first.get(name, 0) + 0.1 * g
            second[name] = 0.999 * second.get(name, 0) + 0.001 * g**2
            speed = (second[name] / (1 - 0.999**step)).sqrt() + 1e-8
            value.data -= RATE * (first[name] / (1 - 0.9**step)) / speed
            ours = made.parameters[step][f"norm.{name}"]
            assert np.abs(ours - value.detach().numpy()).max() <= 1e-6, (step, name)
        assert np.array_equal(made.masks[step].reshape(-1), forward(x, weight, bias).argmax(1).numpy().reshape(-1))
    assert np.abs(made.parameters[STEPS]["norm.weight"] - made.parameters[0]["norm.weight"]).max() > 1e-3


def plain_labels(net, x):
    with torch.no_grad():
        return net(x).argmax(1)


@pytest.mark.parametrize("kind", ["layer", "batch3d", "group3d"])
def test_agreement_under_augmentations(kind):
    net, x = network(kind).float().eval(), image(kind)
    with Episode(net, x, Adaptation(Tent())) as episode:
        ours = augmentation_disagreement(episode)
    plain, shares = plain_labels(net, x), []
    for seed in range(1000, 1008):
        drawn = light_view(torch.Generator().manual_seed(seed))
        assert 0.9 <= drawn.brightness <= 1.1
        seen = x * drawn.brightness + drawn.noise * gaussian_field(x, drawn.seed)
        for axis in drawn.flips:
            assert axis in (-1, -2)
            seen = seen.flip(axis)
        with torch.no_grad():
            logits = net(seen)
        for axis in drawn.flips:
            logits = logits.flip(axis)
        shares.append(float((logits.argmax(1) == plain).float().mean()))
    assert len(set(shares)) > 1
    assert ours == pytest.approx(1 - np.mean(shares), abs=2 / plain.numel())


@pytest.mark.parametrize("kind", ["layer", "batch3d", "group3d"])
def test_agreement_under_dropout_before_the_head(kind):
    net, x = network(kind).float().eval(), image(kind)
    with Episode(net, x, Adaptation(Tent())) as episode:
        ours = dropout_disagreement(episode)
    features = []
    handle = net.head.register_forward_pre_hook(lambda module, inputs: features.append(inputs[0]))
    plain, shares = plain_labels(net, x), []
    handle.remove()
    for seed in range(1000, 1008):
        kept = torch.rand((len(x), 6, *[1] * (x.ndim - 2)), generator=torch.Generator().manual_seed(seed)) >= 0.1
        with torch.no_grad():
            logits = net.head(features[0] * kept / 0.9)
        shares.append(float((logits.argmax(1) == plain).float().mean()))
    assert min(shares) < 1
    assert ours == pytest.approx(1 - np.mean(shares), abs=2 / plain.numel())

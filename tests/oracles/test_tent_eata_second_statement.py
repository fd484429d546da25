"""TENT and EATA for K = 3, against independent computations of their formulas: no shared code, own Adam, own entropy.

Entropy is written as p log p from an explicit softmax, Adam from its paper, the anchor's gradient as
2 (theta - theta_0).
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.objectives.eata import Eata, EataFisher
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import run_episode

torch.set_num_threads(1)
STEPS, RATE, TOLERANCE = 3, 5e-3, 1e-6


def network(norm):
    torch.manual_seed(11)
    layers = [nn.Conv2d(1, 6, 3, padding=1), norm(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), norm(6), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Conv2d(6, 4, 1)).double()
    with torch.no_grad():
        net[-1].weight.mul_(4)
    return net


@pytest.fixture(params=[lambda n: nn.InstanceNorm2d(n, affine=True), nn.BatchNorm2d, lambda n: nn.GroupNorm(3, n)])
def net(request):
    return network(request.param)


@pytest.fixture
def image():
    return torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(3))


def norm_parameters(net):
    return {f"{i}.{kind}": getattr(net[i], kind) for i in (1, 4) for kind in ("weight", "bias")}


class Adam:
    """Kingma and Ba, algorithm 1, written out."""

    def __init__(self, rate):
        self.rate, self.t, self.m, self.v = rate, 0, {}, {}

    def step(self, parameters, gradients):
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g * g
            m_hat, v_hat = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.999**self.t)
            parameters[name].data -= self.rate * m_hat / (v_hat.sqrt() + 1e-8)


class Momentum:
    """Stochastic gradient descent with momentum 0.9."""

    def __init__(self, rate):
        self.rate, self.speed = rate, {}

    def step(self, parameters, gradients):
        for name, g in gradients.items():
            self.speed[name] = 0.9 * self.speed[name] + g if name in self.speed else g
            parameters[name].data -= self.rate * self.speed[name]


def voxel_entropy(net, image):
    p = torch.softmax(net(image), 1)
    return -(p * torch.log(p)).sum(1)


def gradients_of(loss, parameters):
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def second_tent(net, image):
    parameters, adam = norm_parameters(net), Adam(RATE)
    for _ in range(STEPS):
        adam.step(parameters, gradients_of(voxel_entropy(net, image).mean(), parameters))
        yield {name: p.detach().clone() for name, p in parameters.items()}


def second_eata(net, image, margin):
    parameters, adam = norm_parameters(net), Adam(RATE)
    start = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(STEPS):
        by_slice = [voxel_entropy(net, image[i : i + 1]).mean() for i in range(len(image))]
        kept = [h for h in by_slice if float(h.detach()) < margin]
        gradients = gradients_of(sum(kept) / len(kept), parameters)
        adam.step(parameters, {n: g + 2 * 1.0 * (parameters[n].detach() - start[n]) for n, g in gradients.items()})
        yield {name: p.detach().clone() for name, p in parameters.items()}


def second_eata_fisher(net, image, margin_share, redundancy, alpha):
    parameters, sgd = norm_parameters(net), Momentum(RATE)
    start = {name: p.detach().clone() for name, p in parameters.items()}
    e0 = margin_share * math.log(4)
    logits = net(image)
    own = torch.log(torch.softmax(logits, 1)).gather(1, logits.argmax(1, keepdim=True))
    fisher = {name: g**2 for name, g in gradients_of(-own.mean(), parameters).items()}
    mean = None
    for _ in range(STEPS):
        p = torch.softmax(net(image), 1).permute(0, 2, 3, 1).reshape(-1, 4)
        h = -(p * p.log()).sum(1)
        keep = h.detach() < e0
        if mean is not None:
            cosine = (p.detach() @ mean) / (p.detach().norm(dim=1) * mean.norm())
            keep = keep & (cosine.abs() < redundancy)
        assert 0 < keep.sum() < keep.numel()
        gradients = gradients_of((torch.exp(e0 - h[keep].detach()) * h[keep]).mean(), parameters)
        new = p.detach()[keep].mean(0)
        mean = new if mean is None else 0.9 * mean + 0.1 * new
        anchored = {n: g + 2 * alpha * fisher[n] * (parameters[n].detach() - start[n]) for n, g in gradients.items()}
        sgd.step(parameters, anchored)
        yield {name: p.detach().clone() for name, p in parameters.items()}


def compare(made, statement):
    moved = 0.0
    for step, expected in enumerate(statement, start=1):
        for name, value in expected.items():
            assert np.abs(made.parameters[step][name] - value.numpy()).max() <= TOLERANCE, (step, name)
            moved = max(moved, np.abs(made.parameters[step][name] - made.parameters[0][name]).max())
    assert moved > 100 * TOLERANCE


def ours(net, image, objective, **options):
    return run_episode(net, image, objective, steps=STEPS, learning_rate=RATE, keep_parameters=True, **options)


def test_tent(net, image):
    made = ours(net, image, Tent())
    compare(made, second_tent(copy.deepcopy(net).eval(), image.double()))


def test_eata(net, image):
    with torch.no_grad():
        entropies = voxel_entropy(copy.deepcopy(net).eval(), image.double()).mean((1, 2)).sort().values
    margin = float(entropies[1] + entropies[2]) / 2  # the margin binds: two of four slices
    made = ours(net, image, Eata(margin=margin))
    assert made.diagnostics[0]["kept"] == 0.5
    compare(made, second_eata(copy.deepcopy(net).eval(), image.double(), margin))


def test_eata_fisher(net, image):
    with torch.no_grad():
        margin = float(voxel_entropy(copy.deepcopy(net).eval(), image.double()).median()) / math.log(4)  # half are kept
    made = ours(net, image, EataFisher(margin=margin, redundancy=0.9, anchor_weight=2000.0))
    assert 0 < made.diagnostics[1]["kept"] < made.diagnostics[0]["kept"] < 1
    compare(made, second_eata_fisher(copy.deepcopy(net).eval(), image.double(), margin, 0.9, 2000.0))

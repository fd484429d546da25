"""Contract of every objective with every network, over the registry: a new objective is tested automatically."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.objectives import OBJECTIVES
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import NotFinite, NothingToAdapt

torch.set_num_threads(1)  # tiny networks: threads only wait for each other

# Filters that an untrained network would not pass are opened; everything else is the objective's own.
OPEN = {
    "eata": {"margin": 10.0},
    "eata-fisher": {"margin": 2.0, "redundancy": 2.0},
    "sar": {"margin": 2.0},
    "deyo": {"entropy_margin": 2.0, "drop_margin": -2.0, "reduction": "all"},
    "memo": {"views": 2},
}


def norm_unet(norm):
    """One level down, one level up, with names that say so."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True))
            self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), norm(8), nn.ReLU(inplace=True))
            self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
            self.decoder = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True))
            self.head = nn.Conv2d(8, 3, 1)

        def forward(self, x):
            skip = self.encoder(x)
            return self.head(self.decoder(torch.cat([self.up(self.bottom(skip)), skip], 1)))

    return Net()


def plain(dimensions):
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    conv, norm = {2: (nn.Conv2d, nn.InstanceNorm2d), 3: (nn.Conv3d, nn.InstanceNorm3d)}[dimensions]
    kinds = {"norm_op": norm, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU}
    return PlainConvUNet(1, 2, [4, 8], conv, 3, [1, 2], 1, 3, 1, conv_bias=True, deep_supervision=True, **kinds)


def segformer():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_channels=1,
        num_labels=3,
        depths=[1, 1],
        num_encoder_blocks=2,
        hidden_sizes=[8, 8],
        num_attention_heads=[1, 1],
        sr_ratios=[2, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        decoder_hidden_size=8,
    )
    return SegformerForSemanticSegmentation(config)


NETWORKS = {
    "BatchNorm U-Net": (lambda: norm_unet(nn.BatchNorm2d), (3, 1, 16, 16)),
    "GroupNorm U-Net": (lambda: norm_unet(lambda n: nn.GroupNorm(2, n)), (3, 1, 16, 16)),
    "InstanceNorm 2-D": (lambda: plain(2), (3, 1, 16, 16)),
    "InstanceNorm 3-D": (lambda: plain(3), (1, 1, 8, 8, 8)),
    "SegFormer": (segformer, (3, 1, 16, 16)),
}


@pytest.fixture(scope="module", params=NETWORKS)
def subject(request):
    build, shape = NETWORKS[request.param]
    torch.manual_seed(1)
    network = build()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
    network.train()
    images = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    return network, images


@pytest.fixture(params=OBJECTIVES)
def objective(request, subject):
    network, _ = subject
    has_statistics = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    made = OBJECTIVES.build(request.param, **OPEN.get(request.param, {}))
    if getattr(made, "moves", "") in ("statistics", "input") and not has_statistics:
        with pytest.raises(NothingToAdapt, match="BatchNorm"):
            adapted(network, torch.zeros(1, 1, 8, 8), made)
        pytest.skip("there are no running statistics, and it says so")
    return made


def adapted(network, image, objective, *, rate=1e-2, case_id="a", steps=2):
    return run_episode(
        network, image, objective, steps=steps, learning_rate=rate, case_id=case_id, keep_parameters=True, min_area=2
    )


def same(one, other):
    assert all(np.array_equal(a, b) for a, b in zip(one.masks, other.masks, strict=True))
    assert [dict(s) for s in one.signals] == [dict(s) for s in other.signals]
    for first, second in zip(one.parameters, other.parameters, strict=True):
        assert all(np.array_equal(first[name], second[name]) for name in first)


def condition(network):
    """Everything about a network that an episode must give back, beside its weights."""
    return (
        [module.training for module in network.modules()],
        [(p.requires_grad, p.grad is None, p.data_ptr()) for p in network.parameters()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in m.__dict__) for m in network.modules()],
    )


def test_the_network_is_restored_bit_by_bit(subject, objective):
    network, (image, _) = subject
    before, found = fingerprint(network), condition(network)
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    adapted(network, image, objective)
    assert fingerprint(network) == before
    assert condition(network) == found
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert random.getstate() == python_state


def test_two_runs_agree_and_the_order_of_cases_does_not_matter(subject, objective):
    network, (first, second) = subject
    alone = adapted(network, second, objective, case_id="b")
    adapted(network, first, objective, case_id="a")
    torch.manual_seed(99)
    same(adapted(network, second, objective, case_id="b"), alone)


def test_a_rate_of_zero_changes_nothing(subject, objective):
    network, (image, _) = subject
    made = adapted(network, image, objective, rate=0.0)
    assert all(np.array_equal(made.parameters[2][name], value) for name, value in made.parameters[0].items())
    assert np.array_equal(made.masks[2], made.masks[0])
    assert made.signals[2]["entropy"] == made.signals[0]["entropy"]


def test_a_large_rate_changes_something(subject, objective):
    network, (image, _) = subject
    made = adapted(network, image, objective, rate=0.5)
    assert any(not np.array_equal(made.parameters[2][name], value) for name, value in made.parameters[0].items())
    assert made.signals[2]["entropy"] != made.signals[0]["entropy"]


def test_logits_that_are_not_finite_raise_and_the_network_is_restored(subject, objective):
    network, (image, _) = subject
    before, found = fingerprint(network), condition(network)
    calls = []

    def poisoned(inputs):
        from casewise.adapt.logits import at_resolution, logits_of

        calls.append(1)
        logits = at_resolution(logits_of(network(inputs)), inputs.shape[2:])
        return logits * float("nan") if len(calls) > 1 else logits

    with pytest.raises(NotFinite):
        run_episode(network, image, objective, steps=2, forward=poisoned)
    assert fingerprint(network) == before
    assert condition(network) == found

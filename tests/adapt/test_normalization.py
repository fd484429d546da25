"""Whose statistics a normalization layer uses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.parameters import fast_norms, use_batch_statistics
from casewise.adapt.proposers.live import run_episode
from casewise.core.errors import BadInput


@pytest.fixture
def net(make_unet):
    return make_unet(nn.BatchNorm2d).eval()


def test_batch_mode_is_what_training_mode_normalizes_with(net, slices):
    trained = copy.deepcopy(net).train()
    use_batch_statistics(net)
    assert torch.allclose(net(slices), trained(slices), atol=1e-5)


def test_batch_mode_leaves_the_running_statistics_alone(net, slices):
    before = net.encoder[1].running_mean.clone()
    use_batch_statistics(net)
    net(slices)
    assert torch.equal(net.encoder[1].running_mean, before)


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(BadInput, match="one of source, batch, got 'bach'"):
        Adaptation("tent", batch_statistics="bach")


@pytest.mark.parametrize("mode", ["source", "batch"])
def test_m0_is_always_predicted_in_source_mode(net, slices, mode):
    made = run_episode(net, slices, Tent(), steps=1, learning_rate=0.0, batch_statistics=mode)
    assert np.array_equal(made.masks[0], net(slices).argmax(1).numpy())
    assert (made.signals[1]["entropy"] == made.signals[0]["entropy"]) == (mode == "source")


def test_micro_batches_are_refused_where_they_would_change_the_step(net, slices):
    with pytest.raises(BadInput, match="micro-batches would change the batch statistics"):
        run_episode(net, slices, Tent(), steps=1, batch_statistics="batch", max_slices=2)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = layer.running_var = None
    with pytest.raises(BadInput, match="micro-batches"):
        run_episode(net, slices, Tent(), steps=1, max_slices=2)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_fast_norms_are_the_norms_up_to_rounding_and_only_inside(dimensions):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dimensions - 1]
    torch.manual_seed(0)
    layer = kind(3, affine=True).eval()
    nn.init.normal_(layer.weight)
    inputs = 50 + torch.randn(2, 3, *[9] * dimensions)  # a mean far from 0, where careless variances lose digits
    expected, alone = layer(inputs), layer(inputs[0])
    with fast_norms(layer):
        assert "forward" in layer.__dict__
        torch.testing.assert_close(layer(inputs), expected, atol=1e-4, rtol=0)
        assert torch.equal(layer(inputs[0]), alone)  # without a batch axis it runs as it is
    assert "forward" not in layer.__dict__


def test_fast_norms_leave_other_layers_alone():
    class Own(nn.InstanceNorm2d):
        def forward(self, inputs):
            return inputs + 1

    network = nn.Sequential(Own(2), nn.InstanceNorm2d(2, track_running_stats=True), nn.BatchNorm2d(2)).eval()
    taken = nn.InstanceNorm2d(2)
    taken.forward = lambda inputs: inputs - 1
    with fast_norms(nn.Sequential(network, taken)):
        assert not any("forward" in module.__dict__ for module in network.modules())
        assert float(taken(torch.zeros(1))) == -1
    assert float(taken(torch.zeros(1))) == -1


def test_fast_norms_run_as_they_are_on_channels_last():
    layer, inputs = nn.InstanceNorm2d(3), torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    expected = layer(inputs)
    with fast_norms(layer):
        assert torch.equal(layer(inputs), expected)

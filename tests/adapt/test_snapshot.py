"""A network on loan comes back exactly as it was found."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.snapshot import fingerprint, restored
from casewise.core.errors import Refused


def vandalize(network):
    """Change everything that can be changed."""
    network.eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
            parameter.grad = torch.ones_like(parameter)
        for buffer in network.buffers():
            buffer.zero_()
    network.requires_grad_(False)
    network.encoder.register_forward_hook(lambda *_: None)
    network.encoder[1].running_mean = None
    network.encoder[1].track_running_stats = False
    network.head.forward = lambda x: x
    network.decoder[0] = nn.Identity()
    torch.rand(3), np.random.rand(3), random.random()


def everything(network):
    return (
        fingerprint(network),
        [(type(m), m.training, len(m._forward_hooks), sorted(m.__dict__)) for m in network.modules()],
        [(p.requires_grad, p.grad, p.data_ptr()) for p in network.parameters()],
        network.encoder[1].track_running_stats,
        (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()),
    )


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_vandalized_network_comes_back_whole(make_unet, error):
    network = make_unet(nn.BatchNorm2d)
    network.bottom.requires_grad_(False)
    before = everything(network)
    try:
        with restored(network):
            vandalize(network)
            assert everything(network) != before
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert everything(network) == before


def test_hooks_found_on_the_network_still_fire_and_can_be_removed(unet, slices):
    calls = []
    handle = unet.head.register_forward_hook(lambda *_: calls.append(1))
    with restored(unet):
        unet.head._forward_hooks.clear()
        unet(slices)
    assert calls == []
    unet(slices)
    assert calls == [1]
    handle.remove()
    unet(slices)
    assert calls == [1]


def test_a_gradient_that_was_found_is_the_same_tensor_afterwards(unet):
    unet.head.bias.grad = found = torch.ones(3)
    with restored(unet):
        unet.head.bias.grad = None
    assert unet.head.bias.grad is found


def test_only_what_may_change_is_copied(unet):
    def touch_what_was_not_selected():
        with restored(unet, {"encoder.1.weight"}), torch.no_grad():
            unet.encoder[1].weight.add_(1)
            unet.head.bias.add_(1)

    with pytest.raises(Refused, match=r"moved head\.bias, which were not selected"):
        touch_what_was_not_selected()


def test_selected_parameters_are_given_back(unet):
    before = fingerprint(unet)
    with restored(unet, {"encoder.1.weight"}), torch.no_grad():
        unet.encoder[1].weight.add_(1)
    assert fingerprint(unet) == before


def test_another_memory_layout_is_undone(unet):
    pointers = [p.data_ptr() for p in unet.parameters()]
    with restored(unet, ()):
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
    assert [p.data_ptr() for p in unet.parameters()] == pointers


def test_a_fingerprint_notices_one_bit_and_nothing_else(unet):
    before = fingerprint(unet)
    unet.eval()
    assert fingerprint(unet) == before
    with torch.no_grad():
        unet.head.bias[0] = torch.nextafter(unet.head.bias[0], torch.tensor(9.0))
    assert fingerprint(unet) != before


def test_a_fingerprint_reads_half_precision_and_scalars():
    network = nn.Module()
    network.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
    assert len(fingerprint(network)) == 64

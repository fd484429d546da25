"""A network is restored exactly as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.snapshot import fingerprint, restored
from casewise.core.errors import BadInput, MovedUnselected


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
def test_a_changed_network_is_restored_completely(make_unet, error):
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


def in_place(parameter):
    parameter.add_(1)


def through_data(parameter):
    parameter.data[:] += 1


def through_numpy(parameter):
    parameter.detach().numpy()[:] += 1


def through_a_view(parameter):
    parameter.detach().view(-1)[0] = 9


def by_another_memory(parameter):
    parameter.data = parameter.data + 1


def by_giving_the_memory_away(parameter):
    parameter.untyped_storage().resize_(0)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
@pytest.mark.parametrize(
    "move", [in_place, through_data, through_numpy, through_a_view, by_another_memory, by_giving_the_memory_away]
)
def test_a_weight_that_was_not_selected_comes_back_and_is_named(unet, slices, move, error):
    before, logits = fingerprint(unet), unet(slices)

    def touch_what_was_not_selected():
        with restored(unet, {"encoder.1.weight"}), torch.no_grad():
            unet.encoder[1].weight.add_(1)
            move(unet.head.bias)
            if error is not None:
                raise error

    if move is by_giving_the_memory_away:
        with pytest.raises((MovedUnselected, RuntimeError, ZeroDivisionError)):
            touch_what_was_not_selected()
    elif error is None:
        with pytest.raises(MovedUnselected, match=r"changed head\.bias, which were not selected; they were restored"):
            touch_what_was_not_selected()
    else:
        with pytest.raises(error):
            touch_what_was_not_selected()
    assert fingerprint(unet) == before
    assert torch.equal(unet(slices), logits)


def test_a_nan_that_was_there_is_no_change(unet):
    with torch.no_grad():
        unet.head.bias[0] = float("nan")
    before = fingerprint(unet)
    with restored(unet, ()):
        pass
    assert fingerprint(unet) == before


def test_tensors_in_lists_and_plain_attributes_come_back(unet):
    unet.plain = torch.zeros(3)
    unet.listed = [torch.zeros(2), {"inner": [np.zeros(2)]}]
    unet.settings = {"rate": torch.ones(1)}
    held = unet.listed
    with restored(unet):
        unet.plain += 1
        unet.listed[0] += 1
        unet.listed[1]["inner"][0] += 1
        unet.listed.append("more")
        unet.settings["rate"].mul_(5)
        unet.settings["new"] = 1
    assert unet.plain.tolist() == [0, 0, 0]
    assert unet.listed is held
    assert len(held) == 2
    assert held[0].tolist() == [0, 0]
    assert held[1]["inner"][0].tolist() == [0, 0]
    assert unet.settings == {"rate": torch.ones(1)}


def test_hooks_and_attributes_of_a_parameter_are_taken_off_again(unet, slices):
    calls = []
    kept = unet.head.bias.register_hook(lambda grad: calls.append("kept"))
    with restored(unet):
        unet.head.bias.register_hook(lambda grad: calls.append("left behind"))
        unet.head.weight.register_hook(lambda grad: grad * 100)
        unet.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("left behind"))
        unet.head.weight.note = "left behind"
    unet(slices).sum().backward()
    assert calls == ["kept"]
    assert not hasattr(unet.head.weight, "note")
    kept.remove()
    unet(slices).sum().backward()
    assert calls == ["kept"]


def test_the_content_of_a_gradient_that_was_found_comes_back(unet):
    unet.head.bias.grad = found = torch.ones(3)
    with restored(unet):
        found.zero_()
    assert found.tolist() == [1, 1, 1]


def test_lazy_layers_are_refused_with_a_sentence(slices):
    network = nn.Sequential(nn.LazyConv2d(3, 1))
    for touch in (lambda: fingerprint(network), lambda: restored(network).__enter__()):
        with pytest.raises(BadInput, match=r"0\.weight, 0\.bias belong to lazy layers without a shape"):
            touch()
    network(slices)
    assert len(fingerprint(network)) == 64


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

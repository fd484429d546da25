from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.objectives.cotta import Cotta
from casewise.adapt.objectives.deyo import Deyo
from casewise.adapt.objectives.grata import Grata
from casewise.adapt.objectives.memo import Memo
from casewise.adapt.objectives.sar import Sar
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.optimizers import cosine, norm, shifted
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import swapped


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 1))


IMAGE = torch.randn((2, 1, 16, 16), generator=torch.Generator().manual_seed(1))


def test_the_old_values_come_back_bit_for_bit_also_after_an_error():
    with Episode(network(), IMAGE, Adaptation(Tent())) as episode:
        weight = episode.parameters["1.weight"]
        storage, before = weight.data_ptr(), weight.detach().clone()
        with contextlib.suppress(KeyboardInterrupt), swapped(episode.parameters, {"1.weight": torch.zeros(4)}):
            assert weight.eq(0).all()
            raise KeyboardInterrupt
        assert weight.data_ptr() == storage
        assert torch.equal(weight, before)


def test_a_forward_made_before_keeps_its_gradient():
    model = network()
    with Episode(model, IMAGE, Adaptation(Tent())) as episode:
        expected = torch.autograd.grad(model(IMAGE).square().mean(), model[1].weight)[0]
        output = model(IMAGE)
        with torch.no_grad(), swapped(episode.parameters, shifted(episode, {"1.weight": torch.ones(4)}, 5.0)):
            model(IMAGE)
        assert torch.equal(torch.autograd.grad(output.square().mean(), model[1].weight)[0], expected)


def test_norm_and_cosine_are_over_all_tensors_at_once():
    right, up = (
        {"a": torch.tensor([3.0]), "b": torch.tensor([0.0])},
        {"a": torch.tensor([0.0]), "b": torch.tensor([4.0])},
    )
    assert norm({"a": right["a"], "b": up["b"]}) == 5.0
    assert cosine(right, up) == 0.0
    assert cosine(right, {name: -2 * value for name, value in right.items()}) == pytest.approx(-1)


@pytest.mark.parametrize(
    ("objective", "extra", "once"),
    [
        (Tent(), 0, 0),
        (Memo(), 4, 0),
        (Cotta(), 2, 0),
        (Cotta(deploy="teacher"), 3, 0),
        (Cotta(gate=0.0), 1, 1),
        (Sar(margin=2.0), 1, 0),
        (Deyo(), 1, 0),
        (Grata(), 7, 0),
    ],
    ids=lambda value: repr(value).split("(")[0] if not isinstance(value, int) else str(value),
)
def test_an_update_costs_the_forwards_that_its_docstring_says(objective, extra, once):
    model, seen, steps = network(), [], 3
    model.register_forward_hook(lambda *_: seen.append(1))
    run_episode(model, IMAGE, objective, steps=steps)
    assert len(seen) == (steps + 1) + steps * extra + once

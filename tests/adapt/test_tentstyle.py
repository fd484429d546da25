"""Objects in the shape of published code: ``forward_and_adapt`` and ``reset``."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.backbones.module import Module
from casewise.adapt.logits import entropy
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.parameters import select
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput
from casewise.core.records import Case

RATE = 0.02


class OwnTent(nn.Module):
    """A wrapper as people have them: it configures the network, keeps an optimizer and a copy to reset to."""

    def __init__(self, model):
        super().__init__()
        self.model = model.train().requires_grad_(False)
        affine = list(select(model).values())
        for parameter in affine:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.Adam(affine, lr=RATE)
        self.saved = copy.deepcopy(model.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    def reset(self):
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(self.saved[1])

    def forward_and_adapt(self, x):
        assert self.model.training
        logits = self.model(x)
        entropy(logits).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits


class WithArguments(OwnTent):
    """The signature of the first published wrapper."""

    def forward_and_adapt(self, x, model, optimizer):
        assert model is self.model
        assert optimizer is self.optimizer
        return super().forward_and_adapt(x)


@pytest.mark.parametrize("kind", [OwnTent, WithArguments])
def test_a_wrapper_takes_the_same_steps_as_our_tent(unet, slices, kind):
    ours = run_episode(unet, slices, Tent(), steps=3, learning_rate=RATE)
    theirs = run_episode(unet, slices, kind(unet), steps=3)
    assert all(np.array_equal(a, b) for a, b in zip(ours.masks, theirs.masks, strict=True))
    assert "TentStyle(" in theirs.made_by


def test_the_network_and_the_case_before_leave_no_trace(make_unet, slices):
    network = make_unet(nn.BatchNorm2d)
    wrapper = OwnTent(network)
    before, required = fingerprint(network), [p.requires_grad for p in network.parameters()]
    first = run_episode(network, slices, wrapper, steps=2, case_id="a")
    run_episode(network, slices.flip(0) * 2, wrapper, steps=2, case_id="b")
    again = run_episode(network, slices, wrapper, steps=2, case_id="a")
    assert fingerprint(network) == before
    assert [p.requires_grad for p in network.parameters()] == required
    assert network.training
    assert all(np.array_equal(a, b) for a, b in zip(first.masks, again.masks, strict=True))
    assert first.signals[1]["entropy"] != first.signals[0]["entropy"]


def test_an_object_that_adapts_another_network_is_refused(unet, slices):
    with pytest.raises(BadInput, match="adapts another network"):
        run_episode(unet, slices, OwnTent(copy.deepcopy(unet)), steps=1)


def test_an_object_that_is_no_objective_is_refused(unet, slices):
    with pytest.raises(BadInput, match="begin\\(subject\\), or one with forward_and_adapt and reset; got dict"):
        run_episode(unet, slices, {}, steps=1)


def test_a_wrapper_gets_the_picture_padded_as_its_network_does() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 1))
    seen = []
    network.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape[2:])))
    prepared = Module(network, classes=3, dimensions=2, multiple=8).prepare(Case("a", np.ones((1, 13, 6))))
    run_episode(network, prepared.inputs, OwnTent(network), steps=1, forward=prepared.forward)
    assert set(seen) == {(16, 8)}

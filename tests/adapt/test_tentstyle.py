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


class Published(nn.Module):
    """The first published wrapper: calling it adapts, and it is given a network that was configured before."""

    def __init__(self, model, optimizer, episodic=False):
        super().__init__()
        self.model, self.optimizer, self.episodic = model, optimizer, episodic
        self.saved = copy.deepcopy(model.state_dict())

    def forward(self, x):
        logits = self.model(x)
        entropy(logits).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits

    def reset(self):
        self.model.load_state_dict(self.saved)


def setup_tent(model, episodic=False):
    model.train().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.requires_grad_(True)
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return Published(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE), episodic)


class BuiltOnNetwork(Published):
    def __init__(self, network):
        made = setup_tent(network)
        super().__init__(made.model, made.optimizer)


def setup_of_net(net):
    """The authors' functions name their argument in three ways."""
    return setup_tent(net)


@pytest.mark.parametrize("method", [setup_tent, setup_of_net, BuiltOnNetwork])
def test_code_that_configures_the_network_itself_is_built_after_m0(make_unet, slices, method):
    network = make_unet(nn.BatchNorm2d)
    before = fingerprint(network)
    ours = run_episode(network, slices, Tent(), steps=2, learning_rate=RATE, batch_statistics="batch")
    theirs = run_episode(network, slices, method, steps=2)
    assert all(np.array_equal(a, b) for a, b in zip(ours.masks, theirs.masks, strict=True))
    assert fingerprint(network) == before


def test_a_network_that_was_configured_before_m0_is_refused(make_unet, slices):
    network = make_unet(nn.BatchNorm2d)
    with pytest.raises(BadInput, match="M0 would not be the mask of the original model"):
        run_episode(network, slices, setup_tent(network), steps=1)


def test_published_code_that_cannot_run_is_refused_with_the_reason(make_unet, slices):
    def nothing(model):
        return 3

    def resets_itself(model):
        return setup_tent(model, episodic=True)

    class Elsewhere:
        def __init__(self, network):
            self.net = copy.deepcopy(network)

        def forward_and_adapt(self, x):
            return self.net(x)

        def reset(self):
            pass

    wrong = {
        nothing: "nothing returned int",
        resets_itself: "use episodic=False",
        Elsewhere: "adapts another network",
        Published: "it needs model, optimizer",
    }
    for method, words in wrong.items():
        with pytest.raises(BadInput, match=words):
            run_episode(make_unet(nn.BatchNorm2d), slices, method, steps=1)


def test_an_update_may_return_nothing(unet, slices):
    assert run_episode(unet, slices, lambda subject: lambda: None, steps=1).steps == 1

"""The stated cost of every signal is right: forward and backward passes are counted in real episodes."""

from __future__ import annotations

import pytest
import torch

from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.recording import Recording, peak_bytes
from casewise.measure.signals import SIGNALS

STEPS = 2
PROBES = ["augmentation_disagreement", "dropout_disagreement", "grata_cosine"]
SELF_TEST = {"augmentation_disagreement": 1}  # one forward at step 0: the identity view must agree


def pluralize(network, image, monkeypatch, **options):
    """(forwards, backwards) of one episode."""
    passes = {"forwards": 0, "backwards": 0}
    own = torch.autograd.backward

    def backward(*arguments, **more):
        passes["backwards"] += 1
        return own(*arguments, **more)

    def forward(module, inputs):
        passes["forwards"] += 1

    handle = network.register_forward_pre_hook(forward)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", backward)
        run_episode(network, image, Tent(), steps=STEPS, **options)
    handle.remove()
    return passes["forwards"], passes["backwards"]


def test_an_episode_costs_k_backwards_and_one_forward_more(unet, slices, monkeypatch):
    assert pluralize(unet, slices, monkeypatch) == (STEPS + 1, STEPS)


@pytest.mark.parametrize("name", PROBES)
def test_a_signal_costs_what_it_says(name, unet, slices, monkeypatch):
    forwards, backwards = pluralize(unet, slices, monkeypatch, signals=[name])
    said, predictions = SIGNALS[name], STEPS + 1
    assert forwards - (STEPS + 1) == said.forwards * predictions + SELF_TEST.get(name, 0)
    assert backwards - STEPS == said.backwards * predictions


def test_the_gradient_norm_shares_the_backward_of_the_step(unet, slices, monkeypatch):
    assert SIGNALS["gradient_norm"].forwards == 0
    assert pluralize(unet, slices, monkeypatch)[1] == STEPS * SIGNALS["gradient_norm"].backwards


def test_every_reading_is_timed_and_its_memory_is_noted(unet, slices):
    made = run_episode(unet, slices, Tent(), steps=STEPS, signals=["augmentation_disagreement"])
    assert set(made.spent) == {"fragmentation", "gradient_norm", "augmentation_disagreement"}
    assert all(took > 0 and more >= 0 for took, more in made.spent.values())
    assert made.spent["augmentation_disagreement"][0] > made.spent["gradient_norm"][0]  # nine forwards against a sum


def test_memory_that_a_reading_needs_is_noted(monkeypatch):
    peaks = iter([100 * 2**20, 164 * 2**20])
    monkeypatch.setattr("casewise.adapt.recording.peak_bytes", lambda: next(peaks))
    record = Recording(16, True)
    with record.metered("hungry"):
        pass
    assert record.spent["hungry"][0][1] == 64
    assert peak_bytes() > 2**20

"""What runs before anything that moves is computed once a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.objectives.memo import Memo
from casewise.adapt.objectives.sar import Sar
from casewise.adapt.objectives.tent import Tent
from casewise.adapt.proposers.live import run_episode
from casewise.adapt.snapshot import fingerprint


def both(network, slices, objective, **options):
    options = {"steps": 3, "learning_rate": 0.05, "parameters": "decoder-norm", "keep_parameters": True, **options}
    plain = run_episode(network, slices, objective, **options)
    return plain, run_episode(network, slices, objective, cache_frozen=True, **options)


@pytest.mark.parametrize("objective", [Tent(), Sar(margin=2.0), Memo(views=2)])
@pytest.mark.parametrize("max_slices", [None, 2])
def test_a_cached_encoder_gives_the_same_episode_to_the_last_bit(unet, slices, objective, max_slices):
    plain, cached = both(unet, slices, objective, max_slices=max_slices)
    assert all(np.array_equal(a, b) for a, b in zip(plain.masks, cached.masks, strict=True))
    assert all(np.array_equal(plain.parameters[3][n], cached.parameters[3][n]) for n in plain.parameters[3])


def test_the_encoder_runs_once(unet, slices):
    calls = []
    unet.encoder[0].register_forward_hook(lambda *_: calls.append(1))
    before = fingerprint(unet)
    both(unet, slices, Tent())
    assert len(calls) == 4 + 1
    assert fingerprint(unet) == before
    assert "forward" not in unet.encoder.__dict__


def test_nothing_is_cached_behind_what_moves(unet, slices):
    plain, cached = both(unet, slices, Tent(), parameters="encoder-norm")
    assert all(np.array_equal(a, b) for a, b in zip(plain.masks, cached.masks, strict=True))


def test_batch_statistics_are_not_mixed_with_features_of_the_source(make_unet, slices):
    plain, cached = both(make_unet(nn.BatchNorm2d), slices, Tent(), batch_statistics="batch")
    assert all(np.array_equal(a, b) for a, b in zip(plain.masks, cached.masks, strict=True))


def test_features_that_are_changed_in_place_later_are_not_used(slices):
    class Spoils(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Conv2d(1, 4, 1)
            self.decoder = nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 3, 1))

        def forward(self, x):
            features = self.encoder(x)
            features += 1
            features *= features.detach().sigmoid()
            return self.decoder(features)

    torch.manual_seed(0)
    plain, cached = both(Spoils(), slices, Tent())
    assert all(np.array_equal(plain.parameters[3][n], cached.parameters[3][n]) for n in plain.parameters[3])


def test_a_module_that_is_called_twice_hands_out_both_outputs(slices):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Conv2d(1, 4, 3, padding=1)
            self.decoder = nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 3, 1))

        def forward(self, x):
            return self.decoder(torch.cat([self.encoder(x), self.encoder(-x)], 1))

    torch.manual_seed(0)
    plain, cached = both(Twice(), slices, Tent())
    assert all(np.array_equal(plain.parameters[3][n], cached.parameters[3][n]) for n in plain.parameters[3])


def test_parameters_that_are_used_out_of_sight_switch_it_off(slices):
    class OutOfSight(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(1)])
            self.encoder = nn.Conv2d(1, 4, 1)
            self.head = nn.Conv2d(4, 3, 1)

        def forward(self, x):
            return self.head(self.encoder(x * self.scales[0]))

    torch.manual_seed(0)
    plain, cached = both(OutOfSight(), slices, Tent(), parameters="scales.*")
    assert not np.array_equal(plain.parameters[3]["scales.0"], plain.parameters[0]["scales.0"])
    assert np.array_equal(plain.parameters[3]["scales.0"], cached.parameters[3]["scales.0"])

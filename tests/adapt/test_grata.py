from __future__ import annotations

import numpy as np
import pytest
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.episode import Episode
from casewise.adapt.networks import PlainUNet
from casewise.adapt.objectives.grata import Grata, Style, sampled_style
from casewise.adapt.proposers.live import run_episode


def subject_parts():
    torch.manual_seed(0)
    return PlainUNet(features=(4, 8), classes=3), torch.randn(2, 1, 16, 24)


def ladder(objective: Grata, **options):
    network, image = subject_parts()
    return run_episode(network, image, objective, steps=2, keep_parameters=True, **options)


def test_the_rate_is_the_base_rate_times_a_quarter_of_the_squared_alignment():
    for step in ladder(Grata()).diagnostics:
        assert step["multiplier"] == pytest.approx(0.25 * (step["cosine"] + 1) ** 2)
        assert 0 <= step["multiplier"] <= 1


def test_the_first_adam_step_is_as_long_as_the_rate():
    trajectory = ladder(Grata())
    first = max(np.abs(trajectory.parameters[1][n] - v).max() for n, v in trajectory.parameters[0].items())
    assert first == pytest.approx(1e-4 * trajectory.diagnostics[0]["multiplier"], rel=0.02)


def test_the_shared_arm_has_the_same_cosine_and_five_times_the_step():
    own, shared = ladder(Grata()), ladder(Grata.shared())
    assert own.diagnostics[0] == shared.diagnostics[0]
    assert shared.parameters is not None
    for name, start in own.parameters[0].items():
        assert np.allclose(5 * (own.parameters[1][name] - start), shared.parameters[1][name] - start, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [{"gamma_retains_statistics": False}, {"blur_by_channel": True}, {"unit_range": True}, {"hard_target": True}],
    ids=lambda change: next(iter(change)),
)
def test_each_recorded_deviation_changes_the_consistency_gradient_only(change):
    base = {"learning_rate": 1e-4, "seed": 3}  # a draw in which gamma and blur are both chosen
    plain, changed = ladder(Grata(), **base).diagnostics[0], ladder(Grata(**change), **base).diagnostics[0]
    assert plain["entropy_loss"] == changed["entropy_loss"]
    assert plain["consistency_loss"] != changed["consistency_loss"]


def test_the_official_release_undoes_three_deviations():
    official = Grata.official()
    assert (official.gamma_retains_statistics, official.blur_by_channel, official.unit_range) == (False, True, True)
    assert official.learning_rate == 1e-4


def test_the_cosine_changes_no_weights():
    network, image = subject_parts()
    with Episode(network, image, Adaptation(Grata())) as episode:
        before = {name: value.clone() for name, value in network.state_dict().items()}
        ahead, along, _ = Grata().gradient_pair(episode)
        assert set(ahead) == set(along) == set(episode.parameters)
        assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())


def test_the_releases_strong_view_is_stronger_and_bends_the_inverted_picture():
    inputs = torch.rand(400, 1, 2, 2)
    style = sampled_style(inputs, torch.Generator().manual_seed(0), official=True)
    plain = sampled_style(inputs, torch.Generator().manual_seed(0))
    for name, low, high in (("brightness", 0.5, 1.5), ("contrast", 0.5, 1.5), ("gamma", 0.5, 2.0)):
        drawn, before = getattr(style, name), getattr(plain, name)
        assert low <= float(drawn.min()) < float(before.min())
        assert float(before.max()) < float(drawn.max()) <= high
    below, above = (style.gamma < 1).float().mean(), (style.gamma > 1).float().mean()
    assert abs(float(below - above)) < 0.15  # as often below as above
    neutral = torch.ones(1, 1)
    bent = Style(neutral, neutral, 2 * neutral, 0 * neutral, 0 * neutral, inverted=True, retain_statistics=False)
    picture = torch.tensor([[[[0.0, 0.5, 1.0]]]])
    # the inverted picture 0, -0.5, -1 has range 1 and minimum -1: (x + 1)^2 - 1, and back: 0, 0.75, 1
    assert bent.apply(picture).flatten().tolist() == pytest.approx([0.0, 0.75, 1.0], abs=1e-5)

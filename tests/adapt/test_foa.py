from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from casewise.adapt.episode import run_episode
from casewise.adapt.objectives.foa import Foa, SeparableCma, activation_statistics, default_population, discrepancy
from casewise.core.errors import BadInput

IMAGE = torch.randn((2, 1, 16, 16), generator=torch.Generator().manual_seed(1))


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    options = {} if norm is nn.BatchNorm2d else {"affine": True}
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), norm(6, **options), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), norm(6, **options),
        nn.Conv2d(6, 3, 1),
    )  # fmt: skip


def ladder(objective: Foa, model: nn.Module | None = None, **options):
    return run_episode(model or network(), IMAGE, objective, steps=4, keep_parameters=True, **options)


def test_no_gradient_is_ever_computed():
    model = network()
    model.register_full_backward_pre_hook(lambda *_: pytest.fail("a backward ran"))
    trajectory = ladder(Foa(population=5), model)
    assert all(step["gradient_norm"] is None for step in trajectory.signals)
    assert any(np.any(trajectory.parameters[4][n] != v) for n, v in trajectory.parameters[0].items())


def test_the_best_candidate_never_becomes_worse():
    trajectory = ladder(Foa(population=8, deploy="best", tradeoff=0.0), learning_rate=0.05)
    entropies = [step["entropy"] for step in trajectory.signals]
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[-1] < entropies[0]


def test_a_rate_of_zero_stands_still():
    trajectory = ladder(Foa(population=4), learning_rate=0.0)
    for name, start in trajectory.parameters[0].items():
        assert np.array_equal(trajectory.parameters[4][name], start)


def test_a_heavy_second_term_holds_the_activations_near_the_source():
    free, held = (ladder(Foa(population=12, tradeoff=weight), learning_rate=0.05) for weight in (0.0, 1e5))

    def change(trajectory):
        last = {n: torch.from_numpy(v) for n, v in trajectory.parameters[4].items()}
        model = network().eval()
        before = activation_statistics(model, IMAGE)
        model.load_state_dict({**model.state_dict(), **last})
        return discrepancy(activation_statistics(model, IMAGE).moments, before.moments)

    assert change(held) < change(free)


def test_running_statistics_need_batch_normalization():
    assert ladder(Foa(population=4, reference="running")).steps == 4
    with pytest.raises(BadInput, match="needs layers with running statistics"):
        ladder(Foa(population=4, reference="running"), network(nn.InstanceNorm2d))


def test_statistics_of_source_images_can_be_passed_in():
    model = network().eval()
    given = Foa(population=4, statistics=activation_statistics(model, IMAGE))
    own = Foa(population=4)
    assert ladder(given).diagnostics == ladder(own).diagnostics
    other = Foa(population=4, statistics=activation_statistics(model, IMAGE + 1))
    assert len({repr(given), repr(own), repr(other)}) == 3


def test_statistics_of_source_images_are_padded_as_cases_are():
    model, odd = network().eval(), IMAGE[..., :-1]
    padded = nn.functional.pad(odd, (0, 1))
    assert repr(activation_statistics(model, odd, multiple=2)) == repr(activation_statistics(model, padded))
    assert repr(activation_statistics(model, odd)) != repr(activation_statistics(model, padded))


def test_the_channels_of_a_layer_norm_are_its_last_axis():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    statistics = activation_statistics(Tokens(), torch.randn(2, 7, 5))
    assert statistics.moments["norm"][0].shape == (5,)


def test_moments_are_means_and_standard_deviations_of_what_enters_a_layer():
    model = network(nn.InstanceNorm2d)
    with torch.no_grad():
        entering = model[0](IMAGE).transpose(0, 1).flatten(1)
    mean, deviation = activation_statistics(model, IMAGE).moments["1"]
    assert torch.allclose(mean, entering.mean(1))
    assert torch.allclose(deviation, entering.std(1))
    shifted = {"1": (mean + 1, deviation - 2)}
    assert discrepancy(shifted, {"1": (mean, deviation)}) == pytest.approx(6 * (1 + 4), rel=1e-5)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(BadInput, match="at least 2 candidates, got 1"):
        Foa(population=1)
    with pytest.raises(BadInput, match="got 'case' and 'median'"):
        Foa(deploy="median")


def test_the_default_population_is_that_of_the_publication():
    assert default_population(3 * 768) == 27


@pytest.mark.parametrize("scales", [torch.ones(10), torch.logspace(0, 3, 10)], ids=["sphere", "ellipsoid"])
def test_the_search_finds_the_minimum_of_a_bowl(scales):
    search, generator = SeparableCma(torch.full((10,), 3.0), 1.0), torch.Generator().manual_seed(0)
    for _ in range(400):
        search.tell([float((scales * candidate.square()).sum()) for candidate in search.ask(generator)])
    assert search.mean.abs().max() < 1e-4
    if scales[0] != scales[-1]:
        assert search.variance[-1] < search.variance[0] / 50  # it has learned which way is steep

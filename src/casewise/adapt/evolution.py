"""A search without gradients: CMA-ES with a diagonal covariance (Ros and Hansen, PPSN 2008).

Parameters follow Hansen's tutorial (arXiv 1604.00772, table 1); the learning rates of the covariance are multiplied by
(d + 2) / 3, which the diagonal allows. Deterministic under the generator that is passed to :meth:`SeparableCma.ask`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class SeparableCma:
    """Ask for candidates, tell their fitness (lower is better); ``mean`` is where the search stands."""

    def __init__(self, mean: Tensor, spread: float, population: int | None = None) -> None:
        self.mean = mean.double().clone()  # (d,)
        self.spread = float(spread)
        dimension = mean.numel()
        self.population = population or default_population(dimension)
        self.variance = torch.ones_like(self.mean)
        self._path_spread = torch.zeros_like(self.mean)
        self._path_variance = torch.zeros_like(self.mean)
        self._draws = torch.zeros(0, dimension)
        self._generations = 0
        self._set_rates(dimension)

    def ask(self, generator: torch.Generator) -> Tensor:
        """Candidates (population, d): mean + spread * sqrt(variance) * N(0, 1)."""
        shape = (self.population, self.mean.numel())
        self._draws = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.mean)
        return self.mean + self.spread * self.variance.sqrt() * self._draws

    def tell(self, fitness: list[float]) -> None:
        """Move the mean toward the better half of the last candidates, and learn its spread and variances."""
        best = torch.tensor(fitness).argsort(stable=True)[: len(self._weights)].to(self.mean.device)
        draws = self._draws[best]
        step = self._weights @ draws  # in the space where the search distribution is a unit ball
        self._generations += 1
        self.mean = self.mean + self.spread * self.variance.sqrt() * step
        steady = self._follow_paths(step)
        chosen = self._weights @ draws.square()
        along = self._path_variance.square() + (1 - steady) * self._c_path * (2 - self._c_path) * self.variance
        kept = 1 - self._c_one - self._c_many
        self.variance = kept * self.variance + self._c_one * along + self._c_many * chosen * self.variance
        length = float(self._path_spread.norm()) / self._expected_length
        self.spread *= math.exp(self._c_spread / self._damping * (length - 1))

    def _follow_paths(self, step: Tensor) -> float:
        """Advance both evolution paths; 1.0 where the spread's path is not unusually long, else 0.0."""
        keep = 1 - self._c_spread
        gain = math.sqrt(self._c_spread * (2 - self._c_spread) * self._effective)
        self._path_spread = keep * self._path_spread + gain * step
        settled = math.sqrt(1 - keep ** (2 * self._generations))
        limit = (1.4 + 2 / (self.mean.numel() + 1)) * self._expected_length
        steady = float(float(self._path_spread.norm()) / settled < limit)
        gain = steady * math.sqrt(self._c_path * (2 - self._c_path) * self._effective)
        self._path_variance = (1 - self._c_path) * self._path_variance + gain * self.variance.sqrt() * step
        return steady

    def _set_rates(self, dimension: int) -> None:
        parents = max(1, self.population // 2)
        weights = math.log(parents + 0.5) - torch.arange(1, parents + 1, dtype=torch.float64).log()
        self._weights = (weights / weights.sum()).to(self.mean)
        effective = self._effective = float(1 / self._weights.square().sum())
        self._c_spread = (effective + 2) / (dimension + effective + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((effective - 1) / (dimension + 1)) - 1) + self._c_spread
        self._c_path = (4 + effective / dimension) / (dimension + 4 + 2 * effective / dimension)
        diagonal = (dimension + 2) / 3
        one = 2 / ((dimension + 1.3) ** 2 + effective)
        many = 2 * (effective - 2 + 1 / effective) / ((dimension + 2) ** 2 + effective)
        self._c_one = min(1.0, diagonal * one)
        self._c_many = min(1 - self._c_one, diagonal * max(0.0, many))
        self._expected_length = math.sqrt(dimension) * (1 - 1 / (4 * dimension) + 1 / (21 * dimension**2))


def default_population(dimension: int) -> int:
    """4 + 3 ln d, rounded down: 27 for FOA's three prompts of 768."""
    return 4 + int(3 * math.log(dimension))

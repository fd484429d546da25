"""FOA: adapt with forwards only (in the manner of Niu et al., ICML 2024)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from casewise.adapt.logits import entropy
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import displaced
from casewise.adapt.parameters import norm_layers
from casewise.core.errors import BadInput, NotFinite


class SeparableCma:
    """A search without gradients: CMA-ES with a diagonal covariance (Ros and Hansen, PPSN 2008).

    Ask for candidates, tell their fitness (lower is better); ``mean`` is where the search stands. Parameters follow
    Hansen's tutorial (arXiv 1604.00772, table 1); the learning rates of the covariance are multiplied by (d + 2) / 3,
    which the diagonal allows. Deterministic under the generator that is passed to :meth:`ask`.
    """

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


Moments = Mapping[str, tuple[Tensor, Tensor]]
"""(mean, standard deviation) of each channel of what goes into a normalization layer, by the layer's name."""

Part = tuple[int, Tensor, Tensor]
"""(values per channel, mean, standard deviation) of one micro-batch."""


@dataclass(frozen=True, repr=False)
class Statistics:
    """Moments measured on source images; its repr is a digest, so that archives can tell two of them apart."""

    moments: Moments

    def __repr__(self) -> str:
        digest = hashlib.sha256()
        for name, (mean, deviation) in sorted(self.moments.items()):
            digest.update(name.encode() + mean.cpu().numpy().tobytes() + deviation.cpu().numpy().tobytes())
        return f"Statistics(layers={len(self.moments)}, sha256={digest.hexdigest()[:12]})"


@dataclass(frozen=True)
class Foa:
    r"""One generation of CMA-ES on the selected parameters; no gradient is ever computed.

    .. math::
        F(\theta) = \operatorname{mean} H + \frac{\lambda}{64} \sum_{\text{layers}}
        \Big( \|\mu - \mu_s\|^2 + \|\sigma - \sigma_s\|^2 \Big)

    which is FOA's fitness for one sample, with lambda = 0.4. What differs from the published method: scales and shifts
    of normalization layers instead of prompts, so any network will do; a diagonal covariance; no shift of the last
    features. mu_s and sigma_s come from ``statistics`` (measured on source images with :func:`activation_statistics`),
    from BatchNorm's running statistics (``reference="running"``), or are those of M0 on the case (``reference="case"``,
    the default: then the second term holds the activations near where they were).

    The learning rate is the spread of the first generation. ``deploy="mean"`` moves to the mean of the search;
    ``deploy="best"`` to the best candidate so far, as published. An update costs ``population`` (4 + 3 ln d unless
    given) forwards without a graph, no backward; with ``max_slices`` the moments of the micro-batches are pooled.
    """

    population: int | None = None
    tradeoff: float = 0.4  # lambda
    reference: str = "case"
    deploy: str = "mean"
    statistics: Statistics | None = None
    learning_rate: float = 5e-3

    def __post_init__(self) -> None:
        if self.reference not in ("case", "running") or self.deploy not in ("mean", "best"):
            raise BadInput(
                f"reference is 'case' or 'running' and deploy is 'mean' or 'best', "
                f"got {self.reference!r} and {self.deploy!r}"
            )
        if self.population is not None and self.population < 2:
            raise BadInput(f"a generation needs at least 2 candidates, got {self.population}")

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case: the search begins at the source."""
        start = torch.cat([parameter.detach().flatten() for parameter in subject.parameters.values()])
        search = SeparableCma(start, subject.learning_rate, self.population)
        wanted = self._wanted(subject)
        best_score, best = math.inf, search.mean

        def update() -> Mapping[str, float]:
            nonlocal best_score, best
            candidates = search.ask(subject.generator())
            scores = [self._fitness(subject, candidate, wanted) for candidate in candidates]
            lowest = min(scores)
            if not math.isfinite(lowest):
                raise NotFinite(f"no candidate of step {subject.step} has a finite fitness; lower the learning rate")
            search.tell(scores)
            if lowest < best_score:
                best_score, best = lowest, candidates[scores.index(lowest)]
            _move(subject, search.mean if self.deploy == "mean" else best)
            return {"fitness": lowest, "spread": search.spread}

        return update

    def _wanted(self, subject: Adaptable) -> Moments:
        if self.statistics is not None:
            return self.statistics.moments
        if self.reference == "running":
            return _running_statistics(subject.network)
        return _statistics_of(subject.network, lambda: subject.logits(subject.inputs))[0]

    def _fitness(self, subject: Adaptable, candidate: Tensor, wanted: Moments) -> float:
        try:
            with displaced(subject, _by_name(subject, candidate)):
                seen, logits = _statistics_of(subject.network, lambda: subject.logits(subject.inputs))
        except NotFinite:
            return math.inf
        uncertainty = float(entropy(logits, subject.head).mean())
        score = subject.entropy_weight * uncertainty + self.tradeoff / 64 * discrepancy(seen, wanted)
        return score if math.isfinite(score) else math.inf


def activation_statistics(network: nn.Module, images: Tensor, *, multiple: int = 1) -> Statistics:
    """Channel statistics of what goes into each normalization layer, over source images (n, channel, *space).

    ``multiple`` is that of the network's ``Module``: sides are padded to it, as those of a case are.
    """
    from casewise.adapt.backbones.module import PaddedForward

    return Statistics(_statistics_of(network, lambda: network(PaddedForward(network, multiple).pad(images)))[0])


def discrepancy(seen: Moments, wanted: Moments) -> float:
    """Summed squared differences of means and standard deviations, over the layers that both know."""
    shared = [name for name in wanted if name in seen]
    return float(sum((s - w).square().sum() for name in shared for s, w in zip(seen[name], wanted[name], strict=True)))


def _statistics_of(
    network: nn.Module, forward: Callable[[], Tensor]
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    seen: dict[str, list[Part]] = {}
    with torch.no_grad(), _listening(norm_layers(network), seen):
        output = forward()
    return {name: _pooled(parts) for name, parts in seen.items()}, output


@contextmanager
def _listening(layers: Iterable[tuple[str, nn.Module]], seen: dict[str, list[Part]]) -> Iterator[None]:
    def listener(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def listen(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            channels = _by_channel(layer, inputs[0])
            seen.setdefault(name, []).append((channels.shape[1], channels.mean(1), channels.std(1)))

        return listen

    handles = [layer.register_forward_pre_hook(listener(name)) for name, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pooled(parts: list[Part]) -> tuple[Tensor, Tensor]:
    r"""Moments of all micro-batches: :math:`(N-1)\sigma^2 = \sum_i (n_i-1)\sigma_i^2 + n_i(\mu_i-\mu)^2`."""
    if len(parts) == 1:
        return parts[0][1:]
    total = sum(count for count, _, _ in parts)
    mean = torch.stack([count * part for count, part, _ in parts]).sum(0) / total
    squares = [(count - 1) * spread.square() + count * (part - mean).square() for count, part, spread in parts]
    return mean, (torch.stack(squares).sum(0) / (total - 1)).sqrt()


def _by_channel(layer: nn.Module, inputs: Tensor) -> Tensor:
    """(channel, everything else): channels are last for layers that normalize the last axis, else second."""
    last = hasattr(layer, "normalized_shape")
    return inputs.movedim(-1 if last else 1, 0).flatten(1)


def _running_statistics(network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    known = {}
    for name, layer in norm_layers(network):
        mean, variance = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(variance, Tensor):
            known[name] = (mean.clone(), variance.sqrt())
    if not known:
        raise BadInput(
            "reference='running' needs layers with running statistics (BatchNorm) and the network has none; "
            "use reference='case' or pass statistics=activation_statistics(network, source_images)"
        )
    return known


def _by_name(subject: Adaptable, vector: Tensor) -> dict[str, Tensor]:
    sizes = [parameter.numel() for parameter in subject.parameters.values()]
    parts = zip(subject.parameters.items(), torch.split(vector, sizes), strict=True)
    return {name: part.reshape(parameter.shape).to(parameter.dtype) for (name, parameter), part in parts}


@torch.no_grad()
def _move(subject: Adaptable, vector: Tensor) -> None:
    moving = {id(parameter) for parameter in subject.moving()}
    for name, value in _by_name(subject, vector).items():
        if id(subject.parameters[name]) in moving:
            subject.parameters[name].copy_(value)
    subject.changed()

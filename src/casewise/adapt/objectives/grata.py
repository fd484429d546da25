"""GraTa: a consistency step, scaled by its agreement with the entropy gradient (Chen et al., AAAI 2025; D6, C9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import WEAK_VIEWS, drawn_seed, gaussian_field
from casewise.adapt.logits import cross_entropy, entropy, probabilities
from casewise.adapt.objective import Adaptable, ChunkLoss, Update
from casewise.adapt.optimizers import Values, cosine, gradients, optimizer_of, shifted
from casewise.adapt.snapshot import swapped

_TINY = 1e-7


@dataclass(frozen=True, eq=False)
class Style:
    """Strong view of GraTa: random intensity parameters for each (sample, channel); neutral values change nothing.

    Brightness, contrast, gamma, noise and blur are drawn for each sample with probabilities 0.75 / 0.75 / 0.75 / 0.5 /
    0.5. The paper prints the probabilities and the noise variance (up to 0.05, so sigma up to 0.22); the other ranges
    are not stated; here they are the usual ones of such augmentations: brightness and contrast factors in
    [0.75, 1.25], gamma in [0.7, 1.5], blur sigma in [0.5, 1.5] pixels. The official release is stronger: brightness and
    contrast in [0.5, 1.5], gamma in [0.5, 2] on the inverted picture, contrast and gamma below 1 as often as above.
    """

    brightness: Tensor  # (n, channel) factors, 1 is neutral
    contrast: Tensor  # (n, channel) factors around the mean, 1 is neutral
    gamma: Tensor  # (n, channel) exponents on the min-max scaled channel, 1 is neutral
    noise: Tensor  # (n, 1) standard deviations, 0 is neutral
    blur: Tensor  # (n, channel) sigmas in pixels, 0 is neutral
    seed: int = 0  # seed of the noise field
    inverted: bool = False  # apply gamma to the inverted picture, as the official release does
    retain_statistics: bool = True  # restore mean and deviation after gamma (paper); False: official release
    rescale: bool = False  # scale each sample to [0, 1] afterwards, as the official release does

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the inputs in this style; voxels do not move, so there is nothing to invert."""
        styled = inputs * _over_space(self.brightness, inputs)
        styled = _contrasted(styled, _over_space(self.contrast, inputs))
        sign = -1.0 if self.inverted else 1.0
        styled = sign * _gamma_corrected(sign * styled, _over_space(self.gamma, inputs), self.retain_statistics)
        styled = styled + _over_space(self.noise, inputs) * gaussian_field(inputs, self.seed)
        styled = _blurred(styled, self.blur)
        return _unit_range(styled) if self.rescale else styled


def sampled_style(
    inputs: Tensor, generator: torch.Generator, *, retain_statistics: bool = True, blur_by_channel: bool = False,
    rescale: bool = False, official: bool = False,
) -> Style:  # fmt: skip
    """Draw the parameters of a strong view for these inputs.

    ``blur_by_channel`` follows the official release: a sample chosen for blur (p = 0.5) then blurs each channel
    with p = 0.5. The paper omits the second draw (its deviation iv). ``official`` uses the ranges of the release.
    """
    shape = (inputs.shape[0], inputs.shape[1])
    by_sample = (inputs.shape[0], 1)
    uniform = _Uniform(generator)
    blur = uniform.chosen(by_sample, 0.5) * uniform.between(0.5, 1.5, shape)
    if blur_by_channel:
        blur = blur * uniform.chosen(shape, 0.5)
    ranges = ((0.5, 1.5), (0.5, 1.5), (0.5, 2.0)) if official else ((0.75, 1.25), (0.75, 1.25), (0.7, 1.5))
    factors = []
    for number, (low, high) in enumerate(ranges):
        chosen = uniform.chosen(by_sample, 0.75)
        drawn = uniform.around(low, high, shape) if official and number else uniform.between(low, high, shape)
        factors.append(1 + chosen * (drawn - 1))
    return Style(
        brightness=factors[0],
        contrast=factors[1],
        gamma=factors[2],
        noise=uniform.chosen(by_sample, 0.5) * uniform.between(0, 0.05, by_sample).sqrt(),
        blur=blur,
        seed=drawn_seed(generator),
        inverted=official,
        retain_statistics=retain_statistics,
        rescale=rescale,
    )


@dataclass(frozen=True)
class _Uniform:
    generator: torch.Generator

    def between(self, low: float, high: float, shape: tuple[int, int]) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def around(self, low: float, high: float, shape: tuple[int, int]) -> Tensor:
        """Draw below 1 and above 1 with equal probability, uniformly on each side."""
        below, above = self.between(low, 1.0, shape), self.between(1.0, high, shape)
        return torch.where(self.chosen(shape, 0.5) > 0, below, above)

    def chosen(self, shape: tuple[int, int], probability: float) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < probability).float()


def _over_space(values: Tensor, inputs: Tensor) -> Tensor:
    """Reshape (n, channel) values so that they broadcast over the spatial axes."""
    return values.to(inputs).reshape(*values.shape, *[1] * (inputs.ndim - 2))


def _space(inputs: Tensor) -> tuple[int, ...]:
    return tuple(range(2, inputs.ndim))


def _contrasted(inputs: Tensor, factor: Tensor) -> Tensor:
    """Stretch around the mean, mean + factor * (x - mean), and clip to the old range."""
    mean = inputs.mean(_space(inputs), keepdim=True)
    low, high = inputs.amin(_space(inputs), keepdim=True), inputs.amax(_space(inputs), keepdim=True)
    return torch.where(factor == 1, inputs, (mean + factor * (inputs - mean)).clamp(low, high))


def _gamma_corrected(inputs: Tensor, gamma: Tensor, retain_statistics: bool) -> Tensor:
    """x -> range * ((x - min) / range)^gamma + min, optionally with the old mean and deviation."""
    space = _space(inputs)
    low = inputs.amin(space, keepdim=True)
    extent = inputs.amax(space, keepdim=True) - low
    bent = ((inputs - low) / (extent + _TINY)).clamp(0, 1) ** gamma * extent + low
    if retain_statistics:
        bent = (bent - bent.mean(space, keepdim=True)) / (bent.std(space, keepdim=True) + _TINY)
        bent = bent * inputs.std(space, keepdim=True) + inputs.mean(space, keepdim=True)
    return torch.where(gamma == 1, inputs, bent)


def _blurred(inputs: Tensor, sigmas: Tensor) -> Tensor:
    """Blur each (sample, channel) by a separable Gaussian with its sigma; 0: no blur."""
    if not sigmas.any():
        return inputs
    planes = [
        [_smooth(plane, float(sigma)) if sigma else plane for plane, sigma in zip(sample, row, strict=True)]
        for sample, row in zip(inputs, sigmas, strict=True)
    ]
    return torch.stack([torch.stack(sample) for sample in planes])


def _smooth(plane: Tensor, sigma: float) -> Tensor:
    radius = int(4 * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1, device=plane.device, dtype=plane.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (kernel / kernel.sum()).reshape(1, 1, -1)
    for axis in range(plane.ndim):
        lines = plane.movedim(axis, -1)
        flat = functional.pad(lines.reshape(-1, 1, lines.shape[-1]), (radius, radius), mode="replicate")
        plane = functional.conv1d(flat, kernel).reshape(lines.shape).movedim(-1, axis)
    return plane


def _unit_range(inputs: Tensor) -> Tensor:
    """Scale each sample to [0, 1]."""
    rest = tuple(range(1, inputs.ndim))
    low, high = inputs.amin(rest, keepdim=True), inputs.amax(rest, keepdim=True)
    return (inputs - low) / (high - low + _TINY)


@dataclass(frozen=True)
class Grata:
    r"""Step along the consistency gradient; its rate depends on the cosine with the entropy gradient.

    1. :math:`g_{ent} = \nabla \operatorname{mean} H(\theta)`;
    2. :math:`\theta' = \theta - g_{ent}`: one step along the gradient, without a learning rate;
    3. target = mean over six weak views of the probabilities at theta', mapped back;
       :math:`g_{con} = \nabla \operatorname{mean} \mathrm{CE}(\text{target}, p(\text{strong view}))` at theta';
    4. :math:`\eta = \text{rate} \cdot \tfrac14 (\cos(g_{ent}, g_{con}) + 1)^2`;
    5. an Adam step from theta along g_con with eta.

    ``learning_rate`` is the base rate: 1e-4 is the official rate, 5e-4 the shared rate of the paper (:meth:`shared`).
    The paper's five deviations: (i) the softmax head is read from the network, and the mean target is not renormalized;
    (ii) several steps instead of one: ``steps=1`` is native GraTa; (iii) gamma keeps mean and
    deviation (``gamma_retains_statistics``); (iv) blur omits the draw by channel (``blur_by_channel``); (v) the strong
    view acts on z-scored intensities instead of [0, 1] (``unit_range``). :meth:`official` undoes (iii) to (v) and draws
    the stronger view of the release (``official_view``).

    Sigmoid heads use the official losses: :math:`-\sum_k \sigma_k \log(\sigma_k + 10^{-6})`, the positive half only,
    and binary cross-entropy averaged over channels. Cost of an update: two backward passes, and seven forward passes
    (six without a graph) more than the one that predicted the mask. Rotations by 90 degrees need a network that accepts
    both orientations.
    """

    gamma_retains_statistics: bool = True
    blur_by_channel: bool = False
    unit_range: bool = False
    official_view: bool = False  # ranges of the official release, and gamma on the inverted picture
    hard_target: bool = False  # one-hot targets, with which the paper tests why the cosine is negative
    entropy_weighted: ClassVar[bool] = False  # the loss has no entropy term that a modulation could scale

    optimizer: str = "adam"
    learning_rate: float = 1e-4

    @classmethod
    def shared(cls, **options: Any) -> Grata:
        """Return the supplementary variant of the paper: base rate 5e-4, as TENT, EATA and DeYO."""
        return cls(**{"learning_rate": 5e-4, **options})

    @classmethod
    def official(cls, **options: Any) -> Grata:
        """Return the official release, for networks that take intensities in [0, 1]; use ``steps=1``."""
        release = {"gamma_retains_statistics": False, "blur_by_channel": True, "unit_range": True}
        release |= {"official_view": True}
        return cls(**{**release, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case."""
        optimizer = optimizer_of(subject, self.optimizer)

        def update() -> Mapping[str, float]:
            ahead, along, losses = self.gradient_pair(subject)
            agreement = cosine(ahead, along)
            multiplier = 0.25 * (agreement + 1) ** 2
            optimizer.param_groups[0]["lr"] = subject.learning_rate * multiplier
            optimizer.step()
            return losses | {"cosine": agreement, "multiplier": multiplier}

        return update

    def gradient_pair(self, subject: Adaptable) -> tuple[Values, Values, dict[str, float]]:
        """Return the entropy gradient at theta, the consistency gradient at theta' (also in ``.grad``), the losses."""
        uncertain = subject.backward(_entropy_loss(subject))
        ahead = gradients(subject)
        with swapped(subject.parameters, shifted(subject, ahead, -1.0)):
            inconsistent = subject.backward(self._consistency(subject), inputs=self._strong(subject))
        losses = {"entropy_loss": uncertain or 0.0, "consistency_loss": inconsistent or 0.0}
        return ahead, gradients(subject), losses

    def _strong(self, subject: Adaptable) -> Tensor:
        style = sampled_style(
            subject.inputs, subject.generator(), retain_statistics=self.gamma_retains_statistics,
            blur_by_channel=self.blur_by_channel, rescale=self.unit_range, official=self.official_view,
        )  # fmt: skip
        return style.apply(subject.inputs)

    def _consistency(self, subject: Adaptable) -> ChunkLoss:
        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            target = self._target(subject, subject.inputs[rows])
            voxels = cross_entropy(logits, target, subject.head)
            channels = 1 if subject.head == "softmax" else logits.shape[1]
            return voxels.sum() / channels, voxels.numel()

        return loss

    @torch.no_grad()
    def _target(self, subject: Adaptable, inputs: Tensor) -> Tensor:
        seen = [view.invert(probabilities(subject.logits(view.apply(inputs)), subject.head)) for view in WEAK_VIEWS]
        target = torch.stack(seen).mean(0)
        return _hardened(target, subject.head) if self.hard_target else target


def _entropy_loss(subject: Adaptable) -> ChunkLoss:
    def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
        if subject.head == "softmax":
            voxels = entropy(logits, "softmax")
        else:
            yes = logits.sigmoid()
            voxels = -(yes * torch.log(yes + 1e-6)).sum(1)
        return voxels.sum(), voxels.numel()

    return loss


def _hardened(target: Tensor, head: str) -> Tensor:
    if head == "sigmoid":
        return (target > 0.5).to(target)
    return torch.zeros_like(target).scatter_(1, target.argmax(1, keepdim=True), 1.0)


def grata_cosine(subject: Adaptable) -> float:
    r"""Return the cosine of the entropy gradient at theta and the consistency gradient at theta - (entropy gradient).

    For comparison only: it needs gradients, which a deployed controller does not have. Cost: two backward and eight
    forward passes (six without a graph; one because the next update cannot use the last forward pass again). Weights
    and gradients are not changed.
    """
    found = {name: parameter.grad for name, parameter in subject.parameters.items()}
    ahead, along, _ = Grata().gradient_pair(subject)
    for name, parameter in subject.parameters.items():
        parameter.grad = found[name]
    return cosine(ahead, along)

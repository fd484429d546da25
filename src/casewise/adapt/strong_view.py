"""GraTa's strong view: a change of style that leaves the geometry alone (D6).

Brightness, contrast, gamma, noise and blur are drawn for each sample with probabilities 0.75 / 0.75 / 0.75 / 0.5 / 0.5.
The paper prints the probabilities and the noise variance (up to 0.05, so sigma up to 0.22); the other ranges are not
stated and are those customary for this family of augmentations: brightness and contrast factors in [0.75, 1.25], gamma
in [0.7, 1.5], blur sigma in [0.5, 1.5] pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import drawn_seed, gaussian_field

_TINY = 1e-7


@dataclass(frozen=True, eq=False)
class Style:
    """Sampled parameters of a strong view, one for each (sample, channel); the neutral values change nothing."""

    brightness: Tensor  # (n, channel) factors, 1 is neutral
    contrast: Tensor  # (n, channel) factors around the mean, 1 is neutral
    gamma: Tensor  # (n, channel) exponents on the min-max scaled channel, 1 is neutral
    noise: Tensor  # (n, 1) standard deviations, 0 is neutral
    blur: Tensor  # (n, channel) sigmas in pixels, 0 is neutral
    seed: int = 0  # of the noise field
    retain_statistics: bool = True  # gamma gives mean and spread back: the paper's port; False is the official release
    rescale: bool = False  # min-max each sample to [0, 1] afterwards: the official release

    def apply(self, inputs: Tensor) -> Tensor:
        """The inputs in this style; geometry is untouched, so nothing needs to be inverted."""
        styled = inputs * _over_space(self.brightness, inputs)
        styled = _contrasted(styled, _over_space(self.contrast, inputs))
        styled = _gamma_corrected(styled, _over_space(self.gamma, inputs), self.retain_statistics)
        styled = styled + _over_space(self.noise, inputs) * gaussian_field(inputs, self.seed)
        styled = _blurred(styled, self.blur)
        return _unit_range(styled) if self.rescale else styled


def sampled_style(
    inputs: Tensor,
    generator: torch.Generator,
    *,
    retain_statistics: bool = True,
    blur_by_channel: bool = False,
    rescale: bool = False,
) -> Style:
    """Draw the parameters of a strong view for these inputs.

    ``blur_by_channel`` is the official release: a sample chosen for blur (p = 0.5) then blurs each channel with p = 0.5
    again. The paper's port omits the second draw (its deviation iv).
    """
    shape = (inputs.shape[0], inputs.shape[1])
    by_sample = (inputs.shape[0], 1)
    uniform = _Uniform(generator)
    blur = uniform.chosen(by_sample, 0.5) * uniform.between(0.5, 1.5, shape)
    if blur_by_channel:
        blur = blur * uniform.chosen(shape, 0.5)
    return Style(
        brightness=1 + uniform.chosen(by_sample, 0.75) * (uniform.between(0.75, 1.25, shape) - 1),
        contrast=1 + uniform.chosen(by_sample, 0.75) * (uniform.between(0.75, 1.25, shape) - 1),
        gamma=1 + uniform.chosen(by_sample, 0.75) * (uniform.between(0.7, 1.5, shape) - 1),
        noise=uniform.chosen(by_sample, 0.5) * uniform.between(0, 0.05, by_sample).sqrt(),
        blur=blur,
        seed=drawn_seed(generator),
        retain_statistics=retain_statistics,
        rescale=rescale,
    )


@dataclass(frozen=True)
class _Uniform:
    generator: torch.Generator

    def between(self, low: float, high: float, shape: tuple[int, int]) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def chosen(self, shape: tuple[int, int], probability: float) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < probability).float()


def _over_space(values: Tensor, inputs: Tensor) -> Tensor:
    """(n, channel) values that broadcast over the spatial axes."""
    return values.to(inputs).reshape(*values.shape, *[1] * (inputs.ndim - 2))


def _space(inputs: Tensor) -> tuple[int, ...]:
    return tuple(range(2, inputs.ndim))


def _contrasted(inputs: Tensor, factor: Tensor) -> Tensor:
    """Stretch around the mean, kept within the range that was there."""
    mean = inputs.mean(_space(inputs), keepdim=True)
    low, high = inputs.amin(_space(inputs), keepdim=True), inputs.amax(_space(inputs), keepdim=True)
    return torch.where(factor == 1, inputs, (mean + factor * (inputs - mean)).clamp(low, high))


def _gamma_corrected(inputs: Tensor, gamma: Tensor, retain_statistics: bool) -> Tensor:
    """x -> range * ((x - min) / range)^gamma + min, with mean and spread given back on request."""
    space = _space(inputs)
    low = inputs.amin(space, keepdim=True)
    extent = inputs.amax(space, keepdim=True) - low
    bent = ((inputs - low) / (extent + _TINY)).clamp(0, 1) ** gamma * extent + low
    if retain_statistics:
        bent = (bent - bent.mean(space, keepdim=True)) / (bent.std(space, keepdim=True) + _TINY)
        bent = bent * inputs.std(space, keepdim=True) + inputs.mean(space, keepdim=True)
    return torch.where(gamma == 1, inputs, bent)


def _blurred(inputs: Tensor, sigmas: Tensor) -> Tensor:
    """Separable Gaussian blur, each (sample, channel) with a sigma of its own; 0 leaves it alone."""
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
    """Min-max of each sample to [0, 1]."""
    rest = tuple(range(1, inputs.ndim))
    low, high = inputs.amin(rest, keepdim=True), inputs.amax(rest, keepdim=True)
    return (inputs - low) / (high - low + _TINY)

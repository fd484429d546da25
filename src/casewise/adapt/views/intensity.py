"""Views that change intensities: (n, channel, *space) in, the same shape out; every channel for itself.

Networks normalize in two ways. Where each image is z-scored (MRI), a view keeps the mean and the standard deviation of
every channel (``keep="moments"``): what changes is the shape of the histogram. Where intensities have a fixed meaning
(photographs, CT), it keeps the range (``keep="range"``): brighter is then really brighter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import gaussian_field
from casewise.core.errors import BadInput

KEEPS = ("moments", "range")


def _check_keep(keep: str) -> None:
    if keep not in KEEPS:
        raise BadInput(f"a view keeps {' or '.join(KEEPS)} of the intensities, got {keep!r}")


def per_channel(inputs: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Every channel of (n, channel, *space) changed for itself, over all of n and space."""
    if inputs.shape[1] == 1:
        return change(inputs[:, 0]).unsqueeze(1)
    return torch.stack([change(channel) for channel in inputs.unbind(1)], 1)


def as_before(changed: Tensor, channel: Tensor, keep: str) -> Tensor:
    """A changed channel with the moments that it had, or clipped to the range that it had."""
    if keep == "range":
        return changed.clamp(channel.min(), channel.max())
    spread = changed.std(correction=0)
    if not spread > 0:
        return changed  # constant: the ladder leaves the view out
    moved = (changed - changed.mean()).div_(spread)
    return moved.mul_(channel.std(correction=0)).add_(channel.mean())


@dataclass(frozen=True)
class Gamma:
    r"""The channel scaled to 0..1, to the power of ``power``: :math:`u^g`; above 1 darkens the middle."""

    power: float
    keep: str = "moments"

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        if not 0.1 <= self.power <= 10:
            raise BadInput(f"gamma takes a power from 0.1 to 10, got {self.power:g}")

    def __str__(self) -> str:
        return f"gamma({self.power:g})" if self.keep == "moments" else f"gamma({self.power:g},{self.keep})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view; the very same tensor where the power is 1."""
        return inputs if self.power == 1 else per_channel(inputs, self._changed)

    def _changed(self, channel: Tensor) -> Tensor:
        low, high = channel.min(), channel.max()
        curved = (channel - low).div_(high - low).pow_(self.power)
        return as_before(curved.mul_(high - low).add_(low), channel, self.keep)


@dataclass(frozen=True)
class Contrast:
    """Distances from the channel's mean are multiplied by ``factor``; ``keep="range"`` clips what leaves the range."""

    factor: float
    keep: str = ""  # "" clips nothing

    def __post_init__(self) -> None:
        if self.keep not in ("", "range"):
            raise BadInput(f"contrast keeps 'range' or nothing of the intensities, got {self.keep!r}")
        if not 0.1 <= self.factor <= 10:
            raise BadInput(f"contrast takes a factor from 0.1 to 10, got {self.factor:g}")

    def __str__(self) -> str:
        return f"contrast({self.factor:g},{self.keep})" if self.keep else f"contrast({self.factor:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return inputs if self.factor == 1 else per_channel(inputs, self._changed)

    def _changed(self, channel: Tensor) -> Tensor:
        mean = channel.mean()
        changed = mean + self.factor * (channel - mean)
        return as_before(changed, channel, "range") if self.keep else changed


@dataclass(frozen=True)
class Shift:
    """Every intensity plus ``by`` standard deviations of the channel; small ones suit CT."""

    by: float

    def __str__(self) -> str:
        return f"shift({self.by:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return inputs if self.by == 0 else per_channel(inputs, lambda one: one + self.by * one.std(correction=0))


@dataclass(frozen=True)
class Bias:
    """Minus its own Gaussian blur of ``sigma`` pixels in the plane: slow shading is gone."""

    sigma: float = 30.0

    def __str__(self) -> str:
        return f"bias({self.sigma:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return per_channel(inputs, lambda one: as_before(one - blurred(one, self.sigma), one, "moments"))


@dataclass(frozen=True)
class Blur:
    """A Gaussian blur of ``sigma`` pixels in the plane."""

    sigma: float = 0.7

    def __str__(self) -> str:
        return f"blur({self.sigma:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return per_channel(inputs, lambda one: blurred(one, self.sigma))


@dataclass(frozen=True)
class Sharpen:
    r"""Unsharp masking: :math:`x + a (x - G_\sigma x)`."""

    sigma: float = 1.5
    amount: float = 1.0

    def __str__(self) -> str:
        return f"sharpen({self.sigma:g},{self.amount:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return per_channel(inputs, lambda one: one + self.amount * (one - blurred(one, self.sigma)))


@dataclass(frozen=True)
class Clip:
    """Clipped to two percentiles of the channel."""

    low: float = 0.5
    high: float = 98.0
    keep: str = "moments"

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        if not 0 <= self.low < self.high <= 100:
            raise BadInput(f"clip takes two percentiles, 0 <= low < high <= 100, got {self.low:g} and {self.high:g}")

    def __str__(self) -> str:
        ending = "" if self.keep == "moments" else f",{self.keep}"
        return f"clip({self.low:g},{self.high:g}{ending})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return per_channel(inputs, self._changed)

    def _changed(self, channel: Tensor) -> Tensor:
        low, high = quantiles(channel, (self.low / 100, self.high / 100))
        return as_before(channel.clamp(low, high), channel, self.keep)


@dataclass(frozen=True)
class Stretch:
    """Two percentiles of the channel are stretched to the range that it has: hazy pictures get their contrast back."""

    low: float = 1.0
    high: float = 99.0

    def __str__(self) -> str:
        return f"stretch({self.low:g},{self.high:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        return per_channel(inputs, self._changed)

    def _changed(self, channel: Tensor) -> Tensor:
        low, high = quantiles(channel, (self.low / 100, self.high / 100))
        least, most = channel.min(), channel.max()
        stretched = (channel - low) / (high - low) * (most - least) + least
        return as_before(stretched, channel, "range")


@dataclass(frozen=True)
class GreyWorld:
    """Every channel moved to the mean of all: a color cast is gone. Nothing changes where there is one channel."""

    def __str__(self) -> str:
        return "grey-world"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        if inputs.shape[1] == 1:
            return inputs
        means = inputs.mean([axis for axis in range(inputs.ndim) if axis != 1], keepdim=True)
        return inputs - means + means.mean()


@dataclass(frozen=True)
class Noise:
    """Gaussian noise of ``sigma`` standard deviations of the channel; the same field every time."""

    sigma: float = 0.05
    seed: int = 0

    def __str__(self) -> str:
        return f"noise({self.sigma:g},{self.seed})" if self.seed else f"noise({self.sigma:g})"

    def apply(self, inputs: Tensor) -> Tensor:
        """The view."""
        field = gaussian_field(inputs, self.seed)
        spread = inputs.std([axis for axis in range(inputs.ndim) if axis != 1], correction=0, keepdim=True)
        return inputs + self.sigma * spread * field


def blurred(tensor: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur in the plane of the last two axes, cut at three sigma, borders repeated."""
    if sigma <= 0:
        raise BadInput(f"a blur needs a sigma above 0, got {sigma:g}")
    flat = tensor.reshape(-1, 1, *tensor.shape[-2:])
    for axis in (-2, -1):
        reach = min(max(1, round(3 * sigma)), 4096)
        at = torch.arange(-reach, reach + 1, dtype=tensor.dtype, device=tensor.device)
        kernel = torch.exp(-0.5 * (at / sigma) ** 2)
        kernel = kernel / kernel.sum()
        shape = (1, 1, -1, 1) if axis == -2 else (1, 1, 1, -1)
        margins = (0, 0, reach, reach) if axis == -2 else (reach, reach, 0, 0)
        flat = functional.conv2d(functional.pad(flat, margins, mode="replicate"), kernel.view(shape))
    return flat.reshape(tensor.shape)


_LARGEST = 1 << 24  # torch.quantile takes no more values than this; more are sampled evenly


def quantiles(channel: Tensor, at: tuple[float, ...]) -> Tensor:
    """Quantiles of all values of a channel."""
    values = channel.reshape(-1)
    if values.numel() > _LARGEST:
        values = values[:: -(-values.numel() // _LARGEST)]
    return torch.quantile(values, torch.tensor(at, dtype=values.dtype, device=values.device))

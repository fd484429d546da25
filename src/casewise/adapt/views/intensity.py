"""Views that change intensities of (n, channel, *space); each channel is changed separately.

If each image is z-scored (MRI), a view keeps the mean and the standard deviation of every channel
(``keep="moments"``), so only the shape of the histogram changes. If intensities have a fixed meaning (photographs, CT),
a view keeps the range (``keep="range"``), so a brighter view is really brighter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import gaussian_field
from casewise.adapt.views.view_text import WrittenView
from casewise.core.errors import BadInput

KEEPS = ("moments", "range")


def _check_keep(keep: str) -> None:
    if keep not in KEEPS:
        raise BadInput(f"keep must be {' or '.join(KEEPS)}, got {keep!r}")


class ChannelView(WrittenView):
    """Base of views that change each channel of (n, channel, *space) separately, over all of n and space."""

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        if inputs.shape[1] == 1:
            return self.changed(inputs[:, 0]).unsqueeze(1)
        return torch.stack([self.changed(channel) for channel in inputs.unbind(1)], 1)

    def changed(self, channel: Tensor) -> Tensor:
        """Return one changed channel, (n, *space)."""
        raise NotImplementedError


def as_before(changed: Tensor, channel: Tensor, keep: str) -> Tensor:
    """Restore the mean and deviation of a changed channel, or clip it to its old range."""
    if keep == "range":
        return changed.clamp(channel.min(), channel.max())
    spread = changed.std(correction=0)
    if not spread > 0:
        return changed  # a constant channel; the proposer skips such a view
    moved = (changed - changed.mean()).div_(spread)
    return moved.mul_(channel.std(correction=0)).add_(channel.mean())


@dataclass(frozen=True)
class Gamma(ChannelView):
    r"""Scale the channel to 0..1 and raise it to ``power``: :math:`u^g`; above 1 darkens middle intensities."""

    name: ClassVar[str] = "gamma"
    power: float
    keep: str = "moments"

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        if not 0.1 <= self.power <= 10:
            raise BadInput(f"the power of gamma must be from 0.1 to 10, got {self.power:g}")

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs; the same tensor if the power is 1."""
        return inputs if self.power == 1 else super().apply(inputs)

    def changed(self, channel: Tensor) -> Tensor:
        low, high = channel.min(), channel.max()
        curved = (channel - low).div_(high - low).pow_(self.power)
        return as_before(curved.mul_(high - low).add_(low), channel, self.keep)


@dataclass(frozen=True)
class Contrast(ChannelView):
    """Multiply distances from the channel mean m: m + factor (x - m); ``keep="range"`` clips to the old range."""

    name: ClassVar[str] = "contrast"
    factor: float
    keep: str = ""  # "" clips nothing

    def __post_init__(self) -> None:
        if self.keep not in ("", "range"):
            raise BadInput(f"keep of contrast must be 'range' or empty, got {self.keep!r}")
        if not 0.1 <= self.factor <= 10:
            raise BadInput(f"the factor of contrast must be from 0.1 to 10, got {self.factor:g}")

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs; the same tensor if the factor is 1."""
        return inputs if self.factor == 1 else super().apply(inputs)

    def changed(self, channel: Tensor) -> Tensor:
        mean = channel.mean()
        changed = mean + self.factor * (channel - mean)
        return as_before(changed, channel, "range") if self.keep else changed


@dataclass(frozen=True)
class Shift(ChannelView):
    """Add ``by`` standard deviations of the channel; use small values for CT."""

    name: ClassVar[str] = "shift"
    by: float

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs; the same tensor for a shift of 0."""
        return inputs if self.by == 0 else super().apply(inputs)

    def changed(self, channel: Tensor) -> Tensor:
        return channel + self.by * channel.std(correction=0)


@dataclass(frozen=True)
class Bias(ChannelView):
    """Subtract a Gaussian blur of ``sigma`` pixels in the plane, to remove slow shading."""

    name: ClassVar[str] = "bias"
    sigma: float = 30.0

    def changed(self, channel: Tensor) -> Tensor:
        return as_before(channel - blurred(channel, self.sigma), channel, "moments")


@dataclass(frozen=True)
class Blur(ChannelView):
    """Blur by a Gaussian of ``sigma`` pixels in the plane."""

    name: ClassVar[str] = "blur"
    sigma: float = 0.7

    def changed(self, channel: Tensor) -> Tensor:
        return blurred(channel, self.sigma)


@dataclass(frozen=True)
class Sharpen(ChannelView):
    r"""Unsharp masking: :math:`x + a (x - G_\sigma x)`."""

    name: ClassVar[str] = "sharpen"
    sigma: float = 1.5
    amount: float = 1.0

    def changed(self, channel: Tensor) -> Tensor:
        return channel + self.amount * (channel - blurred(channel, self.sigma))


@dataclass(frozen=True)
class Clip(ChannelView):
    """Clip to two percentiles of the channel."""

    name: ClassVar[str] = "clip"
    low: float = 0.5
    high: float = 98.0
    keep: str = "moments"

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        if not 0 <= self.low < self.high <= 100:
            raise BadInput(
                f"the percentiles of clip must be 0 <= low < high <= 100, got {self.low:g} and {self.high:g}"
            )

    def changed(self, channel: Tensor) -> Tensor:
        low, high = quantiles(channel, (self.low / 100, self.high / 100))
        return as_before(channel.clamp(low, high), channel, self.keep)


@dataclass(frozen=True)
class Stretch(ChannelView):
    """Stretch two percentiles of the channel to its range, to raise the contrast of hazy images."""

    name: ClassVar[str] = "stretch"
    low: float = 1.0
    high: float = 99.0

    def changed(self, channel: Tensor) -> Tensor:
        low, high = quantiles(channel, (self.low / 100, self.high / 100))
        least, most = channel.min(), channel.max()
        stretched = (channel - low) / (high - low) * (most - least) + least
        return as_before(stretched, channel, "range")


@dataclass(frozen=True)
class GreyWorld:
    """Move the mean of every channel to the mean of all, to remove a color cast; one channel is not changed."""

    def __str__(self) -> str:
        return "grey-world"

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        if inputs.shape[1] == 1:
            return inputs
        means = inputs.mean([axis for axis in range(inputs.ndim) if axis != 1], keepdim=True)
        return inputs - means + means.mean()


@dataclass(frozen=True)
class Noise(WrittenView):
    """Add Gaussian noise of ``sigma`` standard deviations of the channel; the noise is fixed by the seed."""

    name: ClassVar[str] = "noise"
    sigma: float = 0.05
    seed: int = 0

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        field = gaussian_field(inputs, self.seed)
        spread = inputs.std([axis for axis in range(inputs.ndim) if axis != 1], correction=0, keepdim=True)
        return inputs + self.sigma * spread * field


def blurred(tensor: Tensor, sigma: float) -> Tensor:
    """Blur by a Gaussian in the plane of the last two axes, cut at three sigma, with repeated borders."""
    if sigma <= 0:
        raise BadInput(f"sigma must be above 0, got {sigma:g}")
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


_LARGEST = 1 << 24  # largest size for torch.quantile; larger tensors are sampled evenly


def quantiles(channel: Tensor, at: tuple[float, ...]) -> Tensor:
    """Return quantiles of all values of a channel."""
    values = channel.reshape(-1)
    if values.numel() > _LARGEST:
        values = values[:: -(-values.numel() // _LARGEST)]
    return torch.quantile(values, torch.tensor(at, dtype=values.dtype, device=values.device))

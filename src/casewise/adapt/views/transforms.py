"""Views of one file: transforms of the intensities of (n, channel, *space), and transforms that move voxels.

Intensities: each channel is changed separately. If each image is z-scored (MRI), a view keeps the mean and the standard
deviation of every channel (``keep="moments"``), so only the shape of the histogram changes. If intensities have a fixed
meaning (photographs, CT), a view keeps the range (``keep="range"``), so a brighter view is really brighter.

Space: ``invert`` maps the predicted logits back to the case. Mirrors and rotations by 90 degrees are exact. Scaling and
small rotations resample bilinearly in the plane of the last two axes, so ``invert(apply(x))`` is only approximately x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import gaussian_field
from casewise.core.errors import BadInput


class WrittenView:
    """Base of views whose text, such as ``gamma(1.4,range)``, is their class with their fields.

    A default ``keep`` or ``seed`` is left out.
    """

    def __str__(self) -> str:
        values: list[Any] = []
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if one.name not in ("keep", "seed") or value != one.default:
                values.append(f"{value:g}" if isinstance(value, float) else value)
        return f"{type(self).__name__.lower()}({','.join(map(str, values))})"


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

    by: float

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs; the same tensor for a shift of 0."""
        return inputs if self.by == 0 else super().apply(inputs)

    def changed(self, channel: Tensor) -> Tensor:
        return channel + self.by * channel.std(correction=0)


@dataclass(frozen=True)
class Bias(ChannelView):
    """Subtract a Gaussian blur of ``sigma`` pixels in the plane, to remove slow shading."""

    sigma: float = 30.0

    def changed(self, channel: Tensor) -> Tensor:
        return as_before(channel - blurred(channel, self.sigma), channel, "moments")


@dataclass(frozen=True)
class Blur(ChannelView):
    """Blur by a Gaussian of ``sigma`` pixels in the plane."""

    sigma: float = 0.7

    def changed(self, channel: Tensor) -> Tensor:
        return blurred(channel, self.sigma)


@dataclass(frozen=True)
class Sharpen(ChannelView):
    r"""Unsharp masking: :math:`x + a (x - G_\sigma x)`."""

    sigma: float = 1.5
    amount: float = 1.0

    def changed(self, channel: Tensor) -> Tensor:
        return channel + self.amount * (channel - blurred(channel, self.sigma))


@dataclass(frozen=True)
class Clip(ChannelView):
    """Clip to two percentiles of the channel."""

    low: float = 0.5
    high: float = 98.0
    keep: str = "moments"

    def __post_init__(self) -> None:
        _check_keep(self.keep)
        if not 0 <= self.low < self.high <= 100:
            raise BadInput(f"percentiles of clip must be 0 <= low < high <= 100, got {self.low:g} and {self.high:g}")

    def changed(self, channel: Tensor) -> Tensor:
        low, high = quantiles(channel, (self.low / 100, self.high / 100))
        return as_before(channel.clamp(low, high), channel, self.keep)


@dataclass(frozen=True)
class Stretch(ChannelView):
    """Stretch two percentiles of the channel to its range, to raise the contrast of hazy images."""

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


_AXES = {"x": -1, "y": -2, "z": -3}


@dataclass(frozen=True)
class Mirror(WrittenView):
    """Mirror along axes: x is the last axis (columns), y the one before (rows), z the slices."""

    axes: str = "x"

    def __post_init__(self) -> None:
        if not self.axes or not set(self.axes) <= set(_AXES) or len(set(self.axes)) < len(self.axes):
            raise BadInput(f"the axes of mirror must be x, y, z, each at most once, got {self.axes!r}")

    @property
    def places(self) -> tuple[int, ...]:
        """Axes counted from the end."""
        return tuple(_AXES[axis] for axis in self.axes)

    def apply(self, inputs: Tensor) -> Tensor:
        """Mirror (n, channel, *space)."""
        if max(-place for place in self.places) > inputs.ndim - 2:
            raise BadInput(f"{self} needs {-min(self.places)} axes of space, the inputs have {inputs.ndim - 2}")
        return inputs.flip(self.places)

    def invert(self, maps: Tensor) -> Tensor:
        """Mirror again."""
        return maps.flip(self.places)


@dataclass(frozen=True)
class Rotate90(WrittenView):
    """Rotate counterclockwise by multiples of 90 degrees, in the plane of the last two axes."""

    turns: int = 1

    def apply(self, inputs: Tensor) -> Tensor:
        """Rotate."""
        return torch.rot90(inputs, self.turns, (-2, -1))

    def invert(self, maps: Tensor) -> Tensor:
        """Rotate back."""
        return torch.rot90(maps, -self.turns, (-2, -1))


@dataclass(frozen=True)
class Scale(WrittenView):
    """Resize the image in the plane; the logits are resized back."""

    factor: float

    def __post_init__(self) -> None:
        if not 0.25 <= self.factor <= 4:
            raise BadInput(f"the factor of scale must be from 0.25 to 4, got {self.factor:g}")

    def apply(self, inputs: Tensor) -> Tensor:
        """Resize in the plane; sizes are rounded."""
        rows, columns = inputs.shape[-2:]
        return _resized(inputs, (round(rows * self.factor), round(columns * self.factor)))

    def invert(self, maps: Tensor) -> Tensor:
        """Resize by 1/factor; the backbone resizes to its grid, which corrects rounding."""
        rows, columns = maps.shape[-2:]
        return _resized(maps, (round(rows / self.factor), round(columns / self.factor)))


@dataclass(frozen=True)
class Turn(WrittenView):
    """Rotate and zoom about the center of the plane; outside the image, the border is repeated."""

    degrees: float = 0.0
    zoom: float = 1.0

    def __post_init__(self) -> None:
        if not abs(self.degrees) <= 45 or not 0.5 <= self.zoom <= 2:
            raise BadInput(f"turn takes up to 45 degrees and a zoom from 0.5 to 2, got {self.degrees:g}, {self.zoom:g}")

    def apply(self, inputs: Tensor) -> Tensor:
        """Rotate and zoom, on the same grid."""
        return _sampled(inputs, self.degrees, self.zoom)

    def invert(self, maps: Tensor) -> Tensor:
        """Rotate and zoom back."""
        return _sampled(maps, -self.degrees, 1 / self.zoom)


def _resized(tensor: Tensor, plane: tuple[int, int]) -> Tensor:
    if tuple(tensor.shape[-2:]) == plane:
        return tensor
    flat = tensor.reshape(-1, 1, *tensor.shape[-2:])
    moved = functional.interpolate(flat.float(), size=plane, mode="bilinear", align_corners=False)
    return moved.reshape(*tensor.shape[:-2], *plane).to(tensor.dtype)


def _sampled(tensor: Tensor, degrees: float, zoom: float) -> Tensor:
    """Resample (…, rows, columns) by a rotation and a zoom, in pixels, about the center of the plane."""
    if degrees == 0 and zoom == 1:
        return tensor
    rows, columns = tensor.shape[-2:]
    angle = math.radians(degrees)
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float32) - (rows - 1) / 2,
        torch.arange(columns, dtype=torch.float32) - (columns - 1) / 2,
        indexing="ij",
    )
    from_x = (math.cos(angle) * x - math.sin(angle) * y) / zoom
    from_y = (math.sin(angle) * x + math.cos(angle) * y) / zoom
    grid = torch.stack([from_x * 2 / columns, from_y * 2 / rows], -1)[None].to(tensor.device)
    flat = tensor.reshape(1, -1, rows, columns)
    seen = functional.grid_sample(flat.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return seen.reshape(tensor.shape).to(tensor.dtype)

"""Views that move voxels; ``invert`` maps the predicted logits back to the case.

Mirrors and rotations by 90 degrees are exact. Scaling and small rotations resample bilinearly in the plane of the last
two axes, so ``invert(apply(x))`` is only approximately x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.views.view_text import WrittenView
from casewise.core.errors import BadInput

_AXES = {"x": -1, "y": -2, "z": -3}


@dataclass(frozen=True)
class Mirror(WrittenView):
    """Mirror along axes: x is the last axis (columns), y the one before (rows), z the slices."""

    name: ClassVar[str] = "mirror"
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

    name: ClassVar[str] = "rotate90"
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

    name: ClassVar[str] = "scale"
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

    name: ClassVar[str] = "turn"
    degrees: float = 0.0
    zoom: float = 1.0

    def __post_init__(self) -> None:
        if not abs(self.degrees) <= 45 or not 0.5 <= self.zoom <= 2:
            raise BadInput(
                f"turn takes at most 45 degrees and a zoom from 0.5 to 2, got {self.degrees:g}, {self.zoom:g}"
            )

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

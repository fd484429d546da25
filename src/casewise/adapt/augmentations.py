"""Light random views of gradient methods and agreement signals: flips, quarter turns, brightness and noise.

The parameters of a view are drawn once, so applying it to the same inputs gives the same tensor every time. ``invert``
maps logits back to the geometry of the case. The identity view returns its input itself, so agreement under it is
exactly 1 (C10).

Inputs are (n, channel, rows, columns) for slices or (n, channel, slices, rows, columns) for windows. Flips and quarter
turns act in the plane of the last two axes; the through-plane axis of a window is never turned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from casewise.adapt.logits import at_resolution
from casewise.core.errors import BadInput

_ROWS, _COLUMNS = -2, -1


@dataclass(frozen=True)
class LightView:
    """A view with fixed parameters: brightness, then noise, then flips, then quarter turns."""

    flips: tuple[int, ...] = ()  # axes from the end: -2 rows, -1 columns
    quarter_turns: int = 0  # counterclockwise, in the plane of the last two axes
    brightness: float = 1.0  # intensities are multiplied by it
    noise: float = 0.0  # standard deviation of added Gaussian noise
    seed: int = 0  # seed of the noise field

    def __post_init__(self) -> None:
        if not set(self.flips) <= {_ROWS, _COLUMNS}:
            raise BadInput(f"flips must be in-plane axes, -2 (rows) or -1 (columns), got {self.flips}")
        if self.noise < 0:
            raise BadInput(f"noise is a standard deviation and must be at least 0, got {self.noise}")

    def apply(self, inputs: Tensor) -> Tensor:
        """Return the transformed inputs."""
        if self.brightness != 1.0:
            inputs = inputs * self.brightness
        if self.noise:
            inputs = inputs + self.noise * gaussian_field(inputs, self.seed)
        if self.flips:
            inputs = inputs.flip(self.flips)
        return torch.rot90(inputs, self.quarter_turns, (_ROWS, _COLUMNS)) if self.quarter_turns % 4 else inputs

    def invert(self, maps: Tensor) -> Tensor:
        """Map predictions for ``apply(inputs)`` (logits, probabilities, labels) back to the geometry of the case."""
        if self.quarter_turns % 4:
            maps = torch.rot90(maps, -self.quarter_turns, (_ROWS, _COLUMNS))
        return maps.flip(self.flips) if self.flips else maps


IDENTITY = LightView()

WEAK_VIEWS: tuple[LightView, ...] = (
    IDENTITY,
    LightView(flips=(_COLUMNS,)),
    LightView(flips=(_ROWS,)),
    LightView(quarter_turns=1),
    LightView(quarter_turns=2),
    LightView(quarter_turns=3),
)
"""GraTa's six weak views: the picture, its two mirror images and its three quarter turns (D6)."""


def light_view(generator: torch.Generator) -> LightView:
    """Draw a light view: each in-plane flip with p = 0.5, brightness U[0.9, 1.1], noise with sigma U[0, 0.05] (C10).

    Noise and brightness are meant for z-scored intensities.
    """
    rows, columns, brightness, noise = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
    flips = tuple(axis for axis, draw in ((_ROWS, rows), (_COLUMNS, columns)) if draw < 0.5)
    return LightView(flips, 0, 0.9 + 0.2 * brightness, 0.05 * noise, drawn_seed(generator))


def light_views(seeds: Iterable[int]) -> tuple[LightView, ...]:
    """Return one light view for each seed; the seeds 1000 to 1007 are those of the paper (A7, C10)."""
    return tuple(light_view(torch.Generator().manual_seed(seed)) for seed in seeds)


def drawn_seed(generator: torch.Generator) -> int:
    """Draw a seed for a later generator, so that this generator advances by one number only."""
    return int(torch.randint(2**62, (1,), generator=generator))


def gaussian_field(like: Tensor, seed: int) -> Tensor:
    """Return standard normal noise with the shape, type and device of ``like``; the same on every device."""
    field = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return field.to(device=like.device, dtype=like.dtype)


def block_shuffle(inputs: Tensor, generator: torch.Generator, *, blocks: int = 4) -> Tensor:
    """Cut each sample in ``blocks`` pieces along every spatial axis and permute them, each sample on its own (DeYO).

    Sides that ``blocks`` does not divide are resized to the nearest smaller multiple and back, as DeYO's code does; an
    axis shorter than ``blocks`` is left whole.
    """
    space = inputs.shape[2:]
    cuts = [blocks if side >= blocks else 1 for side in space]
    fitted = [side // cut * cut for side, cut in zip(space, cuts, strict=True)]
    shuffled = torch.stack([_permuted(sample, cuts, generator) for sample in at_resolution(inputs, fitted)])
    return at_resolution(shuffled, space)


def _permuted(sample: Tensor, cuts: list[int], generator: torch.Generator) -> Tensor:
    """Permute the blocks of one sample, (channel, *space)."""
    sides = [side // cut for side, cut in zip(sample.shape[1:], cuts, strict=True)]
    split = [size for pair in zip(cuts, sides, strict=True) for size in pair]  # cut, side, cut, side, ...
    axes = len(cuts)
    grid_first = [1 + 2 * axis for axis in range(axes)] + [0] + [2 + 2 * axis for axis in range(axes)]
    pieces = sample.reshape(sample.shape[0], *split).permute(grid_first)
    tiles = pieces.reshape(-1, *pieces.shape[axes:])
    order = torch.rand(len(tiles), generator=generator).argsort().to(sample.device)
    back = [axes] + [place for axis in range(axes) for place in (axis, axes + 1 + axis)]
    return tiles[order].reshape(pieces.shape).permute(back).reshape(sample.shape)

"""Patches that cover a volume: what updates are made on where a network sees windows, not whole images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional


def patches(volume: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Cover a preprocessed (channel, z, y, x) volume with as few patches as will do: (n, channel, *patch).

    A 2-D patch takes each slice for itself. Small volumes are padded with 0 on both sides, as nnU-Net does.
    """
    flat = len(patch_size) == volume.ndim - 2
    images = list(volume.unbind(1)) if flat else [volume]
    return torch.stack([patch for image in images for patch in _tiles(image, patch_size)])


def _tiles(image: Tensor, patch_size: Sequence[int]) -> Iterator[Tensor]:
    gaps = [max(0, want - have) for want, have in zip(patch_size, image.shape[1:], strict=True)]
    padding = [side for gap in reversed(gaps) for side in (gap // 2, gap - gap // 2)]
    padded = functional.pad(image, padding)
    starts = [_starts(have, want) for have, want in zip(padded.shape[1:], patch_size, strict=True)]
    for corner in itertools.product(*starts):
        window = tuple(slice(first, first + size) for first, size in zip(corner, patch_size, strict=True))
        yield padded[(slice(None), *window)].clone()


def _starts(have: int, want: int) -> list[int]:
    count = math.ceil(have / want)
    return [0] if count == 1 else [round(index * (have - want) / (count - 1)) for index in range(count)]

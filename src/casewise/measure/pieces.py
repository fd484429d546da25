"""The pieces of every label of a mask and the holes in them, all labels in one pass over runs.

A *piece* is a face-connected component of one label. A *hole* is a piece of background that foreground encloses; it
belongs to a label if that label alone touches it, and to no label (0) where several do. A mask of 117 labels costs the
same pass as a mask of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from casewise.measure.masks import Flags, Integers
from casewise.measure.runs import Contacts, Runs, face_contacts, runs_of_labels, united

Enclosure = Literal["volume", "slice"]
"""volume: enclosed in space. slice: enclosed within its slice, for volumes of few thick slices."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of a mask with one layer of background around it; piece 0 is the background outside."""

    runs: Runs
    owner: Integers  # piece of each run
    value: Integers  # label of each piece; 0 is background
    sizes: Integers  # voxels of each piece
    hole_of: Integers  # of each piece: the label around a hole, 0 where there are several, -1 for what is no hole

    def at(self, voxels: Integers) -> Integers:
        """The piece of each of these voxels (flat indices into the padded mask)."""
        return self.owner[np.searchsorted(self.runs.first, voxels, side="right") - 1]

    def voxels_of(self, which: Flags) -> Integers:
        """Flat indices of the voxels of some pieces."""
        runs = np.flatnonzero(which[self.owner])
        lengths = self.runs.lengths[runs]
        start = np.cumsum(lengths) - lengths
        return np.repeat(self.runs.first[runs] - start, lengths) + np.arange(int(lengths.sum()))

    def without(self, voxels: Integers) -> Flags:
        """Which pieces hold nothing but these voxels."""
        return np.asarray(np.bincount(self.at(voxels), minlength=self.sizes.size) == self.sizes)


def padded(mask: NDArray[Any], *, within: Enclosure = "volume") -> NDArray[Any]:
    """The mask with one layer of background around it; slice by slice, stacked as one picture, if asked."""
    if within == "volume" or mask.ndim == 2:
        return np.pad(mask, 1)
    framed = np.pad(mask, ((0, 0), (1, 1), (1, 1)))
    return framed.reshape(-1, framed.shape[-1])


def padded_index(voxels: Integers, shape: tuple[int, ...]) -> Integers:
    """Flat indices into a mask of this shape, as flat indices into the mask with its layer of background around it."""
    places = np.unravel_index(voxels, shape)
    return np.ravel_multi_index([place + 1 for place in places], [size + 2 for size in shape])


def pieces_of(mask: NDArray[Any]) -> Pieces:
    """The pieces of a padded mask (see :func:`padded`) and which of them are holes.

    >>> ring = np.array([[1, 1, 1, 0, 2], [1, 0, 1, 0, 2], [1, 1, 1, 0, 0]])
    >>> found = pieces_of(padded(ring))
    >>> found.value.tolist(), found.sizes.tolist(), found.hole_of.tolist()
    ([0, 1, 2, 0], [24, 8, 2, 1], [-1, -1, -1, 1])
    """
    runs = runs_of_labels(mask)
    label = mask.reshape(-1)[runs.first]
    touching = face_contacts(runs)
    same = [_among(pairs, label[pairs.later] == label[pairs.earlier]) for pairs in touching]
    owner = united(runs.first.size, same)
    sizes = np.bincount(owner, weights=runs.lengths).astype(np.int64)
    value = np.zeros(sizes.size, np.int64)
    value[owner] = label
    return Pieces(runs, owner, value, sizes, _holes(owner, value, label, touching))


def _among(pairs: Contacts, kept: Flags) -> Contacts:
    return Contacts(pairs.later[kept], pairs.earlier[kept], pairs.shift)


def _holes(owner: Integers, value: Integers, label: NDArray[Any], touching: tuple[Contacts, ...]) -> Integers:
    """The label around each enclosed piece of background; a hole never ends a row, so both its neighbors are there."""
    hole_of = np.full(value.size, -1, np.int64)
    enclosed = value == 0
    enclosed[0] = False
    if not enclosed.any():
        return hole_of
    inside = np.flatnonzero(enclosed[owner])
    around = [(owner[inside], label[inside - 1]), (owner[inside], label[inside + 1])]
    for pairs in touching:
        for one, other in ((pairs.later, pairs.earlier), (pairs.earlier, pairs.later)):
            here = enclosed[owner[one]] & (label[other] != 0)
            around.append((owner[one[here]], label[other[here]]))
    hole = np.concatenate([pair[0] for pair in around])
    beside = np.concatenate([pair[1] for pair in around]).astype(np.int64)
    least, most = np.full(value.size, np.iinfo(np.int64).max), np.zeros(value.size, np.int64)
    np.minimum.at(least, hole, beside)
    np.maximum.at(most, hole, beside)
    hole_of[enclosed] = np.where(least == most, most, 0)[enclosed]
    return hole_of

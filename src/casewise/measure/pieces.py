"""The pieces of every label of some masks and the holes in them, all labels of all masks in one pass over runs.

A *piece* is a face-connected component of one label. A *hole* is a piece of background that foreground encloses; it
belongs to a label if that label alone touches it, and to no label (0) where several do. A mask of 117 labels needs
the same single pass as a mask of one. One scan finds the foreground; everything after it works on the runs of the
foreground and the gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.measure.masks import Flags, Integers
from casewise.measure.runs import Contacts, Runs, face_contacts, runs_of_labels, united


@dataclass(frozen=True, eq=False)
class LabelPieces:
    """The pieces of a mask: of its labels, and of the gaps between two runs of foreground in one row."""

    runs: Runs
    label: NDArray[Any]  # of each run; 0 is a gap
    owner: Integers  # piece of each run
    value: Integers  # label of each piece; 0 is background
    sizes: Integers  # voxels of each piece
    hole_of: Integers  # of each piece: the label around a hole, 0 where there are several, -1 for what is no hole

    def voxels_of(self, which: Flags) -> tuple[Integers, Integers]:
        """Flat indices of the voxels of some pieces, and the piece of each."""
        runs = np.flatnonzero(which[self.owner])
        lengths = self.runs.lengths[runs]
        start = np.cumsum(lengths) - lengths
        voxels = np.repeat(self.runs.first[runs] - start, lengths) + np.arange(int(lengths.sum()))
        return voxels, np.repeat(self.owner[runs], lengths)

    def within(self, different: Flags, voxels_differ: Any) -> Flags:
        """True for pieces of a label that consist of voxels that differ: ``different`` is True if the first voxel of a
        run differs, ``voxels_differ`` tests any voxels. Most pieces are excluded by their first voxels, so few are
        tested completely."""
        some_equal = np.zeros(self.sizes.size, bool)
        some_equal[self.owner[~different]] = True
        left = (self.value > 0) & ~some_equal
        if left.any():
            voxels, number = self.voxels_of(left)
            left[number[~voxels_differ(voxels)]] = False
        return np.asarray(left)


def pieces_of(*masks: NDArray[Any]) -> tuple[LabelPieces, ...]:
    """Find the pieces of some masks of one shape, and which of them are holes.

    >>> ring = np.array([[1, 1, 1, 0, 2], [1, 0, 1, 0, 2], [1, 1, 1, 0, 0]])
    >>> (found,) = pieces_of(ring)
    >>> found.value.tolist(), found.sizes.tolist(), found.hole_of.tolist()
    ([1, 0, 2, 0], [8, 2, 2, 1], [-1, -1, -1, 1])
    """
    shape = masks[0].shape
    parts = [_with_gaps(*runs_of_labels(mask)) for mask in masks]
    # The masks lie behind each other with one empty layer between them, so nothing of one touches another.
    apart = (shape[0] + 1) * int(np.prod(shape[1:]))
    first, last = (
        np.concatenate([part[side] + number * apart for number, part in enumerate(parts)]) for side in (0, 1)
    )
    label = np.concatenate([part[2] for part in parts])
    stack = Runs((len(masks) * (shape[0] + 1), *shape[1:]), first, last, first)
    touching = face_contacts(stack)
    same = [_alike(pairs, label) for pairs in touching]
    owner = united(first.size, same)
    lengths = stack.lengths
    sizes = np.bincount(owner, weights=lengths).astype(np.int64)
    value = np.zeros(sizes.size, np.int64)
    value[owner] = label
    hole_of = _holes(stack, label, owner, value, touching)
    return _split(shape, parts, owner, value, sizes, hole_of)


def _with_gaps(runs: Runs, label: NDArray[Any]) -> tuple[Integers, Integers, NDArray[Any]]:
    """First and last voxel and label of every run, with the gaps between two runs of one row, in C order."""
    columns = runs.shape[-1]
    row = runs.first // columns
    gap = np.flatnonzero((row[1:] == row[:-1]) & (runs.first[1:] - runs.last[:-1] > 1))
    first = np.insert(runs.first, gap + 1, runs.last[gap] + 1)
    last = np.insert(runs.last, gap + 1, runs.first[gap + 1] - 1)
    return first, last, np.insert(label, gap + 1, 0)


def _alike(pairs: Contacts, label: NDArray[Any]) -> Contacts:
    kept = label[pairs.later] == label[pairs.earlier]
    return Contacts(pairs.later[kept], pairs.earlier[kept], pairs.shift)


def _holes(runs: Runs, label: NDArray[Any], owner: Integers, value: Integers, walls: tuple[Contacts, ...]) -> Integers:
    """The label around each enclosed piece of background.

    A gap is closed where runs or other gaps cover it whole in every direction; a piece of gaps is a hole if all are.
    """
    hole_of = np.full(value.size, -1, np.int64)
    gap = label == 0
    if not gap.any():
        return hole_of
    covered = np.zeros(label.size)
    beside: list[tuple[Integers, NDArray[Any]]] = []
    for pairs in walls:
        near = np.flatnonzero(gap[pairs.later] | gap[pairs.earlier])
        later, earlier = pairs.later[near], pairs.earlier[near]
        low = np.maximum(runs.first[later] - pairs.shift, runs.first[earlier])
        overlap = np.minimum(runs.last[later] - pairs.shift, runs.last[earlier]) - low + 1
        covered += np.bincount(later, overlap, label.size) + np.bincount(earlier, overlap, label.size)
        beside += [(later, label[earlier]), (earlier, label[later])]
    gaps = np.flatnonzero(gap)
    enclosed = value == 0
    enclosed[owner[gaps[covered[gaps] < 2 * len(walls) * runs.lengths[gaps]]]] = False
    if not enclosed.any():
        return hole_of
    beside += [(gaps, label[gaps - 1]), (gaps, label[gaps + 1])]  # a gap lies between two runs of foreground
    hole = owner[np.concatenate([pair[0] for pair in beside])]
    around = np.concatenate([pair[1] for pair in beside]).astype(np.int64)
    kept = enclosed[hole] & (around > 0)
    least, most = np.full(value.size, np.iinfo(np.int64).max), np.zeros(value.size, np.int64)
    np.minimum.at(least, hole[kept], around[kept])
    np.maximum.at(most, hole[kept], around[kept])
    hole_of[enclosed] = np.where(least == most, most, 0)[enclosed]
    return hole_of


def _split(
    shape: tuple[int, ...], parts: list[tuple[Integers, Integers, NDArray[Any]]], owner: Integers, value: Integers,
    sizes: Integers, hole_of: Integers,
) -> tuple[LabelPieces, ...]:  # fmt: skip
    """Split the pieces by mask; those of one mask have consecutive numbers."""
    found, run, piece = [], 0, 0
    for first, last, label in parts:
        mine = owner[run : run + first.size] - piece
        end = piece + (int(mine.max()) + 1 if mine.size else 0)
        runs = Runs(shape, first, last, first)
        found.append(LabelPieces(runs, label, mine, value[piece:end], sizes[piece:end], hole_of[piece:end]))
        run, piece = run + first.size, end
    return tuple(found)

"""Voxels of D as runs: sequences of neighbors along the last axis.

Two runs touch when one, moved by one row (or one slice), overlaps the other. Both ends of all runs are sorted, so the
partners of every run are found by merging two sorted lists, and no array as large as the volume is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.text import brief
from casewise.measure.masks import Integers


@dataclass(frozen=True, eq=False, repr=False)
class Runs:
    """Runs of D in C order; a run never continues into the next row."""

    __repr__ = brief

    shape: tuple[int, ...]
    first: Integers  # flat index of each run's first voxel
    last: Integers  # flat index of each run's last voxel
    begin: Integers  # where each run begins in the list of voxels

    @property
    def lengths(self) -> Integers:
        """Voxels in each run."""
        return self.last - self.first + 1


@dataclass(frozen=True, eq=False)
class Contacts:
    """Pairs of touching runs, ``earlier`` before ``later`` in C order, ``shift`` voxels apart."""

    later: Integers
    earlier: Integers
    shift: int


def runs_of(voxels: Integers, shape: tuple[int, ...]) -> Runs:
    """Group ascending flat indices into runs."""
    if not voxels.size:
        return Runs(shape, voxels, voxels, voxels)
    # A new run begins wherever the next index is not the direct neighbor of the one before.
    gaps = np.flatnonzero(voxels[1:] - voxels[:-1] != 1) + 1
    begin = np.concatenate([[0], gaps])
    end = np.concatenate([gaps, [voxels.size]])
    first_row, last_row = voxels[begin] // shape[-1], voxels[end - 1] // shape[-1]
    if (first_row != last_row).any():
        # The end of one row and the begin of the next are neighbors in memory, not in space: cut at every row's begin.
        stretch, row = _expanded(first_row + 1, last_row - first_row)
        cuts = begin[stretch] + row * shape[-1] - voxels[begin[stretch]]
        begin = np.sort(np.concatenate([begin, cuts]), kind="stable")  # merges two ascending lists in one sweep
        end = np.concatenate([begin[1:], [voxels.size]])
    return Runs(shape, voxels[begin], voxels[end - 1], begin)


def runs_of_labels(mask: NDArray[Any]) -> tuple[Runs, NDArray[Any]]:
    """The runs of equal foreground label of a mask, and their labels.

    Memory is scanned eight bytes at a time; a word of background alone is never looked at closer.
    """
    flat, columns = np.ascontiguousarray(mask).reshape(-1), mask.shape[-1]
    each = 8 // flat.itemsize  # voxels in one word
    if flat.size % each:
        flat = np.concatenate([flat, np.zeros(-flat.size % each, flat.dtype)])
    words = flat.view(np.uint64)
    there = np.flatnonzero(words != 0)
    near = words[there].view(flat.dtype)
    breaks = np.ones(near.size, bool)
    np.not_equal(near[1:], near[:-1], out=breaks[1:])
    breaks[::each][1:] |= there[1:] - there[:-1] != 1  # a word of background lies between
    begin = np.flatnonzero(breaks)
    length = np.diff(begin, append=near.size)
    label = near[begin]
    kept = label != 0
    begin, length, label = begin[kept], length[kept], label[kept]
    first = there[begin // each] * each + begin % each
    last = first + length - 1
    row, last_row = first // columns, last // columns
    if (row != last_row).any():  # neighbors in memory, not in space: cut at every row's begin
        stretch, cut = _expanded(row + 1, last_row - row)
        first = np.concatenate([first, cut * columns])
        order = np.argsort(first, kind="stable")
        whole = np.concatenate([np.arange(row.size), stretch])[order]
        first, label = first[order], label[whole]
        last = np.minimum(last[whole], (first // columns + 1) * columns - 1)
    return Runs(tuple(mask.shape), first, last, first), label


def face_contacts(runs: Runs) -> tuple[Contacts, ...]:
    """Runs that share a face: the row before, and in 3-D the slice before (B3)."""
    offsets = [(1,)] if len(runs.shape) == 2 else [(0, 1), (1, 0)]
    return tuple(_contacts(runs, offset) for offset in offsets)


def _contacts(runs: Runs, offset: tuple[int, ...]) -> Contacts:
    """Pairs of a run and an earlier one that lies ``offset`` rows (and slices) before it."""
    columns, rows = runs.shape[-1], runs.shape[-2]
    shift = offset[-1] * columns + (offset[0] * rows * columns if len(offset) == 2 else 0)
    # Where the run would lie if it were moved by the offset: every run that overlaps [low, high] touches it.
    low, high = runs.first - shift, runs.last - shift
    # The first candidate is the first run that does not end before ``low``; it is a partner if it begins by ``high``.
    start = _amount_below(runs.last, low)
    later = np.flatnonzero(runs.first[start] <= high)
    # Flat indices wrap from slice to slice: the first row of a slice has no row before it in that slice.
    if offset[-1]:
        later = later[runs.first[later] // columns % rows != 0]
    return Contacts(*_all_partners(runs.first, high, later, start[later]), shift)


def _all_partners(first: Integers, high: Integers, later: Integers, earlier: Integers) -> tuple[Integers, Integers]:
    """From each run and its first partner to all its partners: the next runs, as long as they begin before ``high``."""
    pairs = [(later, earlier)]
    while later.size:
        more = np.flatnonzero(first[earlier + 1] <= high[later])  # earlier < later, so there is a next run
        later, earlier = later[more], earlier[more] + 1
        pairs.append((later, earlier))
    return np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs])


def _amount_below(values: Integers, wanted: Integers) -> Integers:
    """``np.searchsorted(values, wanted)`` where both ascend: a stable sort merges two sorted lists in one sweep."""
    # NumPy's stable sort finds the two ascending stretches and merges them, which beats a binary search per value. The
    # place of the i-th wanted value in the merged list, less the i wanted values before it, counts the smaller values.
    merged = np.argsort(np.concatenate([wanted, values]), kind="stable")
    return np.asarray(np.flatnonzero(merged < wanted.size) - np.arange(wanted.size))


def _expanded(start: Integers, count: Integers) -> tuple[Integers, Integers]:
    """For each i the pairs (i, start[i]), (i, start[i] + 1), ..., ``count[i]`` of them."""
    later = np.repeat(np.arange(count.size), count)
    before = np.cumsum(count) - count  # pairs of all i before this one; subtracting them restarts the count at 0
    return later, np.arange(later.size) + np.repeat(start - before, count)


def united(amount: int, contacts: Sequence[Contacts]) -> Integers:
    """The component number of each run, counted in the order in which components begin.

    Every run points to one earlier partner, pointers are followed to their ends, and contacts that still join two ends
    go another round; all runs together, so a few rounds are enough. The end of a component is its first run.
    """
    later = np.concatenate([pairs.later for pairs in contacts])
    earlier = np.concatenate([pairs.earlier for pairs in contacts])
    itself = np.arange(amount)
    root = itself.copy()
    while later.size:
        root[later] = earlier  # of several partners of a run one is set now; the others follow in a later round
        while not np.array_equal(ends := root[root], root):
            root = ends
        # Contacts within one component are done; the rest join two ends, of which the later points to the earlier, so
        # pointers only ever go back and cannot form a circle.
        later, earlier = root[later], root[earlier]
        apart = later != earlier
        later, earlier = later[apart], earlier[apart]
        later, earlier = np.maximum(later, earlier), np.minimum(later, earlier)
    return np.asarray((np.cumsum(root == itself) - 1)[root])

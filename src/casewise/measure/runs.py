"""Voxels of D as runs: stretches of neighbours along the last axis. Few runs stand for many voxels.

Two runs touch when one, moved by one row (or one slice), overlaps the other. Both ends of all runs are sorted, so the
partners of every run are found by two binary searches, and no array as large as the volume is ever made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csgraph, csr_array

from casewise.measure.masks import Integers


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of D in C order; a run never continues into the next row."""

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
    breaks = voxels[1:] - voxels[:-1] != 1
    if voxels.size:  # neighbours in memory that belong to two rows
        breaks |= voxels[1:] % shape[-1] == 0
    cut = np.flatnonzero(breaks)
    begin = np.concatenate([[0], cut + 1]) if voxels.size else cut
    end = np.concatenate([cut, [voxels.size - 1]]) if voxels.size else cut
    return Runs(shape, voxels[begin], voxels[end], begin)


def face_contacts(runs: Runs) -> list[Contacts]:
    """Runs that share a face: the row before, and in 3-D the slice before (B3)."""
    offsets = [(1,)] if len(runs.shape) == 2 else [(0, 1), (1, 0)]
    return [_contacts(runs, offset, reach=0) for offset in offsets]


def full_contacts(runs: Runs) -> list[Contacts]:
    """Runs that share a face, an edge or a corner: 8-connectivity in 2-D, 26 in 3-D (N3)."""
    offsets = [(1,)] if len(runs.shape) == 2 else [(0, 1), (1, -1), (1, 0), (1, 1)]
    return [_contacts(runs, offset, reach=1) for offset in offsets]


def _contacts(runs: Runs, offset: tuple[int, ...], reach: int) -> Contacts:
    """Pairs of a run and an earlier one that lies ``offset`` rows (and slices) before it, within ``reach`` columns."""
    columns, rows = runs.shape[-1], runs.shape[-2]
    shift = offset[-1] * columns + (offset[0] * rows * columns if len(offset) == 2 else 0)
    low, high = runs.first - shift, runs.last - shift
    if reach:
        column = runs.first % columns
        low = low - (column > 0)
        high = high + (column + (runs.last - runs.first) < columns - 1)
    start = np.searchsorted(runs.last, low)
    stop = np.searchsorted(runs.first, high, side="right")
    if offset[-1]:  # the first (or last) row of a slice has no row before (after) it in that slice
        edge = 0 if offset[-1] > 0 else rows - 1
        stop = np.where(runs.first // columns % rows == edge, start, stop)
    return Contacts(*_expanded(start, np.maximum(stop - start, 0)), shift)


def _expanded(start: Integers, count: Integers) -> tuple[Integers, Integers]:
    """For each i the pairs (i, start[i]), (i, start[i] + 1), ..., ``count[i]`` of them."""
    later = np.repeat(np.arange(count.size), count)
    before = np.cumsum(count) - count
    return later, np.arange(later.size) + np.repeat(start - before, count)


def united(amount: int, contacts: list[Contacts]) -> Integers:
    """The component number of each run, counted in the order in which components begin."""
    later = np.concatenate([pairs.later for pairs in contacts])
    earlier = np.concatenate([pairs.earlier for pairs in contacts])
    graph = csr_array((np.ones(later.size, np.int8), (later, earlier)), shape=(amount, amount))
    _, owner = csgraph.connected_components(graph, directed=False)
    return owner.astype(np.int64)

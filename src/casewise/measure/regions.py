"""The connected components of D, the set of voxels where two masks differ.

One scan of memory finds D: words of eight bytes are compared, and single voxels only where a word differs. Everything
after that works on the runs of D, so the cost is one pass over memory plus |D|. The result equals
``scipy.ndimage.label`` on the whole volume, which the tests check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from casewise.core.errors import BadInput
from casewise.core.text import brief
from casewise.measure.masks import Flags, Integers, checked_masks, is_tensor, least_voxels, on_host
from casewise.measure.runs import Runs, face_contacts, runs_of, united

_WORD = np.dtype(np.uint64)


def changed_voxels(source: Any, adapted: Any, *, foreground: bool) -> Integers:
    """Flat indices (C order, ascending) of D = {x : a(x) != b(x)}, binarized to label > 0 first if ``foreground`` (B1,
    B2)."""
    if is_tensor(source) and is_tensor(adapted) and source.device == adapted.device:
        differ = _differ(source.detach(), adapted.detach(), foreground).reshape(-1)
        return np.asarray(differ.nonzero().reshape(-1).cpu().numpy())
    a, b = on_host(source), on_host(adapted)
    if a.dtype != b.dtype:
        return np.flatnonzero(_differ(a, b, foreground))
    if a.flags.f_contiguous and b.flags.f_contiguous and not a.flags.c_contiguous:
        turned = _scan(a.T, b.T, foreground)
        return np.sort(np.ravel_multi_index(np.unravel_index(turned, a.T.shape)[::-1], a.shape))
    return _scan(np.ascontiguousarray(a), np.ascontiguousarray(b), foreground)


def _differ(a: Any, b: Any, foreground: bool) -> Any:
    """Return a mask of the places where two arrays or two tensors differ."""
    return (a > 0) != (b > 0) if foreground else a != b


def _scan(a: NDArray[Any], b: NDArray[Any], foreground: bool) -> Integers:
    a, b = a.reshape(-1), b.reshape(-1)
    each = _WORD.itemsize // a.itemsize  # voxels in one word
    whole = a.size - a.size % each
    words_a, words_b = a[:whole].view(_WORD), b[:whole].view(_WORD)
    words = np.flatnonzero(words_a != words_b)
    if words.size * each * 4 > a.size:  # most of the volume changed: looking closer everywhere is cheaper
        return np.flatnonzero(_differ(a, b, foreground))
    hits = np.flatnonzero(_differ(words_a[words].view(a.dtype), words_b[words].view(a.dtype), foreground))
    bits = each.bit_length() - 1  # a word holds a power of two of voxels
    found = (words[hits >> bits] << bits) + (hits & (each - 1))
    if whole == a.size:
        return np.asarray(found)
    return np.concatenate([found, whole + np.flatnonzero(_differ(a[whole:], b[whole:], foreground))])


Connectivity = Literal["face", "full"]
"""face: 4 neighbours in 2-D, 6 in 3-D (B3). full: 8 and 26 (N3)."""

_CRUMBS = 24  # fewer voxels of the volume than this for each run, and a dense labelling is cheaper than runs


@dataclass(frozen=True, eq=False, repr=False)
class Regions:
    """D and its components, voxel by voxel of D; nothing here is as large as the volume."""

    __repr__ = brief

    runs: Runs
    voxels: Integers  # flat indices of D in C order
    owner: Integers  # component number of each run
    sizes: Integers  # voxels of each component, in the order in which components begin
    min_area: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the masks."""
        return self.runs.shape

    @property
    def area(self) -> int:
        """|D|."""
        return int(self.voxels.size)

    @cached_property
    def number(self) -> Integers:
        """Component number, from 0, of each voxel of D."""
        return np.repeat(self.owner, self.runs.lengths)

    @cached_property
    def kept(self) -> Flags:
        """True for components that are regions: size >= min_area (B4)."""
        return self.sizes >= self.min_area


def regions_of(
    source: Any, adapted: Any, *, min_area: int = 16, foreground: bool = True, connectivity: Connectivity = "face",
    min_area_mm: float | None = None, spacing_mm: Sequence[float] | None = None,
) -> Regions:  # fmt: skip
    """The components of D = {x : source != adapted}, after binarizing to foreground unless ``foreground=False``
    (B1-B4).

    ``min_area_mm`` (mm2 in 2-D, mm3 in 3-D, with ``spacing_mm``) replaces ``min_area`` when it is given (S26).
    """
    source, adapted = checked_masks(source=source, adapted=adapted)
    least = least_voxels(min_area, min_area_mm, spacing_mm, axes=source.ndim)
    voxels = changed_voxels(source, adapted, foreground=foreground)
    return components(voxels, tuple(source.shape), min_area=least, connectivity=connectivity)


def components(
    voxels: Integers, shape: tuple[int, ...], *, min_area: int = 1, connectivity: Connectivity = "face"
) -> Regions:
    """The components of a set of voxels, given as ascending flat indices (C order)."""
    if connectivity not in ("face", "full"):
        raise BadInput(f"connectivity must be 'face' or 'full', got {connectivity!r}")
    runs = runs_of(voxels, shape)
    if connectivity == "full" or runs.first.size * _CRUMBS > math.prod(shape):
        owner = _labelled(runs, voxels, connectivity)
    else:
        owner = united(runs.first.size, face_contacts(runs))
    sizes = np.bincount(owner, weights=runs.lengths).astype(np.int64)
    return Regions(runs, voxels, owner, sizes, min_area)


def _labelled(runs: Runs, voxels: Integers, connectivity: Connectivity) -> Integers:
    """Component number of each run from a dense labelling: for many small components, and for corners that touch."""
    dense = np.zeros(runs.shape, bool)
    dense.reshape(-1)[voxels] = True
    neighbors = ndimage.generate_binary_structure(dense.ndim, 1 if connectivity == "face" else dense.ndim)
    labels, amount = ndimage.label(dense, structure=neighbors)
    owner = labels.reshape(-1)[runs.first] - 1
    # SciPy may number components otherwise than in the order in which they begin, which both ways promise: renumber.
    # Written backwards, the entry that stays is the first run of each component.
    begins = np.empty(amount, np.int64)
    begins[owner[::-1]] = np.arange(owner.size)[::-1]
    rank = np.empty(amount, np.int64)
    rank[np.argsort(begins)] = np.arange(amount)
    return np.asarray(rank[owner])

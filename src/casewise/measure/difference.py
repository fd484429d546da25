"""Where two masks differ: one scan of memory, eight bytes at a time, and a closer look only where a word differs.

Equal bytes mean equal labels, so a word that is equal in both masks holds no voxel of D, whatever "differ" means.
At the small edits of test-time adaptation this is all that ever touches the whole volume.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.measure.masks import Flags, Integers, is_tensor, on_host

_WORD = np.dtype(np.uint64)


def changed_voxels(source: Any, adapted: Any, *, foreground: bool) -> Integers:
    """Flat indices (C order, ascending) of D = {x : a(x) != b(x)}, binarized to label > 0 first if asked (B1, B2)."""
    if is_tensor(source) and is_tensor(adapted) and source.device == adapted.device:
        return _on_device(source.detach(), adapted.detach(), foreground)
    a, b = on_host(source), on_host(adapted)
    if a.dtype != b.dtype:
        return np.flatnonzero(_differ(a, b, foreground))
    if a.flags.f_contiguous and b.flags.f_contiguous and not a.flags.c_contiguous:
        turned = _scan(a.T, b.T, foreground)
        return np.sort(np.ravel_multi_index(np.unravel_index(turned, a.T.shape)[::-1], a.shape))
    return _scan(np.ascontiguousarray(a), np.ascontiguousarray(b), foreground)


def _differ(a: NDArray[Any], b: NDArray[Any], foreground: bool) -> Flags:
    differ: Flags = (a > 0) != (b > 0) if foreground else a != b
    return differ


def _on_device(a: Any, b: Any, foreground: bool) -> Integers:
    different = (a > 0) != (b > 0) if foreground else a != b
    voxels: Integers = different.reshape(-1).nonzero().reshape(-1).cpu().numpy()
    return voxels


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

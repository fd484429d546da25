"""LabelPieces and holes of several masks in one pass, against SciPy mask by mask and label by label."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from casewise.measure.pieces import pieces_of
from casewise.measure.runs import runs_of_labels

SHAPES = st.sampled_from([(5, 7), (4, 16), (1, 9), (3, 4, 5), (2, 5, 8), (3, 1, 11), (2, 6, 16)])


@st.composite
def masks(draw, amount=2):
    shape = draw(SHAPES)
    seed, density = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from([np.uint8, np.uint16, np.int64]))
    return [(rng.integers(1, 3, shape) * (rng.random(shape) < density)).astype(kind) for _ in range(amount)]


def holes_by_scipy(mask: np.ndarray) -> list[tuple[int, int]]:
    """(voxels, label around it or 0) of each enclosed piece of background."""
    framed = np.pad(mask, 1)
    pieces, count = ndimage.label(framed == 0)
    found = []
    for number in range(1, count + 1):
        hole = pieces == number
        if not hole[(0,) * mask.ndim]:
            around = set(framed[ndimage.binary_dilation(hole) & ~hole].tolist())
            found.append((int(hole.sum()), around.pop() if len(around) == 1 else 0))
    return sorted(found)


@given(masks())
@settings(max_examples=120, deadline=None)
def test_pieces_and_holes_of_both_masks_are_those_of_scipy(both):
    for mask, found in zip(both, pieces_of(*both), strict=True):
        for label in (1, 2):
            numbered, count = ndimage.label(mask == label)
            assert sorted(found.sizes[found.value == label]) == sorted(np.bincount(numbered.ravel())[1:])
            assert int((found.value == label).sum()) == count
        holes = sorted((int(found.sizes[n]), int(found.hole_of[n])) for n in np.flatnonzero(found.hole_of >= 0))
        assert holes == sorted(holes_by_scipy(mask))
        for number in range(found.sizes.size):
            voxels, owner = found.voxels_of(np.arange(found.sizes.size) == number)
            assert voxels.size == found.sizes[number]
            assert set(owner.tolist()) == {number}
            assert set(mask.reshape(-1)[voxels].tolist()) == {int(found.value[number])}


@given(masks(amount=1))
@settings(max_examples=60, deadline=None)
def test_runs_hold_the_foreground_once_and_never_leave_their_row(one):
    (mask,) = one
    runs, label = runs_of_labels(mask)
    drawn = np.zeros(mask.size, mask.dtype)
    for first, last, value in zip(runs.first, runs.last, label, strict=True):
        assert first // mask.shape[-1] == last // mask.shape[-1]
        assert not drawn[first : last + 1].any()
        drawn[first : last + 1] = value
    assert np.array_equal(drawn.reshape(mask.shape), mask)


@pytest.mark.parametrize("shape", [(6, 9), (3, 6, 9)])
def test_an_empty_mask_has_no_piece(shape):
    nothing, all_one = pieces_of(np.zeros(shape, np.uint8), np.ones(shape, np.uint8))
    assert nothing.sizes.size == 0
    assert (all_one.sizes.tolist(), all_one.value.tolist()) == ([int(np.prod(shape))], [1])

"""What holds for every pair (and triple) of masks: the kernel against a flood fill, and the arithmetic of spec B."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from casewise import fragmentation, harm
from casewise.measure import regions as kernel
from casewise.measure.regions import regions_of

shapes = hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=6)
options = settings(max_examples=200, deadline=None, derandomize=True)
many = settings(options, max_examples=500)


def masks_of(count: int, labels: int = 2) -> st.SearchStrategy[tuple[np.ndarray, ...]]:
    """So many masks of one shape with labels 0 .. ``labels``, from raw bytes (quick to draw, and they shrink)."""

    def drawn(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[np.ndarray, ...]]:
        size = count * int(np.prod(shape))
        bytes_ = st.binary(min_size=size, max_size=size)
        return bytes_.map(lambda raw: tuple((np.frombuffer(raw, np.uint8) % (labels + 1)).reshape(count, *shape)))

    return shapes.flatmap(drawn)


def flood_fill(different: np.ndarray) -> list[set[tuple[int, ...]]]:
    """Components by walking from voxel to voxel; nothing of SciPy or of the kernel in it."""
    spots = [tuple(spot) for spot in np.argwhere(different).tolist()]
    left = set(spots)
    found = []
    for start in spots:
        if start not in left:
            continue
        left.discard(start)
        piece, edge = {start}, [start]
        while edge:
            here = edge.pop()
            for axis in range(different.ndim):
                for step in (-1, 1):
                    near = (*here[:axis], here[axis] + step, *here[axis + 1 :])
                    if near in left:
                        left.discard(near)
                        piece.add(near)
                        edge.append(near)
        found.append(piece)
    return found


def pieces_of(found: kernel.Regions) -> list[set[tuple[int, ...]]]:
    spots = np.stack(np.unravel_index(found.voxels, found.shape), axis=1).tolist()
    pieces: list[set[tuple[int, ...]]] = [set() for _ in found.sizes]
    for number, spot in zip(found.number, spots, strict=True):
        pieces[number].add(tuple(spot))
    return pieces


@pytest.mark.parametrize("dense", [False, True], ids=["by runs", "by dense labelling"])
@pytest.mark.parametrize("foreground", [True, False])
@many
@given(masks=masks_of(2))
def test_regions_are_those_of_a_flood_fill(foreground, dense, masks):
    source, adapted = masks
    different = (source > 0) != (adapted > 0) if foreground else source != adapted
    crumbs = kernel._CRUMBS
    kernel._CRUMBS = different.size + 1 if dense else 0
    try:
        found = regions_of(source, adapted, foreground=foreground)
    finally:
        kernel._CRUMBS = crumbs
    expected = flood_fill(different)
    assert pieces_of(found) == expected
    assert found.sizes.tolist() == [len(piece) for piece in expected]


@options
@given(masks=masks_of(2), min_area=st.integers(1, 9))
def test_fragmentation_is_symmetric_and_flips_change_nothing(masks, min_area):
    source, adapted = masks
    there = fragmentation(source, adapted, min_area=min_area)
    back = fragmentation(adapted, source, min_area=min_area)
    flipped = fragmentation(source[:, ::-1], adapted[:, ::-1], min_area=min_area)
    assert there == flipped
    without_foreground = {"delta_foreground"}
    assert {k: v for k, v in there.as_signals().items() if k not in without_foreground} == {
        k: v for k, v in back.as_signals().items() if k not in without_foreground
    }


@options
@given(masks=masks_of(3), min_area=st.integers(1, 6), foreground=st.booleans())
def test_the_four_shares_of_a_changed_mask_sum_to_one(masks, min_area, foreground):
    found = harm(*masks, min_area=min_area, foreground=foreground)
    total = found.ha + found.ba + found.neutral_scored + found.unscored
    assert total == pytest.approx(1.0 if found.area else 0.0, abs=1e-12)
    assert len(found.table) == found.regions
    assert found.table["share"].sum() == pytest.approx(1 - found.unscored if found.area else 0.0)


@options
@given(masks=masks_of(3), foreground=st.booleans())
def test_harm_never_grows_with_the_smallest_area(masks, foreground):
    ladder = [harm(*masks, min_area=least, foreground=foreground).ha for least in range(1, 10)]
    assert ladder == sorted(ladder, reverse=True)


@options
@given(masks=masks_of(3))
def test_a_binary_region_is_harmful_iff_more_than_half_of_it_was_right(masks):
    source, adapted, label = masks
    right = ((source > 0) == (label > 0)).reshape(-1)
    found = harm(source, adapted, label, min_area=1)
    for number, verdict in zip(found.table["number"], found.table["verdict"], strict=True):
        voxels = found.found.voxels[found.found.number == number]
        twice = 2 * int(right[voxels].sum()) - voxels.size
        assert verdict == ("harmful" if twice > 0 else "beneficial" if twice < 0 else "neutral")


@options
@given(masks=masks_of(3))
def test_swapping_source_and_adapted_swaps_harm_and_benefit(masks):
    source, adapted, label = masks
    there, back = harm(source, adapted, label, min_area=2), harm(adapted, source, label, min_area=2)
    assert (there.ha, there.ba, there.unscored) == (back.ba, back.ha, back.unscored)


@options
@given(masks=masks_of(2))
def test_scale_free_statistics_survive_doubling_the_resolution(masks):
    small = fragmentation(*masks)
    large = fragmentation(*(double(mask) for mask in masks))
    assert large.area == small.area * 2 ** masks[0].ndim
    assert large.effective_regions == pytest.approx(small.effective_regions, rel=1e-12)
    assert large.largest_share == small.largest_share
    assert large.delta_foreground == small.delta_foreground
    assert large.delta == small.delta


@options
@given(masks=masks_of(2), volume=st.floats(0.5, 40))
def test_regions_counted_in_millimetres_survive_doubling_the_resolution(masks, volume):
    axes = masks[0].ndim
    small = fragmentation(*masks, min_area_mm=volume, spacing_mm=(2.0,) * axes)
    large = fragmentation(*(double(mask) for mask in masks), min_area_mm=volume, spacing_mm=(1.0,) * axes)
    assert large.regions == small.regions


@options
@given(masks=masks_of(2), dtypes=st.tuples(*[st.sampled_from(["u1", "i2", "u2", "i4", "u4", "i8", "u8"])] * 2))
def test_the_type_and_the_layout_of_masks_change_nothing(masks, dtypes):
    source, adapted = masks
    expected = fragmentation(source, adapted, min_area=2, foreground=False)
    typed = [mask.astype(dtype) for mask, dtype in zip(masks, dtypes, strict=True)]
    columns_first = [np.asfortranarray(mask) for mask in masks]
    strided = [np.repeat(mask, 2, axis=1)[:, ::2] for mask in masks]
    for variant in (typed, columns_first, strided, [columns_first[0], strided[1]]):
        assert fragmentation(*variant, min_area=2, foreground=False) == expected


def double(mask: np.ndarray) -> np.ndarray:
    for axis in range(mask.ndim):
        mask = np.repeat(mask, 2, axis=axis)
    return mask

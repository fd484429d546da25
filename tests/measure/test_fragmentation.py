"""Fragmentation on pictures that a person can check."""

from __future__ import annotations

import numpy as np
import pytest

from casewise import BadInput, fragmentation
from casewise.measure.signals import SIGNALS


def picture(text: str) -> np.ndarray:
    """A mask from rows of digits; a dot is background."""
    return np.array([[0 if letter == "." else int(letter) for letter in row] for row in text.split()], np.uint8)


EMPTY = picture("........ ........ ........")


def test_an_unchanged_mask_has_no_pieces():
    found = fragmentation(EMPTY, EMPTY)
    assert (found.regions, found.delta, found.area, found.effective_regions, found.largest) == (0, 0, 0, 0, 0)
    assert found.largest_share is None
    assert found.singleton_share is None
    assert found.delta_foreground is None


def test_one_solid_change_is_one_effective_region():
    found = fragmentation(EMPTY, picture("1111.... 1111.... ........"), min_area=8)
    assert (found.regions, found.area, found.effective_regions, found.largest_share) == (1, 8, 1.0, 1.0)
    assert found.delta == 8 / 24


def test_four_crumbs_are_four_effective_regions_and_no_region():
    found = fragmentation(EMPTY, picture("1.1..... ........ 1.1....."), min_area=2)
    assert (found.regions, found.effective_regions, found.singleton_share, found.largest) == (0, 4.0, 1.0, 1)


@pytest.mark.parametrize(("min_area", "regions"), [(5, 1), (6, 1), (7, 0)])
def test_a_component_of_exactly_min_area_is_a_region(min_area, regions):
    assert fragmentation(EMPTY, picture("111111.. ........ ........"), min_area=min_area).regions == regions


def test_corners_do_not_connect_unless_asked():
    steps = picture("11...... ..11.... ....11..")
    assert fragmentation(EMPTY, steps, min_area=1).regions == 3
    assert fragmentation(EMPTY, steps, min_area=1, connectivity="full").regions == 1


def test_the_end_of_a_row_does_not_touch_the_begin_of_the_next():
    assert fragmentation(EMPTY, picture(".......1 1....... ........"), min_area=1).regions == 2
    assert fragmentation(EMPTY, picture("......11 111111.1 ........"), min_area=1).regions == 2


def test_the_last_row_of_a_slice_does_not_touch_the_first_row_of_the_next():
    before = np.zeros((2, 3, 4), np.uint8)
    after = before.copy()
    after[0, 2] = after[1, 0] = 1
    assert fragmentation(before, after, min_area=1).regions == 2


def test_slices_connect_through_faces():
    before = np.zeros((3, 3, 3), np.uint8)
    after = before.copy()
    after[:, 1, 1] = 1
    assert fragmentation(before, after, min_area=3).regions == 1


def test_a_change_of_class_counts_only_when_labels_are_compared():
    before, after = picture("1111...."), picture("2222....")
    assert fragmentation(before, after, min_area=1).area == 0
    assert fragmentation(before, after, min_area=1, foreground=False).area == 4


def test_change_is_told_by_the_foreground_of_the_source():
    found = fragmentation(picture("1111...."), picture("111....."), min_area=1)
    assert found.delta_foreground == 1 / 4
    assert fragmentation(picture("........"), picture("1......."), min_area=1).delta_foreground is None


def test_area_may_be_given_in_millimetres():
    changed = picture("111111.. ........ ........")
    assert fragmentation(EMPTY, changed, min_area_mm=12.0, spacing_mm=(2.0, 1.0)).regions == 1
    assert fragmentation(EMPTY, changed, min_area_mm=12.1, spacing_mm=(2.0, 1.0)).regions == 0


def test_millimetres_need_a_spacing():
    with pytest.raises(BadInput, match=r"min_area_mm=10.0 needs spacing_mm"):
        fragmentation(EMPTY, EMPTY, min_area_mm=10.0)


@pytest.mark.parametrize("min_area", [0, -1, 2.5])
def test_min_area_is_a_count(min_area):
    with pytest.raises(BadInput, match=r"whole number of at least 1 voxel, got"):
        fragmentation(EMPTY, EMPTY, min_area=min_area)


def test_an_unknown_connectivity_is_named():
    with pytest.raises(BadInput, match=r"'face' or 'full', got 'corner'"):
        fragmentation(EMPTY, EMPTY, connectivity="corner")


def test_signals_have_the_names_of_the_registry():
    signals = fragmentation(EMPTY, picture("1.1..... ........ ........")).as_signals()
    assert set(signals) <= set(SIGNALS)
    assert [name for name in SIGNALS if name in signals] == list(signals)
    assert signals["area"] == 2.0
    assert signals["delta_foreground"] is None


def test_every_signal_says_what_it_is():
    assert all(info.name == name and info.meaning for name, info in SIGNALS.items())


def test_inputs_are_left_as_they_were():
    before, after = EMPTY.copy(), picture("11...... ........ ........")
    before.setflags(write=False)
    after.setflags(write=False)
    assert fragmentation(before, after).area == 2


def test_cost_does_not_grow_with_the_number_of_regions_times_the_volume():
    before = np.zeros((512, 512), np.uint8)
    after = before.copy()
    after[::4, ::4] = 1  # 16384 regions: one boolean mask each would touch four thousand million voxels
    assert fragmentation(before, after, min_area=1).regions == 128 * 128

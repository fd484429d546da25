"""Cleanup on pictures that a person can check, and on random masks against a slow independent computation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

from casewise.core.errors import BadInput
from casewise.measure.cleanup import Cleanup


def cleaned(text, rows):
    return Cleanup.parse(text).apply(np.array(rows, np.uint8)).tolist()


def test_largest_keeps_one_component_of_each_named_label():
    mask = [[1, 1, 0, 1], [0, 0, 0, 2], [2, 2, 0, 0]]
    assert cleaned("largest(1)", mask) == [[1, 1, 0, 0], [0, 0, 0, 2], [2, 2, 0, 0]]
    assert cleaned("largest(1,2)", mask) == [[1, 1, 0, 0], [0, 0, 0, 0], [2, 2, 0, 0]]


def test_corners_do_not_connect_and_equal_components_keep_the_first():
    assert cleaned("largest(1)", [[1, 0], [0, 1]]) == [[1, 0], [0, 0]]


def test_islands_below_the_volume_go_and_others_stay():
    assert cleaned("islands(2:2)", [[2, 0, 2, 2], [0, 0, 0, 0], [2, 2, 2, 0]]) == [
        [0, 0, 2, 2], [0, 0, 0, 0], [2, 2, 2, 0],
    ]  # fmt: skip


def test_fill_fills_background_and_leaves_what_another_label_holds():
    ring = [[2, 2, 2, 2], [2, 0, 1, 2], [2, 2, 2, 2]]
    assert cleaned("fill(2)", ring) == [[2, 2, 2, 2], [2, 2, 1, 2], [2, 2, 2, 2]]


def test_steps_run_in_the_order_in_which_they_are_written():
    mask = [[1, 1, 1, 0, 1], [1, 0, 1, 0, 0], [1, 1, 1, 0, 1]]
    assert cleaned("largest(1)+fill(1)", mask) == [[1, 1, 1, 0, 0]] * 3


def test_three_dimensions_and_the_type_of_the_mask():
    mask = np.zeros((3, 4, 4), np.int16)
    mask[0, 0, 0] = mask[1, 0, 0] = mask[2, 3, 3] = 300
    made = Cleanup.parse("largest(300)").apply(mask)
    assert made.dtype == np.int16
    assert np.argwhere(made).tolist() == [[0, 0, 0], [1, 0, 0]]
    assert mask[2, 3, 3] == 300, "the mask that was given stays"


@pytest.mark.parametrize("text", ["", "largest(1)", "largest(1,2)+islands(2:50,3:4)+fill(3)"])
def test_text_is_read_as_it_is_written(text):
    assert Cleanup.parse(text).text == text


@pytest.mark.parametrize(
    "text", ["biggest(1)", "largest", "largest(0)", "largest(1,1)", "islands(2)", "fill(1:3)", "fill(1", "+"]
)
def test_other_text_is_refused(text):
    with pytest.raises(BadInput):
        Cleanup.parse(text)


small = arrays(np.uint8, st.sampled_from([(5, 6), (3, 4, 4)]), elements=st.integers(0, 2))


@given(small, st.integers(1, 5))
def test_cleanup_agrees_with_a_second_computation(mask, least):
    wanted = mask.copy()
    numbers, count = ndimage.label(mask == 1)
    for number in range(1, count + 1):
        if (numbers == number).sum() < least:
            wanted[numbers == number] = 0
    assert np.array_equal(Cleanup.parse(f"islands(1:{least})").apply(mask), wanted)
    kept = Cleanup.parse("largest(1)").apply(mask) == 1
    assert ndimage.label(kept)[1] == min(count, 1)
    assert kept.sum() == max([(numbers == number).sum() for number in range(1, count + 1)], default=0)


@given(small)
def test_a_cleanup_repeated_changes_nothing_and_touches_only_its_label(mask):
    for text in ("largest(1)", "islands(1:3)", "fill(1)"):
        made = Cleanup.parse(text).apply(mask)
        assert np.array_equal(Cleanup.parse(text).apply(made), made)
        assert set(zip(mask[made != mask], made[made != mask], strict=True)) <= {
            (0, 1) if text == "fill(1)" else (1, 0)
        }

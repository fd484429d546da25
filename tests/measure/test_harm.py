"""Harm on pictures that a person can check (B5-B7, B15)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from worlds.masks import harm_by_class

from casewise import BadInput, harm


def row(text: str) -> np.ndarray:
    """One row of digits as a mask; a dot is background, v is the void label 255."""
    return np.array([[0 if letter == "." else 255 if letter == "v" else int(letter) for letter in text]], np.uint8)


def test_rolling_back_harms_nothing():
    source, label = row("11..11.."), row("1111....")
    found = harm(source, source, label)
    assert (found.ha, found.ba, found.neutral_scored, found.unscored, found.delta, found.area) == (0, 0, 0, 0, 0, 0)
    assert len(found.table) == found.regions == 0
    assert found.rows() == []


def test_a_region_that_was_right_is_harmful_and_one_that_was_wrong_is_beneficial():
    found = harm(row("........"), row("11..1111"), row("....1111"), min_area=2)
    assert (found.ha, found.ba, found.neutral_scored, found.unscored) == (2 / 6, 4 / 6, 0, 0)
    assert found.table["verdict"].tolist() == ["harmful", "beneficial"]
    assert found.voxel_harm == 2 / 6


def test_an_exact_tie_is_neutral():
    found = harm(row("...."), row("1111"), row("11.."), min_area=1)
    assert (found.ha, found.ba, found.neutral_scored) == (0, 0, 1)
    assert found.table["verdict"].tolist() == ["neutral"]
    assert found.voxel_harm == 0.5


def test_the_denominator_counts_components_that_are_too_small():
    found = harm(row("........"), row("1111.1.1"), row("........"), min_area=4)
    assert (found.ha, found.unscored, found.regions, found.area) == (4 / 6, 2 / 6, 1, 6)


def test_a_change_without_a_region_is_not_judged():
    found = harm(row("........"), row("1.1.1.1."), row("........"), min_area=2)
    assert (found.ha, found.ba, found.neutral_scored, found.unscored, found.regions) == (0, 0, 0, 1, 0)
    assert found.voxel_harm == 1


def test_void_voxels_belong_to_a_region_but_are_never_wrong():
    found = harm(row("......"), row("111111"), row("1....v"), min_area=1, ignore=255)
    assert (found.ha, found.area, found.table["area"].tolist()) == (1.0, 6, [6])
    assert found.voxel_harm == 4 / 6


def test_a_region_of_void_only_is_neutral():
    found = harm(row("...."), row("1111"), row("vvvv"), min_area=1, ignore=255)
    assert (found.ha, found.ba, found.neutral_scored) == (0, 0, 1)


def test_without_ignore_the_void_label_is_foreground():
    assert harm(row("...."), row("1111"), row("vvvv"), min_area=1).ba == 1


def test_with_many_classes_both_may_be_wrong():
    found = harm(row("1111"), row("2222"), row("3333"), min_area=1, foreground=False)
    assert (found.neutral_scored, found.voxel_harm) == (1, 0)
    assert harm(row("1111"), row("2222"), row("1222"), min_area=1, foreground=False).ba == 1


def test_the_table_describes_each_region():
    before = np.zeros((6, 12), np.uint8)
    after = before.copy()
    after[0:5, 0:5] = after[0:2, 8:10] = 1
    found = harm(before, after, before, min_area=4, spacing_mm=(2.0, 0.5))
    large, small = found.table
    assert (large["area"], small["area"], found.ha) == (25, 4, 1.0)
    assert large["box_low"].tolist() == [0, 0]
    assert large["box_high"].tolist() == [5, 5]
    assert small["centroid"].tolist() == [0.5, 8.5]
    assert large["boundary"] == 16  # a ring around nine inner voxels; the border of the image counts as outside
    assert large["compactness"] == 25 / 16**2
    assert small["compactness"] == 1 / 4  # thin regions give exactly 1 / A (M6)
    assert (large["distance"], large["distance_mm"]) == (0, 0)
    assert small["distance"] == pytest.approx(np.hypot(1.5, 6.5))
    assert small["distance_mm"] == pytest.approx(np.hypot(3.0, 3.25))
    assert small["share"] == 4 / 29


def test_distance_in_millimetres_is_undefined_without_a_spacing():
    assert np.isnan(harm(row("...."), row("1111"), row("1111"), min_area=1).table["distance_mm"]).all()


def test_rows_are_plain_and_go_to_json():
    (only,) = harm(row("...."), row("1111"), row("1111"), min_area=1, spacing_mm=(1, 1)).rows()
    assert json.loads(json.dumps(only))["verdict"] == "beneficial"
    assert only["box_high"] == [1, 4]


def test_area_in_millimetres_and_in_voxels_agree():
    masks = row("........"), row("1111..11"), row("........")
    assert harm(*masks, min_area_mm=6.0, spacing_mm=(1.0, 2.0)).ha == harm(*masks, min_area=3).ha == 4 / 6


def test_a_missing_label_is_named():
    with pytest.raises(BadInput, match=r"label must be an integer or bool mask, got None; pass the label"):
        harm(row("...."), row("1111"), None)


def test_edits_between_classes_are_seen_class_by_class():
    source, adapted, label = row("1111...."), row("2222...."), row("2222....")
    assert harm(source, adapted, label, min_area=1).area == 0
    by_class = harm_by_class(source, adapted, label, min_area=1)
    assert sorted(by_class) == [1, 2]
    assert (by_class[1].ba, by_class[2].ba) == (1, 1)


def test_harm_by_class_leaves_void_voxels_out():
    by_class = harm_by_class(row("...."), row("1111"), row("1vvv"), ignore=255, min_area=1)
    assert sorted(by_class) == [1]
    assert by_class[1].ba == 1
    assert harm_by_class(row("...."), row("1111"), row(".vvv"), ignore=255, min_area=1)[1].ha == 1

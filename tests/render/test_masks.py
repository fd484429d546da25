"""Pictures of masks: the right slice, the right outline, small files."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from casewise.render.mask_pictures import BETTER, WORSE, SliceView, data_uri, edits, painted, view_of

MEASURE = {"min_area": 4, "foreground": True, "ignore": None}


@pytest.fixture
def volume():
    """Adaptation adds a wrong block in slice 2 and a right one in slice 4."""
    source, label = np.zeros((6, 40, 40), np.uint8), np.zeros((6, 40, 40), np.uint8)
    adapted = source.copy()
    adapted[2, 5:9, 5:9] = 1
    adapted[4, 20:23, 20:23] = label[4, 20:23, 20:23] = 1
    return source, adapted, label


def test_edits_are_painted_where_they_are(volume):
    change = edits(*volume, measure=MEASURE)
    assert change.worse[2, 5:9, 5:9].all()
    assert change.worse.sum() == 16
    assert change.better[4, 20:23, 20:23].all()
    assert change.better.sum() == 9


def test_the_slice_with_most_harm_is_shown(volume):
    change = edits(*volume, measure=MEASURE)
    assert view_of(change, *volume).index == 2
    assert view_of(change, *volume, index=4).index == 4


def test_harm_of_a_slice_is_not_harm_of_the_case(volume):
    change = edits(*volume, measure=MEASURE)
    assert change.found.ha == pytest.approx(16 / 25)
    assert change.ha_of(SliceView(2, slice(0, 40), slice(0, 40))) == 1.0
    assert change.ha_of(SliceView(4, slice(0, 40), slice(0, 40))) == 0.0
    assert change.ha_of(SliceView(0, slice(0, 40), slice(0, 40))) == 0.0


def test_worse_is_outlined_red_and_better_blue(volume):
    source, adapted, label = volume
    change = edits(source, adapted, label, measure=MEASURE)
    for index, color in ((2, WORSE), (4, BETTER)):
        picture = painted(adapted, SliceView(index, slice(0, 40), slice(0, 40)), change=change)
        assert (picture == color).all(axis=-1).any()
    assert not (painted(source, SliceView(2, slice(0, 40), slice(0, 40))) == WORSE).all(axis=-1).any()


def test_the_window_holds_the_edit_and_stays_inside(volume):
    view = view_of(edits(*volume, measure=MEASURE), *volume)
    assert view.rows.start <= 5 < 9 <= view.rows.stop <= 40
    assert view.words((6, 40, 40)).startswith("slice 3 of 6, rows ")


def test_large_images_are_thinned_and_keep_thin_edits():
    source = np.zeros((900, 1600), np.uint8)
    adapted, label = source.copy(), source.copy()
    adapted[450, 100:140] = 1
    change = edits(source, adapted, label, measure=MEASURE)
    picture = painted(adapted, SliceView(None, slice(0, 900), slice(0, 1600)), change=change)
    assert max(picture.shape) <= 180
    assert (picture == WORSE).all(axis=-1).any()


def test_a_panel_is_a_small_png(volume):
    uri = data_uri(painted(volume[1], SliceView(2, slice(0, 40), slice(0, 40))))
    assert uri.startswith("data:image/png;base64,")
    assert len(uri) < 4000
    assert Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).size == (160, 160)

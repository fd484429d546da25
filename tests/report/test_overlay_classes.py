"""Pages say what their colors mean, and class 0 of a street is a class."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from PIL import Image

from casewise.core.records import Action, Case, Decision, State, Trajectory
from casewise.deployment import CaseResult
from casewise.render.mask_pictures import (
    Classes,
    Preview,
    SliceView,
    _busiest,
    _panels,
    _wrapped,
    as_rgb,
    edits_over,
    legend,
    overlay_png,
    painted,
)
from casewise.report.prediction_page import prediction_page
from casewise.run.predict_case import preview_of

NAMES = {0: "road", 1: "sky", 2: "thing"}
SOURCE = np.array([[0, 1], [2, 2]])
DEPLOYED = np.array([[1, 1], [0, 2]])
TITLE = 11 + 4  # pixels of a line of titles on a narrow sheet
STREET = Preview(np.zeros((2, 2), np.uint8), SOURCE, DEPLOYED, DEPLOYED, None, NAMES, background=False)


def panels(preview: Preview) -> list[np.ndarray]:
    sheet = np.array(Image.open(io.BytesIO(overlay_png(preview))))[TITLE:]
    side = sheet.shape[0]
    found = [sheet[:, left : left + side] for left in range(0, sheet.shape[1], side + 4)]
    return [panel[side // 4 :: side // 2, side // 4 :: side // 2][:2, :2] for panel in found]


def test_the_road_is_painted_and_nothing_is_added_or_removed() -> None:
    source, _, edits, _ = panels(STREET)
    assert source[0, 0].tolist() == [64, 32, 64]  # half of the road's own color over black
    assert edits[0, 0].tolist() == edits[1, 0].tolist()  # both are "another class", neither blue nor red
    assert edits[0, 1].tolist() == [0, 0, 0]


def test_where_0_is_background_it_is_left_free_and_edits_have_a_direction() -> None:
    source, _, edits, _ = panels(replace(STREET, background=True))
    assert source[0, 0].tolist() == [0, 0, 0]
    assert edits[0, 0].tolist() != edits[1, 0].tolist()


def test_the_legend_names_every_class_with_its_color() -> None:
    assert legend(NAMES, background=False)[0] == ("road", "#804080")
    assert [name for name, _ in legend(NAMES, background=True)] == ["sky", "thing"]
    facts = {"model": "m", "policy": "p", "calibration_id": "", "scores": {}, "versions": {}}
    page = prediction_page([], {**facts, "classes": {**NAMES, 3: "<b>x</b>"}, "background": False})
    assert '<i style="background:#804080"></i>road' in page
    assert "red removed" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "red removed" in prediction_page([], facts)


def test_what_changed_is_enlarged_and_further_slices_follow() -> None:
    image, source = np.zeros((64, 64), np.uint8), np.zeros((64, 64), int)
    source[20:30, 20:30] = 1
    grown = source.copy()
    grown[20:30, 30:34] = 1
    plain = Preview(image, source, grown, grown, 3, NAMES)
    assert _busiest(source != grown) == (slice(17, 33), slice(24, 40))  # a quarter, with the change in its middle
    small, tall = (Image.open(io.BytesIO(overlay_png(one))) for one in (plain, replace(plain, more=(plain,))))
    assert small.size == (4 * 192 + 3 * 4, 192 + TITLE)
    assert tall.size[1] == 2 * small.size[1]
    drawn = np.array(small)[TITLE:, -192:]
    assert (drawn[:, :, 2] > drawn[:, :, 0]).mean() > 0.1  # blue: 40 of the 256 enlarged pixels were added


def test_the_picture_is_of_the_slice_that_any_ladder_changes_most() -> None:
    source = np.zeros((3, 4, 4), int)
    view, update = source.copy(), source.copy()
    view[1, 0, :2], update[2, :, :3] = 1, 1
    some = Trajectory("a", (source, view), ({}, {}), rungs=("mean",))
    tent = Trajectory("a", (source, update), ({}, {}))
    decision = Decision("a", Action.KEEP, State(1, ladder="some"), 2, "choose")
    found = CaseResult(view, source, decision, some, ladders={"some": some, "tent": tent})
    seen = preview_of(Case("a", np.zeros((1, 3, 4, 4), np.float32)), found)
    assert seen.slice == 2
    assert [one.slice for one in seen.more] == [1]
    assert preview_of(Case("a", np.zeros((1, 3, 4, 4), np.float32)), replace(found, ladders={})).slice == 1


def test_titles_say_whether_the_new_mask_was_written() -> None:
    source, image = np.zeros((8, 8), int), np.zeros((8, 8), np.uint8)

    def titles(adapted: np.ndarray, deployed: np.ndarray) -> list[str]:
        return [title for title, _ in _panels(Preview(image, source, adapted, deployed, 0))][1:3]

    assert titles(source + 1, source + 1) == ["written mask", "what changed"]
    assert titles(source + 1, source) == ["new mask, not used", "where they differ"]
    assert titles(source, source)[0] == "new mask, the same"


class Ruler:
    """A font whose letters are all ten pixels wide."""

    def getlength(self, text: str) -> float:
        return 10.0 * len(text)


def test_a_long_caption_is_wrapped_and_nothing_of_it_is_lost() -> None:
    title = "contrast(0.7,range) then mirror(x), enlarged"
    for width in (70, 120, 1000):
        lines = _wrapped(title, Ruler(), width)
        assert all(10 * len(line) <= width for line in lines)
        assert "".join(lines).replace(" ", "") == title.replace(" ", "")
    assert _wrapped(title, Ruler(), 200) == ["contrast(0.7,range)", "then mirror(x),", "enlarged"]


def test_wide_frames_stand_two_in_a_row_and_are_enlarged_where_most_changed() -> None:
    source = np.zeros((90, 160), int)
    other = source.copy()
    other[::30, ::30] = 1  # crumbs everywhere, so that no window holds all of them
    other[60:85, 100:150] = 1
    street = Preview(np.zeros((90, 160), np.uint8), source, other, other, None, NAMES, background=False)
    rows, columns = _busiest(source != other)
    assert (rows.stop - rows.start, columns.stop - columns.start) == (45, 80)
    assert rows.start <= 60 < 85 <= rows.stop
    assert columns.start <= 100 < 150 <= columns.stop
    assert Image.open(io.BytesIO(overlay_png(street))).width == 2 * 192 + 4


def test_a_frame_at_full_size_makes_no_sheet_of_many_megabytes() -> None:
    mask = np.zeros((1080, 1920), np.uint8)
    large = Image.open(io.BytesIO(overlay_png(Preview(mask, mask, mask, mask, None, NAMES, background=False))))
    assert large.width == 2 * 720 + 4


def test_a_report_paints_the_road_where_0_is_a_class() -> None:
    mask, view = np.zeros((4, 4), int), SliceView(None, slice(0, 4), slice(0, 4))
    street, organ = Classes({0: "road", 1: "thing"}, background=False), Classes({0: "road", 1: "thing"})
    assert painted(mask, view, classes=street)[0, 0].tolist() == [128, 64, 128]
    assert painted(mask, view, classes=organ).tolist() == painted(mask, view).tolist()  # ground
    assert street.legend[0] == ("road", "#804080")
    assert [name for name, _ in organ.legend] == ["thing"]
    unnamed = painted(mask, view, classes=Classes({}, background=False))
    assert unnamed.tolist() != painted(mask, view).tolist()


def test_a_change_that_was_not_used_can_be_seen_on_a_grey_image() -> None:
    source, adapted = np.zeros((4, 4), np.uint8), np.eye(4, dtype=np.uint8)
    drawn = edits_over(as_rgb(np.full((4, 4), 150, np.uint8)), Preview(np.zeros((4, 4)), source, adapted, source, None))
    assert np.ptp(drawn[0, 0].astype(int)) > 100  # a color
    assert (drawn[0, 1] == 150).all()

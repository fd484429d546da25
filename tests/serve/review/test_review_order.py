"""Worst first and region by region, on numbers and masks that a person can check."""

from __future__ import annotations

import json

import numpy as np

from casewise.core.prediction_record import OUTSIDE
from casewise.render.mask_pictures import windowed
from casewise.serve.review_cases import (
    Masks,
    Predictions,
    ReviewCase,
    _near,
    changes_by_slice,
    listed_regions,
    mask_slice,
    shown_first,
    state_order,
    worst_first,
)


def case(name: str, **more) -> ReviewCase:
    return ReviewCase(name, "hash", **more)


def by_id(*cases: ReviewCase) -> dict[str, ReviewCase]:
    return {one.id: one for one in cases}


def test_without_an_estimate_of_quality_the_larger_edit_is_worse():
    cases = by_id(case("a", edit=0.1), case("b", edit=0.3), case("c", edit=0.2), case("d"))
    assert worst_first(cases) == ["b", "c", "a", "d"]


def test_no_output_comes_before_a_failed_adaptation_before_everything_else():
    cases = by_id(
        case("z-none"), case("risky", edit=0.9), case("fallback", status="fallback"), case("failed", status="failed")
    )
    assert worst_first(cases) == ["failed", "fallback", "risky", "z-none"]


def test_states_sort_as_steps():
    assert sorted(("10", "2~0.5", "2", "1"), key=state_order) == ["1", "2", "2~0.5", "10"]
    assert shown_first(("1", "2", "2~0.5")) == "2"
    assert shown_first(("2~0.5",)) == "2~0.5"
    assert shown_first(()) is None
    assert shown_first(("1", "2", "tent:4")) == "2"  # of the deployed ladder
    assert shown_first(("deployed", "1", "tent:4")) == "deployed"
    assert sorted(("tent:10", "tent:9", "2"), key=state_order) == ["2", "tent:9", "tent:10"]


def volume() -> Masks:
    source = np.zeros((4, 10, 10), np.uint8)
    source[1, 2:6, 2:6] = 1
    adapted = source.copy()
    adapted[1, 2:6, 2:4] = 2  # 8 relabeled
    adapted[2, 7:9, 7:9] = 1  # 4 added
    adapted[3, 7:9, 7:9] = 1  # 4 more of the same region
    adapted[0, 0, 0] = 1  # a crumb
    deployed = source.copy()
    deployed[2, 7:9, 7:9] = 1
    return Masks(source, adapted, deployed, (4.0, 1.0, 1.0))


def test_regions_say_what_changed_where_and_whether_it_is_deployed():
    found = listed_regions(volume(), min_area=4)
    assert (found["area"], found["total"], found["crumbs"]) == (17, 2, 1)
    first, second = found["regions"]
    assert (first["relabeled"], first["added"], first["removed"]) == (8, 0, 0)
    assert (first["deployed"], first["box"]) == (0.0, [[1, 1], [2, 5], [2, 3]])
    assert (second["added"], second["deployed"]) == (8, 0.5)
    assert second["at"][0] in (2, 3)


def test_slices_are_weighed_by_their_change_and_else_by_foreground():
    masks = volume()
    assert changes_by_slice(masks)[0] == [1, 8, 4, 4]
    same = Masks(masks.source, masks.source, masks.source, None)
    assert changes_by_slice(same)[0] == [0, 16, 0, 0]
    unsaved = Masks(masks.source, None, masks.deployed, None)
    assert changes_by_slice(unsaved)[0] == [0, 0, 4, 0]


def test_a_window_around_the_masks_ignores_what_is_far_away():
    voxels = np.zeros((4, 40, 40), np.float32)
    voxels[:, 30:, 30:] = 4000
    voxels[1, 2:6, 2:6] = 50
    voxels[0, 0, 0], voxels[0, 0, 1] = np.nan, np.inf
    source = np.zeros(voxels.shape, np.uint8)
    source[1, 2:6, 2:6] = 1
    masks = Masks(source, None, source, None)
    assert windowed(voxels)[1, 3, 3] < 10
    near = windowed(voxels, voxels[_near(masks)])
    assert near[1, 3, 3] == 255
    assert (near[0, 0, 0], near[0, 0, 1]) == (0, 255)


def test_labels_above_255_keep_their_boundaries():
    import io

    from PIL import Image

    mask = np.array([[0, 255, 256, 1000]], np.uint16)
    read = np.asarray(Image.open(io.BytesIO(mask_slice(Masks(mask, None, mask, None), None))))
    assert read[0, :, 0].tolist() == [0, 255, 1, 235]


def test_a_case_that_the_labels_do_not_cover_has_no_estimate(predictions):
    """The page of the prediction folder prints none either, and says why."""
    entry = json.loads(predictions.layout.entry("kept").read_text())
    reason = {"reason": "mean for every case; flagged: its quality may be as low as 0.700"}
    estimated = {**entry, "decision": {**entry["decision"], **reason, "quality": 0.8, "quality_low": 0.7}}
    for notes, low in (([], 0.7), ([f"{OUTSIDE}: its masks are unlike the others"], None)):
        predictions.entry("kept", **{**estimated, "notes": notes})
        found = Predictions(predictions.layout.out)
        assert found.cases["kept"].quality_low == low
        assert found.cases["kept"].reason == (reason["reason"] if low else "mean for every case")

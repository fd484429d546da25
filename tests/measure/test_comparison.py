"""New against old on one case: tiny pictures, and independent computations with scipy on whole volumes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage
from worlds.masks import harm_by_class

from casewise.core.errors import BadInput
from casewise.measure.comparison import comparison
from casewise.measure.metrics.harm import harm
from casewise.measure.metrics.overlap import dice, miou
from casewise.measure.metrics.surface import assd, hd95


def block(*boxes: tuple[int, ...], shape: tuple[int, ...] = (5, 12, 16)) -> np.ndarray:
    """A mask with boxes (label, z0, z1, y0, y1, x0, x1)."""
    mask = np.zeros(shape, np.uint8)
    for label, z0, z1, y0, y1, x0, x1 in boxes:
        mask[z0:z1, y0:y1, x0:x1] = label
    return mask


ORGAN = block((1, 0, 5, 2, 9, 2, 9), (2, 1, 4, 2, 6, 11, 15))


def row(found, label):
    return next(one for one in found.labels if one.label == label)


def test_equal_masks_have_changed_nothing():
    found = comparison(ORGAN, ORGAN, ORGAN, spacing_mm=(10, 1, 1))
    assert (found.changed, found.regions, found.ha, found.change, found.warnings) == (0, 0, 0.0, 0.0, ())
    assert [one.shift_hd95 for one in found.labels] == [0.0, 0.0]
    assert row(found, 1).volume_old_ml == pytest.approx(5 * 49 * 10 / 1000)


def test_a_hole_is_counted_for_its_label_alone():
    new = ORGAN.copy()
    new[2, 4:6, 4:6] = 0
    found = comparison(ORGAN, new)
    assert [(one.holes_old, one.holes_new, one.holes_gained) for one in found.labels] == [(0, 1, 1), (0, 0, 0)]
    assert found.warnings == ("label 1: 1 hole, 1.6 % of it",)  # 4 of 245 voxels
    assert found.warned({1: "LV"}) == ("LV (1): 1 hole, 1.6 % of it",)
    back = comparison(new, ORGAN)
    assert (row(back, 1).holes_gained, row(back, 1).holes_lost) == (0, 1)


def test_crumbs_are_counted_and_nobody_is_asked_to_look_at_them():
    new = ORGAN.copy()
    new[2, 5, 5], new[2, 11, 0] = 0, 1  # 1 of 245 voxels each
    found = comparison(ORGAN, new)
    assert (row(found, 1).holes_gained, row(found, 1).components_gained) == (1, 1)
    assert (found.suspicion, found.warnings) == (0.0, ())
    new[2, 11, 1:3] = 1
    assert comparison(ORGAN, new).warnings == ("label 1: 1 piece gained, 1.2 % of it",)
    assert comparison(ORGAN, new).suspicion == pytest.approx(3 / 247)


def test_the_more_of_a_label_came_or_went_the_more_suspicious():
    small, large, gone = ORGAN.copy(), ORGAN.copy(), np.where(ORGAN == 2, 0, ORGAN).astype(np.uint8)
    small[0, 11, 0:4], large[0:4, 10:12, 10:15] = 1, 1
    moved = np.roll(ORGAN, 3, axis=2)
    scores = [comparison(ORGAN, new).suspicion for new in (ORGAN, small, large, moved, gone)]
    assert scores == sorted(scores)
    assert (scores[0], scores[-1]) == (0.0, 1.0)
    assert len(set(scores)) == 5


def test_where_zero_is_a_label_it_has_a_row_and_there_is_no_background():
    old = np.array([[0, 0, 1, 1], [0, 0, 1, 255]], np.uint8)
    new = np.array([[0, 1, 1, 1], [0, 1, 1, 1]], np.uint8)
    found = comparison(old, new, old, metric="miou", min_area=1, zero_is_label=True)
    assert [(one.label, one.voxels_old, one.voxels_new) for one in found.labels] == [(0, 4, 2), (1, 3, 6), (255, 1, 0)]
    assert (found.changed, found.changed_share) == (3, 3 / 8)
    assert found.metric_new == pytest.approx(miou(new, old))
    assert [one.label for one in comparison(old, new, min_area=1).labels] == [1, 255]
    ignored = comparison(old, new, old, ignore=255, zero_is_label=True, min_area=1)
    assert ignored.made_wrong == 2
    assert [one.label for one in comparison(old, new, classes=(0,), zero_is_label=True).labels] == [0]
    with pytest.raises(BadInput, match="with zero_is_label every voxel is foreground"):
        comparison(old, new, foreground=True, zero_is_label=True)


def test_a_gap_that_is_open_in_space_is_no_hole():
    new = ORGAN.copy()
    new[0, 4:6, 4:6] = 0  # the first slice: nothing lies above it
    assert row(comparison(ORGAN, new), 1).holes_gained == 0


def test_a_ring_around_another_label_has_no_hole():
    ring = block((2, 0, 5, 1, 10, 1, 10), (1, 0, 5, 3, 8, 3, 8))
    assert [one.holes_new for one in comparison(ring, ring).labels] == [0, 0]


def test_a_gap_between_two_labels_is_a_hole_of_neither():
    ring = block((2, 0, 5, 1, 10, 1, 10), (1, 0, 5, 3, 8, 3, 8))
    gap = ring.copy()
    gap[2, 5, 7:9] = 0
    assert sum(one.holes_gained for one in comparison(ring, gap).labels) == 0
    assert comparison(ring, gap).changed == 2


def test_a_lost_piece_is_lost_though_another_came():
    old = block((1, 0, 2, 0, 3, 0, 3), (1, 0, 2, 8, 11, 0, 3))
    new = block((1, 0, 2, 0, 3, 0, 3), (1, 0, 2, 8, 11, 12, 15))
    found = row(comparison(old, new), 1)
    assert (found.components_old, found.components_new) == (2, 2)
    assert (found.components_gained, found.components_lost, found.largest_gained, found.largest_lost) == (1, 1, 18, 18)


def test_a_split_is_seen_in_the_number_of_pieces():
    old = block((1, 0, 2, 2, 5, 0, 12))
    new = old.copy()
    new[:, :, 6] = 0
    found = row(comparison(old, new), 1)
    assert (found.components_old, found.components_new, found.components_gained, found.components_lost) == (1, 2, 0, 0)


def test_swapped_labels_are_seen_though_the_foreground_is_the_same():
    new = np.array([0, 2, 1], np.uint8)[ORGAN]
    found = comparison(ORGAN, new, ORGAN)
    assert found.changed == np.count_nonzero(ORGAN)
    assert (found.metric_old, found.metric_new, found.ha) == (1.0, 0.0, 1.0)
    assert comparison(ORGAN, new, ORGAN, foreground=True).changed == 0
    assert row(found, 1).agreement == 0.0


def test_a_shift_by_a_voxel_keeps_the_volume_and_moves_the_surface():
    new = np.roll(ORGAN, 1, axis=1)
    found = row(comparison(ORGAN, new, spacing_mm=(10, 1.5, 1)), 1)
    assert (found.drift, found.components_lost, found.holes_gained) == (0.0, 0, 0)
    assert found.shift_hd95 == pytest.approx(1.5)


def test_labels_that_come_and_go_are_reported():
    without = np.where(ORGAN == 2, 0, ORGAN).astype(np.uint8)
    assert comparison(ORGAN, without).warnings == ("label 2 is gone",)
    assert comparison(without, ORGAN).warnings == ("label 2 is new",)
    assert np.isnan(row(comparison(without, ORGAN), 2).drift)


def test_worse_regions_have_their_box_in_the_whole_volume():
    new = ORGAN.copy()
    new[1:3, 3:6, 3:6] = 0
    found = comparison(ORGAN, new, ORGAN, spacing_mm=(10, 1, 1))
    (region,) = found.regressions
    assert (region.low, region.high, region.voxels, region.worse) == ((1, 3, 3), (3, 6, 6), 18, 18)
    assert region.ml == pytest.approx(0.18)
    assert (found.made_wrong, found.made_right, found.worse_voxels) == (18, 0, 1.0)
    assert comparison(ORGAN, new).worse_voxels is None


def test_classes_narrow_the_comparison():
    new = np.where(ORGAN == 2, 3, ORGAN).astype(np.uint8)
    assert comparison(ORGAN, new, classes=(1,)).changed == 0
    assert [one.label for one in comparison(ORGAN, new, classes=(1,)).labels] == [1]


def test_ignored_voxels_are_never_wrong_and_no_label():
    label = ORGAN.copy()
    label[1:3, 3:6, 3:6] = 255
    new = ORGAN.copy()
    new[1:3, 3:6, 3:6] = 0
    found = comparison(ORGAN, new, label, ignore=255)
    assert (found.ha, found.made_wrong, found.metric_new) == (0.0, 0, 1.0)
    assert [one.label for one in found.labels] == [1, 2]


def test_empty_masks_are_no_error():
    nothing = np.zeros_like(ORGAN)
    found = comparison(nothing, nothing, nothing)
    assert (found.changed, found.changed_share, found.labels) == (0, 0.0, ())
    assert np.isnan(found.change)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"metric": "auc"}, "the metric must be dice or miou, got 'auc'"),
        ({"surfaces": "some"}, "surfaces must be 'none', 'moved' or 'all', got 'some'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(BadInput, match=sentence):
        comparison(ORGAN, ORGAN, ORGAN, **options)


def test_instances_are_refused():
    with pytest.raises(BadInput, match="give classes, not instances"):
        comparison(np.full((2, 2), 70000), np.full((2, 2), 70000))


def crumbs(seed: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Old, new and label: smooth noise in four labels, with some voxels flipped."""
    draw = np.random.default_rng(seed)
    masks = []
    field = ndimage.gaussian_filter(draw.normal(size=shape), 1.2)
    for _ in range(3):
        moved = field + 0.25 * ndimage.gaussian_filter(draw.normal(size=shape), 1.0)
        masks.append(np.digitize(moved, np.quantile(field, (0.55, 0.7, 0.85))).astype(np.uint8))
    return masks


def holes_by_scipy(mask: np.ndarray, label: int) -> list[np.ndarray]:
    """Components of what is not the label, all background, that do not reach the border."""
    outside = np.pad(mask != label, 1, constant_values=True)
    pieces, count = ndimage.label(outside)
    found = []
    for number in range(1, count + 1):
        piece = pieces == number
        if not piece[(0,) * mask.ndim] and not np.pad(mask, 1)[piece].any():
            found.append(piece)
    return found


@pytest.mark.parametrize("shape", [(24, 33), (6, 15, 17)])
@pytest.mark.parametrize("seed", range(4))
def test_everything_agrees_with_a_plain_computation_on_the_whole_volume(seed, shape):
    old, new, label = crumbs(seed, shape)
    spacing = (3.0, 1.0, 0.7)[-len(shape) :]
    found = comparison(old, new, label, spacing_mm=spacing, surfaces="all", min_area=4)
    judged = harm(old, new, label, foreground=False, min_area=4)
    assert (found.ha, found.ba, found.regions, found.changed) == (judged.ha, judged.ba, judged.regions, judged.area)
    assert found.metric_old == pytest.approx(dice(old, label))
    assert found.metric_new == pytest.approx(dice(new, label))
    scores = comparison(old, new, label, metric="miou", surfaces="none")
    assert scores.metric_new == pytest.approx(miou(new, label))
    by_class = harm_by_class(old, new, label, min_area=4)
    for one in found.labels:
        c = one.label
        a, b, y = old == c, new == c, label == c
        pieces = {name: ndimage.label(mask)[1] for name, mask in (("old", a), ("new", b))}
        assert (one.components_old, one.components_new) == (pieces["old"], pieces["new"])
        numbered = ndimage.label(b)[0]
        alone = [n for n in range(1, pieces["new"] + 1) if not (a & (numbered == n)).any()]
        assert one.components_gained == len(alone)
        before, after = holes_by_scipy(old, c), holes_by_scipy(new, c)
        assert (one.holes_old, one.holes_new) == (len(before), len(after))
        assert one.holes_gained == sum(not any((hole & other).any() for other in before) for hole in after)
        assert one.dice_new == pytest.approx(dice(new == c, label == c))
        assert (one.ha, one.ba) == pytest.approx((by_class[c].ha, by_class[c].ba))
        assert one.shift_hd95 == pytest.approx(hd95(a, b, spacing_mm=spacing))
        assert one.shift_assd == pytest.approx(assd(a, b, spacing_mm=spacing))
        assert one.hd95_old == pytest.approx(hd95(a, y, spacing_mm=spacing))


def test_nothing_depends_on_where_in_the_volume_the_organ_lies():
    wide = np.zeros((9, 40, 64), np.uint8)
    inside = (slice(2, 7), slice(20, 32), slice(30, 46))
    old, new, label = (wide.copy() for _ in range(3))
    changed = np.roll(ORGAN, 1, axis=2)
    for mask, content in ((old, ORGAN), (new, changed), (label, ORGAN)):
        mask[inside] = content
    here, there = (comparison(*three).as_dict() for three in ((old, new, label), (ORGAN, changed, ORGAN)))
    for name in ("voxels", "delta", "regressions"):
        here.pop(name), there.pop(name)
    assert str(here) == str(there)


def test_tensors_and_other_integer_types_give_the_same():
    torch = pytest.importorskip("torch")
    new = np.roll(ORGAN, 1, axis=2)
    plain = str(comparison(ORGAN, new, ORGAN).as_dict())
    tensors = comparison(torch.from_numpy(ORGAN), torch.from_numpy(new), torch.from_numpy(ORGAN))
    assert str(tensors.as_dict()) == plain
    assert str(comparison(ORGAN.astype(np.int32), new.astype(np.int64), ORGAN.astype(np.uint16)).as_dict()) == plain

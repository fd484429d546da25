"""Signals of disagreement: pictures that a person can check, and independent computations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from casewise.core.errors import BadInput
from casewise.measure.signals import SIGNALS
from casewise.measure.signals.agreement import candidates_of

SMALL = np.array([[1, 1, 0, 0, 0, 0]])
GROWN = np.array([[1, 1, 1, 0, 0, 0]])
APART = np.array([[1, 1, 1, 0, 0, 2]])


def said_again(first: np.ndarray, second: np.ndarray) -> float:
    """Mean class Dice of a pair, from sets of voxels."""
    values = []
    for c in {*first.ravel().tolist(), *second.ravel().tolist()} - {0}:
        a, b = set(np.flatnonzero(first == c).tolist()), set(np.flatnonzero(second == c).tolist())
        values.append(2 * len(a & b) / (len(a) + len(b)))
    return float(np.mean(values)) if values else 1.0


def test_every_name_is_registered() -> None:
    found = list(candidates_of([SMALL, GROWN]).signals()[0])
    assert found == [
        "agreement", "likeness", "agreement_source", "agreement_all", "weighted_agreement", "support",
    ]  # fmt: skip
    assert set(found) <= set(SIGNALS)


def test_three_masks_of_one_row() -> None:
    m0, grown, apart = candidates_of([SMALL, GROWN, APART]).signals()
    assert m0["agreement"] == pytest.approx((4 / 5 + (4 / 5 + 0) / 2) / 2)
    assert grown["agreement_source"] == pytest.approx(4 / 5)
    assert grown["support"] == pytest.approx(1 / 2)  # of M0 and the third, the third holds the new voxel
    assert apart["support"] == pytest.approx((1 / 2 + 0) / 2)
    assert m0["support"] is None


def test_the_majority_is_the_middle_mask() -> None:
    found = candidates_of([SMALL, GROWN, APART])
    assert found.mask(found.majority, SMALL).tolist() == GROWN.tolist()


def test_a_tie_goes_to_m0() -> None:
    found = candidates_of([SMALL, GROWN])
    assert found.mask(found.majority, SMALL).tolist() == SMALL.tolist()


def test_a_consensus_among_the_candidates_has_no_vote() -> None:
    alone = candidates_of([SMALL, GROWN, APART]).signals()
    beside = candidates_of([SMALL, GROWN, APART, GROWN], voters=(0, 1, 2)).signals()
    assert beside[:3] == alone
    assert beside[3]["agreement"] > alone[1]["agreement"]  # it is compared with all three, its copy included


def test_background_counts_where_it_is_a_class() -> None:
    road, less = np.array([[0, 0, 1, 1]]), np.array([[0, 1, 1, 1]])
    assert candidates_of([road, less]).dice[0, 1] == pytest.approx(4 / 5)
    assert candidates_of([road, less], background=True).dice[0, 1] == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_candidates_that_are_all_m0_agree() -> None:
    for signals in candidates_of([SMALL, SMALL, SMALL]).signals():
        assert signals["agreement"] == signals["agreement_all"] == 1.0
    for signals in candidates_of([EMPTY, EMPTY, EMPTY]).signals():
        assert signals["agreement"] is signals["agreement_all"] is None
        assert signals["likeness"] == signals["agreement_source"] == 1.0


def test_one_mask_is_refused() -> None:
    with pytest.raises(BadInput, match="M0 and at least one other candidate, got 1 mask"):
        candidates_of([SMALL])
    with pytest.raises(BadInput, match=r"numbers of the 2 candidates, got \[5\]"):
        candidates_of([SMALL, GROWN], voters=(5,))


stacks = hnp.arrays(
    np.uint8, st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 5)), elements=st.integers(0, 3)
)


@given(stacks)
def test_pairwise_dice_agrees_with_a_second_computation(masks: np.ndarray) -> None:
    found = candidates_of(list(masks))
    for i, j in itertools.product(range(len(masks)), repeat=2):
        assert found.dice[i, j] == pytest.approx(said_again(masks[i], masks[j]))


@given(stacks)
def test_signals_do_not_see_the_order_of_space_nor_of_the_others(masks: np.ndarray) -> None:
    plain = candidates_of(list(masks)).signals()
    flipped = candidates_of([mask[::-1, ::-1] for mask in masks]).signals()
    turned = candidates_of([masks[0], *masks[:0:-1]]).signals()
    for one, two in ((plain, flipped), ([plain[0], *plain[:0:-1]], turned)):
        for first, second in zip(one, two, strict=True):
            assert {k: v for k, v in first.items() if v is not None} == pytest.approx(
                {k: v for k, v in second.items() if v is not None}
            )


@given(stacks)
def test_support_is_a_share_and_a_lone_edit_has_none(masks: np.ndarray) -> None:
    for signals in candidates_of(list(masks)).signals():
        assert signals["support"] is None or 0 <= signals["support"] <= 1
        assert signals["agreement"] is None or 0 <= signals["agreement"] <= 1 + 1e-12
        assert 0 <= signals["likeness"] <= 1 + 1e-12
    lone = masks[0].copy()
    lone[0, 0] = 9
    assert candidates_of([masks[0], masks[0], lone]).signals()[2]["support"] == 0.0


EMPTY = np.zeros_like(SMALL)


def test_empty_masks_are_alike_and_say_nothing_about_their_quality() -> None:
    m0, same, drawn = candidates_of([EMPTY, EMPTY, SMALL]).signals()
    assert m0["agreement"] == m0["agreement_all"] == 0.0  # over the pairs that are not both empty
    assert m0["likeness"] == same["likeness"] == 0.5
    assert drawn["likeness"] == 0.0
    assert same["agreement_source"] == 1.0  # no edit


def test_weighted_agreement_is_the_mean_pair_times_the_certainty_of_the_votes() -> None:
    masks = [np.array([[1, 1, 0, 0]]), np.array([[1, 1, 1, 0]]), np.array([[1, 1, 2, 0]])]
    pairs = [said_again(masks[i], masks[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    split = np.log(3)  # the third voxel has one vote for each of the three classes
    expected = np.mean(pairs) * (1 - split / 3 / np.log(3))  # over the three voxels that any voter calls foreground
    found = candidates_of(masks)
    assert [one["weighted_agreement"] for one in found.signals()] == pytest.approx([expected] * 3)
    same = candidates_of([masks[0], masks[0]])
    assert same.signals()[0]["weighted_agreement"] == same.certainty == 1.0


def test_a_consensus_without_a_vote_does_not_change_the_certainty() -> None:
    masks = [SMALL, GROWN, APART]
    assert candidates_of([*masks, GROWN], voters=(0, 1, 2)).certainty == candidates_of(masks).certainty

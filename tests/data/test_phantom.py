"""Phantoms: the same voxels on every machine, anatomy that holds together, and a shift that is a shift."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scipy import ndimage

from casewise.core.errors import BadInput, UnknownName
from casewise.data.phantom import cardiac_cohort


def test_a_case_is_the_same_each_time_and_does_not_depend_on_the_cohorts_size() -> None:
    small, large = cardiac_cohort("B", 2, split="target"), cardiac_cohort("B", 9, split="target")
    first, again = small.case("target_B_001"), large.case("target_B_001")
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(small.label("target_B_001"), large.label("target_B_001"))


def test_splits_vendors_and_runs_give_other_hearts() -> None:
    images = [
        cardiac_cohort("B", 1, split="target").case("target_B_000").image,
        cardiac_cohort("B", 1, split="target", run=1).case("target_B_000").image,
        cardiac_cohort("B", 1, split="calibration").case("calibration_B_000").image,
    ]
    assert len({hashlib.sha256(image.tobytes()).hexdigest() for image in images}) == 3


def test_the_left_ventricle_lies_inside_the_myocardium() -> None:
    cohort = cardiac_cohort("A", 6, split="anatomy")
    for case_id in cohort.ids:
        label = cohort.label(case_id)
        around = np.stack([ndimage.binary_dilation(piece == 1) for piece in label]) & (label != 1)
        touched = np.bincount(label[around], minlength=4)
        assert touched[2] > 10 * touched[[0, 3]].sum(), f"the cavity of {case_id} leaks: {touched}"
        assert set(np.unique(label[0])) == {0, 1, 2, 3}, "the base shows all three"


def test_vendor_b_shades_and_bends_contrast_more_than_vendor_a() -> None:
    def facts(vendor: str) -> tuple[float, float]:
        images = [case.image[0] for case in cardiac_cohort(vendor, 12, split="shift")]
        shading = [ndimage.gaussian_filter(image.mean(axis=0), 20).std() for image in images]
        skewness = [float((image**3).mean()) for image in images]  # z-scored, so this is the skewness
        return float(np.mean(shading)), float(np.std(skewness))

    (shading_a, bend_a), (shading_b, bend_b) = facts("A"), facts("B")
    assert shading_b > 1.2 * shading_a
    assert bend_b > 1.2 * bend_a


def test_images_are_normalized_and_finite() -> None:
    for case in cardiac_cohort("B", 3, split="range"):
        assert case.image.dtype == np.float32
        assert case.image.mean() == pytest.approx(0, abs=1e-4)
        assert case.image.std() == pytest.approx(1, abs=1e-4)


def test_an_unknown_vendor_is_named_when_a_case_is_asked_for() -> None:
    with pytest.raises(UnknownName, match="no vendor is called 'Z'"):
        cardiac_cohort("Z", 1, split="x").case("x_Z_000")


def test_a_cohort_says_what_it_has() -> None:
    cohort = cardiac_cohort("A", 2, split="source")
    with pytest.raises(BadInput, match="has no case 'nobody'"):
        cohort.case("nobody")
    with pytest.raises(BadInput, match=r"splits: \['source'\]"):
        cohort.select(split="target")
    assert len(cohort.select(group="vendor A")) == 2

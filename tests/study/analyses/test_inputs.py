"""The input column of the pictures: the right slice of the right file, boxes, and what happens without them."""

from __future__ import annotations

from dataclasses import replace

import nibabel
import numpy as np
import pytest
from PIL import Image

from casewise.core.errors import BadInput, Mismatch
from casewise.render.mask_pictures import WORSE, SliceView, as_rgb, edits, fitted, painted
from casewise.study.analyses import ANALYSES
from casewise.study.analyses.qualitative import input_plane
from casewise.study.study import Extras, images_of

SHAPE = (48, 48)


@pytest.fixture
def folder(tmp_path, study):
    for case_id in study.evaluation.ids:
        Image.fromarray(np.full((*SHAPE, 3), (10, 200, 30), np.uint8)).save(tmp_path / f"{case_id}.png")
    return tmp_path


def given(study, *, foreground, **extras):
    made = {**study.evaluation.configuration, "foreground": foreground}
    archive = replace(study.evaluation, manifest={**study.evaluation.manifest, "configuration": made})
    return replace(study, evaluation=archive, extras=Extras(**extras))


def titles(picture):
    return [axis.get_title(loc="left").split("\n")[0] for axis in picture.figure.axes]


def test_driving_scenes_get_the_columns_of_the_paper(study, folder):
    others = {"CoTTA": study.evaluation}
    section = ANALYSES["qualitative"](given(study, foreground=False, images=images_of(folder), others=others))
    assert titles(section.pictures[0]) == ["input", "M0", "fixed-4", "τ-stop", "CoTTA"]
    assert section.pictures[0].paper == "fig:acdc-qual-supp"
    assert "Boxes" in section.pictures[0].caption
    assert not section.missing
    shown = section.pictures[0].figure.axes[0].images[0].get_array()
    assert (np.asarray(shown) == (10, 200, 30)).all()


def test_medical_pictures_get_the_input_before_their_own_columns(study, folder):
    section = ANALYSES["qualitative"](given(study, foreground=True, images=images_of(folder)))
    assert titles(section.pictures[0]) == ["input", "label", "M0", "fixed-4", "COQR router"]
    assert "Boxes" not in section.pictures[0].caption


@pytest.mark.parametrize("foreground", [True, False])
def test_without_images_the_masks_stay_and_say_so(study, foreground):
    section = ANALYSES["qualitative"](given(study, foreground=foreground))
    assert titles(section.pictures[0]) == ["label", "M0", "fixed-4", "COQR router"]
    assert "--images" in section.missing["input column of the pictures"]
    assert "No input column" in section.pictures[0].caption


def test_an_image_of_another_shape_is_not_shown(study, folder):
    for file in folder.iterdir():
        Image.new("RGB", (20, 20)).save(file)
    section = ANALYSES["qualitative"](given(study, foreground=False, images=images_of(folder)))
    assert "input" not in titles(section.pictures[0])
    assert "has shape (20, 20), its mask (48, 48)" in section.missing["input column of the pictures"]


def volume_file(path, voxels):
    nibabel.save(nibabel.Nifti1Image(voxels.T, np.eye(4)), path)


def test_a_volume_gives_the_slice_in_view_of_its_first_channel(tmp_path):
    voxels = np.arange(3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
    voxels[1, 0, 0] = np.nan
    volume_file(tmp_path / "a_0000.nii.gz", voxels)
    volume_file(tmp_path / "a_0001.nii.gz", -voxels)
    plane = input_plane(images_of(tmp_path), "a", (3, 5, 4), 1)
    assert plane.shape == (5, 4)
    assert plane.dtype == np.uint8
    assert plane[0, 0] == 0, "not finite is black"
    assert (np.diff(plane.ravel()[1:].astype(int)) >= 0).all(), "the second channel would fall"
    assert plane.max() == 255


def test_a_volume_of_one_slice_fits_a_flat_mask(tmp_path):
    volume_file(tmp_path / "a.nii.gz", np.zeros((1, 5, 4), np.int16))
    assert input_plane(images_of(tmp_path), "a", (5, 4), None).shape == (5, 4)


def test_what_cannot_be_shown_is_explained(tmp_path):
    volume_file(tmp_path / "a.nii.gz", np.zeros((2, 5, 4), np.int16))
    with pytest.raises(BadInput, match="has no case b"):
        input_plane(images_of(tmp_path), "b", (2, 5, 4), 0)
    with pytest.raises(Mismatch, match=r"a\.nii\.gz has shape \(2, 5, 4\), its mask \(2, 4, 5\)"):
        input_plane(images_of(tmp_path), "a", (2, 4, 5), 0)


def test_the_image_is_cropped_as_the_masks_are():
    plane = np.zeros((40, 40), np.uint8)
    plane[10, 20] = 255
    shown = as_rgb(fitted(plane[10:20, 20:30], 10))
    assert shown.shape == (10, 10, 3)
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert shown.sum() == 3 * 255


def test_boxes_stand_around_what_was_made_worse_only():
    source = np.zeros((40, 40), np.uint8)
    adapted, label = source.copy(), source.copy()
    adapted[10:14, 10:14] = 1
    adapted[28:32, 28:32] = label[28:32, 28:32] = 1
    change = edits(source, adapted, label, measure={"min_area": 4, "foreground": True, "ignore": None})
    everything = SliceView(None, slice(0, 40), slice(0, 40))
    boxed = (painted(adapted, everything, change=change, side=40, boxes=True) == WORSE).all(axis=-1)
    plain = (painted(adapted, everything, change=change, side=40) == WORSE).all(axis=-1)
    assert boxed[6, 6:18].all()
    assert boxed[17, 6:18].all()
    assert not plain[6].any()
    assert not boxed[20:].any()

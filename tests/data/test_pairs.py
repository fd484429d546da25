"""Pairs of folders: what belongs together, and every kind of trouble by its name."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from PIL import Image
from worlds.updates import AFFINE, heart, write

from casewise.core.errors import BadInput, BadPair, UnsafeInput
from casewise.data.pairs import KINDS, Pair, find_pairs, label_names, label_sets, read_pair


@pytest.fixture
def folders(tmp_path):
    for name in ("old", "new"):
        write(tmp_path / name, "a", heart())
    return tmp_path


def found(root, **more):
    return find_pairs(root / "old", root / "new", **more)


def test_masks_of_one_name_are_a_pair_and_other_files_are_left_aside(folders):
    (folders / "new" / "dataset.json").write_text("{}")
    (folders / "new" / "plans.json").write_text("{}")
    (pair,) = found(folders)
    assert (pair.id, pair.old.name, pair.label) == ("a", "a.nii.gz", None)


def test_every_name_that_stands_alone_is_there(folders):
    write(folders / "old", "b", heart())
    write(folders / "new", "c", heart())
    assert [(pair.id, pair.old is None, pair.new is None) for pair in found(folders)] == [
        ("a", False, False),
        ("b", False, True),
        ("c", True, False),
    ]


def test_labels_of_other_cases_are_left_aside_and_channels_name_the_image(folders):
    write(folders / "labels", "a", heart())
    write(folders / "labels", "z", heart())
    write(folders / "images", "a_0000", heart())
    (pair,) = found(folders, labels=folders / "labels", images=folders / "images")
    assert (pair.label.name, pair.image.name) == ("a.nii.gz", "a_0000.nii.gz")


def test_other_names_come_from_a_table(folders):
    write(folders / "new", "a_v2", heart())
    table = folders / "names.csv"
    table.write_text("case,old,new\nfirst,a.nii.gz,a_v2.nii.gz\nsecond,a.nii.gz,nowhere.nii.gz\n")
    first, second = found(folders, names=table)
    assert (first.id, first.new.name, second.new) == ("first", "a_v2.nii.gz", None)
    table.write_text("case,old,new\nfirst,a.nii.gz,../../etc/passwd\n")
    with pytest.raises(UnsafeInput, match="points outside of"):
        found(folders, names=table)


def test_links_are_followed_and_one_to_a_missing_file_is_not_passed_over(folders, tmp_path_factory):
    elsewhere = write(tmp_path_factory.mktemp("else"), "b", heart())
    (folders / "old" / "b.nii.gz").symlink_to(elsewhere)
    (folders / "old" / "c.nii.gz").symlink_to("nowhere.nii.gz")
    assert {pair.id: pair.old and pair.old.name for pair in found(folders)} == {
        "a": "a.nii.gz",
        "b": "b.nii.gz",
        "c": "c.nii.gz",
    }


def test_groups_and_patients_come_from_a_table(folders):
    table = folders / "cases.csv"
    table.write_text("case,site,patient\na,B,p7\n")
    (pair,) = found(folders, cases=table)
    assert (pair.group, pair.cluster) == ("B", "p7")


def test_folders_that_share_no_name_are_refused_with_a_way_out(tmp_path):
    write(tmp_path / "old", "a", heart())
    write(tmp_path / "new", "b", heart())
    with pytest.raises(BadInput, match=r"has the same name .*--names pairs\.csv"):
        found(tmp_path)


def test_two_files_of_one_case_are_refused(folders):
    np.save(folders / "old" / "a.npy", heart())
    with pytest.raises(BadInput, match="both of case a; keep one of them"):
        found(folders)


def trouble(pair, **options) -> BadPair:
    with pytest.raises(BadPair) as caught:
        read_pair(pair, **options)
    assert caught.value.kind in KINDS
    return caught.value


def test_a_missing_partner_has_a_name(folders):
    error = trouble(Pair("a", folders / "old" / "a.nii.gz", None))
    assert (error.kind, str(error)) == ("missing", "a has old and no new mask; predict it, or remove the case")


def test_other_shapes_are_refused_and_resampled_by_name(folders):
    small = write(folders / "new", "a", heart()[:, :-2])
    pair = Pair("a", folders / "old" / "a.nii.gz", small)
    error = trouble(pair)
    assert error.kind == "shape"
    assert "old has shape (5, 28, 32), new (5, 26, 32)" in str(error)
    _, new, _ = read_pair(pair, resample="nearest")
    assert np.array_equal(new.mask, heart())  # what was cut off is background


def test_one_slice_with_and_without_its_axis_is_one_mask(tmp_path):
    for name, mask in (("old", heart()[2]), ("new", heart()[2]), ("label", heart()[2:3])):
        np.save(tmp_path / f"{name}.npy", mask)
    pair = Pair("a", tmp_path / "old.npy", tmp_path / "new.npy", label=tmp_path / "label.npy")
    assert all(np.array_equal(one.mask, heart()[2]) for one in read_pair(pair))


def test_other_places_are_refused_and_resampled_by_name(folders):
    moved = AFFINE.copy()
    moved[0, 3] = 3.0  # two voxels of 1.5 mm along the columns
    pair = Pair("a", folders / "old" / "a.nii.gz", write(folders / "new", "a", heart(), moved))
    error = trouble(pair)
    assert error.kind == "affine"
    assert "affines differ by up to 3" in str(error)
    _, new, _ = read_pair(pair, resample="nearest")
    assert np.array_equal(new.mask[..., 2:], heart()[..., :-2])
    with pytest.raises(BadInput, match="--resample must be nearest, got 'linear'"):
        read_pair(pair, resample="linear")


def test_arrays_without_a_place_are_resampled_over_the_same_field(tmp_path):
    large, small = heart(), heart()[:, ::2, ::2]
    np.save(tmp_path / "old.npy", large)
    np.save(tmp_path / "new.npy", small)
    _, new, _ = read_pair(Pair("a", tmp_path / "old.npy", tmp_path / "new.npy"), resample="nearest")
    assert new.mask.shape == large.shape
    assert np.count_nonzero(new.mask != large) < 0.1 * large.size


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("new.npy", np.zeros((2, 5, 28, 32), np.uint8), "channels"),
        ("new.npy", np.full((5, 28, 32), 0.5), "channels"),
        ("new.png", np.zeros((28, 32, 3), np.uint8), "channels"),
        ("new.npy", b"\x93NUMPY nonsense", "unreadable"),
        ("new.nii.gz", b"\x1f\x8b truncated", "unreadable"),
        ("new.png", b"no picture", "unreadable"),
    ],
)
def test_what_is_no_mask_has_a_kind(folders, tmp_path, name, content, kind):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name.endswith(".png"):
        Image.fromarray(content).save(path)
    else:
        np.save(path, content)
    assert trouble(Pair("a", folders / "old" / "a.nii.gz", path)).kind == kind


def test_a_time_axis_is_several_channels(folders):
    import nibabel

    path = folders / "new" / "a.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((32, 28, 5, 2), np.uint8), AFFINE), path)
    assert trouble(Pair("a", folders / "old" / "a.nii.gz", path)).kind == "channels"


def test_pickles_are_never_opened(folders, tmp_path):
    np.save(tmp_path / "new.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert trouble(Pair("a", folders / "old" / "a.nii.gz", tmp_path / "new.npy")).kind == "unreadable"


def test_label_values_that_only_one_side_ever_has_are_named_once():
    held = [("a", [1, 2], [1, 2, 4]), ("b", [1], [1, 4]), ("c", [1, 2], [1])]
    ((case_id, sentence),) = label_sets(held)
    assert case_id == "a"
    assert sentence.startswith(
        "label 4 is in 2 new masks (such as a) and in no old one; the new version invents it, or"
    )
    ((_, sentence),) = label_sets([("a", [1, 2], [1])])
    assert "in no new one; the new version lost it, or its classes differ" in sentence
    ((_, sentence),) = label_sets(iter([("a", [1, 2], [1])]), lambda label: f"RV ({label})")
    assert sentence.startswith("RV (2) is in 1 old masks (such as a) and in no new one")


def test_a_bad_pair_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(BadPair("shape", "other shapes")))
    assert (error.kind, str(error)) == ("shape", "other shapes")


def test_labels_are_called_as_dataset_json_says_and_two_that_differ_are_told(tmp_path):
    old, new = tmp_path / "a" / "old", tmp_path / "b" / "new"
    for folder, labels in (
        (old, {"background": 0, "LV": 1, "both": [1, 2]}),
        (new.parent, {"0": "background", "1": "RV"}),
    ):
        folder.mkdir(parents=True)
        (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    new.mkdir()
    names, said = label_names(None, [old, new])
    assert names == {0: "background", 1: "LV"}
    assert len(said) == 1
    assert "label 1 is 'LV' in" in said[0]
    assert "and 'RV' in" in said[0]
    assert label_names(None, [old, old]) == (names, [])
    assert label_names("1=LV, 2=my\x07o", [old, new]) == ({1: "LV", 2: "myo"}, [])
    assert label_names(str(old / "dataset.json"), [])[0] == names
    (old / "dataset.json").write_text("{")
    assert label_names(None, [old]) == ({}, [])
    with pytest.raises(BadInput, match=r"takes nnU-Net's dataset\.json or words such as 1=LV,2=MYO, got 'LV'"):
        label_names("LV", [])

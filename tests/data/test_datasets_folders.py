"""nnU-Net raw folders, plain folders with their table, recognition, and writing a dataset out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.core.errors import BadInput, UnknownName, UnsafeInput
from casewise.data.datasets import DATASETS, load_dataset, recognize
from casewise.data.datasets.located import files_of
from casewise.data.datasets.nnunet_raw import classes_of, nnunet_raw
from casewise.data.datasets.plain import plain, write_plain
from casewise.data.folders import list_cases, with_groups, with_labels
from casewise.data.nifti import read_volume
from casewise.data.phantom import cardiac_cohort

Write = Callable[..., Path]
SHEARED = np.array([[1.2, 0.4, 0, -90], [0.0, 1.3, 0, -80], [0, 0, 9.6, 4], [0, 0, 0, 1.0]])


def dataset_json(root: Path, **changes: Any) -> None:
    plans: dict[str, Any] = {
        "channel_names": {"0": "T2", "1": "ADC"},
        "labels": {"background": 0, "PZ": 1, "TZ": 2, "ignore": 3},
        "numTraining": 2,
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps({**plans, **changes}))


@pytest.fixture
def raw(tmp_path: Path, volume: Write) -> Path:
    root = tmp_path / "Dataset017_Prostate"
    for part, case in (("Tr", "p_001"), ("Tr", "p_007"), ("Ts", "q_002")):
        for channel in range(2):
            volume(root / f"images{part}" / f"{case}_{channel:04d}.nii.gz", np.full((6, 5, 4), channel, np.float32))
        volume(root / f"labels{part}" / f"{case}.nii.gz", np.full((6, 5, 4), 2, np.uint8))
    dataset_json(root)
    return root


def test_channels_splits_and_classes_of_nnunet(raw: Path) -> None:
    cohort = nnunet_raw(raw)
    assert {case_id: member.split for case_id, member in cohort.members.items()} == {
        "p_001": "training", "p_007": "training", "q_002": "test",
    }  # fmt: skip
    assert cohort.case("p_007").image[:, 0, 0, 0].tolist() == [0, 1]
    assert (cohort.classes, cohort.ignore) == (("background", "PZ", "TZ"), 3)
    assert recognize(raw) == "nnunet_raw"


def test_regions_are_named_by_the_integers_they_are_written_as() -> None:
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}
    assert classes_of({"labels": labels, "regions_class_order": [1, 3, 2]}) == (
        "background",
        "whole",
        "enhancing",
        "core",
    )
    with pytest.raises(BadInput, match="regions_class_order of 3 integers"):
        classes_of({"labels": labels})


def test_a_missing_channel_is_named(raw: Path) -> None:
    (raw / "imagesTr" / "p_007_0001.nii.gz").unlink()
    with pytest.raises(BadInput, match=r"p_007: dataset.json has 2 channels, imagesTr p_007_0000"):
        nnunet_raw(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channel_names": None, "modality": {"0": "MR"}}, "nnUNetv2_convert_old_nnUNet_dataset"),
        ({"file_ending": ".nrrd"}, r"file_ending '.nrrd'"),
        ({"labels": None}, "lacks labels"),
    ],
)
def test_a_dataset_json_that_cannot_be_used_says_why(raw: Path, changes: dict[str, Any], message: str) -> None:
    dataset_json(raw, **changes)
    plans = {key: value for key, value in json.loads((raw / "dataset.json").read_text()).items() if value is not None}
    (raw / "dataset.json").write_text(json.dumps(plans))
    with pytest.raises(BadInput, match=message):
        nnunet_raw(raw)


def test_nnunet_cases_get_groups_from_a_table(raw: Path) -> None:
    (raw / "cases.csv").write_text("case,site,patient\np_001,X,1\np_007,Y,1\nq_002,Y,2\n")
    member = nnunet_raw(raw).members["p_007"]
    assert (member.group, member.cluster, member.split) == ("Y", "1", "training")


def test_color_pictures_of_nnunet_are_three_channels(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    picture(tmp_path / "imagesTr" / "a_0000.png", photo)
    dataset_json(tmp_path, channel_names={"0": "R", "1": "G", "2": "B"}, file_ending=".png")
    assert np.array_equal(nnunet_raw(tmp_path).case("a").image, np.moveaxis(photo, -1, 0))
    picture(tmp_path / "imagesTr" / "a_0000.png", photo[..., 0])
    dataset_json(tmp_path, channel_names={"0": "grey"}, file_ending=".png")
    assert np.array_equal(nnunet_raw(tmp_path).case("a").image, photo[None, ..., 0])


@pytest.fixture
def folders(tmp_path: Path, volume: Write) -> Path:
    for vendor, code in (("vendorA", "A1"), ("vendorB", "B1")):
        for phase in ("ED", "ES"):
            volume(tmp_path / vendor / "images" / f"{code}_{phase}.nii.gz", np.ones((6, 5, 4), np.int16), SHEARED)
            volume(tmp_path / vendor / "labels" / f"{code}_{phase}.nii.gz", np.ones((6, 5, 4), np.uint8), SHEARED)
    rows = "".join(f"{c}1_{p},{c}1,{c},{'source' if c == 'A' else 'calibration'}\n" for c in "AB" for p in ("ED", "ES"))
    (tmp_path / "cases.csv").write_text("case,subject,vendor,split\n" + rows)
    return tmp_path


def test_the_table_may_lie_one_level_up_and_say_more_cases(folders: Path) -> None:
    cohort = plain(folders / "vendorB")
    assert cohort.ids == ("B1_ED", "B1_ES")
    member = cohort.members["B1_ED"]
    assert (member.group, member.cluster, member.split, member.labelled) == ("B", "B1", "calibration", True)
    assert cohort.facts["cluster"] == "column subject of cases.csv"


def test_folders_side_by_side_are_groups(folders: Path) -> None:
    (folders / "cases.csv").unlink()
    cohort = plain(folders)
    assert {case_id: member.group for case_id, member in cohort.members.items()} == {
        "A1_ED": "vendorA", "A1_ES": "vendorA", "B1_ED": "vendorB", "B1_ES": "vendorB",
    }  # fmt: skip
    assert {member.cluster for member in cohort.members.values()} == {None}
    assert plain(folders, cluster="(.+)_E[DS]").members["B1_ES"].cluster == "B1"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("_E[DS]", "needs brackets"), ("(.+)_frame_", "does not match case A1_ED"), ("(", "no.* pattern")],
)
def test_a_cluster_pattern_that_cannot_work_says_why(folders: Path, pattern: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plain(folders, cluster=pattern)


def test_a_case_that_the_table_lacks_is_named(folders: Path) -> None:
    (folders / "cases.csv").write_text("case,group\nA1_ED,A\n")
    with pytest.raises(BadInput, match=r"no row for A1_ES, B1_ED, B1_ES"):
        plain(folders)
    (folders / "cases.csv").write_text("case,group\nA1_ED,A\nA1_ED,B\n")
    with pytest.raises(BadInput, match=r"more than one row for \['A1_ED'\]"):
        plain(folders)


def test_one_id_in_two_folders_becomes_two_with_the_names_of_the_folders(folders: Path, volume: Write) -> None:
    volume(folders / "vendorB" / "images" / "A1_ED.nii.gz", np.ones((6, 5, 4), np.int16))
    with pytest.raises(BadInput, match=r"no row for vendorA_A1_ED"):  # the table must use the same names
        plain(folders)
    (folders / "cases.csv").unlink()
    assert {"vendorA_A1_ED", "vendorB_A1_ED", "vendorB_B1_ED"} <= set(plain(folders).ids)


def test_images_alone_are_unlabelled_cases(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    picture(tmp_path / "a.png", photo)
    cohort = load_dataset(tmp_path)
    assert not cohort.members["a"].labelled


def test_a_link_out_of_a_dataset_is_refused(tmp_path: Path, volume: Write) -> None:
    secret = volume(tmp_path / "secret.nii.gz", np.ones((6, 5, 4), np.int16))
    (tmp_path / "data" / "BMC").mkdir(parents=True)
    (tmp_path / "data" / "BMC" / "Case00.nii.gz").symlink_to(secret)
    with pytest.raises(UnsafeInput, match="points outside"):
        load_dataset(tmp_path / "data")


def test_nothing_is_recognized_in_an_empty_folder(tmp_path: Path) -> None:
    assert recognize(tmp_path) is None
    assert recognize(tmp_path / "nowhere") is None
    with pytest.raises(BadInput, match="the layout of none of nnunet_raw, mnms, "):
        load_dataset(tmp_path)
    with pytest.raises(BadInput, match="nowhere is not a folder"):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(UnknownName, match="Did you mean 'mnms'"):
        load_dataset(tmp_path, "mmns")


@pytest.mark.parametrize("name", DATASETS)
def test_every_loader_refuses_a_folder_that_is_not_its_own(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadInput, match=str(tmp_path)):
        DATASETS[name](tmp_path)


def test_a_written_dataset_comes_back_where_it_lay(folders: Path, tmp_path: Path) -> None:
    cohort = plain(folders).select(group="B")
    out = tmp_path / "out"
    assert list(write_plain(cohort, out)) == ["B1_ED", "B1_ES"]
    before, after = (read_volume(files_of(c)["B1_ED"].images[0]) for c in (cohort, plain(out)))
    assert np.array_equal(before.geometry.affine, after.geometry.affine)
    assert before.voxels.dtype == after.voxels.dtype
    assert plain(out).members == cohort.members
    cases = with_groups(with_labels(list_cases(out / "images"), out / "labels"), out / "cases.csv")  # as record reads
    assert [(case.id, case.cluster, case.split) for case in cases] == [
        ("B1_ED", "B1", "calibration"), ("B1_ES", "B1", "calibration"),
    ]  # fmt: skip


def test_a_frame_of_a_movie_is_written_as_a_volume(tmp_path: Path, volume: Write) -> None:
    root, code = tmp_path / "OpenDataset", "A0S9V9"
    volume(root / "Testing" / code / f"{code}_sa.nii.gz", np.arange(4 * 4 * 2 * 3, dtype=np.int16).reshape(4, 4, 2, 3))
    (root / "t.csv").write_text(f"External code,Vendor,ED,ES\n{code},A,0,2\n")
    list(write_plain(load_dataset(root), tmp_path / "out"))
    written = nibabel.load(tmp_path / "out" / "images" / f"{code}_ES_0000.nii.gz")
    assert written.shape == (4, 4, 2)
    assert written.header.get_zooms() == (0.5, 0.75, 3.0)
    assert np.asarray(written.dataobj)[0, 0, 0] == 2
    assert not (tmp_path / "out" / "labels").exists()


def test_pictures_are_written_with_their_labels(tmp_path: Path, picture: Write, photo: NDArray[np.uint8]) -> None:
    picture(tmp_path / "in/images/T0001.png", photo)
    picture(tmp_path / "in/labels/T0001.png", np.ones((6, 8), np.uint8))
    cohort = load_dataset(tmp_path / "in")
    list(write_plain(cohort, tmp_path / "out"))
    back = load_dataset(tmp_path / "out")
    assert np.array_equal(back.case("T0001").image, cohort.case("T0001").image)
    assert (back.label("T0001") == 1).all()
    with pytest.raises(BadInput, match="is not empty"):
        list(write_plain(cohort, tmp_path / "out"))


def test_a_phantom_has_no_files() -> None:
    with pytest.raises(BadInput, match="was not read from files"):
        files_of(cardiac_cohort("B", 1, split="x"))

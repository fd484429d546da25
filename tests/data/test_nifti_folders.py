"""Input folders become cases; pictures come through a whitelist."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from casewise.core.errors import BadInput, UnsafeInput
from casewise.data.folders import list_cases, part_of, with_groups, with_labels
from casewise.data.pictures import read_label_picture, read_picture, write_label_picture


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_nnunet_names_group_channels_by_case(tmp_path: Path) -> None:
    touch(tmp_path / "i", "b_0001.nii.gz", "b_0000.nii.gz", "a_0000.nii.gz", "notes.txt")
    cases = list_cases(tmp_path / "i", ending=".nii.gz")
    assert [(case.id, [path.name for path in case.images]) for case in cases] == [
        ("a", ["a_0000.nii.gz"]),
        ("b", ["b_0000.nii.gz", "b_0001.nii.gz"]),
    ]


def test_other_names_are_one_file_a_case(tmp_path: Path) -> None:
    touch(tmp_path / "i", "x_rgb.png", "frame_000775.png")
    assert [case.id for case in list_cases(tmp_path / "i")] == ["frame_000775", "x_rgb"]


def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    touch(tmp_path / "archive", "scan.nii.gz")
    touch(tmp_path / "i")
    (tmp_path / "i" / "a_0000.nii.gz").symlink_to(tmp_path / "archive" / "scan.nii.gz")
    (case,) = list_cases(tmp_path / "i")
    assert (case.id, case.checked().images[0].name) == ("a", "a_0000.nii.gz")


def test_an_id_cannot_leave_a_page_whatever_the_file_is_called(tmp_path: Path) -> None:
    touch(tmp_path / "i", "<script>_0000.nii.gz")
    (case,) = list_cases(tmp_path / "i")
    assert case.name == "<script>"
    assert case.id.startswith("script-")


def test_labels_and_groups_are_found_by_case(tmp_path: Path) -> None:
    cases = list_cases(touch(tmp_path / "i", "a_0000.nii.gz", "b_0000.nii.gz"))
    labelled = with_labels(cases, touch(tmp_path / "l", "a.nii.gz"))
    assert [case.label is None for case in labelled] == [False, True]
    (tmp_path / "g.csv").write_text("case,group,cluster,split\na,siemens,p1,calibration\nb,,p2,\n")
    grouped = with_groups(labelled, tmp_path / "g.csv")
    assert (grouped[0].group, grouped[0].cluster, grouped[0].split) == ("siemens", "p1", "calibration")
    assert (grouped[1].group, grouped[1].cluster, grouped[1].split) == (None, "p2", None)
    (tmp_path / "g.csv").write_text("case,group\na,x\n")
    with pytest.raises(BadInput, match=r"no row for b \(1 of 2 cases"):
        with_groups(cases, tmp_path / "g.csv")


def test_groups_are_read_from_the_columns_that_people_have(tmp_path: Path) -> None:
    cases = list_cases(touch(tmp_path / "i", "a_0000.nii.gz", "b_0000.nii.gz"))
    (tmp_path / "g.csv").write_text("case,vendor,subject\na,siemens,p1\nb,philips,p2\n", encoding="utf-8-sig")
    grouped = with_groups(cases, tmp_path / "g.csv")
    assert [(case.group, case.cluster) for case in grouped] == [("siemens", "p1"), ("philips", "p2")]
    (tmp_path / "g.csv").write_text("case,vendor\na,siemens\na,philips\nb,philips\n")
    with pytest.raises(BadInput, match=r"more than one row for \['a'\]"):
        with_groups(cases, tmp_path / "g.csv")
    (tmp_path / "g.csv").write_text("name,vendor\na,siemens\n")
    with pytest.raises(BadInput, match=r"any of group, site, vendor, .*, and a row for each case"):
        with_groups(cases, tmp_path / "g.csv")


def test_parts_go_by_stride_as_in_nnunet(tmp_path: Path) -> None:
    cases = list_cases(touch(tmp_path / "i", *(f"c{n}_0000.nii.gz" for n in range(7))))
    parts = [part_of(cases, parts=3, part=part) for part in range(3)]
    assert [case.id for case in parts[1]] == ["c1", "c4"]
    assert sorted(case.id for part in parts for case in part) == [case.id for case in cases]
    with pytest.raises(BadInput, match="must be from 0"):
        part_of(cases, parts=3, part=3)


def test_pictures_round_trip(tmp_path: Path) -> None:
    mask = np.arange(12, dtype=np.uint8).reshape(3, 4)
    write_label_picture(tmp_path / "m.png", mask)
    np.testing.assert_array_equal(read_label_picture(tmp_path / "m.png"), mask)
    write_label_picture(tmp_path / "large.png", mask.astype(int) + 1000)
    np.testing.assert_array_equal(read_label_picture(tmp_path / "large.png"), mask.astype(int) + 1000)
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(tmp_path / "c.png")
    assert read_picture(tmp_path / "c.png").shape == (3, 3, 4)
    assert read_picture(tmp_path / "c.png", gray=True).shape == (1, 3, 4)
    assert np.array_equal(read_picture(tmp_path / "large.png", gray=True)[0], mask.astype(int) + 1000)
    with pytest.raises(BadInput, match="16-bit grays"):  # Pillow would make all of them white
        read_picture(tmp_path / "large.png")
    with pytest.raises(BadInput, match="one number per pixel"):
        read_label_picture(tmp_path / "c.png")


def test_other_formats_and_too_many_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((30, 30), np.uint8)).save(tmp_path / "a.gif")
    (tmp_path / "a.gif").rename(tmp_path / "a.png")
    with pytest.raises(BadInput, match="PNG, JPEG, BMP"):
        read_picture(tmp_path / "a.png")
    Image.fromarray(np.zeros((30, 30), np.uint8)).save(tmp_path / "b.png")
    with pytest.raises(UnsafeInput, match="30 x 30 pixels"):
        read_picture(tmp_path / "b.png", max_pixels=800)

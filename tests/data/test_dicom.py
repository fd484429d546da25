"""DICOM in and out: one series is one case, and a mask goes to SEG and back voxel by voxel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from casewise.core.errors import BadInput, UnsafeInput
from casewise.data.dicom_series import is_dicom_folder, read_series
from casewise.data.nifti import read_volume, write_volume

pydicom = pytest.importorskip("pydicom")
highdicom = pytest.importorskip("highdicom")

from worlds.dicom_series import (  # noqa: E402
    OBLIQUE,
    STRAIGHT,
    find_series,
    read_report,
    read_segmentation,
    write_series,
)

from casewise.data import dicom_objects as objects  # noqa: E402

CLASSES = {0: "background", 1: "left ventricle", 2: "myocardium", 5: "scar"}
VALUES = np.arange(4 * 5 * 6).reshape(4, 5, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_series(tmp_path / "heart", VALUES)
    return tmp_path


def test_a_series_is_one_case_called_after_its_folder(folder: Path) -> None:
    (series,) = find_series(folder)
    assert series.case_id == "heart"
    assert series.shape == (4, 5, 6)
    assert is_dicom_folder(folder)
    assert np.array_equal(read_series(series).voxels, VALUES)


def test_the_patient_number_goes_nowhere_but_binds_the_cases_of_one_patient(tmp_path: Path) -> None:
    for name, patient in (("a", "4711"), ("b", "4711"), ("c", "4712")):
        write_series(tmp_path / name, VALUES, patient=patient)
    a, b, c = find_series(tmp_path)
    assert a.cluster == b.cluster != c.cluster
    assert "4711" not in a.cluster


@pytest.mark.parametrize("orientation", [STRAIGHT, OBLIQUE], ids=["straight", "oblique"])
@pytest.mark.parametrize("step_mm", [2.5, -2.5], ids=["ascending", "descending"])
def test_a_volume_lies_where_simpleitk_says(tmp_path: Path, orientation: tuple[float, ...], step_mm: float) -> None:
    sitk = pytest.importorskip("SimpleITK")
    write_series(tmp_path, VALUES, orientation=orientation, step_mm=step_mm)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(tmp_path)))
    theirs = reader.Execute()
    (series,) = find_series(tmp_path)
    ours = read_series(series)
    assert np.array_equal(ours.voxels, sitk.GetArrayFromImage(theirs))
    axes = np.array(theirs.GetDirection()).reshape(3, 3) * np.array(theirs.GetSpacing())
    flip = np.diag([-1.0, -1.0, 1.0])
    assert np.allclose(ours.geometry.affine[:3, :3], flip @ axes, atol=1e-4)
    assert np.allclose(ours.geometry.affine[:3, 3], flip @ np.array(theirs.GetOrigin()), atol=1e-3)
    assert np.allclose(ours.spacing_mm, theirs.GetSpacing()[::-1], atol=1e-5)


def test_a_volume_survives_nifti_and_keeps_no_name(tmp_path: Path) -> None:
    write_series(tmp_path / "in", VALUES, orientation=OBLIQUE)
    volume = read_series(find_series(tmp_path / "in")[0])
    write_volume(tmp_path / "out.nii", volume)
    back = read_volume(tmp_path / "out.nii")
    assert np.array_equal(back.voxels, volume.voxels)
    assert np.allclose(back.geometry.affine, volume.geometry.affine, atol=1e-4)
    assert b"Doe" not in (tmp_path / "out.nii").read_bytes()


def test_values_are_rescaled_slice_by_slice(tmp_path: Path) -> None:
    first = write_series(tmp_path, VALUES[:2], slope=2, intercept=-1024, series_uid="1.2.3")
    (series,) = find_series(tmp_path)
    assert read_series(series).voxels.dtype == np.int16
    assert np.array_equal(read_series(series).voxels, VALUES[:2] * 2 - 1024)
    one = pydicom.dcmread(first[1])
    one.RescaleSlope = 0.5
    one.save_as(first[1])
    voxels = read_series(find_series(tmp_path)[0]).voxels
    assert voxels.dtype == np.float32
    assert np.allclose(voxels[1], VALUES[1] * 0.5 - 1024)
    assert np.allclose(voxels[0], VALUES[0] * 2 - 1024)


def test_a_missing_slice_is_named_by_its_neighbours(tmp_path: Path) -> None:
    write_series(tmp_path / "s", VALUES)[2].unlink()
    with pytest.raises(BadInput, match=r"series s: 1 slice is missing between 001\.dcm and 003\.dcm \(5\.00 mm apart"):
        find_series(tmp_path)


def test_a_series_that_was_cut_short_is_seen_by_its_promise(tmp_path: Path) -> None:
    write_series(tmp_path / "s", VALUES, NumberOfSeriesRelatedInstances=4)[3].unlink()
    with pytest.raises(BadInput, match="series s: 4 images are announced, 3 are present"):
        find_series(tmp_path)


def test_two_slices_at_one_place_are_named(tmp_path: Path) -> None:
    write_series(tmp_path / "s", VALUES, series_uid="1.2.3")
    write_series(tmp_path / "s", VALUES[:1], series_uid="1.2.3", name="again{}.dcm")
    with pytest.raises(BadInput, match=r"000\.dcm and again0\.dcm have the same position"):
        find_series(tmp_path)


def test_mixed_slices_are_named(tmp_path: Path) -> None:
    write_series(tmp_path / "s", VALUES, series_uid="1.2.3")
    write_series(tmp_path / "s", VALUES[:, :4], series_uid="1.2.3", name="other{}.dcm", origin_mm=(0.0, 0.0, 90.0))
    with pytest.raises(BadInput, match=r"series s mixes slices: 000\.dcm has size 5 x 6, other0\.dcm has 4 x 6"):
        find_series(tmp_path)


def test_a_tilted_gantry_is_refused(tmp_path: Path) -> None:
    for number, path in enumerate(write_series(tmp_path / "s", VALUES)):
        one = pydicom.dcmread(path)
        x, y, z = one.ImagePositionPatient
        one.ImagePositionPatient = [x, y + 0.7 * number, z]
        one.save_as(path)
    with pytest.raises(BadInput, match=r"a tilted gantry, 2\.1 mm aside"):
        find_series(tmp_path)


@pytest.mark.parametrize(
    ("tags", "sentence"),
    [({"NumberOfFrames": 3}, "holds several frames"), ({"SamplesPerPixel": 3}, "is in color"),
     ({"ImagePositionPatient": None}, "lacks ImagePositionPatient")],
)  # fmt: skip
def test_what_is_no_slice_is_refused(tmp_path: Path, tags: dict[str, object], sentence: str) -> None:
    path = write_series(tmp_path / "s", VALUES[:1])[0]
    one = pydicom.dcmread(path)
    for tag, value in tags.items():
        setattr(one, tag, value)
    one.save_as(path)
    with pytest.raises(BadInput, match=f"series s: 000.dcm {sentence}"):
        find_series(tmp_path)


def test_a_header_that_asks_for_too_much_is_refused_before_its_pixels(folder: Path) -> None:
    with pytest.raises(UnsafeInput, match="series heart needs"):
        find_series(folder, max_bytes=100)


def test_truncated_pixels_are_named(tmp_path: Path) -> None:
    path = write_series(tmp_path / "s", np.zeros((1, 64, 64)))[0]
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BadInput, match=r"000\.dcm has 3000 bytes, less than its pixels; send it again"):
        find_series(tmp_path)


def test_links_out_of_the_folder_are_refused_and_dicomdir_is_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM" + b"junk")
    assert len(find_series(folder)) == 1
    inside = folder / "heart"
    (inside / "link.dcm").symlink_to(write_series(folder.parent / "elsewhere", VALUES[:1])[0])
    with pytest.raises(BadInput, match=r"link\.dcm is a link out of"):
        find_series(inside)


def test_several_series_of_one_folder_get_their_numbers(tmp_path: Path) -> None:
    write_series(tmp_path / "s", VALUES, name="a{}.dcm", SeriesNumber=4)
    write_series(tmp_path / "s", VALUES, name="b{}.dcm", SeriesNumber=7)
    assert [series.case_id for series in find_series(tmp_path)] == ["s_4", "s_7"]


@pytest.mark.parametrize("orientation", [STRAIGHT, OBLIQUE], ids=["straight", "oblique"])
@pytest.mark.parametrize("step_mm", [2.5, -2.5], ids=["ascending", "descending"])
def test_a_mask_comes_back_from_seg_voxel_by_voxel(
    tmp_path: Path, orientation: tuple[float, ...], step_mm: float
) -> None:
    write_series(tmp_path / "in", VALUES, orientation=orientation, step_mm=step_mm)
    (series,) = find_series(tmp_path / "in")
    mask = np.random.default_rng(0).choice([0, 0, 1, 2, 5], size=series.shape).astype(np.uint8)
    mask[1] = 0  # an empty slice, which SEG leaves out
    objects.write_segmentation(tmp_path / "seg.dcm", mask, series, classes=CLASSES)
    assert np.array_equal(read_segmentation(tmp_path / "seg.dcm", series), mask)
    stored = highdicom.seg.segread(tmp_path / "seg.dcm")
    assert {uid for _, _, uid in stored.get_source_image_uids()} <= {one.instance_uid for one in series.slices}
    volume = stored.get_volume(combine_segments=True)  # another reader's own idea of where the mask lies
    ours = np.linalg.inv(np.diag([-1.0, -1.0, 1.0, 1.0]) @ series.affine)
    for index in np.argwhere(volume.array > 0):
        place = ours @ volume.affine @ np.array([*index, 1.0])
        column, row, number = np.rint(place[:3]).astype(int)
        assert mask[number, row, column] == {1: 1, 2: 2, 3: 5}[int(volume.array[tuple(index)])]


def test_an_empty_mask_is_a_segmentation_too(folder: Path, tmp_path: Path) -> None:
    (series,) = find_series(folder)
    empty = np.zeros(series.shape, np.uint8)
    objects.write_segmentation(tmp_path / "seg.dcm", empty, series, classes=CLASSES)
    assert np.array_equal(read_segmentation(tmp_path / "seg.dcm", series), empty)


def test_segments_have_the_models_names_and_codes_and_others_are_tissue(folder: Path, tmp_path: Path) -> None:
    (series,) = find_series(folder)
    own = tmp_path / "codes.json"
    own.write_text(json.dumps({"Myocardium": {"category": "anatomy", "type": ["1", "99LOCAL", "My muscle"]}}))
    path = tmp_path / "seg.dcm"
    objects.write_segmentation(path, np.ones(series.shape, int), series, classes=CLASSES, codes=objects.read_codes(own))
    stored = pydicom.dcmread(path)
    said = [(s.SegmentLabel, s.SegmentedPropertyTypeCodeSequence[0].CodeMeaning) for s in stored.SegmentSequence]
    assert said == [("left ventricle", "Left ventricle"), ("myocardium", "My muscle"), ("scar", "Tissue")]
    assert stored.PatientID == "P1"
    assert stored.StudyInstanceUID == series.study_uid


def test_codes_that_are_no_codes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "codes.json"
    path.write_text('{"a": {"category": "thing", "type": ["1"]}}')
    with pytest.raises(BadInput, match=r"codes\.json: a row of codes is"):
        objects.read_codes(path)


def test_masks_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    (series,) = find_series(folder)
    with pytest.raises(BadInput, match=r"shape \(2, 2, 2\), series heart \(4, 5, 6\)"):
        objects.write_segmentation(tmp_path / "s", np.zeros((2, 2, 2), int), series, classes=CLASSES)
    with pytest.raises(BadInput, match=r"labels \[3\] that no class name"):
        objects.write_segmentation(tmp_path / "s", np.full(series.shape, 3), series, classes=CLASSES)


def test_the_report_says_the_decision_the_flag_and_the_promise(folder: Path, tmp_path: Path) -> None:
    (series,) = find_series(folder)
    objects.write_segmentation(tmp_path / "seg.dcm", np.ones(series.shape, int), series, classes=CLASSES)
    said = objects.Statement("Rolled back: 31 regions changed.", "3 regions differ", "At most 10 % harm.", "casewise 9")
    objects.write_report(tmp_path / "sr.dcm", series, tmp_path / "seg.dcm", said)
    assert read_report(tmp_path / "sr.dcm") == {
        "decision": "Rolled back: 31 regions changed.", "flag": "3 regions differ", "certificate": "At most 10 % harm.",
    }  # fmt: skip
    stored = pydicom.dcmread(tmp_path / "sr.dcm")
    referred = {
        item.ReferencedSOPInstanceUID
        for study in stored.CurrentRequestedProcedureEvidenceSequence
        for series_item in study.ReferencedSeriesSequence
        for item in series_item.ReferencedSOPSequence
    }
    masks = pydicom.dcmread(tmp_path / "seg.dcm")
    assert referred == {masks.SOPInstanceUID, *(one.instance_uid for one in series.slices)}
    quiet = replace(said, flag="", certificate="")
    objects.write_report(tmp_path / "quiet.dcm", series, tmp_path / "seg.dcm", quiet)
    assert read_report(tmp_path / "quiet.dcm")["flag"] == "nothing was flagged"

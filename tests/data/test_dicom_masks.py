"""DICOM masks: SEG of three kinds and RTSTRUCT become NIfTI on one grid, with one number for one name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pydicom = pytest.importorskip("pydicom")
highdicom = pytest.importorskip("highdicom")

from pydicom.dataset import Dataset, FileDataset, FileMetaDataset  # noqa: E402
from pydicom.uid import ExplicitVRLittleEndian, RTStructureSetStorage, generate_uid  # noqa: E402
from typer.testing import CliRunner  # noqa: E402
from worlds.dicom_series import OBLIQUE, STRAIGHT, find_series, write_series  # noqa: E402

import casewise  # noqa: E402
from casewise.archive.store import open_archive  # noqa: E402
from casewise.cli import app  # noqa: E402
from casewise.core.errors import BadInput  # noqa: E402
from casewise.data import dicom_objects as objects  # noqa: E402
from casewise.data.dicom_masks import filled_polygon, is_mask_folder, nifti_folders  # noqa: E402
from casewise.data.dicom_series import read_series  # noqa: E402
from casewise.data.nifti import read_volume  # noqa: E402

CLASSES = {1: "LV", 2: "RV"}
SHAPE = (5, 12, 10)


def truth():
    mask = np.zeros(SHAPE, np.uint8)
    mask[1:4, 2:8, 2:6] = 1
    mask[2, 3:6, 6:9] = 2
    return mask


def series_of(root, patient="P1", **more):
    write_series(root / "images" / patient, np.arange(np.prod(SHAPE)).reshape(SHAPE), patient=patient, **more)
    return next(one for one in find_series(root / "images") if one.case_id in (patient, "images"))


def contours(mask, series, at):
    """The outline of a box of one label on a slice, in millimetres: along the borders of its voxels."""
    rows, columns = np.nonzero(mask)
    low, high = (rows.min() - 0.5, columns.min() - 0.5), (rows.max() + 0.5, columns.max() + 0.5)
    lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ series.affine
    corners = [(low[1], low[0]), (high[1], low[0]), (high[1], high[0]), (low[1], high[0])]
    return [value for x, y in corners for value in (lps @ [x, y, at, 1])[:3]]


def write_rtstruct(path: Path, series, structures: dict[str, list[list[float]]], patient="P1") -> Path:
    """Contours by name, as planning systems write them."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = RTStructureSetStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = RTStructureSetStorage, meta.MediaStorageSOPInstanceUID
    data.Modality, data.PatientID = "RTSTRUCT", patient
    referenced, study, frame = Dataset(), Dataset(), Dataset()
    referenced.SeriesInstanceUID = series.uid
    study.RTReferencedSeriesSequence = [referenced]
    frame.RTReferencedStudySequence = [study]
    data.ReferencedFrameOfReferenceSequence = [frame]
    data.StructureSetROISequence, data.ROIContourSequence = [], []
    for number, (name, outlines) in enumerate(structures.items(), 1):
        structure, drawn = Dataset(), Dataset()
        structure.ROINumber, structure.ROIName = number, name
        drawn.ReferencedROINumber, drawn.ContourSequence = number, []
        for outline in outlines:
            contour = Dataset()
            contour.ContourGeometricType, contour.NumberOfContourPoints = "CLOSED_PLANAR", len(outline) // 3
            contour.ContourData = [f"{value:.6f}" for value in outline]
            drawn.ContourSequence.append(contour)
        data.StructureSetROISequence.append(structure)
        data.ROIContourSequence.append(drawn)
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, data, enforce_file_format=True)
    return path


def fractional(path, mask, series):
    """One FRACTIONAL segment, 0.8 inside and 0.3 in a halo that is no part of the mask."""
    shares = np.where(mask > 0, 0.8, 0.3 * (np.roll(mask, 1, axis=2) > 0)).astype(np.float32)
    description = highdicom.seg.SegmentDescription(
        1, "LV", objects._code(objects._CATEGORIES["tissue"]), objects._code(objects._CATEGORIES["tissue"]), "MANUAL"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    highdicom.seg.Segmentation(
        objects._headers(series), shares, "FRACTIONAL", [description], highdicom.UID(), 1, highdicom.UID(), 1, "m", "m",
        "1", "0", max_fractional_value=100, fractional_type="OCCUPANCY",
    ).save_as(path)  # fmt: skip


@pytest.mark.parametrize("kind", ["binary", "labelmap"])
@pytest.mark.parametrize(("orientation", "step"), [(STRAIGHT, 2.5), (OBLIQUE, -2.5)])
def test_segmentations_come_back_voxel_by_voxel_on_the_grid_of_their_images(tmp_path, kind, orientation, step):
    series = series_of(tmp_path, orientation=orientation, step_mm=step)
    (tmp_path / "seg").mkdir()
    objects.write_segmentation(tmp_path / "seg" / "a.dcm", truth(), series, classes=CLASSES, kind=kind)
    ((folder,), _, _) = nifti_folders([tmp_path / "seg"], tmp_path / "keep", images=tmp_path / "images")
    read = read_volume(folder / "a.nii.gz")
    assert np.array_equal(read.voxels, truth())
    assert np.allclose(read.geometry.affine, read_series(series).geometry.affine, atol=1e-4)
    assert json.loads((folder / "dataset.json").read_text())["labels"] == {"background": 0, "LV": 1, "RV": 2}


def test_fractional_segments_are_cut_at_one_half(tmp_path):
    series, mask = series_of(tmp_path), (truth() == 1).astype(np.uint8)
    fractional(tmp_path / "seg" / "a.dcm", mask, series)
    ((folder,), _, _) = nifti_folders([tmp_path / "seg"], tmp_path / "keep", images=tmp_path / "images")
    assert np.array_equal(read_volume(folder / "a.nii.gz").voxels, mask)


def test_contours_are_filled_on_their_slices_and_a_contour_within_a_contour_is_a_hole(tmp_path):
    series = series_of(tmp_path, orientation=OBLIQUE)
    box, hole = np.zeros(SHAPE[1:], bool), np.zeros(SHAPE[1:], bool)
    box[2:9, 2:8], hole[4:6, 4:6] = True, True
    outlines = [contours(box, series, 2), contours(hole, series, 2), contours(box, series, 3)]
    write_rtstruct(tmp_path / "rt" / "a.dcm", series, {"RV": outlines})
    ((folder,), _, _) = nifti_folders([tmp_path / "rt"], tmp_path / "keep", images=tmp_path / "images")
    expected = np.zeros(SHAPE, np.uint8)
    expected[2:4, 2:9, 2:8] = 1
    expected[2, 4:6, 4:6] = 0
    assert np.array_equal(read_volume(folder / "a.nii.gz").voxels, expected)


def test_two_folders_of_dicom_are_compared_whatever_the_files_are_called(tmp_path):
    """AI/ holds segmentations, SIGNED/ the contours that a clinician corrected; series and names pair them."""
    for patient in ("P1", "P2"):
        series = series_of(tmp_path, patient)
        (tmp_path / "ai").mkdir(exist_ok=True)
        objects.write_segmentation(tmp_path / "ai" / f"{patient}.seg.dcm", truth(), series, classes=CLASSES)
        signed = truth()
        signed[2, 3:6, 6:9] = 0
        outlines = [contours(signed[at] == 1, series, at) for at in (1, 2, 3)]
        if patient == "P1":  # the clinician removed the right chamber of the second patient
            outlines_rv = [contours(truth()[2] == 2, series, 2)]
            write_rtstruct(tmp_path / "signed" / "1.dcm", series, {"LV": outlines, "RV": outlines_rv}, patient)
        else:
            write_rtstruct(tmp_path / "signed" / "2.dcm", series, {"LV": outlines}, patient)
    found = casewise.compare(tmp_path / "ai", tmp_path / "signed")
    assert {case.id: case.found.changed for case in found.cases} == {"P1": 0, "P2": 9}
    assert found.names[2] == "RV"
    words = ["compare", tmp_path / "ai", tmp_path / "signed", "-i", tmp_path / "images", "-o", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "RV (2) is gone" in (tmp_path / "out" / "report.html").read_text()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["summary"]["named"] == 2  # patients come from the headers
    assert "P1" not in (tmp_path / "out" / "dicom" / "cases.csv").read_text().replace("P1,", "")


@pytest.mark.parametrize("kinds", [("binary", "labelmap"), ("labelmap", "fractional"), ("fractional", "contours")])
def test_every_kind_of_dicom_mask_is_compared_with_every_other(tmp_path, kinds):
    """The same mask in two kinds is no change; a row that the second folder lacks is found on the command line."""
    series, whole = series_of(tmp_path), (truth() == 1).astype(np.uint8)
    less = whole.copy()
    less[:, 7] = 0
    for folder, kind, mask in (("old", kinds[0], whole), ("new", kinds[1], less), ("same", kinds[1], whole)):
        path = tmp_path / folder / "a.dcm"
        path.parent.mkdir()
        if kind == "fractional":
            fractional(path, mask, series)
        elif kind == "contours":
            write_rtstruct(path, series, {"LV": [contours(mask[at] == 1, series, at) for at in (1, 2, 3)]})
        else:
            objects.write_segmentation(path, mask, series, classes={0: "background", 1: "LV"}, kind=kind)
    images = {"images": tmp_path / "images"}
    assert casewise.compare(tmp_path / "old", tmp_path / "same", **images).cases[0].found.changed == 0
    words = ["compare", tmp_path / "old", tmp_path / "new", "-i", tmp_path / "images", "-o", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, (result.output, result.exception)
    (row,) = json.loads((tmp_path / "out" / "summary.json").read_text())["summary"]["labels"]
    assert row["drift"]["estimate"] == pytest.approx(-1 / 6)


def test_import_and_qc_read_dicom_too(tmp_path):
    for patient in ("P1", "P2"):
        series = series_of(tmp_path, patient)
        for name, mask in (("old", truth()), ("new", np.roll(truth(), 1, axis=2))):
            (tmp_path / name).mkdir(exist_ok=True)
            objects.write_segmentation(tmp_path / name / f"{patient}.dcm", mask, series, classes=CLASSES)
    words = ["import", "--old", tmp_path / "old", "--new", tmp_path / "new", "--labels", tmp_path / "old"]
    result = CliRunner().invoke(app, [str(word) for word in [*words, "-o", tmp_path / "archive"]])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "2 cases, 1 step, 2 labelled" in result.output
    words = ["qc", tmp_path / "old", tmp_path / "new", tmp_path / "old", "-o", tmp_path / "qc"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "P1" in (tmp_path / "qc" / "qc.csv").read_text()


def test_contours_alone_are_imported_and_controlled_with_their_images_and_keep_their_patients(tmp_path):
    """Two series of one patient: both have the patient of their headers."""
    for case in ("P1_ED", "P1_ES"):
        series = series_of(tmp_path, case, PatientID="P1")
        for name, label in (("old", 1), ("new", 2)):
            outlines = [contours(truth()[2] == label, series, 2)]
            write_rtstruct(tmp_path / name / f"{case}.dcm", series, {"LV": outlines}, "P1")
    folders, images = [str(tmp_path / "old"), str(tmp_path / "new")], ["-i", str(tmp_path / "images")]
    words = [
        "import",
        "--old",
        folders[0],
        "--new",
        folders[1],
        "--labels",
        folders[0],
        "-o",
        str(tmp_path / "archive"),
    ]
    assert "give the image series with -i IMAGES" in str(CliRunner().invoke(app, words).exception)
    result = CliRunner().invoke(app, [*words, *images])
    assert result.exit_code == 0, (result.output, result.exception)
    clusters = {entry.cluster for entry in open_archive(tmp_path / "archive").entries.values()}
    assert len(clusters) == 1
    assert next(iter(clusters)).startswith("patient-")
    result = CliRunner().invoke(app, ["qc", *folders, *images, "-o", str(tmp_path / "qc")])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "grid" not in (tmp_path / "qc" / "qc.csv").read_text()


def test_the_damaged_file_is_named_and_not_the_intact_one_beside_it(tmp_path):
    """A contour of two and a half points, a header that was overwritten, an empty file."""
    for patient in ("P1", "P2", "P3", "P4"):
        series = series_of(tmp_path, patient)
        outline = contours(truth()[2] == 1, series, 2)
        write_rtstruct(
            tmp_path / "signed" / f"{patient}.dcm", series, {"LV": [outline[: 8 if patient == "P1" else 12]]}
        )
        path = tmp_path / "ai" / f"{patient}.dcm"
        path.parent.mkdir(exist_ok=True)
        objects.write_segmentation(path, truth(), series, classes=CLASSES)
    held = bytearray((tmp_path / "ai" / "P2.dcm").read_bytes())
    held[200:600] = np.random.default_rng(0).bytes(400)
    (tmp_path / "ai" / "P2.dcm").write_bytes(held)
    (tmp_path / "ai" / "P3.dcm").write_bytes(b"")
    found = casewise.compare(tmp_path / "ai", tmp_path / "signed", images=tmp_path / "images")
    assert [case.id for case in found.cases] == ["P4"]
    assert found.pairs == 4
    said = {problem.case: problem.message for problem in found.problems if problem.kind == "unreadable"}
    assert said["P1"].startswith("signed/P1.dcm cannot be read")
    assert "ai/" not in said["P1"]
    for patient in ("P2", "P3"):
        assert said[patient] == f"ai/{patient}.dcm cannot be read as DICOM; export it again"


def test_what_cannot_be_placed_is_reported(tmp_path):
    series = series_of(tmp_path)
    outline = contours(truth()[2] == 1, series, 2)
    write_rtstruct(tmp_path / "rt" / "a.dcm", series, {"LV": [outline]})
    with pytest.raises(BadInput, match=r"a\.dcm: contours have no grid of their own; give the image series with -i"):
        nifti_folders([tmp_path / "rt"], tmp_path / "keep")
    beyond = [value + (1000.0 if at % 3 == 2 else 0.0) for at, value in enumerate(outline)]
    write_rtstruct(tmp_path / "rt" / "a.dcm", series, {"LV": [beyond]})
    with pytest.raises(BadInput, match="a contour of LV lies on no slice"):
        nifti_folders([tmp_path / "rt"], tmp_path / "keep", images=tmp_path / "images")
    assert not is_mask_folder(tmp_path / "images")


def test_a_damaged_file_affects_only_its_own_case_and_cases_are_called_after_folders(tmp_path):
    """Exports give all patients files of one name, in a folder for each patient."""
    for patient in ("P1", "P2", "P3", "P4"):
        series = series_of(tmp_path, patient)
        for name in ("ai", "signed"):
            (tmp_path / name / patient).mkdir(parents=True)
            objects.write_segmentation(tmp_path / name / patient / "seg.dcm", truth(), series, classes=CLASSES)
    cut, headless = (tmp_path / "ai" / patient / "seg.dcm" for patient in ("P2", "P3"))
    cut.write_bytes(cut.read_bytes()[:-40])
    stored = pydicom.dcmread(headless)
    del stored.ReferencedSeriesSequence
    stored.save_as(headless)
    found = casewise.compare(tmp_path / "ai", tmp_path / "signed", out=tmp_path / "out")
    assert [case.id for case in found.cases] == ["P1", "P4"]
    said = {problem.case: problem.message for problem in found.problems if problem.kind == "unreadable"}
    assert said["P2"].startswith("P2/seg.dcm cannot be read")
    assert said["P2"].count("seg.dcm") == 1  # the intact file of the other folder is not blamed
    assert said["P3"].startswith("P3/seg.dcm does not name its series")
    assert [problem.case for problem in found.problems] == ["P2", "P3"]  # P3 is not missing as well
    assert (found.exit_code, found.pairs) == (3, 4)
    (tmp_path / "ai" / "P4" / "seg.dcm").unlink()  # nothing of an earlier run stands for a mask that is gone
    assert len(casewise.compare(tmp_path / "ai", tmp_path / "signed", out=tmp_path / "out").cases) == 1
    words = ["qc", tmp_path / "ai", tmp_path / "signed", "-o", tmp_path / "qc"]
    assert CliRunner().invoke(app, [str(word) for word in words]).exit_code == 3
    rows = (tmp_path / "qc" / "qc.csv").read_text()
    assert "P4" in rows
    assert "P2/seg.dcm" in rows
    assert [row.split(",")[0] for row in rows.splitlines()].count("P3") == 1


def test_polygons_hold_the_pixels_whose_centers_lie_inside():
    from matplotlib.path import Path as Outline

    draw = np.random.default_rng(0)
    centers = np.stack(np.meshgrid(np.arange(20), np.arange(30), indexing="ij"), axis=-1).reshape(-1, 2)
    for _ in range(20):
        angles = np.sort(draw.uniform(0, 2 * np.pi, 9))
        points = np.stack([10 + 12 * draw.random(9) * np.sin(angles), 15 + 14 * np.cos(angles)], axis=1)
        expected = Outline(points).contains_points(centers).reshape(20, 30)
        assert np.array_equal(filled_polygon(points, (20, 30)), expected)

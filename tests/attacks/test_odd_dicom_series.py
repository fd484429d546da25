"""One odd DICOM series fails alone, and attributes that may be absent may be absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
import pytest
from typer.testing import CliRunner
from worlds.dicom_series import find_series, read_segmentation, write_series

from casewise.cli import app
from casewise.core.errors import BadInput
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Action, Decision, State
from casewise.data.dicom_objects import write_segmentation
from casewise.data.dicom_series import read_series, survey_series
from casewise.data.nifti import write_mask
from casewise.run import dicom
from casewise.run.dicom import write_objects

VALUES = np.zeros((3, 6, 5))
TYPE_2 = ("PatientBirthDate", "PatientSex", "PatientName", "PatientID", "StudyDate", "StudyTime", "StudyID",
          "AccessionNumber", "ReferringPhysicianName", "PositionReferenceIndicator", "Manufacturer",
          "SliceThickness")  # fmt: skip


def edited(path: Path, **tags: object) -> None:
    data = pydicom.dcmread(path)
    for tag, value in tags.items():
        if value is None:
            delattr(data, tag)
        else:
            setattr(data, tag, value)
    data.save_as(path)


@pytest.mark.parametrize("tag", TYPE_2)
def test_a_series_without_an_optional_attribute_gets_its_segmentation(tag: str, tmp_path: Path) -> None:
    for path in write_series(tmp_path / "s", VALUES):
        edited(path, **{tag: None})
    (series,) = find_series(tmp_path / "s")
    mask = np.zeros(VALUES.shape, np.uint8)
    mask[1, 2:4, 2:4] = 1
    write_segmentation(tmp_path / "seg.dcm", mask, series, classes={1: "heart"})
    assert np.array_equal(read_segmentation(tmp_path / "seg.dcm", series), mask)


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        ({"PixelSpacing": [0.0, 0.0]}, "PixelSpacing 0 x 0; it must be positive"),
        ({"PixelSpacing": [-1.0, 1.0]}, "must be positive"),
        ({"PixelSpacing": [1.0]}, "bad"),
        ({"ImageOrientationPatient": [1.0, 0.0, 0.0]}, "bad"),
        ({"ImagePositionPatient": [1.0, 0.0]}, "bad"),
        ({"SOPInstanceUID": None}, "bad"),
        ({"Rows": 0}, "bad"),
        ({"SOPInstanceUID": "1.2.3"}, "several slices have one SOPInstanceUID"),
        ({"ImageOrientationPatient": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]}, "two unit vectors at a right angle"),
        ({"ImageOrientationPatient": [2.0, 0.0, 0.0, 0.0, 2.0, 0.0]}, "two unit vectors at a right angle"),
    ],
)
def test_one_bad_series_affects_no_other(tags: dict[str, object], says: str, tmp_path: Path) -> None:
    write_series(tmp_path / "good", VALUES)
    for path in write_series(tmp_path / "bad", VALUES):
        edited(path, **tags)
    found, refused = survey_series(tmp_path)
    assert [one.case_id for one in found] == ["good"]
    assert list(refused) == ["bad"]
    assert says in str(refused["bad"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"\x28\0\x10\0US", b"\x28\0\x10\0ZZ", "Unknown Value Representation 'ZZ'"),
        (b"-10.0", b"nan  ", "must be finite"),
        (b"\x20\0\x0e\0UI", b"\x20\0\x0e\0ZZ", "cannot be read as DICOM"),
    ],
)
def test_a_value_that_pydicom_cannot_read_costs_no_other_series(
    old: bytes, new: bytes, says: str, tmp_path: Path
) -> None:
    write_series(tmp_path / "good", VALUES)
    for path in write_series(tmp_path / "bad", VALUES):
        path.write_bytes(path.read_bytes().replace(old, new, 1))
    found, refused = survey_series(tmp_path)
    assert [one.case_id for one in found] == ["good"]
    assert all(says in str(error) for error in refused.values())
    assert refused


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        ({"RescaleSlope": [1.0, 2.0]}, "cannot be read"),
        ({"RescaleSlope": 0}, "the slope not 0"),
        ({"RescaleSlope": "inf"}, "must be finite"),
        ({"Rows": 3}, r"\(2, 3, 5\), the header says \(3, 5\)"),
        ({"BitsStored": 60}, "cannot be read"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydicom
def test_pixels_that_contradict_their_header_are_refused(tags: dict[str, object], says: str, tmp_path: Path) -> None:
    for path in write_series(tmp_path, VALUES):
        edited(path, **tags)
    (series,) = find_series(tmp_path)
    with pytest.raises(BadInput, match=says):
        read_series(series)


@pytest.mark.parametrize("how", ["cut", "empty", "link", "loop", "outside"])
def test_a_series_that_lost_its_last_slice_is_not_segmented_without_it(how: str, tmp_path: Path) -> None:
    """A lost slice in the middle leaves a gap; a lost slice at an end is known by its damaged file only."""
    write_series(tmp_path / "in" / "good", VALUES)
    last = write_series(tmp_path / "in" / "bad", VALUES)[-1]
    content = last.read_bytes()
    last.unlink()
    (tmp_path / "elsewhere.dcm").write_bytes(content)
    links = {"link": "nowhere.dcm", "loop": last.name, "outside": tmp_path / "elsewhere.dcm"}
    if how in links:
        last.symlink_to(links[how])
    else:
        last.write_bytes(content[:132] if how == "cut" else b"")
    found, refused = survey_series(tmp_path / "in")
    assert [one.case_id for one in found] == ["good"]
    assert list(refused) == ["bad"], "one damaged file counts once"
    assert "002.dcm" in str(refused["bad"])
    assert "a slice may be missing" in str(refused["bad"])


def test_a_wrong_kind_of_segmentation_is_refused_before_the_first_case(tmp_path: Path) -> None:
    write_series(tmp_path / "in" / "s", VALUES)
    words = ["predict", "-i", tmp_path / "in", "-o", tmp_path / "out", "-m", "casewise.adapt.networks:phantom_cardiac"]
    done = CliRunner().invoke(app, [*map(str, words), "--policy", "m0", "--set", "segmentation=fractional"])
    assert done.exit_code == 1
    assert "must be binary or labelmap, got 'fractional'" in str(done.exception)
    assert not list((tmp_path / "out").glob("*.nii.gz"))


def test_one_damaged_file_affects_no_series(tmp_path: Path) -> None:
    write_series(tmp_path / "good", VALUES)
    (tmp_path / "torn.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\x02\x00\x10\x00UI\xff\xff")
    data = pydicom.dcmread(write_series(tmp_path / "lone", VALUES[:1])[0])
    del data.SeriesInstanceUID
    data.save_as(tmp_path / "nameless.dcm")
    found, refused = survey_series(tmp_path)
    assert [one.case_id for one in found] == ["good", "lone"]
    assert "nameless.dcm" in refused


def test_a_folder_of_damaged_files_only_says_what_is_wrong(tmp_path: Path) -> None:
    data = pydicom.dcmread(write_series(tmp_path / "x", VALUES[:1])[0])
    del data.SeriesInstanceUID
    data.save_as(tmp_path / "x" / "000.dcm")
    with pytest.raises(BadInput, match="SeriesInstanceUID"):
        survey_series(tmp_path)


def test_a_segmentation_that_cannot_be_written_affects_no_other_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_series(tmp_path / "in" / name, VALUES)
    masks, entries = {}, []
    for series in find_series(tmp_path / "in"):
        masks[series.case_id] = tmp_path / f"{series.case_id}.nii.gz"
        write_mask(masks[series.case_id], np.ones(VALUES.shape, np.uint8), read_series(series).geometry)
        decision = Decision(series.case_id, Action.ROLLBACK, State(0), 0, "m0")
        entries.append(PredictedCase(series.case_id, "done", decision))

    write = dicom.write_segmentation

    def odd(path: Path, mask: object, series: object, **more: object) -> str:
        if getattr(series, "case_id", "") == "a":
            raise AttributeError("no attribute that highdicom wants")
        return write(path, mask, series, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(dicom, "write_segmentation", odd)
    failed = write_objects(tmp_path / "in", tmp_path / "out", masks, entries, classes={1: "heart"})
    assert list(failed) == ["a"]
    assert (tmp_path / "out" / "dicom" / "b.seg.dcm").is_file()


@pytest.mark.parametrize("place", [0, -1])
def test_a_slice_without_its_size_is_not_left_out(place: int, tmp_path: Path) -> None:
    """At an end of the series no gap would show that a slice is missing."""
    write_series(tmp_path / "good", VALUES)
    edited(write_series(tmp_path / "bad", VALUES)[place], Rows=None)
    found, refused = survey_series(tmp_path)
    assert ([one.case_id for one in found], list(refused)) == (["good"], ["bad"])


def test_a_deflated_file_that_may_unpack_to_too_much_is_not_unpacked(tmp_path: Path, monkeypatch) -> None:
    write_series(tmp_path / "good", VALUES)
    for path in write_series(tmp_path / "bad", VALUES):
        data = pydicom.dcmread(path)
        data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
        pydicom.dcmwrite(path, data)
    assert len(survey_series(tmp_path)[0]) == 2
    monkeypatch.setattr("casewise.data.dicom_series.MAX_BYTES", 1000)
    assert all("it may unpack to too much" in str(error) for error in survey_series(tmp_path)[1].values())
    assert len(survey_series(tmp_path)[0]) == 1


@pytest.mark.whole
@pytest.mark.parametrize("command", ["predict", "record"])
def test_a_series_without_readable_pixels_is_a_failed_case(command: str, tmp_path: Path) -> None:
    write_series(tmp_path / "in" / "good", np.arange(3 * 24 * 24).reshape(3, 24, 24))
    for path in write_series(tmp_path / "in" / "bad", np.zeros((3, 24, 24))):
        edited(path, BitsStored=None)
    words = [command, "-i", tmp_path / "in", "-o", tmp_path / "out", "-m", "worlds.discs:eroding_model"]
    more = ["--policy", "m0"] if command == "predict" else ["--propose", "views:gamma(1.4)"]
    done = CliRunner().invoke(app, [*map(str, words), *more], catch_exceptions=False)
    assert done.exit_code == 3
    assert "Failed, no mask: bad" in done.output or "1 failed" in done.output
    assert done.output.count("pixels of 000.dcm cannot be read") == 1

"""Recording: what is known of a case may come later, labels lie where their images lie, odd names lose no case."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.archive.store import describe_cases, open_archive
from casewise.archive.verify import verify
from casewise.core import records
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import made_case_id
from casewise.core.seeds import content_id
from casewise.data.folders import CaseFiles, list_cases, with_labels
from casewise.data.nifti import check_same_place
from casewise.data.splits import count_patients
from casewise.judge.policy import READY, fitted_on
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, record_folder

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)


@pytest.fixture
def recording(model: Model, images: Path) -> RecordCase:
    cases = gathered_cases(model.load(), images)
    return RecordCase(model, {"one": HOW, "two": HOW}, {files.id: files for files in cases})


def described(work: RecordCase, **facts: str) -> RecordCase:
    return replace(work, cases={name: replace(files, **facts) for name, files in work.cases.items()})


def record(work: RecordCase, path: Path, said: list[str] | None = None) -> None:
    told = None if said is None else said.append
    assert [
        result.error for result in record_folder(work, LocalEngine(), path, on_warning=told)[1] if result.error
    ] == []


def test_patients_that_become_known_later_are_filled_in_on_every_ladder(recording: RecordCase, tmp_path: Path) -> None:
    said: list[str] = []
    record(recording, tmp_path / "a")
    assert count_patients(open_archive(tmp_path / "a", ladder="one").entries.values()) == 3
    record(described(recording, cluster="p1", group="site"), tmp_path / "a", said)
    assert verify(tmp_path / "a") == []
    for ladder in ("one", "two"):
        entries = open_archive(tmp_path / "a", ladder=ladder).entries.values()
        assert {(entry.cluster, entry.group) for entry in entries} == {("p1", "site")}
        assert count_patients(entries) == 1
    assert "filled in for 3 cases" in said[0]
    record(recording, tmp_path / "a")  # a run without the table takes nothing away
    assert count_patients(open_archive(tmp_path / "a", ladder="one").entries.values()) == 1


def test_calibration_counts_the_patients_that_recording_counted(recording: RecordCase, tmp_path: Path) -> None:
    record(recording, tmp_path / "a")
    two = {name: replace(files, cluster=f"p{n % 2}") for n, (name, files) in enumerate(recording.cases.items())}
    record(replace(recording, cases=two), tmp_path / "a")
    policy = fitted_on(READY["fixed-k"], open_archive(tmp_path / "a", ladder="one").entries.values())
    assert sorted(set(policy.calibration_clusters)) == ["p0", "p1"]


def test_another_patient_than_the_recorded_one_is_refused(recording: RecordCase, tmp_path: Path) -> None:
    record(described(recording, cluster="p1", split="evaluation"), tmp_path / "a")
    for facts, wrong in (({"cluster": "p2"}, "cluster 'p1'"), ({"split": "calibration"}, "split 'evaluation'")):
        with pytest.raises(Mismatch, match=wrong):
            record(described(recording, **facts), tmp_path / "a")
    assert verify(tmp_path / "a") == []


def test_an_update_that_was_killed_is_noticed_and_finished(
    recording: RecordCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(recording, tmp_path / "a")
    known = described(recording, cluster="p1")
    with monkeypatch.context() as patch:
        patch.setattr("casewise.archive.store.Archive._seal", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            describe_cases(tmp_path / "a", known.cases.values())
    assert verify(tmp_path / "a")
    record(known, tmp_path / "a")
    assert verify(tmp_path / "a") == []


def test_the_name_of_the_image_folder_is_free(recording: RecordCase, tmp_path: Path) -> None:
    list(record_folder(recording, LocalEngine(), tmp_path / "a", dataset="first")[1])
    list(record_folder(recording, LocalEngine(), tmp_path / "a", dataset="second")[1])


# ---- labels ----


def volume(path: Path, affine: np.ndarray, shape: tuple[int, ...] = (8, 6, 4)) -> Path:
    nibabel.save(nibabel.Nifti1Image(np.ones(shape, np.uint8), affine), path)
    return path


@pytest.mark.parametrize("change", ["shifted", "flipped", "scaled"])
def test_a_label_elsewhere_than_its_image_is_refused_with_both_affines(change: str, tmp_path: Path) -> None:
    affine = np.diag([1.5, 1.5, 8.0, 1.0])
    other = affine.copy()
    if change == "shifted":
        other[0, 3] = 50.0
    elif change == "flipped":
        other[0, 0] *= -1
    else:
        other[:3, :3] *= 1.5
    image, label = volume(tmp_path / "i.nii.gz", affine), volume(tmp_path / "l.nii.gz", other)
    with pytest.raises(BadInput, match=r"ignore-geometry.*affine is \[\[.*the other is \[\[1\.5"):
        check_same_place(image, label)
    check_same_place(image, volume(tmp_path / "near.nii.gz", affine + 1e-4))


def test_a_reader_that_turns_images_accepts_a_turned_label(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.arange(192, dtype=np.uint8).reshape(8, 6, 4), np.diag([1.5, 1.5, 8.0, 1.0]))
    nibabel.save(image, tmp_path / "i.nii.gz")
    turned = image.as_reoriented(nibabel.orientations.axcodes2ornt(("P", "L", "S")))
    nibabel.save(turned, tmp_path / "l.nii.gz")
    check_same_place(tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", reorients=True)
    far = turned.affine.copy()
    far[0, 3] += 50
    nibabel.save(nibabel.Nifti1Image(np.asarray(turned.dataobj), far), tmp_path / "far.nii.gz")
    with pytest.raises(BadInput, match="50 mm away"):
        check_same_place(tmp_path / "i.nii.gz", tmp_path / "far.nii.gz", reorients=True)


def test_headers_that_say_nothing_are_accepted(tmp_path: Path) -> None:
    image = volume(tmp_path / "i.nii.gz", np.diag([1.5, 1.5, 8.0, 1.0]))
    silent = nibabel.Nifti1Image(np.ones((8, 6, 4), np.uint8), None)
    nibabel.save(silent, tmp_path / "l.nii.gz")
    check_same_place(image, tmp_path / "l.nii.gz")
    check_same_place(image, volume(tmp_path / "identity.nii.gz", np.eye(4)))
    check_same_place(image, tmp_path / "label.png")


def test_a_moved_label_affects_only_its_own_case_and_may_be_allowed(
    recording: RecordCase, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "labels").mkdir()
    affine = nibabel.load(images / "case_0_0000.nii.gz").affine
    shape = nibabel.load(images / "case_0_0000.nii.gz").shape
    for number in range(3):
        moved = affine.copy()
        moved[1, 3] += 50 * (number == 1)
        volume(tmp_path / "labels" / f"case_{number}.nii.gz", moved, shape)
    cases = with_labels(list(recording.cases.values()), tmp_path / "labels")
    work = replace(recording, cases={files.id: files for files in cases})
    results = {result.case_id: result.error for result in record_folder(work, LocalEngine(), tmp_path / "a")[1]}
    assert [name for name, error in results.items() if error] == ["case_1"]
    assert "50 mm away" in str(results["case_1"])
    record(replace(work, ignore_geometry=True), tmp_path / "a")
    assert len(open_archive(tmp_path / "a", ladder="one").ids) == 3


@pytest.mark.parametrize("image", [(24, 24), (24, 24, 1)])
@pytest.mark.parametrize("label", [(24, 24), (24, 24, 1)])
def test_a_volume_of_one_slice_keeps_its_label(
    image: tuple[int, ...], label: tuple[int, ...], model: Model, tmp_path: Path
) -> None:
    for name, shape in (("images", image), ("labels", label)):
        (tmp_path / name).mkdir()
        values = np.random.default_rng(0).normal(size=shape) if name == "images" else np.ones(shape)
        nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), 2 * np.eye(4)), tmp_path / name / "c.nii.gz")
    cases = gathered_cases(model.load(), tmp_path / "images", labels=tmp_path / "labels")
    record(RecordCase(model, {"": HOW}, {files.id: files for files in cases}), tmp_path / "a")
    assert open_archive(tmp_path / "a").label("c").sum() == 24 * 24


# ---- names ----


def test_ids_are_long_and_a_collision_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(made_case_id("é").rpartition("-")[2]) == 16
    for name in ("é", "è", "plain"):
        (tmp_path / f"{name}.nii.gz").write_bytes(b"")
    assert len(list_cases(tmp_path)) == 3

    class Weak:
        sha256 = staticmethod(lambda content: hashlib.sha256(b""))

    monkeypatch.setattr(records, "hashlib", Weak)
    with pytest.raises(BadInput, match=r"would both be case .*rename one"):
        list_cases(tmp_path)


def test_a_made_id_may_not_be_the_name_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "é.nii.gz").write_bytes(b"")
    (tmp_path / f"{made_case_id('é')}.nii.gz").write_bytes(b"")
    with pytest.raises(BadInput, match="would both be case"):
        list_cases(tmp_path)


def test_two_labels_of_one_case_are_refused(tmp_path: Path) -> None:
    for name in ("a.nii.gz", "a.nii", "b.nii.gz", "b.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(BadInput, match=r"a\.nii and a\.nii\.gz"):
        with_labels([CaseFiles("a", (tmp_path / "a.nii",))], tmp_path)


def test_a_link_to_nothing_is_a_case_that_fails(tmp_path: Path) -> None:
    (tmp_path / "a.nii.gz").write_bytes(b"")
    (tmp_path / "b.nii.gz").symlink_to(tmp_path / ".git" / "annex" / "objects" / "b.nii.gz")
    found = list_cases(tmp_path, broken_links=True)
    assert [case.id for case in found] == ["a", "b"]
    with pytest.raises(BadInput, match=r"b\.nii\.gz is a link to a missing file"):
        found[1].checked()
    with pytest.raises(BadInput, match=r"b\.nii\.gz"):
        list_cases(tmp_path)


def test_arrays_are_named_by_their_content() -> None:
    one = np.arange(6.0)
    assert content_id(one) == content_id(one[::-1][::-1])
    others = [one + 1, one.reshape(2, 3), one.astype(np.float32), one[:5]]
    assert len({content_id(one), *map(content_id, others)}) == 5
    records.check_case_id(content_id(one))

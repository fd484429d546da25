"""Recording: every candidate into an archive, labels only in the parent, resuming where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from casewise.archive.store import open_archive
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import State
from casewise.data.folders import with_labels
from casewise.guard import guard
from casewise.judge.controllers import CONTROLLERS
from casewise.replay import replay
from casewise.run.local import LocalEngine
from casewise.run.model import Adaptation, Model
from casewise.run.record import RecordCase, adaptation_of, parsed_states, record_folder
from casewise.run.setup import gathered_cases

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=2, min_area=4)


@pytest.fixture
def recording(model: Model, images: Path, tmp_path: Path) -> RecordCase:
    (tmp_path / "labels").mkdir()
    label = np.zeros((24, 24, 2), np.uint8)
    label[5:15, 5:15] = 1
    for number in range(2):
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), tmp_path / "labels" / f"case_{number}.nii.gz")
    cases = with_labels(gathered_cases(model, images), tmp_path / "labels")
    return RecordCase(model, HOW, {files.id: files for files in cases})


def test_an_archive_holds_every_step_the_shrunk_state_and_the_labels(recording: RecordCase, tmp_path: Path) -> None:
    archive, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    assert [result.error for result in results] == [None] * 3
    there = open_archive(tmp_path / "a")
    assert there.states == (State(0), State(1), State(2), State(2, 0.5))
    assert [there.entries[case_id].labelled for case_id in there.ids] == [True, True, False]
    assert there.label("case_0").sum() == 200
    assert adaptation_of(there.configuration) == HOW
    assert archive.binding == HOW.binding(recording.model.load())


def test_a_replay_of_the_archive_decides_as_the_live_run(recording: RecordCase, tmp_path: Path) -> None:
    archive, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    list(results)
    controller = CONTROLLERS.build("fixed-k", step=2)
    backbone = recording.model.load()
    for decision in replay(archive, controller):
        case = backbone.read(recording.cases[decision.case_id]).case
        live = guard(case, backbone, "tent", controller, steps=2, learning_rate=0.05, min_area=4)
        assert live.decision == decision
        np.testing.assert_array_equal(live.mask, archive.mask(case.id, decision.state))


def test_resuming_records_only_what_is_missing(recording: RecordCase, tmp_path: Path) -> None:
    some = replace(recording, cases={"case_1": recording.cases["case_1"]})
    list(record_folder(some, LocalEngine(), tmp_path / "a")[1])
    _, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    assert [result.case_id for result in results] == ["case_0", "case_2"]
    with pytest.raises(Mismatch, match="another objective"):
        record_folder(replace(recording, adaptation=replace(HOW, learning_rate=0.1)), LocalEngine(), tmp_path / "a")


def test_a_bad_case_is_left_out_and_told(recording: RecordCase, images: Path, tmp_path: Path) -> None:
    (images / "case_1_0000.nii.gz").write_bytes(b"broken")
    archive, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    errors = {result.case_id: result.kind for result in results}
    assert errors == {"case_0": None, "case_1": "BadInput", "case_2": None}
    assert archive.ids == ("case_0", "case_2")


def test_a_label_of_another_shape_is_told(recording: RecordCase, tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.zeros((5, 5, 5), np.uint8), np.eye(4)), tmp_path / "labels" / "case_0.nii.gz")
    _, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    assert {result.case_id: result.error is None for result in results} == {
        "case_0": False,
        "case_1": True,
        "case_2": True,
    }


def test_states_are_written_as_step_and_alpha() -> None:
    assert parsed_states("") == ()
    assert parsed_states("2:0.5,3:0.25") == (State(2, 0.5), State(3, 0.25))
    with pytest.raises(BadInput, match=r"step:alpha, such as 2:0.5"):
        parsed_states("2")

"""Recording: every candidate into an archive, labels only in the parent, resuming where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.archive.store import open_archive
from casewise.core.errors import BadInput, Mismatch, Overlap, UnsafeInput
from casewise.core.records import Mask, State
from casewise.data.folders import with_labels
from casewise.guard import guard
from casewise.judge.controllers import CONTROLLERS
from casewise.replay import replay
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, parsed_states, record_folder, risk_statistics

HOW = Adaptation(objective="tent", learning_rate=0.05, steps=2, min_area=4)
KEPT = replace(HOW, shrink=(State(2, 0.5),))


@pytest.fixture
def recording(model: Model, images: Path, tmp_path: Path) -> RecordCase:
    (tmp_path / "labels").mkdir()
    label = np.zeros((24, 24, 2), np.uint8)
    label[5:15, 5:15] = 1
    for number in range(2):
        nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), tmp_path / "labels" / f"case_{number}.nii.gz")
    cases = with_labels(gathered_cases(model.load(), images), tmp_path / "labels")
    return RecordCase(model, {"": KEPT}, {files.id: files for files in cases})


def test_an_archive_holds_every_step_the_shrunk_state_and_the_labels(recording: RecordCase, tmp_path: Path) -> None:
    archive, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    assert [result.error for result in results] == [None] * 3
    there = open_archive(tmp_path / "a")
    assert there.states == (State(0), State(1), State(2), State(2, 0.5))
    assert [there.entries[case_id].labelled for case_id in there.ids] == [True, True, False]
    assert there.label("case_0").sum() == 200
    assert Adaptation.from_plain(there.configuration["adaptation"]) == HOW
    assert archive.binding == HOW.binding(recording.backbone)


def test_a_replay_of_the_archive_decides_as_the_live_run(recording: RecordCase, tmp_path: Path) -> None:
    archive, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    list(results)
    controller = CONTROLLERS.build("fixed-k", step=2)
    backbone = recording.backbone
    for decision in replay(archive, controller):
        case = backbone.read(recording.cases[decision.case_id]).case
        live = guard(case, backbone, controller, "tent", steps=2, learning_rate=0.05, min_area=4)
        assert live.decision == decision
        np.testing.assert_array_equal(live.mask, archive.mask(case.id, decision.state))


def test_resuming_records_only_what_is_missing(recording: RecordCase, tmp_path: Path) -> None:
    some = replace(recording, cases={"case_1": recording.cases["case_1"]})
    list(record_folder(some, LocalEngine(), tmp_path / "a")[1])
    _, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    assert [result.case_id for result in results] == ["case_0", "case_2"]
    with pytest.raises(Mismatch, match="another learning_rate"):
        record_folder(adapting(recording, replace(KEPT, learning_rate=0.1)), LocalEngine(), tmp_path / "a")


def test_other_signals_are_another_archive(recording: RecordCase, tmp_path: Path) -> None:
    """Half of the cases with a signal and half without would be no use to anybody."""
    list(record_folder(recording, LocalEngine(), tmp_path / "a")[1])
    with pytest.raises(Mismatch, match="signals"):
        record_folder(adapting(recording, replace(KEPT, signals=("drop",))), LocalEngine(), tmp_path / "a")


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


def test_a_label_that_is_refused_unopened_affects_only_its_own_case(
    recording: RecordCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = recording.backbone
    read = backbone.read_label

    def refusing(path: Path) -> Mask:
        if path.name == "case_1.nii.gz":
            raise UnsafeInput(f"{path.name} is a bomb")
        return read(path)

    monkeypatch.setattr(type(backbone), "read_label", lambda _, path: refusing(path))
    _, results = record_folder(recording, LocalEngine(), tmp_path / "a")
    errors = {result.case_id: result.error for result in results}
    assert errors == {
        "case_0": None, "case_1": "label case_1.nii.gz cannot be used: case_1.nii.gz is a bomb", "case_2": None,
    }  # fmt: skip


def test_states_are_written_as_step_and_alpha() -> None:
    assert parsed_states("") == ()
    assert parsed_states("2:0.5,3:0.25") == (State(2, 0.5), State(3, 0.25))
    with pytest.raises(BadInput, match=r"step:alpha, such as 2:0.5"):
        parsed_states("2")


@pytest.fixture
def five(model: Model, five_images: Path) -> RecordCase:
    return RecordCase(model, {"": KEPT}, {files.id: files for files in gathered_cases(model.load(), five_images)})


def adapting(work: RecordCase, how: Adaptation) -> RecordCase:
    return replace(work, proposers={"": how})


def test_a_modulated_recording_measures_risk_with_plain_calibration_cases(five: RecordCase, tmp_path: Path) -> None:
    """C6 on step 1 of the plain archive; what comes back from the configuration modulates likewise (D8, E3)."""
    plain, results = record_folder(five, LocalEngine(), tmp_path / "plain")
    list(results)
    known = risk_statistics(tmp_path / "plain", five.model, HOW)
    first = plain.signals().query("step == 1")
    assert known.mean_regions == pytest.approx(first["regions"].mean())
    assert known.sigma_delta == pytest.approx(first["delta"].std(ddof=0))

    how = replace(HOW, modulation="param-subset", statistics=known)
    archive, results = record_folder(adapting(five, how), LocalEngine(), tmp_path / "subset")
    assert [result.error for result in results] == [None] * 5
    assert archive.binding.options["modulation"] == "param-subset"
    assert Adaptation.from_plain(open_archive(tmp_path / "subset").configuration["adaptation"]) == how
    controller, backbone = CONTROLLERS.build("fixed-k", step=2), five.backbone
    for decision in replay(archive, controller):
        case = backbone.read(five.cases[decision.case_id]).case
        live = guard(case, backbone, controller, how)
        assert live.decision == decision
    after_one = {name: known.risk(*first.set_index("case").loc[name, ["regions", "delta"]]) for name in plain.ids}
    differ = {
        step: {name for name in plain.ids if (archive.mask(name, State(step)) != plain.mask(name, State(step))).any()}
        for step in (1, 2)
    }
    assert not differ[1], "update 1 reads r_0, below 0 for every case: nothing is held back yet (D9)"
    assert differ[2]
    assert differ[2] == {name for name, risk in after_one.items() if risk > 0}


def test_risk_is_not_measured_with_other_trajectories(five: RecordCase, tmp_path: Path) -> None:
    list(record_folder(five, LocalEngine(), tmp_path / "plain")[1])
    with pytest.raises(Mismatch, match=r"recorded with learning_rate 0.05.* instead of 0.1; record .* without mod"):
        risk_statistics(tmp_path / "plain", five.model, replace(HOW, learning_rate=0.1))
    marked = {name: replace(files, split="evaluation") for name, files in five.cases.items()}
    list(record_folder(replace(five, cases=marked), LocalEngine(), tmp_path / "evaluation")[1])
    with pytest.raises(Overlap):
        risk_statistics(tmp_path / "evaluation", five.model, HOW)
    with pytest.raises(BadInput, match="name that archive with --set statistics="):
        replace(HOW, modulation="param-subset").built()

"""Guarded predictions of a folder: outputs, failures, resuming, and nothing stale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.core.chain import Chain
from casewise.core.errors import BadInput, Refused
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Policy
from casewise.deployment import Deployment
from casewise.render.mask_pictures import overlay_png
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.predict_case import PredictCase
from casewise.run.predict_folder import predict_folder, prediction_work
from casewise.run.prediction_folder import is_complete, verify_predictions
from casewise.serve.review_cases import Predictions, listed_regions

Maker = Callable[..., PredictCase]
HOW = Adaptation(objective="tent", learning_rate=0.05, steps=1, min_area=4)
M0 = Policy("m0", "m0", {}, 0)


def run(work: PredictCase, **options: Any) -> dict[str, PredictedCase]:
    return {entry.case: entry for entry in predict_folder(work, LocalEngine(), **options)}


def tree(folder: Path) -> dict[str, Any]:
    """Every file's content; entries without their timing, and no audit log (it tells of every run)."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or name == "audit.jsonl":
            continue
        found[name] = path.read_bytes()
        if name.endswith(".json") and name.startswith("casewise/"):
            found[name] = {key: value for key, value in json.loads(path.read_text()).items() if key != "timing"}
    return found


def test_every_case_has_a_mask_an_entry_and_a_line(work: Maker, tmp_path: Path, images: Path) -> None:
    made = work(draw=overlay_png, save_candidates=True)
    entries = run(made)
    assert [entry.status for entry in entries.values()] == ["done"] * 3
    entry = entries["case_0"]
    assert entry.action == "keep"
    assert entry.decision.executed == 1
    assert set(entry.signals) == {"0", "1"}
    assert entry.inputs.keys() == {"case_0_0000.nii.gz"}
    mask = nibabel.load(tmp_path / "out" / "case_0.nii.gz")
    np.testing.assert_array_equal(mask.affine, nibabel.load(images / "case_0_0000.nii.gz").affine)
    assert {path.name for path in (tmp_path / "out/casewise/candidates/case_0").iterdir()} == {"0.nii.gz", "1.nii.gz"}
    assert verify_predictions(tmp_path / "out") == []
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / "audit.jsonl").read_text().splitlines()]
    assert events == ["run-started", "case", "case", "case", "run-finished"]


def test_an_entry_counts_the_changes_of_the_written_mask_as_the_review_page_does(work: Maker, tmp_path: Path) -> None:
    """Also where a class became another one, which the signals of a controller do not see."""
    entries, folder = run(work()), Predictions(tmp_path / "out")
    for case_id, entry in entries.items():
        masks = folder.masks(case_id, folder.cases[case_id].adapted)
        listed = listed_regions(masks, min_area=folder.min_area)
        assert ((masks.source > 0) & (masks.deployed > 0) & (masks.source != masks.deployed)).any()
        assert sum(one["counts"] for one in entry.regions) == listed["total"]
        assert entry.changed == listed["area"] / np.count_nonzero(masks.source)


def test_without_adaptation_the_mask_is_m0(work: Maker, tmp_path: Path) -> None:
    run(work(save_candidates=True, out="adapted"))
    entries = run(work(policy=M0, out="plain"))
    for case_id, entry in entries.items():
        assert entry.action == "rollback"
        theirs = tmp_path / "adapted/casewise/candidates" / case_id / "0.nii.gz"
        assert (tmp_path / "plain" / f"{case_id}.nii.gz").read_bytes() == theirs.read_bytes()


def test_the_result_of_a_case_does_not_depend_on_the_others(work: Maker, tmp_path: Path) -> None:
    run(work(out="all"))
    alone = work(out="alone")
    run(replace(alone, cases={"case_2": alone.cases["case_2"]}))
    reverse = work(out="reverse")
    run(replace(reverse, cases=dict(reversed(list(reverse.cases.items())))))
    files = [(tmp_path / name / "case_2.nii.gz").read_bytes() for name in ("all", "alone", "reverse")]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("taken", ["image", "label"])
def test_a_mask_never_takes_the_place_of_an_image_or_a_label(
    model: Model, images: Path, tmp_path: Path, taken: str
) -> None:
    folders = {name: tmp_path / name for name in ("image", "label")}
    for folder in folders.values():
        folder.mkdir()
        shutil.copy(images / "case_0_0000.nii.gz", folder / "case_0.nii.gz")  # named as its mask will be
    before = (folders[taken] / "case_0.nii.gz").read_bytes()
    cases = gathered_cases(model.load(), folders["image"], labels=folders["label"])
    with pytest.raises(BadInput, match="choose another folder with -o"):
        prediction_work(Deployment(model, M0, {"": HOW}), cases, folders[taken])
    assert (folders[taken] / "case_0.nii.gz").read_bytes() == before
    assert run(prediction_work(Deployment(model, M0, {"": HOW}), cases, tmp_path / "out"))["case_0"].status == "done"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def not_a_number(path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.full((24, 24, 2), np.nan, np.float32), np.eye(4)), path)


def four_axes(path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.zeros((24, 24, 2, 3), np.float32), np.eye(4)), path)


def constant(path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones((24, 24, 2), np.float32), np.eye(4)), path)


@pytest.mark.parametrize("spoil", [truncate, not_a_number, four_axes, constant])
def test_one_bad_case_fails_alone_and_leaves_nothing_old(
    spoil: Callable[[Path], None], work: Maker, images: Path, tmp_path: Path
) -> None:
    run(work())
    assert (tmp_path / "out" / "case_1.nii.gz").exists()
    spoil(images / "case_1_0000.nii.gz")
    entries = run(work())
    assert {case: entry.status for case, entry in entries.items()} == {
        "case_0": "done", "case_1": "failed", "case_2": "done",
    }  # fmt: skip
    assert not (tmp_path / "out" / "case_1.nii.gz").exists(), "an old output stands in for a failed new one"
    assert entries["case_1"].error
    assert "\n" not in entries["case_1"].error
    assert verify_predictions(tmp_path / "out") == []


@dataclass(frozen=True)
class Breaks:
    """An objective whose update fails in a chosen way."""

    error: str

    def begin(self, subject: Any) -> Any:
        def update() -> Any:
            if self.error == "memory":
                raise torch.OutOfMemoryError("out of memory, injected")
            subject.moving()[0].data.mul_(float("nan"))
            return {}

        return update


@pytest.mark.parametrize("error", ["memory", "nan"])
def test_where_adaptation_fails_m0_is_deployed(error: str, work: Maker, tmp_path: Path) -> None:
    run(work(policy=M0, out="plain"))
    entries = run(work(adaptation=replace(HOW, objective=Breaks(error))))
    for case_id, entry in entries.items():
        assert entry.status == "fallback"
        assert entry.action == "rollback"
        assert "adaptation failed" in entry.decision.reason
        ours = (tmp_path / "out" / f"{case_id}.nii.gz").read_bytes()
        assert ours == (tmp_path / "plain" / f"{case_id}.nii.gz").read_bytes()


def test_out_of_time_deploys_m0(work: Maker) -> None:
    entries = run(work(timeout_s=1e-9))
    assert {entry.error_kind for entry in entries.values()} == {"OutOfTime"}
    assert {entry.status for entry in entries.values()} == {"fallback"}


def test_a_case_above_max_ram_is_refused(work: Maker) -> None:
    entries = run(work(max_ram=1000))
    assert all("max-ram allows" in entry.error for entry in entries.values())


def test_resuming_trusts_hashes_and_not_file_names(work: Maker, images: Path, tmp_path: Path) -> None:
    before = run(work())
    (tmp_path / "out" / "case_0.nii.gz").write_bytes(b"something else")
    nibabel.save(
        nibabel.Nifti1Image(np.eye(24, dtype=np.float32)[:, :, None] * [1, 2], np.eye(4)), images / "case_1_0000.nii.gz"
    )
    complete = {name: is_complete(work().layout, files, work().key) for name, files in work().cases.items()}
    assert complete == {"case_0": False, "case_1": False, "case_2": True}
    after = run(work(), resume=True, overwrite=True)
    assert after["case_2"].timing == before["case_2"].timing, "a complete case was done again"
    assert after["case_0"].outputs == before["case_0"].outputs
    assert after["case_1"].inputs != before["case_1"].inputs
    other = work(adaptation=replace(HOW, seed=7))
    assert not any(is_complete(other.layout, files, other.key) for files in other.cases.values())


def test_masks_that_no_run_wrote_are_refused_and_untouched(work: Maker, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "case_1.nii.gz").write_bytes(b"a label")
    with pytest.raises(
        Refused, match=r"holds case_1\.nii\.gz, which casewise did not write.*-o, or add --set overwrite=true"
    ):
        run(work())
    assert (out / "case_1.nii.gz").read_bytes() == b"a label"
    assert not (out / "audit.jsonl").exists()
    assert [entry.status for entry in run(work(), overwrite=True).values()] == ["done"] * 3
    assert [entry.status for entry in run(work()).values()] == ["done"] * 3, "what a run wrote may be replaced"


@pytest.mark.parametrize("resume", [True, False])
def test_a_mask_that_a_person_edited_is_not_replaced(resume: bool, work: Maker, tmp_path: Path) -> None:
    run(work())
    entry = tmp_path / "out" / "casewise" / "case_0.json"
    plain = json.loads(entry.read_text())
    (tmp_path / "out" / "case_0.nii.gz").write_bytes(b"drawn by hand")
    with pytest.raises(Refused, match=r"case_0\.nii\.gz, which casewise did not write or which changed since"):
        run(work(), resume=resume)
    assert (tmp_path / "out" / "case_0.nii.gz").read_bytes() == b"drawn by hand"
    assert json.loads(entry.read_text()) == plain


def test_masks_that_a_killed_run_left_without_an_entry_are_its_own(
    work: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import casewise.run.predict_case as predict_case

    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(predict_case, "write_entry", stops)
    with pytest.raises(KeyboardInterrupt):
        run(work())
    monkeypatch.undo()
    assert (tmp_path / "out" / "case_0.nii.gz").is_file()
    assert [entry.status for entry in run(work(), resume=True).values()] == ["done"] * 3


@pytest.mark.parametrize("written", range(1, 9))
def test_a_run_that_stops_at_any_write_is_completed_by_the_next(
    written: int, work: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injection at the rename: the process stops there as if it were killed, temporary files and all."""
    import casewise.core.durable as durable

    run(work(draw=overlay_png, out="whole"))
    left = [written]
    rename = durable.os.replace

    def stops(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(durable.os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        run(work(draw=overlay_png))
    monkeypatch.undo()
    run(work(draw=overlay_png), resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_later_edit_of_an_output_or_an_entry_is_found(work: Maker, tmp_path: Path) -> None:
    run(work())
    entry = tmp_path / "out" / "casewise" / "case_0.json"
    entry.write_text(entry.read_text().replace('"keep"', '"shrink"'))
    (tmp_path / "out" / "case_1.nii.gz").unlink()
    problems = verify_predictions(tmp_path / "out")
    assert problems == ["case_1.nii.gz is missing", "casewise/case_0.json is not the file that the audit log names"]
    assert Chain(tmp_path / "out" / "audit.jsonl").problems == []

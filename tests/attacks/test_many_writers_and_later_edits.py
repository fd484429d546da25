"""Several processes write to one output folder, and somebody edits it later."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.discs import disc, eroding_model

from casewise.adapt.adaptation import Adaptation
from casewise.archive import store
from casewise.archive.verify import verify
from casewise.cli.calibrate import _kept_previous
from casewise.core.chain import Chain
from casewise.core.durable import TEMPORARY, file_lock, replacing, sweep
from casewise.core.errors import Mismatch, Refused
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Binding, Case, Policy, Trajectory
from casewise.data.folders import CaseFiles
from casewise.run.local import LocalEngine, Result
from casewise.run.predict_case import PredictCase
from casewise.run.predict_folder import claimed
from casewise.run.prediction_folder import verify_predictions
from casewise.run.record_folder import RecordCase, record_folder

MODEL = "casewise.adapt.networks:phantom_cardiac"


def scans(root: Path, count: int) -> Path:
    for kind in ("images", "labels"):
        (root / kind).mkdir(parents=True)
    for number in range(count):
        voxels = np.random.default_rng(number).normal(size=(16, 16, 2)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), root / "images" / f"c{number}.nii.gz")
        nibabel.save(
            nibabel.Nifti1Image((voxels > 0).astype(np.uint8), np.eye(4)), root / "labels" / f"c{number}.nii.gz"
        )
    return root


def words(root: Path, *more: object) -> list[str]:
    typed = ["-i", root / "images", "-o", root / "out", "-l", root / "labels", "-m", MODEL, "-device", "cpu"]
    return [str(word) for word in [*typed, "--policy", "m0", "--set", "contract=off", "--set", "overlays=false", *more]]


def predict(root: Path, *more: object) -> Any:
    app = importlib.import_module("casewise.cli.predict").app
    return CliRunner().invoke(app, words(root, *more), catch_exceptions=False)


# ---- several writers ----


def test_a_sweep_leaves_the_files_of_living_writers_and_takes_those_of_dead_ones(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with replacing(tmp_path / "mask.nii.gz") as temporary:
        temporary.write_bytes(b"half")
        dead = temporary.with_name(temporary.name.replace(f"-{temporary.name.split('-')[2]}-", f"-{ended.pid}-", 1))
        old = tmp_path / f"{TEMPORARY}{'0' * 32}-of-casewise-0.1.nii.gz"
        for path in (dead, old):
            path.write_bytes(b"left behind")
        sweep(tmp_path)
        assert temporary.exists()
        assert not dead.exists()
        assert not old.exists()
    assert (tmp_path / "mask.nii.gz").read_bytes() == b"half"


def test_two_runs_share_a_folder_only_where_they_share_no_case(tmp_path: Path) -> None:
    with claimed(tmp_path, ["a", "b"]):
        with claimed(tmp_path, ["c"]):
            pass
        with pytest.raises(Refused, match=r"is predicting 1 of these cases \(such as b\) into the same folder; wait"):
            claimed(tmp_path, ["b", "c"]).__enter__()
    with claimed(tmp_path, ["b", "c"]):
        pass
    (tmp_path / "dead.json").write_text(json.dumps({"process": 1, "host": "x", "cases": ["a"]}))
    with claimed(tmp_path, ["a"]):  # nobody holds the claim of a process that was killed
        assert not (tmp_path / "dead.json").exists()


def test_a_second_process_on_the_same_cases_is_refused_in_a_sentence(tmp_path: Path) -> None:
    scans(tmp_path, 2)
    with claimed(tmp_path / "out" / "casewise" / "running", ["c1"]), pytest.raises(Refused, match="such as c1"):
        predict(tmp_path)


def test_page_and_summary_hold_the_cases_of_all_parts(tmp_path: Path) -> None:
    scans(tmp_path, 5)
    first = predict(tmp_path, "-num_parts", 2, "-part_id", 0)
    assert "3 masks" in first.stdout
    second = predict(tmp_path, "-num_parts", 2, "-part_id", 1, "--set", f"report={tmp_path / 'run.json'}").stdout
    assert "2 masks" in second
    assert "(over 5 cases)" in second
    page = (tmp_path / "out" / "report.html").read_text()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert all(f"c{number}" in page for number in range(5))
    assert len(summary["metric_per_case"]) == 5
    assert "original masks" in first.stdout
    assert "(over" not in first.stdout
    assert verify_predictions(tmp_path / "out", tmp_path / "run.json") == []


def test_cases_of_a_part_that_was_killed_are_missed_by_verify_and_on_the_page(tmp_path: Path) -> None:
    scans(tmp_path, 3)
    out = tmp_path / "out"
    Chain(out / "audit.jsonl").append("run-started", {"to_do": ["c1"]})  # and nothing more of this part
    assert predict(tmp_path, "-num_parts", 2, "-part_id", 0).exit_code == 0
    assert "1 more case of this folder had no result when this page was written (such as c1)" in (
        (out / "report.html").read_text()
    )
    (problem,) = verify_predictions(out)
    assert problem.startswith(
        "1 case that was begun has no result (such as c1): the run was killed or is still running"
    )
    assert predict(tmp_path, "-num_parts", 2, "-part_id", 1).exit_code == 0
    assert "had no result" not in (out / "report.html").read_text()
    assert verify_predictions(out) == []


@pytest.mark.slow
def test_parts_at_the_same_time_lose_no_case(tmp_path: Path) -> None:
    scans(tmp_path, 40)
    program = "from casewise.cli import main\nmain()"
    parts = [
        subprocess.Popen(
            [sys.executable, "-c", program, "predict", *words(tmp_path, "-num_parts", 4, "-part_id", part)]
        )
        for part in range(4)
    ]
    assert [part.wait() for part in parts] == [0] * 4
    assert len(list((tmp_path / "out").glob("c*.nii.gz"))) == 40
    assert len(json.loads((tmp_path / "out" / "summary.json").read_text())["metric_per_case"]) == 40
    assert verify_predictions(tmp_path / "out") == []
    assert not list((tmp_path / "out").rglob(f"{TEMPORARY}*"))


def test_a_locked_file_belongs_to_one_process(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock") as own:
        assert own is not None
        with file_lock(tmp_path / "lock", wait=False) as other:
            assert other is None
    with file_lock(tmp_path / "lock", wait=False) as after:
        assert after is not None


# ---- inputs that change during the run ----


def before_the_first_case(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Do something when the run has begun."""
    predicted = PredictCase._predicted

    def changed(self: PredictCase, files: CaseFiles, began: float) -> PredictedCase:
        if files.id == "c0":
            what()
        return predicted(self, files, began)

    monkeypatch.setattr(PredictCase, "_predicted", changed)


def test_an_image_that_vanishes_affects_only_its_own_case_and_no_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans(tmp_path, 4)
    gone, elsewhere = tmp_path / "images" / "c1.nii.gz", tmp_path / "images" / "c2.nii.gz"

    def vanish() -> None:
        gone.unlink()
        elsewhere.unlink()
        elsewhere.symlink_to("/nowhere/c2.nii.gz")

    before_the_first_case(monkeypatch, vanish)
    assert predict(tmp_path).exit_code == 3
    out = tmp_path / "out"
    entries = {path.stem: json.loads(path.read_text()) for path in (out / "casewise").glob("*.json")}
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "c0": "done", "c1": "failed", "c2": "failed", "c3": "done",
    }  # fmt: skip
    assert entries["c1"]["error"] == "No such file or directory: c1.nii.gz"
    assert entries["c2"]["error"].startswith("c2.nii.gz is a link to a missing file")
    for file in (*(out / "casewise").glob("*.json"), out / "audit.jsonl", out / "report.html"):
        assert str(tmp_path) not in file.read_text(), file.name


def test_an_image_that_changes_while_it_is_read_has_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans(tmp_path, 2)
    read = iter(range(100))
    monkeypatch.setattr("casewise.run.predict_case.input_hashes", lambda files: {files.id: str(next(read) == 0)})
    assert predict(tmp_path).exit_code == 3
    entries = [json.loads((tmp_path / "out" / "casewise" / f"c{number}.json").read_text()) for number in range(2)]
    assert [entry["status"] for entry in entries] == ["failed", "done"]
    assert entries[0]["error"] == "the image of case c0 was changed while it was read; predict it again"


def test_a_damaged_label_affects_only_its_own_score_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans(tmp_path, 4)
    labels = tmp_path / "labels"

    def damage() -> None:
        (labels / "c1.nii.gz").write_bytes((labels / "c1.nii.gz").read_bytes()[:60])
        (labels / "c2.nii.gz").unlink()
        other = nibabel.Nifti1Image(np.zeros((8, 8, 2), np.uint8), np.eye(4))
        nibabel.save(other, labels / "c3.nii.gz")

    before_the_first_case(monkeypatch, damage)
    done = predict(tmp_path)
    assert done.exit_code == 3
    summary, page = (json.loads((tmp_path / "out" / "summary.json").read_text()), tmp_path / "out" / "report.html")
    assert list(summary["adapt"]["cases"]) == ["c0"]
    for sentence in ("c1 is not scored: c1.nii.gz", "c2 is not scored: c2.nii.gz is not a file", "c3 is not scored: l"):
        assert f"! {sentence}" in done.stderr
        assert sentence in page.read_text()
    assert "(over 1 case)" in done.stdout
    assert verify_predictions(tmp_path / "out") == []


# ---- later edits ----


def log_lines(out: Path) -> list[str]:
    return (out / "audit.jsonl").read_text().splitlines(keepends=True)


def cut_off(out: Path) -> None:
    (out / "audit.jsonl").write_text("".join(log_lines(out)[:-2]))


def written_anew(out: Path) -> None:
    events = Chain(out / "audit.jsonl").lines()
    (out / "audit.jsonl").unlink()
    for event in events:
        plain = {key: value for key, value in event.items() if key not in ("event", "previous", "hash", "time")}
        Chain(out / "audit.jsonl").append(event["event"], {**plain, "note": "changed"})


def edited_page(out: Path) -> None:
    (out / "report.html").write_text((out / "report.html").read_text() + "<p>all is well</p>")


def edited_summary(out: Path) -> None:
    (out / "summary.json").write_text((out / "summary.json").read_text().replace("1", "9", 1))


def unlogged_entry(out: Path) -> None:
    (out / "casewise" / "c9.json").write_bytes((out / "casewise" / "c0.json").read_bytes())


def stray_mask(out: Path) -> None:
    (out / "c7.nii.gz").write_bytes((out / "c0.nii.gz").read_bytes())


def without_its_entry(out: Path) -> None:
    (out / "casewise" / "c0.json").unlink()


def edited_mask(out: Path) -> None:
    (out / "c0.nii.gz").write_bytes((out / "c1.nii.gz").read_bytes() + b"\0")


EDITS: dict[Callable[[Path], None], str] = {
    cut_off: "audit.jsonl was truncated: the report has",
    written_anew: "audit.jsonl was replaced: its line",
    edited_page: "report.html was changed after it was written",
    edited_summary: "summary.json was changed after it was written",
    unlogged_entry: "casewise/c9.json has no line in the audit log",
    stray_mask: "c7.nii.gz is a mask without an entry",
    without_its_entry: "c0.nii.gz is a mask without an entry",
    edited_mask: "c0.nii.gz was changed after it was written",
}


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = scans(tmp_path_factory.mktemp("predicted"), 2)
    assert predict(root, "--set", f"report={root / 'run.json'}").exit_code == 0
    return root


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_verify_notices(edit: Callable[[Path], None], predicted: Path, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "copy"
    shutil.copytree(predicted, root)
    app = importlib.import_module("casewise.cli.inspect").app
    typed = [str(root / "out"), "--set", f"report={root / 'run.json'}"]
    assert CliRunner().invoke(app, typed, catch_exceptions=False).exit_code == 0
    edit(root / "out")
    done = CliRunner().invoke(app, typed, catch_exceptions=False)
    assert done.exit_code == 1
    assert EDITS[edit] in done.stdout


def test_ladders_that_begin_at_once_on_one_new_archive_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = store.write_manifest
    monkeypatch.setattr(store, "write_manifest", lambda *given: (time.sleep(0.01), slow(*given)))
    binding = Binding("m", "tent", "array", "min_area=16")
    start = threading.Barrier(6)

    def record(number: int) -> None:
        start.wait()
        archive = store.create_archive(tmp_path / "a", binding=binding, steps=1, ladder=f"l{number}")
        mask = np.zeros((4, 4), np.uint8)
        made = Trajectory("c", (mask, mask + number % 2), ({}, {}))
        archive.add(Case("c", np.zeros((1, 4, 4))), made).seal()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(record, range(6)))
    found = store.open_archive(tmp_path / "a")
    assert sorted(found.ladders) == [f"l{number}" for number in range(6)]
    assert verify(tmp_path / "a") == []
    assert sorted(found.manifest["cases"]["c"]["ladders"]) == sorted(found.ladders)


@pytest.mark.parametrize(("changed", "image", "label"), [("", 0, 0), ("image", 1, 0), ("label", 0, 1)])
def test_a_recorded_case_whose_image_or_label_changed_is_refused(
    changed: str, image: int, label: int, tmp_path: Path
) -> None:
    """The candidates and the label that were recorded would be taken for those of the new files."""

    def record(image: int, label: int) -> list[Result]:
        cases = {"c": Case("c", disc(image, 2, 24)[0], cluster="p")}
        work = RecordCase(
            eroding_model(), {"one": Adaptation("tent", 0.05, steps=1)}, cases, {"c": disc(label, 2, 24)[1]}
        )
        return list(record_folder(work, LocalEngine(), tmp_path / "a")[1])

    assert record(0, 0)[0].error is None
    with pytest.raises(Mismatch, match=f"the {changed} of case c changed") if changed else nullcontext():
        assert record(image, label) == []
    assert verify(tmp_path / "a") == []


def test_a_policy_that_is_put_aside_stays_for_a_second_calibrate(tmp_path: Path) -> None:
    """Two at the same time: the second one found no file to rename and ended with a traceback."""
    (tmp_path / "policy.json").write_text("{}")
    made = Policy("m0", "fixed-k", {"step": 0}, 1)
    kept = [_kept_previous(tmp_path, made) for _ in range(2)]
    assert [one.name for one in kept if one is not None] == ["policy-previous-1.json", "policy-previous-2.json"]
    assert (tmp_path / "policy.json").read_text() == "{}"

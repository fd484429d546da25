"""``kill -9`` while a command writes: the output is reported as incomplete, and the next run finishes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive
from worlds.discs import disc, eroding_model
from worlds.kills import killed, kills
from worlds.predictions import hearts
from worlds.updates import update

import casewise
from casewise.adapt.adaptation import Adaptation
from casewise.archive.store import open_archive
from casewise.archive.verify import verify
from casewise.cli import app
from casewise.cli.certify import _check_place
from casewise.core.durable import TEMPORARY, write_durably
from casewise.core.errors import BadInput
from casewise.core.records import Case, Policy
from casewise.judge.certificates.certificate import CERTIFICATE, CERTIFICATE_PAGE, certificate_problems
from casewise.judge.policy import write_policy
from casewise.learn.tuning import Tuning
from casewise.run.local import LocalEngine
from casewise.run.prediction_folder import verify_predictions
from casewise.run.record_folder import RecordCase, record_folder


def call(*words: object) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    return result


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(f"{TEMPORARY}*")]


def same(one: Path, other: Path, *without: str) -> None:
    """Both folders hold the same files with the same bytes."""
    trees = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (one, other)
    ]
    names = [{name for name in tree if not name.endswith(without)} for tree in trees]
    assert names[0] == names[1]
    assert all(trees[0][name] == trees[1][name] for name in names[0])


def is_called_incomplete(folder: Path) -> bool:
    seen = CliRunner().invoke(app, ["inspect", str(folder)])
    return seen.exit_code == 1 and "incomplete" in seen.output


def test_certify(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "archive", cases=24).path
    call("calibrate", archive, "--policy", "cardiac")
    words = ("certify", archive, "--alpha", "0.3", "--set", "force=true", "--out")
    call(*words, tmp_path / "whole")
    tried = 0
    for at in kills(lambda: call(*words, tmp_path / "out"), every=2):
        tried += 1
        incomplete = certificate_problems(tmp_path / "out") if (tmp_path / "out").exists() else []
        assert bool(incomplete) == (tmp_path / "out" / CERTIFICATE).exists(), at
        assert is_called_incomplete(tmp_path / "out") or not incomplete
        call(*words, tmp_path / "out")
        assert certificate_problems(tmp_path / "out") == []
        assert killed(lambda: call(*words, tmp_path / "out"), at=3)
        assert is_called_incomplete(tmp_path / "out"), "its page is that of another certificate"
        call(*words, tmp_path / "out")
        assert not left_behind(tmp_path / "out")
        same(tmp_path / "out", tmp_path / "whole", "json", "html")
        shutil.rmtree(tmp_path / "out")
    assert tried >= 2


def test_predict(tmp_path: Path) -> None:
    """Killed after the last mask, too: page, summary and the refusal of a foreign folder come after it."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        volume = nibabel.Nifti1Image(disc(number, 2, 24)[0][0][..., None], np.diag([1.5, 1.5, 5, 1]))
        nibabel.save(volume, images / f"{number}.nii.gz")
    words = ("predict", "-i", images, "-m", "worlds.discs:eroding_model", "--policy", "m0", "--continue_prediction",
             "-o", tmp_path / "out")  # fmt: skip
    tried = 0
    for at in kills(lambda: call(*words), every=3):
        if (tmp_path / "out" / "audit.jsonl").is_file():
            tried += 1
            assert verify_predictions(tmp_path / "out"), at
        shutil.rmtree(tmp_path / "out")
    call(*words)
    assert verify_predictions(tmp_path / "out") == []
    assert tried >= 4
    log = tmp_path / "out" / "audit.jsonl"  # every mask is there, and its worker processes were just ended
    log.write_text(
        "".join(
            line for line in log.read_text().splitlines(True) if '"run-finished"' not in line and '"pages"' not in line
        )
    )
    assert any("incomplete" in problem for problem in verify_predictions(tmp_path / "out"))


def test_a_command_removes_what_a_killed_one_left_beside_its_output(tmp_path: Path) -> None:
    def write() -> None:
        write_durably(tmp_path / "decisions.jsonl", b"{}")

    assert killed(write, at=1)
    assert left_behind(tmp_path)
    assert not killed(write, at=99)
    assert not left_behind(tmp_path)


def test_a_page_of_somebody_else_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / CERTIFICATE_PAGE).write_text("mine")
    with pytest.raises(BadInput, match="did not write"):
        _check_place(tmp_path)


def test_a_take_over(tmp_path: Path) -> None:
    root = update(tmp_path, cases=4, wrong=False)
    binding = {
        "model": "imported",
        "objective": "v2",
        "loader": "masks",
        "measure": "min_area=1 foreground=True connectivity=face",
    }
    policy = Policy("fixed-k", "fixed-k", {"step": 1}, 1, binding=casewise.core.records.Binding(**binding))
    words = (
        "compare", root / "old", root / "new", "--take-over", write_policy(tmp_path / "p.json", policy),
        "--set", "method=v2", "-o",
    )  # fmt: skip
    call(*words, tmp_path / "whole")
    tried = 0
    for _ in kills(lambda: call(*words, tmp_path / "out"), every=4):
        masks = tmp_path / "out" / "masks"
        if masks.is_dir() and (masks / "audit.jsonl").is_file():
            tried += 1
            assert any("incomplete" in problem for problem in verify_predictions(masks)) or not verify_predictions(
                masks
            )
        call(*words, tmp_path / "out")
        assert verify_predictions(masks) == []
        assert not left_behind(tmp_path / "out")
        for mask in (tmp_path / "whole" / "masks").glob("*.nii.gz"):
            assert (masks / mask.name).read_bytes() == mask.read_bytes()
        shutil.rmtree(tmp_path / "out")
    assert tried >= 2


def test_review_apply(tmp_path: Path) -> None:
    folder = hearts(tmp_path / "predictions").layout.out
    words = ("review", folder, "--apply", "-o")
    result = CliRunner().invoke(app, [*map(str, words), str(tmp_path / "whole")])
    assert result.exit_code in (0, 3), result.output

    def apply() -> None:
        assert CliRunner().invoke(app, [*map(str, words), str(tmp_path / "out")]).exit_code in (0, 3)

    tried = 0
    for _ in kills(apply, every=2):
        tried += 1
        if (tmp_path / "out" / "applied.jsonl").is_file():
            assert any("incomplete" in problem for problem in verify_predictions(tmp_path / "out"))
        apply()
        assert verify_predictions(tmp_path / "out") == []
        assert not left_behind(tmp_path / "out")
        same(tmp_path / "out", tmp_path / "whole", "jsonl")
        shutil.rmtree(tmp_path / "out")
    assert tried >= 2


SHORT = Tuning(updates=2, batch=2, augmentation="none")


def fitted(out: Path) -> casewise.Deployment:
    made = [disc(number, 2, 24) for number in range(5)]
    patients = [f"p{number}" for number in range(5)]
    images, labels = [image for image, _ in made], [label for _, label in made]
    return casewise.fit(eroding_model(), images, labels, patients=patients, out=out, views="", tuning=SHORT, jobs=1)


def test_fit_and_its_recording(tmp_path: Path) -> None:
    """Killed in tuning, in recording, in choosing and while the deployment is written: the next call goes on."""
    whole = fitted(tmp_path / "whole")
    done = []
    for _ in kills(lambda: fitted(tmp_path / "out"), every=9, most=60):  # every run goes on where the last was killed
        done.append(len(list((tmp_path / "out").rglob("*"))))
        if (tmp_path / "out" / "plan.json").exists() and not (tmp_path / "out" / "fit.html").exists():
            assert is_called_incomplete(tmp_path / "out")
    again = fitted(tmp_path / "out")
    assert len(done) >= 3
    assert done == sorted(done), "nothing that was finished is lost"
    assert replace_ids(again.policy) == replace_ids(whole.policy)
    assert verify(tmp_path / "out" / "archive") == []
    assert not left_behind(tmp_path / "out")
    image = disc(9, 2, 24)[0]
    np.testing.assert_array_equal(again.predict(image).mask, whole.predict(image).mask)
    tuned = [json.loads((root / "tuned" / "folds.json").read_text()) for root in (tmp_path / "out", tmp_path / "whole")]
    assert tuned[0] == tuned[1]


def recorded(out: Path) -> None:
    cases = {f"c{number}": Case(f"c{number}", disc(number, 2, 24)[0], cluster=f"p{number}") for number in range(3)}
    labels = {name: disc(number, 2, 24)[1] for number, name in enumerate(cases)}
    hows = {name: Adaptation("tent", 0.05, steps=1) for name in ("one", "two")}
    work = RecordCase(eroding_model(), hows, cases, labels=labels)
    assert not [one.error for one in record_folder(work, LocalEngine(), out)[1] if one.error]


def test_record(tmp_path: Path) -> None:
    """Killed before any of its files is durable: cases that are there are whole, and the next run adds the rest."""
    recorded(tmp_path / "whole")
    done = []
    for _ in kills(lambda: recorded(tmp_path / "out"), every=5):  # every run goes on where the last was killed
        done.append(len(list((tmp_path / "out").glob("cases/*/entry.json"))))
        if (tmp_path / "out" / "manifest.json").exists() and done[-1] < 3:
            assert any("incomplete" in problem for problem in verify(tmp_path / "out"))
    recorded(tmp_path / "out")
    assert len(done) >= 3
    assert done == sorted(done), "no recorded case is lost"
    assert verify(tmp_path / "out") == []
    assert not left_behind(tmp_path / "out")
    for ladder in ("one", "two"):
        views = [open_archive(tmp_path / name, ladder=ladder) for name in ("out", "whole")]
        assert views[0].ids == views[1].ids == ("c0", "c1", "c2")
        for name in views[0].ids:
            assert views[0].entries[name].mask_sha256 == views[1].entries[name].mask_sha256


def test_import(tmp_path: Path) -> None:
    root = update(tmp_path, cases=4, wrong=False)
    words = ("import", "--old", root / "old", "--new", root / "new", "-o")
    call(*words, tmp_path / "whole")
    tried = 0
    for _ in kills(lambda: call(*words, tmp_path / "out"), every=5, most=60):
        tried += 1
        if (tmp_path / "out" / "manifest.json").exists():
            assert any("incomplete" in problem for problem in verify(tmp_path / "out"))
        assert is_called_incomplete(tmp_path / "out")
        call(*words, tmp_path / "out")
        assert verify(tmp_path / "out") == []
        same(tmp_path / "out", tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")
    assert tried >= 2


def test_compare(tmp_path: Path) -> None:
    root = update(tmp_path, cases=4)
    words = ("compare", root / "old", root / "new", "-l", root / "labels", "-j", 1, "-o")
    call(*words, tmp_path / "whole")
    tried = 0
    for _ in kills(lambda: call(*words, tmp_path / "out"), every=3):
        tried += 1
        assert is_called_incomplete(tmp_path / "out") != (tmp_path / "out" / "summary.json").exists()
        call(*words, tmp_path / "out")
        assert not left_behind(tmp_path / "out")
        same(tmp_path / "out", tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")
    assert tried >= 2


def replace_ids(policy: Policy) -> dict[str, Any]:
    """What a policy does, without ids of the archive that it was fitted on."""
    return {"controller": policy.controller, "options": dict(policy.options), "cleanup": policy.cleanup}

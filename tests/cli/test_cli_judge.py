"""import, verify, calibrate and replay, as a person types them."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from worlds.cohorts import synthetic_archive

from casewise.cli import app
from casewise.core.errors import BadInput, CasewiseError, UnknownName


def said(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, CasewiseError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


@pytest.fixture
def archive(tmp_path):
    return synthetic_archive(tmp_path / "a", cases=12).path


def test_calibrate_prints_the_preflight_and_writes_the_policy_into_the_archive(archive):
    output = said("calibrate", archive, "--policy", "cardiac").output
    for words in ("cut-points of delta", "buckets: low", "under resampling", "helped", "HA by step", "smallest risk"):
        assert words in output
    policy = json.loads((archive / "policy.json").read_text())
    assert policy["name"] == "cardiac"
    assert policy["preflight"]["retained"]["go"] is True
    assert "choices in this design: shrink 0.5 (never varied)" in output


def test_a_degenerate_coordinate_is_reported(tmp_path):
    archive = synthetic_archive(tmp_path, cases=24).path
    assert "leave mid empty" in said("calibrate", archive, "--policy", "prostate").stderr


def test_the_policy_is_replayed_from_its_folder_and_decisions_are_written(archive, tmp_path):
    said("calibrate", archive, "--policy", "cardiac")
    output = said("replay", archive, archive, "-o", tmp_path / "decisions.jsonl").output
    assert output.startswith("12 cases: ")
    assert "executed" in output
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    assert {"value", "cut_low", "cut_high", "bucket", "action", "executed", "deployed", "state_hash"} <= set(lines[0])


def test_replay_replaces_its_own_decisions_and_no_other_file(archive, tmp_path):
    out = tmp_path / "decisions.jsonl"
    for step in (1, 2):
        said("replay", archive, "fixed-k", "--option", f"step={step}", "-o", out)
    assert {json.loads(line)["deployed"] for line in out.read_text().splitlines()} == {2}
    for foreign in (b'{"case": "mine"}\n', b"\x89PNG\r\n", b"[1]\n"):
        out.write_bytes(foreign)
        with pytest.raises(BadInput, match="replay did not write"):
            said("replay", archive, "fixed-k", "--option", "step=1", "-o", out)
        assert out.read_bytes() == foreign


@pytest.mark.parametrize(
    ("words", "deployed"), [(["m0"], "0.000"), (["fixed-k", "--option", "step=2"], "2.000"), (["frag-stop"], "")]
)
def test_a_controller_without_calibration_is_replayed_by_name(archive, words, deployed):
    assert f"mean steps deployed {deployed}" in said("replay", archive, *words).output


def test_a_router_without_calibration_says_so(archive):
    with pytest.raises(BadInput, match="run casewise calibrate first"):
        said("replay", archive, "router")
    with pytest.raises(UnknownName, match="Did you mean 'frag-stop'"):
        said("replay", archive, "fragstop")
    with pytest.raises(BadInput, match="--option takes name=value"):
        said("replay", archive, "fixed-k", "--option", "step")


def test_verify_says_whole_or_names_the_damage(archive):
    assert "no problem found" in said("inspect", archive).output
    (archive / "cases/case-0003/masks.npz").write_bytes(b"no")
    result = said("inspect", archive)
    assert result.exit_code == 1
    assert "case-0003: masks.npz was changed" in result.output


def test_verify_of_a_folder_that_is_not_there_is_a_wrong_argument_and_no_damage(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere does not exist"):
        said("inspect", tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="is not a folder"):
        said("inspect", tmp_path / "file")


def blob(size):
    mask = np.zeros((24, 24), np.uint8)
    mask[4 : 4 + size, 4 : 4 + size] = 1
    return mask


@pytest.mark.parametrize("kind", ["npy", "png", "nii.gz"])
def test_masks_of_every_kind_are_imported_calibrated_and_replayed(tmp_path, kind):
    (tmp_path / "labels").mkdir()
    for number in range(6):
        folder = tmp_path / "masks" / f"c{number}"
        folder.mkdir(parents=True)
        for step in range(3):
            save(folder / f"step_{step}.{kind}", blob(8 + step + number // 2), kind)
        save(tmp_path / "labels" / f"c{number}.{kind}", blob(12), kind)
    made = tmp_path / "archive"
    output = said("import", "--masks", tmp_path / "masks", "--labels", tmp_path / "labels", "--out", made).output
    assert "6 cases, 2 steps, 6 labelled" in output
    assert "no problem found" in said("inspect", made).output
    assert "GO" in said("calibrate", made, "--policy", "prostate", "--set", "coordinate=delta").output
    assert said("replay", made, made).output.startswith("6 cases")


def save(path, mask, kind):
    if kind == "npy":
        np.save(path, mask)
    elif kind == "png":
        Image.fromarray(mask).save(path)
    else:
        import nibabel

        nibabel.save(nibabel.Nifti1Image(mask[..., None], np.diag([1.5, 1.5, 5.0, 1.0])), path)


def test_a_file_with_a_pickle_inside_is_not_imported(tmp_path):
    folder = tmp_path / "masks" / "c1"
    folder.mkdir(parents=True)
    for step in range(2):
        np.save(folder / f"step_{step}.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(BadInput, match="not a plain NumPy array"):
        said("import", "--masks", tmp_path / "masks", "--out", tmp_path / "archive")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("router",), "has no coordinate"),
        (("router", "--set", "coordinate=delta"), "these have: default, cardiac"),
        (("frag-stop", "--set", "coordinate=delta"), "coordinate works only with policies that route"),
        (("fixed-k", "--set", "coordinate=delta"), "coordinate works only with policies that route"),
        (("choose", "--set", "coordinate=delta", "--set", "hybrid=true"), "reads no coordinate, hybrid; leave it out"),
    ],
)
def test_an_option_that_a_policy_does_not_read_is_refused(archive, words, refusal):
    with pytest.raises(BadInput, match=refusal):
        said("calibrate", archive, "--policy", *words)
    assert not (archive / "policy.json").exists()


def test_a_file_that_was_named_and_is_not_there_is_one_sentence(monkeypatch, capsys):
    from casewise.cli import main

    def gone(*_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "nope")

    monkeypatch.setattr("casewise.archive.store.as_archive", gone)
    monkeypatch.setattr("sys.argv", ["casewise", "calibrate", "nope"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "nope does not exist" in capsys.readouterr().err

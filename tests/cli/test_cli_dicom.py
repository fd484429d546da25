"""casewise predict on a folder of DICOM series: NIfTI, SEG and a structured report, for any backbone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from casewise.adapt.adaptation import Adaptation
from casewise.cli import app
from casewise.core.errors import BadInput
from casewise.core.prediction_record import OUTSIDE, PredictedCase
from casewise.core.records import Action, Decision, Policy, State
from casewise.data.nifti import read_label
from casewise.judge.policy import write_policy
from casewise.run.dicom import decision_sentence, flag_sentence
from casewise.run.predict_folder import _in_words

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("highdicom")

from miniature_nnunet import scan, write_model, write_scans  # noqa: E402
from worlds.dicom_series import OBLIQUE, STRAIGHT, find_series, read_report, read_segmentation, write_series  # noqa: E402


def said(*words: object, code: int = 0) -> Any:
    torch.set_num_threads(1)
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), steps=12)


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    """A straight, a descending and an oblique series, and one with a missing slice."""
    for name, orientation, step_mm, seed in (
        ("straight", STRAIGHT, 2.0, 1), ("descending", STRAIGHT, -2.0, 2), ("oblique", OBLIQUE, 2.0, 3),
    ):  # fmt: skip
        values = np.rint(scan(seed, shift=0.3)[0])
        write_series(tmp_path / "in" / name, values, orientation=orientation, step_mm=step_mm, pixel_mm=(1.0, 1.0))
    write_series(tmp_path / "in" / "torn", np.rint(scan(4)[0]))[1].unlink()
    return tmp_path / "in"


def test_series_go_in_and_masks_come_out_in_every_form(model: Path, studies: Path, tmp_path: Path) -> None:
    out, how = tmp_path / "out", Adaptation("tent", learning_rate=1e-3, steps=1).as_plain()
    policy = write_policy(tmp_path / "policy.json", Policy("fixed-k", "fixed-k", {"step": 1}, 1, adaptation=how))
    words = ("predict", "-i", studies, "-o", out, "-m", model, "--disable_tta", "-device", "cpu", "--policy", policy,
             "--set", "overlays=false", "--set", "contract=warn")  # fmt: skip
    result = said(*words, code=3)  # the torn series
    lost = "series torn: 1 slice is missing between 000.dcm and 002.dcm"
    assert lost in result.stderr
    assert lost in (out / "report.html").read_text(), "who reads the page only must see that a series has no mask"
    assert sorted(path.name for path in (out / "dicom").iterdir()) == [
        f"{name}.{kind}.dcm" for name in ("descending", "oblique", "straight") for kind in ("seg", "sr")
    ]
    for name in ("straight", "descending", "oblique"):
        (series,) = find_series(studies / name)
        mask = read_label(out / f"{name}.nii.gz")
        assert mask.any()
        assert np.array_equal(read_segmentation(out / "dicom" / f"{name}.seg.dcm", series), mask)
        entry = json.loads((out / "casewise" / f"{name}.json").read_text())
        report = read_report(out / "dicom" / f"{name}.sr.dcm")
        assert report["decision"].startswith("Used: a new mask (step 1), not the model's original one. Why: ")
        assert report["certificate"] == "no certificate was given"
        assert entry["status"] == "done"
    assert b"Doe" not in (out / "casewise" / "images" / "straight_0000.nii.gz").read_bytes()
    again = json.loads(said(*words, "--continue_prediction", "--json", code=3).stdout)
    assert again["statuses"] == {"done": 3}


def test_a_report_calls_a_view_no_update_and_repeats_no_promise_that_is_void() -> None:
    decision = Decision("a", Action.KEEP, State(13), 13, "consensus", reason="the consensus of the candidates")
    why = "the consensus of the candidates"
    sentence = f"Used: a new mask (mean), not the model's original one. Why: {why}"
    assert decision_sentence(PredictedCase("a", "done", decision, "mean")) == sentence
    for void, expected in (
        (None, "at most one in ten"),
        ("the watch rang", "the certificate does not hold here: the watch rang"),
    ):
        assert _in_words({"statement": "at most one in ten", "why_void": void}) == expected
    assert _in_words(None) == ""


def test_the_report_of_a_case_that_the_labels_do_not_cover_gives_no_bound() -> None:
    why = "mean for every case; flagged: its quality may be as low as 0.629"
    decision = Decision("a", Action.KEEP, State(1), 1, "fixed-candidate", reason=why, flagged=True, quality_low=0.629)
    known = PredictedCase("a", "done", decision, candidate="mean")
    assert (why in decision_sentence(known), "as low as 0.63" in flag_sentence(known)) == (True, True)
    unlike = replace(known, notes=(f"{OUTSIDE}: its masks are unlike the others",))
    assert decision_sentence(unlike).endswith("Why: mean for every case")
    assert flag_sentence(unlike) == f"flagged by the policy; {OUTSIDE}: its masks are unlike the others"


def test_inspect_says_who_reads_a_folder_of_series(studies: Path) -> None:
    with pytest.raises(BadInput, match="holds DICOM series, which fit, predict and record read"):
        said("inspect", studies)


def test_a_part_without_a_series_is_no_error(studies: Path) -> None:
    from casewise.run.dicom import write_series as converted

    assert converted(studies, ()) == ((), {})


def test_record_takes_series_and_keeps_patients_together(studies: Path, tmp_path: Path) -> None:
    from casewise.archive.store import open_archive

    words = ("-m", "casewise.adapt.networks:phantom_cardiac", "--steps", "1", "--set", "shrink=", "-device", "cpu")
    said("record", "-i", studies, "-o", tmp_path / "archive", *words, code=3)  # one series lacks a slice
    archive = open_archive(tmp_path / "archive")
    assert archive.ids == ("descending", "oblique", "straight")
    assert len({entry.cluster for entry in archive.entries.values()}) == 1  # all of patient P1


def test_the_monai_deploy_operator_runs_predict_and_passes_the_folder_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in for the SDK, where that is not installed; the test below takes the SDK itself."""
    import importlib
    import subprocess
    import sys
    import types

    class Operator:
        def __init__(self, fragment: object, *args: object, **kwargs: object) -> None:
            self.fragment = fragment

    parts: dict[str, dict[str, object]] = {
        "monai.deploy": {},
        "monai.deploy.core": {
            "Application": object, "ConditionType": object, "Operator": Operator, "OperatorSpec": object
        },
        "monai.deploy.conditions": {"CountCondition": object},
    }  # fmt: skip
    for name, content in parts.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "monai_deploy_operator", raising=False)
    operator = importlib.import_module("monai_deploy_operator").GuardedSegmentation
    monkeypatch.delitem(sys.modules, "monai_deploy_operator")
    made = operator(None, model="M", policy="P", out=str(tmp_path), series="own", config=Path("c.toml"))
    asked: list[list[str]] = []
    codes = iter((3, 0, 1))

    def ran(words: list[str]) -> types.SimpleNamespace:
        asked.append(words)
        return types.SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(subprocess, "run", ran)
    folders = iter((Path("series"), None, None, None))
    given = types.SimpleNamespace(receive=lambda name: next(folders))
    emitted: list[object] = []
    passed = types.SimpleNamespace(emit=lambda value, name: emitted.append((value, name)))
    made.compute(given, passed, None)
    made.compute(given, passed, None)
    assert emitted == [(tmp_path / "dicom", "dicom_folder")] * 2
    assert asked[0][2:8] == ["casewise", "--config", "c.toml", "predict", "-i", "series"]
    assert asked[1][7] == "own"  # nobody gave another folder
    with pytest.raises(RuntimeError, match="exit code 1"):
        made.compute(given, passed, None)
    with pytest.raises(ValueError, match="no folder of series"):
        operator(None, model="M", policy="P").compute(given, passed, None)


def test_the_monai_deploy_application_runs_in_the_sdk(model: Path, tmp_path: Path) -> None:
    """In a process of its own, since the SDK's threads outlive an application."""
    import subprocess
    import sys
    from importlib.util import find_spec

    if find_spec("monai") is None or find_spec("monai.deploy") is None:
        pytest.skip("needs the MONAI Deploy App SDK (pip install monai-deploy-app-sdk)")
    import monai_deploy_operator

    write_series(tmp_path / "in" / "heart", np.rint(scan(1, shift=0.3)[0]), step_mm=2.0, pixel_mm=(1.0, 1.0))
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "network").symlink_to(model)
    words = ("-m", model, "--disable_tta", "-device", "cpu", "--propose", "views:mirror(x),gamma(1.4)")
    write_scans(tmp_path, range(20, 26), shift=0.3)
    said("record", "-i", tmp_path / "images", "-l", tmp_path / "labels", "-o", tmp_path / "archive", *words)
    said("calibrate", tmp_path / "archive", "--policy", "consensus", "-o", tmp_path / "pack" / "policy.json")
    (tmp_path / "pack" / "casewise.toml").write_text('[predict]\ndisable_tta = true\ndevice = "cpu"\n')
    places = ("-i", tmp_path / "in", "-o", tmp_path / "out", "-m", tmp_path / "pack")
    program = [sys.executable, str(monai_deploy_operator.__file__), *map(str, places)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (series,) = find_series(tmp_path / "in")
    mask = read_label(tmp_path / "out" / "heart.nii.gz")
    assert np.array_equal(read_segmentation(tmp_path / "out" / "dicom" / "heart.seg.dcm", series), mask)


def two_channels() -> torch.nn.Module:
    """A network that takes T1 and FLAIR and finds what is bright in the second."""
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.InstanceNorm2d(2, affine=True))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[0.0, -1.0], [0.0, 1.0]])[:, :, None, None])
        network[0].bias.zero_()
    return network


@pytest.fixture
def brain(tmp_path: Path) -> Path:
    """A study with three series, of which two are channels, and another one whose FLAIR has another grid."""
    values = np.rint(scan(1)[0])
    for study, flair in (("ann", values.max() - values), ("bob", values[:, :-2])):
        uid = pydicom.uid.generate_uid()
        for number, (name, planes) in enumerate((("T1 ax", values), ("FLAIR ax", flair), ("scout", values[:1]))):
            place = tmp_path / "in" / study / name.split()[0]
            write_series(
                place, planes, StudyInstanceUID=uid, SeriesDescription=name, SeriesNumber=number, patient=study
            )
    return tmp_path / "in"


def test_series_of_one_study_are_the_channels_of_one_case(brain: Path, tmp_path: Path) -> None:
    out, network = tmp_path / "out", f"{__name__}:two_channels"
    words = (
        "predict",
        "-i",
        brain,
        "-o",
        out,
        "-m",
        network,
        "-device",
        "cpu",
        "--policy",
        "m0",
        "--set",
        "overlays=false",
    )
    result = said(*words, "--set", "channels=t1*,flair*", code=3)
    assert (
        "study bob: series 'T1 ax' (4 x 40 x 36) and 'FLAIR ax' (4 x 38 x 36) do not lie on one grid; register and "
        "resample them before" in result.stderr
    )
    images = sorted(path.name for path in (out / "casewise" / "images").iterdir())
    assert images == ["ann_0000.nii.gz", "ann_0001.nii.gz"]
    mask, dark = read_label(out / "ann.nii.gz"), read_label_like(out / "casewise" / "images" / "ann_0001.nii.gz")
    assert np.array_equal(mask == 1, dark > dark.mean(axis=(1, 2), keepdims=True))  # the second channel decided
    (series,) = (one for one in find_series(brain / "ann", channels=("T1*", "FLAIR*")))
    assert np.array_equal(read_segmentation(out / "dicom" / "ann.seg.dcm", series), mask)


def read_label_like(path: Path) -> Any:
    import nibabel

    return np.asarray(nibabel.load(path).dataobj).T  # type: ignore[attr-defined]


def test_channels_that_nobody_named_are_refused_with_the_series_that_are_there(brain: Path, tmp_path: Path) -> None:
    network = f"{__name__}:two_channels"
    words = ("predict", "-i", brain, "-o", tmp_path / "out", "-m", network, "-device", "cpu", "--policy", "m0")
    with pytest.raises(
        BadInput, match=r"takes 2 channels, and 1 series per case is given; .*'FLAIR ax', 'T1 ax', 'scout'"
    ):
        said(*words)
    with pytest.raises(BadInput, match=r"study ann: 0 series are called 'T2\*', one is expected; there are 'FLAIR ax'"):
        said(*words, "--set", "channels=T1*,T2*")
    with pytest.raises(BadInput, match=r"'T1\*,FLAIR\*', got 'T1\*,'"):
        said(*words, "--set", "channels=T1*,")
    (tmp_path / "plain").mkdir()
    with pytest.raises(BadInput, match=r"channels .* DICOM series, and .*plain has none"):
        said("predict", "-i", tmp_path / "plain", *words[3:], "--set", "channels=T1*,FLAIR*")


def test_a_label_value_that_the_model_does_not_have_is_named(model: Path, tmp_path: Path) -> None:
    images, labels = tmp_path / "images", tmp_path / "labels"
    (name,) = write_scans(tmp_path, [0], shift=0.3)
    label = nib.load(labels / f"{name}.nii.gz")
    values = np.asarray(label.dataobj).astype(np.uint8)
    values[values == 1] = 7
    nib.save(nib.Nifti1Image(values, label.affine), labels / f"{name}.nii.gz")
    words = ("record", "-m", model, "-i", images, "-l", labels, "--steps", 1, "--set", "shrink=", "--disable_tta")
    result = said(*words, "-device", "cpu", "-o", tmp_path / "archive")
    assert f"casewise: {name}: its label holds 7, which is not a class of the model" in result.stderr

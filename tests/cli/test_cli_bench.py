"""``casewise bench``: what it measures, that labels come last, and that one recording serves bench and study."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from worlds.datasets import write_data
from worlds.discs import OneSided

from casewise.adapt.backbones.checkpoints import write_safetensors
from casewise.archive.store import open_archive
from casewise.cli import app
from casewise.core.errors import BadInput, Mismatch
from casewise.core.records import State
from casewise.judge.ledger import read_ledger
from casewise.study.benchmark import OPENED, SEALED, result_table

FACTORY = "casewise.adapt.networks:PlainUNet"
pytestmark = pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")


def call(*arguments: object) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a network, and a finished benchmark with views and two updates of TENT."""
    from casewise.adapt.networks import PlainUNet

    folder = tmp_path_factory.mktemp("bench")
    torch.manual_seed(3)
    write_safetensors(folder / "unet.safetensors", PlainUNet().state_dict())
    write_data(folder / "data", 14)
    outcome = run(folder, folder / "out", "--propose", "tent")
    assert outcome.exit_code == 0, outcome.output
    assert "default (took " in outcome.output  # the design that default took
    return folder


def run(home: Path, out: Path, *more: object, data: Path | None = None) -> Any:
    model = ("-m", FACTORY, "--weights", home / "unet.safetensors", "-device", "cpu", "--set", "min-area=1")
    views = ("--propose", "two=views:mirror(x),gamma(1.4)")
    updates = ("--set", "steps=2", "--set", "lr=1e-2") if "tent" in more else ()
    return call("bench", data or home / "data", *model, *views, *updates, "-o", out, "--alpha", 0.4, *more)


def result_of(home: Path) -> dict[str, Any]:
    return json.loads((home / "out" / "result.json").read_text())


def named(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(method for method in result["methods"] if method["name"] == name)


def test_every_method_is_measured_with_its_cost(home: Path) -> None:
    result = result_of(home)
    names = [method["name"] for method in result["methods"]]
    assert names[:3] == ["M0", "two: mean for everyone", "two: default"]
    assert [len(result[side]) for side in ("calibration", "evaluation")] == [7, 7]
    wanted = {
        "M0": (1, 0),
        "two: mean for everyone": (3, 0),
        "tent: step 2 for everyone": (None, 2),
        "two + tent: default": (None, 2),  # reads both ladders, so their costs add up
    }
    for name, cost in wanted.items():
        scores = named(result, name)["scores"]
        assert (scores["forwards"], scores["updates"]) == cost
        assert scores["seconds"] > 0
    assert named(result, "M0")["scores"]["gain"] == 0
    assert named(result, "two + tent: default")["ladders"] == ["two", "tent"]
    assert all(
        one["scores"]["gain"] <= result["oracle"] + 1e-9 for one in result["methods"] if "merge" not in one["policy"]
    )


def test_a_gain_is_what_masks_and_labels_say(home: Path) -> None:
    """The mean gain of the consensus a second time, from the files."""
    scores = result_of(home)["methods"][1]["scores"]
    archive = open_archive(home / "out" / "evaluation", ladder="two")
    gains = []
    for case_id in archive.ids:
        label = np.asarray(nibabel.load(home / "data" / "labels" / f"{case_id}.nii.gz").dataobj).T > 0
        both = [archive.mask(case_id, state) == 1 for state in (State(3), State(0))]
        new, old = (2 * (mask & label).sum() / (mask.sum() + label.sum()) for mask in both)
        gains.append(new - old)
    assert scores["gain"] == pytest.approx(np.mean(gains), abs=1e-9)
    assert scores["helped"] == sum(gain > 0 for gain in gains)
    assert scores["hurt_by_a_point"] == sum(gain < -0.01 for gain in gains)


def test_tables_are_written_as_csv_and_latex(home: Path) -> None:
    with (home / "out" / "tables" / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    result = result_of(home)
    assert [row["method"].partition(" (took")[0] for row in rows] == [method["name"] for method in result["methods"]]
    assert float(rows[1]["gain"]) == pytest.approx(result["methods"][1]["scores"]["gain"])
    assert r"\toprule" in (home / "out" / "tables" / "bench.tex").read_text()


def test_labels_are_opened_once_and_after_the_decisions(home: Path) -> None:
    result = result_of(home)
    choices = [line["choice"] for line in read_ledger(home / "out" / "evaluation")]
    assert choices == [f"{SEALED} {result['decisions_sha256']}", f"{OPENED} {result['decisions_sha256']}"]
    assert result["labels_seen_before_decisions"] is False


def test_an_interrupted_run_resumes_and_opens_nothing_twice(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "evaluation" / "cases" / "case_13" / "ladder-tent")
    manifest = json.loads((tmp_path / "out" / "evaluation" / "manifest.json").read_text())
    manifest.pop("cases")  # as before sealing
    (tmp_path / "out" / "evaluation" / "manifest.json").write_text(json.dumps(manifest))
    assert run(home, tmp_path / "out", "--propose", "tent").exit_code == 0
    again = json.loads((tmp_path / "out" / "result.json").read_text())
    assert again["decisions_sha256"] == result_of(home)["decisions_sha256"]
    assert len(read_ledger(tmp_path / "out" / "evaluation")) == 2


def test_decisions_taken_after_the_labels_are_marked(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "out", tmp_path / "out")
    later = run(home, tmp_path / "out", "--policy", "frag-stop", "--quiet")
    assert later.exit_code == 0
    assert "labels were read in this folder before" in later.output
    assert json.loads((tmp_path / "out" / "result.json").read_text())["labels_seen_before_decisions"] is True


def test_study_reads_the_archives_of_bench(home: Path, tmp_path: Path) -> None:
    """One recording serves both (issue 35, item 6)."""
    shutil.copytree(home / "out", tmp_path / "out")
    archives = (tmp_path / "out" / "evaluation", "-c", tmp_path / "out" / "calibration")
    policy = tmp_path / "out" / "policies" / "tent-default.json"
    where = ("-o", tmp_path / "report", "--only", "deployment", "--set", "resamples=100")
    done = call("study", *archives, "-p", policy, *where)
    assert done.exit_code == 0, done.output
    with (tmp_path / "report" / "tables" / "methods.csv").open(newline="") as file:
        fixed = next(row for row in csv.DictReader(file) if row["method"].startswith("fixed-2"))
    assert float(fixed["metric"]) == pytest.approx(
        named(result_of(home), "tent: step 2 for everyone")["scores"]["metric"]
    )


def test_an_archive_is_not_recorded_again(home: Path, tmp_path: Path) -> None:
    """Two archives of an earlier run, without a model: the same decisions and scores, and the table as LaTeX."""
    archives = (home / "out" / "evaluation", "--calibration", home / "out" / "calibration")
    done = call("bench", *archives, "-o", tmp_path / "again", "--alpha", 0.4, "--propose", "two", "-q")
    assert done.exit_code == 0, done.output
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert [one["name"] for one in again["methods"]][:2] == ["M0", "two: mean for everyone"]
    assert named(again, "two: default")["cases"] == named(result_of(home), "two: default")["cases"]
    assert "tent" not in done.output
    assert (tmp_path / "again" / "bench.html").exists()


@pytest.mark.slow
def test_designs_that_labels_fit_are_certified_on_the_other_half(home: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "data", 36)
    write_safetensors(tmp_path / "unet.safetensors", OneSided().state_dict())
    more = ("--propose", "tent", "--policy", "merge", "--alpha", 0.9, "--loss", "worse-voxels", "--delta", 0.3)
    model = ("-m", "worlds.discs:OneSided", "--weights", tmp_path / "unet.safetensors")
    outcome = run(home, tmp_path / "out", *more, *model, "-q", data=tmp_path / "data")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    for name in ("two: merge, certified", "two + tent: merge, certified"):
        promised = named(result, name)["promise"]
        assert (promised["units"], promised["delta"], promised["alpha"]) == (9, 0.3, 0.9)  # half of 18 patients
        assert promised["missed"] == (promised["realized"] > 0.9)
        assert f"! {name}: fitted on half of the calibration" in outcome.output


def test_a_missed_promise_and_a_no_go_are_marked(home: Path) -> None:
    result = result_of(home)
    method = result["methods"][1]
    method["promise"] = {"loss": "ha", "alpha": 0.4, "realized": 0.5, "missed": True}
    assert result_table(result).rows[1]["promise"] == "ha ≤ 0.4: 0.500, MISSED"
    method["notes"] = ["two: NO-GO: 1 case was helped and 6 were hurt"]
    assert result_table(result).rows[1]["promise"] == "NO-GO; ha ≤ 0.4: 0.500, MISSED"


def test_every_option_arrives(home: Path, tmp_path: Path) -> None:
    """One run in which each option differs from its default, and what the result says of it."""
    write_data(tmp_path / "evaluates", 5, prefix="new", split=False)
    write_data(tmp_path / "calibrates", 6, prefix="old", split=False)
    options = (
        "--calibration",
        tmp_path / "calibrates",
        "--policy",
        "fixed-k",
        "--policy",
        "cardiac",
    )
    more = ("--propose", "tent", "--set", "steps=4", "--set", "shrink=2:0.5", "--metric", "miou", "--set", "seed=5")
    promised = ("--loss", "harmed", "--alpha", 0.6, "--set", "margin=0.02")
    outcome = run(home, tmp_path / "out", *options, *more, *promised, "--json", "-q", data=tmp_path / "evaluates")
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert json.loads(outcome.stdout)["decisions_sha256"] == result["decisions_sha256"]
    assert result["metric"] == "miou"
    assert {case[:3] for case in result["calibration"]} == {"old"}
    assert {case[:3] for case in result["evaluation"]} == {"new"}
    designs = {method["design"] for method in result["methods"]} - {""}
    assert "fixed-k" in designs
    assert designs <= {"fixed-k", "cardiac"}
    promises = [method["promise"] for method in result["methods"] if method["promise"]]
    assert all((one["loss"], one["alpha"]) == ("harmed", 0.6) for one in promises)
    archive = open_archive(tmp_path / "out" / "evaluation", ladder="tent")
    assert archive.steps == 4
    assert State(2, 0.5) in archive.states
    assert archive.configuration["seed"] == 5


def test_wrong_questions_are_answered_in_one_sentence(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'defalt'"):
        run(home, tmp_path / "new", "--policy", "defalt")
    with pytest.raises(Mismatch, match="metric"):
        run(home, home / "out", "--metric", "miou")
    shutil.copytree(home / "out", tmp_path / "out")
    drawn = write_data(tmp_path / "drawn" / "data", 14, split=False)
    with pytest.raises(Mismatch, match="other cases than this benchmark"):
        run(home, tmp_path / "out", "--set", "share=0.5", data=drawn)

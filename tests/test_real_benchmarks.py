"""The scripts behind benchmarks/RESULTS.md: recorded, told and left out, on pictures that a program made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    yield
    for name in [name for name in sys.modules if name.startswith("real_") or name == "real"]:
        del sys.modules[name]


def test_a_line_has_an_interval_by_patient_and_none_for_a_few_sequences():
    from real_question import line

    one = {"error": [1.0, 3.0], "cpu": 8.2, "seconds": 4.56}
    gain = np.array([0.1, -0.02, 0.1, 0.1, 0.1, 0.1])
    many = line("average", gain, list("abcdef"), one, "cardiac")
    assert many.startswith("| average | +0.0800 [+0.0286, +0.1314] | 5 : 1 | 1 | -0.020 | 2.0 | 8 | 4.6 |")
    assert "| +0.0800 |" in line("average", gain, list("aabbbb"), one, "cardiac")


def test_every_script_finds_what_it_imports(tmp_path):
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    words = [sys.executable, "-c", f"import {', '.join(names)}"]
    done = subprocess.run(words, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_clinical_measures_by_hand():
    from real_question import cup_to_disc, measure_errors

    full, half = np.zeros((2, 4, 4), np.uint8), np.zeros((2, 4, 4), np.uint8)
    full[:, :2], half[:1, :2] = 1, 1
    masks, labels = {"p_ED": full, "p_ES": full}, {"p_ED": full, "p_ES": half}
    assert measure_errors("cardiac", masks, labels, ["p", "p"]) == [50.0]
    eye = np.zeros((8, 8), np.uint8)
    eye[1:7, 2:6], eye[2:5, 3:5] = 1, 2
    assert cup_to_disc(eye) == 0.5
    assert measure_errors("fundus", {"a": np.minimum(eye, 1)}, {"a": eye}, ["a"]) == [0.5]
    assert measure_errors("polyps", {"a": eye}, {"a": eye}, ["a"]) == []


def test_certain_votes_of_views_that_agree_count_fully():
    from real_question import agreements, auroc

    from casewise.measure.metrics.overlap import dice

    class View:
        """Three masks of one case, then their mean."""

        def __init__(self, *masks):
            self.masks, self.entries = masks, {"a": SimpleNamespace(rungs=("x", "y", "mean"))}

        def mask(self, case_id, state):
            return self.masks[state.step]

    same = np.eye(6, dtype=np.uint8)
    assert agreements(View(same, same, same), "a", dice) == (1.0, 1.0)
    other = np.fliplr(same)
    first, weighted = agreements(View(same, same, other), "a", dice)
    assert (first, round(weighted, 3)) == (0.5, round(1 / 3 * (1 - 0.9183), 3))  # H(1/3) = .9183 bit
    assert auroc(np.array([3.0, 2.0, 1.0]), np.array([True, False, False])) == 1.0


def test_what_other_cohorts_choose_is_scored_here():
    from real_question import M0, across

    def table(average, shipped):
        rows = {M0: [0.5, 0.5], "average": [0.5 + average] * 2, "**`fit` as it ships** (m0)": [0.5 + shipped] * 2}
        return {"rows": {name: {"metric": values} for name, values in rows.items()}}

    told = {"hearts": table(0.1, 0.1), "eyes": table(-0.2, 0.0)}
    lines = list(across(told, {"hearts": "cardiac", "eyes": "fundus"}))
    assert lines[1:] == [
        f"| hearts | {M0} | +0.0000 | +0.0000 | +0.1000 |",
        "| eyes | average | +0.1000 | -0.2000 | +0.0000 |",
    ]


def photographs(folder, names, classes):
    """Round things of one or two labels inside each other, on 64 x 64 pictures."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        rows, columns = np.mgrid[:64, :64]
        distance = (rows - rng.integers(24, 40)) ** 2 + (columns - rng.integers(24, 40)) ** 2
        label = ((distance < 300).astype(np.uint8) + (distance < 80)).clip(max=classes).astype(np.uint8)
        picture = 40 + 70 * label[..., None] + rng.integers(0, 60, (64, 64, 3))
        Image.fromarray(picture.astype(np.uint8)).save(folder / "images" / name)
        Image.fromarray(label).save(folder / "labels" / f"{name.split('.')[0]}.png")


def made_data(data):
    """Polyps and fundus in the layout of the real data: 24 source images, seven cases of each split."""
    for cohort, source, target, ending, classes in (
        ("polyps", "kvasir_seg", "cvc_clinicdb", "jpg", 1),
        ("fundus_disc_cup", "rimone_v3", "drishti_gs", "png", 2),
    ):
        photographs(data / cohort / source, [f"s{k}-L.{ending}" for k in range(24)], classes)
        photographs(data / cohort / target, [f"t{k}.{ending}" for k in range(14)], classes)
        rows = [f"t{k},{target},{('calibration', 'development')[k // 7]},q{k}" for k in range(14)]
        (data / cohort / "cases.csv").write_text("\n".join(["case,domain,split,cluster", *rows]) + "\n")


def make(*asked):
    """``make`` with this interpreter and nothing installed."""
    home = Path(sys.executable).parent
    folders = ":".join(str(ROOT / name) for name in ("src", "tests", "examples"))
    command = ["make", "-o", ".venv/.dev", f"BIN={home}", f"PYTHONPATH={folders}", *asked]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_one_command_goes_from_data_to_the_last_table(tmp_path):
    """``make bench-real`` as a small run on two made cohorts; only the nnU-Net and the driving model are left out."""
    made_data(tmp_path / "data")
    asked = [f"DATA={tmp_path / 'data'}", f"OUT={tmp_path / 'out'}", "SHIFTS=polyps-0 fundus-0", "ARMS=tent"]
    done = make("bench-real", *asked, "CASES=5", "JOBS=2")
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {file.stem: file.read_text() for file in sorted((tmp_path / "out" / "pages").iterdir())}
    assert list(pages) == ["0-question", "4-paper", "5-gradients"]
    for page in pages.values():
        assert page.lstrip().startswith("**A small run**: 5 cases of each split")
    for shift in ("polyps-0", "fundus-0"):
        assert f"### {shift}: 5 new cases of 5 patients, 5 labelled ones of 5" in pages["0-question"]
    for row in ("leave the model alone (M0)", "`views-photo`, consensus", "TENT for every case", "tuned, norm + head",
                "average of tuned and M0", "weights 1/2 of the way", "mean of the folds' predictions",
                "tuned, all weights", "views through the tuned weights",
                "`choose` among views and tuned"):  # fmt: skip
        assert pages["0-question"].count(f"\n| {row} |") == 2, row  # the last table may name it again
    assert pages["0-question"].count("| **`fit` as it ships** (") == 2
    assert "### Chosen on other cohorts" in pages["0-question"]
    assert "No study of cardiac arms" in pages["4-paper"]
    assert "| fundus, tent | 5 |" in pages["5-gradients"]
    whole = make("bench-real", *asked)
    assert whole.returncode != 0  # the small run's folder is not mistaken for the beginning of a whole one
    assert "holds a small run of 5 cases and a whole run is asked for" in whole.stderr


def test_a_small_run_takes_cases_in_turn_from_clusters(tmp_path):
    from real_folders import small_run, start_run, write_folders

    made_data(tmp_path / "data")
    listed = tmp_path / "data" / "polyps" / "cases.csv"
    listed.write_text(listed.read_text().replace("q1\n", "q0\n").replace("q2\n", "q0\n").replace("q8\n", "q7\n"))
    start_run(tmp_path / "out", 5)
    for _ in range(2):  # a run that goes on finds what it left
        home = write_folders("polyps", tmp_path / "data", tmp_path / "out")
    kept = pd.read_csv(home / "calibration" / "cases.csv")
    assert list(kept["case"]) == ["t0", "t3", "t4", "t5", "t6"]  # t1 and t2 are of the same sequence as t0
    assert sorted(file.stem for file in (home / "calibration" / "labels").iterdir()) == ["t0", "t3", "t4", "t5", "t6"]
    assert list(pd.read_csv(home / "development" / "cases.csv")["case"]) == ["t7", "t9", "t10", "t11", "t12"]
    assert small_run(tmp_path / "out") == 5
    start_run(tmp_path / "out", 5)
    with pytest.raises(SystemExit, match="holds a small run of 5 cases and a whole run is asked for: say -o ANOTHER"):
        start_run(tmp_path / "out", None)
    with pytest.raises(SystemExit, match="at least 5 cases of each split, 3 calibrate nothing"):
        start_run(tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_a_training_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    from benchmarks import source_training

    made_data(tmp_path / "data")
    few = {"data": tmp_path / "data", "epochs": 3, "most": 16}
    whole = source_training.train("polyps", 0, out=tmp_path / "whole", **few)
    save = source_training._save

    def stop(state, path):
        save(state, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(source_training, "_save", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            source_training.train("polyps", 0, out=tmp_path / "parts", **few)
    monkeypatch.setattr(source_training, "_save", save)
    parts = source_training.train("polyps", 0, out=tmp_path / "parts", **few)
    assert len(parts.validation_curve) == 3
    assert parts.validation_curve == pytest.approx(whole.validation_curve, abs=1e-3)
    one, other = (load_file(tmp_path / name / "polyps-0.safetensors") for name in ("whole", "parts"))
    assert all(np.allclose(one[key], other[key], atol=1e-4) for key in one)
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["polyps-0.json", "polyps-0.safetensors"]


def test_arms_that_the_question_records_are_not_recorded_again(tmp_path):
    import real
    import real_shifts

    from casewise.core.records import State

    known = real_shifts.shifts(tmp_path, tmp_path)
    taken = {(shift.name, arm.name): arm.ladder for shift in real.shifts(tmp_path, tmp_path).values()
             for arm in shift.arms if arm.ladder is not None}  # fmt: skip
    assert set(taken) == {("cardiac", "tent"), ("cardiac", "tuned"), ("fundus", "tent")}
    for (cohort, arm), (shift, ladder) in taken.items():
        assert known[shift].cohort == cohort
        where = real.shifts(tmp_path, tmp_path)[cohort]
        chosen = next(one for one in where.arms if one.name == arm)
        home = tmp_path / "question" / shift
        fitted = "fit/archive" if arm == "tuned" else "calibration"
        assert where.archive(chosen, tmp_path, "calibration") == home / fitted
        assert where.archive(chosen, tmp_path, "development") == home / "development"
        if ladder == "tent":
            how = known[shift].tent
            assert (how.learning_rate, how.steps) == (5e-4, 4)
            assert how.shrink == (State(2, 0.5),)


def test_tables_of_a_few_sequences_print_no_interval():
    from real_tables import Study, interval

    findings = {
        "deployment.intervals": {"rows": [{"id": "router~m0:metric", "estimate": 0.01, "low": 0.0, "high": 0.02}]}
    }
    said = {kind: interval(Study("driving", "tent", "default", {"findings": findings, "warnings": warnings})
                           .row("deployment.intervals", id="router~m0:metric"))
            for kind, warnings in (("few", ["FEW: 2 patients"]), ("many", ["NO-GO: ..."]))}  # fmt: skip
    assert said == {"few": "+0.0100 [undefined]", "many": "+0.0100 [+0.0000, +0.0200]"}

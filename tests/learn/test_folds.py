"""Cross-fitting: nobody is predicted by weights that saw their patient, killed runs go on, failed folds leave M0."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.discs import cohort, tiny_backbone

from casewise.adapt.tuned_weights import TunedWeights, mean_weights, read_tuned_folder, temporary_weights
from casewise.core.durable import is_alive
from casewise.core.errors import BadInput, Mismatch, TooFewCases
from casewise.learn import folds
from casewise.learn.folds import cross_fit, deal
from casewise.learn.tuning import Tuning

FAST = Tuning(updates=3, batch=2)


@given(st.sets(st.integers(0, 99), min_size=4, max_size=30), st.integers(0, 5))
def test_patients_are_dealt_once_into_folds_of_nearly_equal_size(numbers, seed):
    patients = [f"p{number}" for number in numbers]
    dealt = deal(patients + patients, seed=seed)
    assert sorted(patient for fold in dealt for patient in fold) == sorted(patients)
    sizes = [len(fold) for fold in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert len(dealt) == (5 if len(patients) >= 10 else len(patients) // 2)


def test_fewer_than_four_patients_are_refused():
    with pytest.raises(TooFewCases, match="at least 4 patients"):
        deal(["a", "b", "c"] * 5)
    with pytest.raises(BadInput, match="between 2"):
        deal(["a", "b", "c", "d"], 5)


@given(st.integers(4, 23), st.integers(0, 3))
def test_every_patient_is_left_out_once(count, seed):
    patients = [f"p{number}" for number in range(count)]
    dealt = deal(patients, seed=seed)
    assert sorted(patient for fold in dealt for patient in fold) == sorted(patients)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_patient_gets_weights_that_never_saw_it(tmp_path):
    cases, labels, patients = cohort(5, each=2)
    made = cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path, workers=1)
    found = made.read()
    assert made.folds == deal(patients)
    assert len(found.folds) == 2
    for patient in set(patients):
        own = found.without(patient)
        assert patient in own.left_out
        assert patient not in own.trained_on
        assert {*own.left_out} | {*own.trained_on} == {*patients}
    assert {*found.mean.trained_on} == {*patients}
    assert found.without("somebody new") is found.mean


def test_a_label_changes_nothing_for_its_own_patient(tmp_path):
    """Independent computation: spoil a patient's labels, and the weights that judge this patient stay bit-identical."""
    cases, labels, patients = cohort(4)
    spoiled = [1 - label if patient == "p2" else label for label, patient in zip(labels, patients, strict=True)]
    honest = cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path / "a", workers=1).read()
    other = cross_fit(tiny_backbone(), cases, spoiled, patients, FAST, folder=tmp_path / "b", workers=1).read()
    for patient in patients:
        one, two = honest.without(patient).values, other.without(patient).values
        same = all(torch.equal(one[name], two[name]) for name in one)
        assert same == (patient in honest.without("p2").left_out)


def test_half_of_the_patients_for_a_learning_curve(tmp_path):
    cases, labels, patients = cohort(6)
    made = cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path, folds=2, workers=1).read()
    assert [len(one.trained_on) for one in made.folds] == [3, 3]


def test_a_fold_that_fails_is_reported_and_leaves_m0(tmp_path, monkeypatch):
    cases, labels, patients = cohort(4)
    whole, out = folds.tune, deal(patients)[1]

    def failing(backbone, cases, *rest, **more):
        wrong = not {case.cluster for case in cases} & {*out}  # the fold that leaves these patients out
        tuning = replace(rest[1], learning_rate=1e30, updates=5) if wrong else rest[1]
        return whole(backbone, cases, rest[0], tuning, **more)

    monkeypatch.setattr(folds, "tune", failing)
    made = cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path, workers=1)
    assert list(made.failed) == [1]
    assert "learning rate" in made.failed[1]
    found = made.read()
    assert [found.without(patient) is None for patient in patients] == [patient in out for patient in patients]
    assert {*found.failed} == {*out}


def test_workers_find_the_same_weights_and_tell_their_progress(tmp_path):
    cases, labels, patients = cohort(4)
    told = []
    alone = cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path / "a", workers=1).read()
    both = cross_fit(
        tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path / "b", workers=2,
        on_progress=lambda *said: told.append(said[:2]),
    ).read()  # fmt: skip
    for one, other in zip(alone.folds, both.folds, strict=True):
        assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)
    assert sorted(told) == [(fold, update) for fold in (0, 1) for update in (0, 1, 2, 3)]


@pytest.mark.slow
def test_an_error_of_a_worker_is_raised_here(tmp_path):
    cases, labels, patients = cohort(4)
    with pytest.raises(BadInput, match="holds 9"):
        cross_fit(tiny_backbone(), cases, [label * 9 for label in labels], patients, FAST, folder=tmp_path, workers=2)


def _long_run(folder):
    cases, labels, patients = cohort(4)
    tuning = replace(FAST, updates=20)

    def told(fold, update, loss):
        if fold == 1 and update == 2:  # the first fold is finished
            os.kill(os.getpid(), signal.SIGKILL)

    cross_fit(tiny_backbone(), cases, labels, patients, tuning, folder=folder, workers=1, on_progress=told)


def test_a_killed_run_continues_with_the_folds_that_are_missing(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_long_run, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["fold-0.safetensors", "folds.json"]
    first = (tmp_path / "fold-0.safetensors").stat().st_mtime_ns
    cases, labels, patients = cohort(4)
    told = []
    tuning = replace(FAST, updates=20)
    made = cross_fit(
        tiny_backbone(), cases, labels, patients, tuning, folder=tmp_path, workers=1,
        on_progress=lambda fold, update, loss: told.append(fold),
    )  # fmt: skip
    assert (told.count(0), told.count(1)) == (1, 21)
    assert (tmp_path / "fold-0.safetensors").stat().st_mtime_ns == first
    assert len(made.read().folds) == 2


def test_a_label_that_was_refused_can_be_corrected_in_the_same_folder(tmp_path):
    cases, labels, patients = cohort(4)
    with pytest.raises(BadInput, match="holds 9"):
        cross_fit(tiny_backbone(), cases, [label * 9 for label in labels], patients, FAST, folder=tmp_path, workers=1)
    assert cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path, workers=1).read().folds


def test_swapped_files_change_nothing_and_a_copy_or_a_strange_file_is_refused(tmp_path):
    """The files say which patients they leave out; their names decide nothing."""
    cases, labels, patients = cohort(4)
    options = {"folder": tmp_path, "workers": 1}
    made = cross_fit(tiny_backbone(), cases, labels, patients, FAST, **options)
    before = {patient: made.read().without(patient).values for patient in patients}
    first, second = sorted(tmp_path.glob("*.safetensors"))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    after = cross_fit(tiny_backbone(), cases, labels, patients, FAST, **options).read()
    for patient, own in before.items():
        assert all(torch.equal(own[name], after.without(patient).values[name]) for name in own)
    (tmp_path / "fold-2.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(Mismatch, match="folds"):
        cross_fit(tiny_backbone(), cases, labels, patients, FAST, **options)
    (tmp_path / "fold-2.safetensors").rename(second)  # its patients would get weights that were tuned on them
    with pytest.raises(Mismatch, match="folds"):
        cross_fit(tiny_backbone(), cases, labels, patients, FAST, **options)


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    cases, labels, patients = cohort(4)
    cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path, workers=1)
    with pytest.raises(Mismatch, match=r"started with other options \(tuning"):
        cross_fit(tiny_backbone(), cases, labels, patients, replace(FAST, seed=4), folder=tmp_path, workers=1)
    corrected = [1 - labels[0], *labels[1:]]
    with pytest.raises(Mismatch, match=r"started with other options \(data"):
        cross_fit(tiny_backbone(), cases, corrected, patients, FAST, folder=tmp_path, workers=1)
    with pytest.raises(BadInput, match="p0_0 is of patient p0, got q"):
        cross_fit(tiny_backbone(), cases, labels, ["q", *patients[1:]], FAST, folder=tmp_path, workers=1)
    with pytest.raises(Mismatch, match=r"started with other options \(model"):
        cross_fit(tiny_backbone(norm="batch"), cases, labels, patients, FAST, folder=tmp_path, workers=1)


@pytest.mark.slow
def test_workers_end_with_the_run_that_started_them(tmp_path):
    """kill -9 of the run leaves no process behind that trains on."""
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)])
    noted = tmp_path / "workers"
    _wait_for(lambda: noted.exists() and len(noted.read_text().split()) == 2)  # the file is there before its content
    workers = [int(text) for text in noted.read_text().split()]
    run.kill()
    run.wait()
    _wait_for(lambda: not any(is_alive(worker) for worker in workers))


RUN = """
import multiprocessing, sys
from pathlib import Path
from casewise.core.durable import write_durably
from casewise.learn.folds import cross_fit
from casewise.learn.tuning import Tuning
from worlds.discs import tiny_backbone, cohort

if __name__ == "__main__":
    folder = Path(sys.argv[1])

    def told(*_):
        workers = " ".join(str(child.pid) for child in multiprocessing.active_children())
        write_durably(folder / "workers", workers.encode())

    cross_fit(tiny_backbone(), *cohort(4), Tuning(updates=10**6, batch=1), folder=folder, workers=2, on_progress=told)
"""


def _wait_for(met, seconds=120):
    until = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < until
        time.sleep(0.1)


# ---- files ----


def weights(**values):
    return TunedWeights({name: torch.tensor(value) for name, value in values.items()}, "m" * 64, ("p",))


def test_a_file_says_what_it_belongs_to_and_comes_back_whole(tmp_path):
    made = replace(weights(a=[1.0, 2.0]), left_out=("q",), tuning={"updates": 3}, facts={"seconds": 1.5}, fold="fold-1")
    made.write(tmp_path / "fold-1.safetensors")
    read = TunedWeights.read(tmp_path / "fold-1.safetensors")
    assert torch.equal(read.values["a"], made.values["a"])
    assert (read.model, read.trained_on, read.left_out, read.tuning, read.facts, read.fold) == (
        made.model, ("p",), ("q",), {"updates": 3}, {"seconds": 1.5}, "fold-1",
    )  # fmt: skip


def test_another_model_and_other_files_are_refused(tmp_path):
    with pytest.raises(Mismatch, match="belong to model mmmm"):
        weights(a=[1.0]).check("n" * 64)
    (tmp_path / "fold-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInput, match="no tuned weights"):
        read_tuned_folder(tmp_path)
    with pytest.raises(BadInput, match="casewise fit"):
        read_tuned_folder(tmp_path / "empty")
    with pytest.raises(Mismatch, match="has no a"), temporary_weights(torch.nn.Linear(1, 1), weights(a=[1.0])):
        pass


def test_the_mean_is_the_mean_and_sums_who_trained_it():
    made = mean_weights([weights(a=[1.0, 2.0]), replace(weights(a=[3.0, 6.0]), trained_on=("q",))])
    assert made.values["a"].tolist() == [2.0, 4.0]
    assert made.trained_on == ("p", "q")
    with pytest.raises(Mismatch, match="different tensors"):
        mean_weights([weights(a=[1.0]), weights(b=[1.0])])


def test_the_plan_names_the_patients_of_every_fold(tmp_path):
    cases, labels, patients = cohort(4)
    cross_fit(tiny_backbone(), cases, labels, patients, FAST, folder=tmp_path, workers=1)
    plan = json.loads((tmp_path / "folds.json").read_text())
    assert [{*fold["left_out"]} | {*fold["trained_on"]} for fold in plan["folds"]] == [{*patients}] * 2
    assert plan["tuning"]["updates"] == 3


def test_a_network_that_an_unguarded_script_defines_is_tuned_and_the_script_runs_once(tmp_path):
    program = """
from pathlib import Path
from casewise.learn.folds import cross_fit
from casewise.learn.tuning import Tuning
from casewise.adapt.model import as_model
from worlds.discs import Tiny, cohort

class Mine(Tiny):
    pass

print("the script runs")
found = cross_fit(as_model(Mine()), *cohort(4), Tuning(updates=1, batch=1), folder=Path("tuned"), workers=2)
print(len(found.read().folds), "folds")
"""
    (tmp_path / "script.py").write_text(program)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["the script runs", "2 folds"], done.stderr

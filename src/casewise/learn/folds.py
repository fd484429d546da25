"""Cross-fitting by patient: tune the weights of each fold without the patients of that fold, in parallel processes.

Each fold runs in a separate process with one torch thread and writes one file atomically. An interrupted run resumes
with the folds that have no file.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from casewise.adapt.backbones import Backbone
from casewise.adapt.model import Model, loaded
from casewise.adapt.tuned_weights import ENDING, FAILED, FOLDS, FailedFold, TunedFolder, read_tuned_folder
from casewise.archive.layout import image_sha256, mask_sha256
from casewise.core.durable import file_sha256, json_sha256, sweep, write_json
from casewise.core.errors import BadInput, CasewiseError, Mismatch, NotFinite, TooFewCases, in_one_line
from casewise.core.json_records import begin_or_continue, from_plain, read_json
from casewise.core.processes import needs_script, spawn
from casewise.core.records import Case, Mask
from casewise.core.seeds import seed_of
from casewise.core.text import pluralize
from casewise.data.folders import CaseFiles
from casewise.data.splits import cluster_of
from casewise.learn.tuning import Tuning, tune

FEWEST, MANY = 4, 10  # patients: fewer than the first are refused, from the second on there are five folds

OnFold = Callable[[int, int, float], None]
"""Called before the first and after every update with the fold, the number of its updates and the loss."""


@dataclass(frozen=True)
class CrossFit:
    """Result of :func:`cross_fit`."""

    folder: Path
    folds: tuple[tuple[str, ...], ...]  # the patients that each fold leaves out
    failed: Mapping[int, str]  # reason by fold, if its training failed; the patients of that fold keep M0
    notes: tuple[str, ...] = ()  # sentences about labels that may be mistakes
    cpu_seconds: float = 0.0  # CPU time of training, summed over the folds

    def read(self) -> TunedFolder:
        """Read the tuned weights."""
        return read_tuned_folder(self.folder)


def deal(patients: Iterable[str], folds: int | None = None, *, seed: int = 0) -> tuple[tuple[str, ...], ...]:
    """Divide patients into folds of nearly equal size.

    Args:
        patients: Names; each counts once.
        folds: Number of folds; default: 5 for ten patients or more, else one fold for every two patients.
        seed: Seed of the random order.

    Returns:
        The patients of each fold.

    Raises:
        TooFewCases: There are fewer than four patients.

    Example:
        >>> [len(fold) for fold in deal(["a", "b", "c", "d", "e"])]
        [3, 2]
    """
    names = sorted(set(patients))
    if len(names) < FEWEST:
        raise TooFewCases(
            f"learning from labels needs at least {FEWEST} patients, so that some can be left out; there "
            f"{'is' if len(names) == 1 else 'are'} {pluralize(len(names), 'patient')}: label more patients, or "
            f"use views, which need no learning"
        )
    count = (5 if len(names) >= MANY else len(names) // 2) if folds is None else folds
    if not 2 <= count <= len(names):
        raise BadInput(f"the number of folds must be between 2 and the number of patients, {len(names)}; got {count}")
    order = np.random.default_rng(seed).permutation(len(names))
    return tuple(tuple(sorted(names[place] for place in order[first::count])) for first in range(count))


def cross_fit(
    model: Model | Backbone,
    cases: Sequence[Case | CaseFiles],
    labels: Sequence[Mask | Path],
    patients: Sequence[str],
    tuning: Tuning | None = None,
    *,
    folder: Path,
    folds: int | None = None,
    workers: int | None = None,
    on_progress: OnFold | None = None,
) -> CrossFit:
    """Tune a model once for each fold, without the patients of that fold.

    Args:
        model: The model; a ``Model`` is loaded in every process.
        cases: The labelled cases, or their files, which are then read where they are needed.
        labels: Their labels, or the files of them.
        patients: The patient of each case: its cluster, or its id where it has none. A patient is left out with all
            cases.
        tuning: Options of the training.
        folder: Folder for the files. An interrupted run resumes here.
        folds: Number of folds; see :func:`deal`.
        workers: Processes; None for one per core, 1 for this process only. A model of a class that a script or a
            notebook defines is trained in this process.
        on_progress: Called after every update with the fold, the number of its updates and the loss.

    Returns:
        The patients that each fold left out, and the failed folds.

    Raises:
        TooFewCases: There are fewer than four patients.
        Mismatch: The folder holds folds of another model, tuning, set of patients, or of other images or labels.
        BadInput: A label cannot be used, or a case is of another patient.
    """
    tuning = tuning or Tuning()
    if not len(cases) == len(labels) == len(patients):
        counts = f"{len(cases)} cases, {len(labels)} labels and {len(patients)} patients"
        raise BadInput(f"every case needs a label and a patient, got {counts}")
    for case, patient in zip(cases, patients, strict=True):
        if (known := cluster_of(case)) != patient:
            raise BadInput(
                f"case {case.id} is of patient {known}, got {patient}; give the cluster of a case, or its id "
                f"where it has none, because the folds are found by it"
            )
    dealt = deal(patients, folds, seed=tuning.seed)
    trained = [tuple(sorted(set(patients) - set(out))) for out in dealt]
    plan = {
        "model": loaded(model).fingerprint, "tuning": asdict(tuning),
        "data": json_sha256([_digest(one) for one in (*cases, *labels)]),
        "folds": [{"left_out": out, "trained_on": used} for out, used in zip(dealt, trained, strict=True)],
    }  # fmt: skip
    if begin_or_continue(folder / FOLDS, plan):
        sweep(folder)
    told = on_progress or (lambda fold, update, loss: None)
    jobs = []
    for number, (out, used) in enumerate(zip(dealt, trained, strict=True)):
        if any((folder / f"fold-{number}{ending}").is_file() for ending in (ENDING, FAILED)):
            told(number, tuning.updates, float("nan"))
            continue
        mine = [place for place, patient in enumerate(patients) if patient in set(used)]
        own = replace(tuning, seed=seed_of(tuning.seed, f"fold-{number}") % 2**32)
        data = [cases[i] for i in mine], [labels[i] for i in mine]
        jobs.append(_Job(model, *data, own, folder, number, out, used))
        told(number, 0, 0.0)
    count = min(workers or cores(), max(1, len(jobs)))
    if count == 1 or needs_script(jobs[0]):  # a network that is defined in the user's script is tuned in this process
        for job in jobs:
            with _one_thread():
                job(told)
    else:
        _run(jobs, count, told)
    return _result(folder, dealt)


def _result(folder: Path, dealt: tuple[tuple[str, ...], ...]) -> CrossFit:
    failed = {
        number: from_plain(FailedFold, read_json(file), file.name).reason
        for number in range(len(dealt))
        if (file := folder / f"fold-{number}{FAILED}").is_file()
    }
    if len(failed) == len(dealt):
        return CrossFit(folder, dealt, failed)
    folds = read_tuned_folder(folder).folds
    if sorted(one.left_out for one in folds) != sorted(out for number, out in enumerate(dealt) if number not in failed):
        raise Mismatch(f"the weights in {folder} are not those of the folds in {FOLDS}; delete {folder} and fit again")
    facts = [one.facts for one in folds]
    notes = tuple(dict.fromkeys(note for one in facts for note in one.get("notes", ())))
    return CrossFit(folder, dealt, failed, notes, sum(float(one.get("cpu_seconds", 0.0)) for one in facts))


@dataclass(frozen=True, eq=False)
class _Job:
    """Trains one fold: reads the cases, tunes, writes the file."""

    model: Model | Backbone
    cases: Sequence[Case | CaseFiles]
    labels: Sequence[Mask | Path]
    tuning: Tuning
    folder: Path
    number: int
    left_out: tuple[str, ...]
    trained_on: tuple[str, ...]

    def __call__(self, told: OnFold) -> None:
        backbone = loaded(self.model)
        cases = [read_case(backbone, case) for case in self.cases]
        labels = [backbone.read_label(label) if isinstance(label, Path) else label for label in self.labels]
        name = f"fold-{self.number}"
        try:
            said = partial(told, self.number)
            tuned = tune(backbone, cases, labels, self.tuning, on_progress=said)
        except NotFinite as error:
            write_json(self.folder / f"{name}{FAILED}", {"left_out": self.left_out, "reason": in_one_line(error)})
            return
        weights = replace(tuned, trained_on=self.trained_on, left_out=self.left_out, fold=name)
        weights.write(self.folder / f"{name}{ENDING}")


def _digest(one: Case | CaseFiles | Mask | Path) -> Any:
    """Return a hash of an image or a label, so that a corrected label is noticed."""
    if isinstance(one, CaseFiles):
        return [file_sha256(image) for image in one.images]
    if isinstance(one, Case):
        return image_sha256(one.image)
    return file_sha256(one) if isinstance(one, Path) else mask_sha256(one)


def read_case(backbone: Backbone, case: Case | CaseFiles) -> Case:
    """Return a case in memory as it is, another one from its files."""
    return case if isinstance(case, Case) else backbone.read(case.checked()).case


def _run(jobs: Sequence[_Job], count: int, told: OnFold) -> None:
    """Run every job in its own process, ``count`` at a time; the first error ends all of them."""
    waiting, running = list(jobs), dict[Connection, Any]()
    try:
        while waiting or running:
            while waiting and len(running) < count:
                ours, theirs = multiprocessing.Pipe(duplex=False)
                running[ours] = spawn(_serve, theirs, waiting.pop(0))
                theirs.close()
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                _listen(pipe, running, told)
    finally:
        for pipe, process in running.items():
            process.kill()
            process.join()
            pipe.close()


def _listen(pipe: Connection, running: dict[Connection, Any], told: OnFold) -> None:
    try:
        said = pipe.recv()
    except EOFError:
        process = running.pop(pipe)
        process.join()
        pipe.close()
        if process.exitcode:
            raise CasewiseError(
                f"a process that trained a fold died with exit code {process.exitcode}"
                f"{', probably out of memory' if process.exitcode < 0 else ': its error is above'}; "
                "repeat the command with fewer processes or a smaller batch; finished folds are kept"
            ) from None
        return
    if isinstance(said, CasewiseError):
        raise said
    told(*said)


def _serve(pipe: Connection, job: _Job) -> None:
    """Main function of a worker process: train one fold; exit when the parent process ends."""
    torch.set_num_threads(1)
    try:
        job(lambda *said: pipe.send(said))
    except CasewiseError as error:
        pipe.send(error)
    pipe.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one torch thread, so that the weights equal those of a worker process."""
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(found)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

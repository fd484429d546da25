"""Every proposer on every real shift: views and gradient ladders against one M0, recorded case by case.

    python benchmarks/real_ladders.py --data DATA -o OUT [hearts fundus-0 ...] [--ladders mri tent] [--cases 5]

A run that was interrupted goes on where it stopped, and an archive that is whole is left alone. On one idle core the
hearts take about two hours, the other shifts together one; the source models of fundus and polyps are trained first
(a quarter of an hour to an hour each). ``--jobs 2`` records two shifts at a time, each on one thread. Archives go to
OUT/COHORT/ladders-SHIFT/{calibration,development}.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from real_folders import SMALL_TRAINING, SPLITS, small_run, start_run, write_folders

from casewise.adapt.adaptation import Adaptation
from casewise.archive.store import open_archive
from casewise.core.records import State
from casewise.data.folders import CaseFiles, list_cases, with_groups, with_labels
from casewise.deployment import Deployment, Model
from casewise.run.local import LocalEngine
from casewise.run.record_folder import RecordCase, record_folder

HOME = Path(__file__).parent
SEEDS = (0, 1)


@dataclass(frozen=True)
class Shift:
    """A frozen model, a cohort, and the proposers that are recorded against the model's M0."""

    name: str
    cohort: str
    model: Model
    ladders: Mapping[str, Adaptation]
    metric: str = "dice"
    seed: int | None = None  # of the source model, where it is trained by our script

    def archive(self, out: Path, split: str) -> Path:
        """Where its recording of one split lies."""
        return out / self.cohort / f"ladders-{self.name}" / split


def gradients(rates: Mapping[str, float], **measured: object) -> dict[str, Adaptation]:
    """The gradient proposers: four updates with the shrunk state of the paper's router, five toward the consensus."""
    found = {
        name: Adaptation(name, rate, steps=4, shrink=(State(2, 0.5),), **measured)  # type: ignore[arg-type]
        for name, rate in rates.items()
    }
    return {"consensus": Adaptation("consensus", steps=5, **measured), **found}  # type: ignore[arg-type]


def views(names: str, **measured: object) -> Adaptation:
    """A set of views, with the probabilities of each where they differ."""
    return Adaptation(f"views:{names}", keep_ballots=True, **measured)  # type: ignore[arg-type]


def shifts(weights: Path, out: Path) -> dict[str, Shift]:
    """What is recorded; EATA's rate on hearts is the one that ``real.py`` chooses without labels."""
    heart = str(weights / "nnunet_mnms_vendorA")
    gentle = {"tent": 5e-4, "eata": 5e-4, "cotta": 5e-4}
    city = {"min_area": 51, "foreground": False}
    hearts = {
        "random12": views("random(12)"),
        "mri": views("mri,gamma(0.8),clip,blur"),
        **gradients({**gentle, "eata": 2e-3}),
    }
    mirrored = {
        "mri-once": views("mri"),  # as a user records it: M0 with mirroring, each view one reading without
        "mri": views("gamma(1.4),bias(30),random(5)", mirrored_views=True),
        **gradients({**gentle, "eata": 2e-3}),
    }
    photos = {"photo": views("photo,scale(0.75)"), "random12": views("random(12,photos)"), **gradients(gentle)}
    driving = {
        "driving": views("driving,scale(0.75)", **city),
        "random12": views("random(12,photos)", **city),
        **gradients(dict.fromkeys(gentle, 1e-4), **city),
    }
    vit = Model("benchmarks.efficientvit:model", weights / "efficientvit_b0_cityscapes.pth")
    made = [
        Shift("hearts", "cardiac", Model(heart, mirroring=False), hearts),
        Shift("hearts-mirrored", "cardiac", Model(heart), mirrored),
        Shift("driving", "driving", vit, driving, "miou"),
    ]
    for cohort in ("fundus", "polyps"):
        for seed in SEEDS:
            model = Model(f"benchmarks.source_training:{cohort}", out / "sources" / f"{cohort}-{seed}.safetensors")
            made.append(Shift(f"{cohort}-{seed}", cohort, model, photos, seed=seed))
    return {shift.name: shift for shift in made}


def train_source(cohort: str, data: Path, out: Path, *, seed: int = 0) -> Path:
    """The source model of fundus or polyps, once; where its weights lie."""
    file = out / "sources" / f"{cohort}-{seed}.safetensors"
    if not file.exists():
        script = ["-m", "benchmarks.source_training", cohort, "--data", data, "-o", file.parent]
        short = () if small_run(out) is None else chain.from_iterable(SMALL_TRAINING)
        subprocess.run(
            [sys.executable, *map(str, script), "--seeds", str(seed), *map(str, short)], cwd=HOME.parent, check=True
        )
    return file


def cases_of(folder: Path, ending: str) -> list[CaseFiles]:
    """The cases of a plain folder with their labels, groups and clusters."""
    return with_groups(
        with_labels(list_cases(folder / "images", ending=ending), folder / "labels"), folder / "cases.csv"
    )


def record(shift: Shift, data: Path, out: Path, only: Sequence[str] | None) -> None:
    """Ladder by ladder, both splits of each before the next, so that an unfinished run still has whole ladders."""
    folders = out / shift.cohort / "folders"
    if shift.seed is not None:
        train_source(shift.cohort, data, out, seed=shift.seed)
    for name in only or shift.ladders:
        for split in SPLITS:
            cases = cases_of(folders / split, shift.model.load().ending)
            path = shift.archive(out, split)
            if _lacking(path, name, cases):
                _record_ladder(shift, name, cases, path)


def _lacking(path: Path, ladder: str, cases: Sequence[CaseFiles]) -> bool:
    if not (path / "manifest.json").exists():
        return True
    there = open_archive(path)
    return ladder not in there.ladders or any(files.id not in there.on(ladder).entries for files in cases)


def _record_ladder(shift: Shift, name: str, cases: Sequence[CaseFiles], path: Path) -> None:
    deployment = Deployment(shift.model, (shift.ladders[name],), ladders=(name,))
    work = RecordCase(deployment, {files.id: files for files in cases})
    _, results = record_folder(work, LocalEngine(), path, metric=shift.metric, dataset=shift.cohort)
    began = time.perf_counter()
    for result in results:
        now = time.perf_counter()
        print(f"{shift.name} {path.name} {name} {result.case_id} {now - began:.1f} s {result.error or ''}", flush=True)
        began = now


def record_apart(names: Sequence[str], jobs: int, words: Sequence[object]) -> None:
    """Each shift by a process of its own, so many at a time; all are tried, and those that failed are named."""

    def recorded(name: str) -> int:
        return subprocess.run([sys.executable, __file__, name, *map(str, words)]).returncode

    with ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(recorded, names))
    failed = [name for name, code in zip(names, codes, strict=True) if code]
    if failed:
        raise SystemExit(f"{', '.join(failed)}: not recorded to the end; the same command goes on from there")


def main() -> None:
    """Record the shifts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shifts", nargs="*", metavar="SHIFT", help="hearts, hearts-mirrored, fundus-0, ...; all")
    parser.add_argument("--data", type=Path, required=True, help="folder with mnms_cardiac, fundus_disc_cup, ...")
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--ladders", nargs="*", help="only these")
    parser.add_argument(
        "--cases", type=int, help="a small run: so many cases of each split, source models half trained"
    )
    parser.add_argument("--jobs", type=int, default=1, help="shifts that are recorded at a time, each on one thread")
    options = parser.parse_args()
    os.environ.setdefault("nnUNet_compile", "f")
    sys.path.insert(0, str(HOME.parent))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data, out = options.data.resolve(), options.out.resolve()
    weights = (options.weights or data.parent / "weights").resolve()
    known = shifts(weights, out)
    start_run(out, options.cases)
    names = options.shifts or list(known)
    for name in names:
        if name not in known:
            parser.error(f"no shift is called {name!r}; there are {', '.join(known)}")
    for cohort in dict.fromkeys(known[name].cohort for name in names):
        write_folders(cohort, data, out)  # before shifts of one cohort might write them at once
    if options.jobs > 1 and len(names) > 1:
        words: list[object] = ["--data", data, "--weights", weights, "-o", out]
        words += ["--cases", options.cases] if options.cases is not None else []
        record_apart(names, options.jobs, [*words, "--ladders", *options.ladders] if options.ladders else words)
        return
    for name in names:
        record(known[name], data, out, options.ladders)


if __name__ == "__main__":
    main()

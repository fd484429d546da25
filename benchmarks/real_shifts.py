"""The real shifts: a frozen model, a cohort, and how the cases are scored.

Archives and models of a run lie below one folder OUT. The source models of fundus and polyps are trained by
``source_training.py``, once.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from real_folders import SMALL_TRAINING, small_run

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.core.records import State
from casewise.data.folders import CaseFiles, list_cases, with_groups, with_labels

HOME = Path(__file__).parent
SEEDS = (0, 1)


@dataclass(frozen=True)
class Shift:
    """A frozen model, a cohort, and the gradient adaptation that is recorded there."""

    name: str
    cohort: str
    model: Model
    tent: Adaptation
    metric: str = "dice"
    seed: int | None = None  # of the source model, where our script trains it


def shifts(weights: Path, out: Path) -> dict[str, Shift]:
    """Return every shift by name."""
    heart = str(weights / "nnunet_mnms_vendorA")
    tent = Adaptation("tent", 5e-4, steps=4, shrink=(State(2, 0.5),))
    street = Adaptation("tent", 1e-4, steps=4, shrink=(State(2, 0.5),), foreground=False)
    vit = Model("benchmarks.efficientvit:model", weights / "efficientvit_b0_cityscapes.pth")
    made = [
        Shift("hearts-mirrored", "cardiac", Model(heart), tent),
        Shift("hearts", "cardiac", Model(heart, mirroring=False), tent),
        Shift("driving", "driving", vit, street, "miou"),
    ]
    for seed in SEEDS:
        for cohort in ("fundus", "polyps"):
            model = Model(f"benchmarks.source_training:{cohort}", out / "sources" / f"{cohort}-{seed}.safetensors")
            made.append(Shift(f"{cohort}-{seed}", cohort, model, tent, seed=seed))
    return {shift.name: shift for shift in made}


def train_source(cohort: str, data: Path, out: Path, *, seed: int = 0) -> Path:
    """Train the source model of fundus or polyps where it is not there yet; return the file of its weights."""
    file = out / "sources" / f"{cohort}-{seed}.safetensors"
    if not file.exists():
        script = ["-m", "benchmarks.source_training", cohort, "--data", data, "-o", file.parent]
        short = () if small_run(out) is None else chain.from_iterable(SMALL_TRAINING)
        subprocess.run(
            [sys.executable, *map(str, script), "--seeds", str(seed), *map(str, short)],
            cwd=HOME.parent, check=True, stdout=sys.stderr,
        )  # fmt: skip
    return file


def cases_of(folder: Path, ending: str) -> list[CaseFiles]:
    """Return the cases of a plain folder with their labels, groups and clusters."""
    return with_groups(
        with_labels(list_cases(folder / "images", ending=ending), folder / "labels"), folder / "cases.csv"
    )

"""The real shifts: a frozen model, a cohort, and how the cases are scored.

Archives and models of a run lie below one folder OUT. Source models that we train, those of fundus and polyps and the
ones that are trained for longer, are made once by ``source_training.py``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from real_folders import SMALL_TRAINING, small_run

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.core.records import State
from casewise.data.folders import CaseFiles, list_cases, with_groups, with_labels

HOME = Path(__file__).parent
HEARTS = "hearts-longer"


@dataclass(frozen=True)
class Shift:
    """A frozen model, a cohort, and the gradient adaptation that is recorded there."""

    name: str
    cohort: str
    model: Model
    tent: Adaptation
    metric: str = "dice"
    source: str | None = None  # the source model, where our script trains it

    @property
    def kind(self) -> str:
        """Which organ or scene: cardiac, fundus, polyps or driving."""
        return self.cohort.partition("-")[0]


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
    made.append(Shift(HEARTS, "cardiac", Model(str(out / "sources" / HEARTS)), tent, source=HEARTS))
    for name in ("fundus-0", "polyps-0", "fundus-1", "polyps-1", "polyps-longer-0"):
        recipe = name.rpartition("-")[0].replace("-", "_")
        model = Model(f"benchmarks.source_training:{recipe}", out / "sources" / f"{name}.safetensors")
        made.append(Shift(name, recipe.partition("_")[0], model, tent, source=name))
    return {shift.name: shift for shift in made}


def unseen_shifts(weights: Path, out: Path) -> dict[str, Shift]:
    """Return the shifts that nothing was tuned on, by name; the name is that of the cohort."""
    known = shifts(weights, out)
    made = [replace(known["hearts"], name="cardiac-swapped", cohort="cardiac-swapped")]
    for kind in ("fundus", "polyps"):
        name = f"{kind}-reversed"
        model = Model(f"benchmarks.source_training:{kind}", out / "sources" / f"{name}-0.safetensors")
        made.append(replace(known[f"{kind}-0"], name=name, cohort=name, model=model, source=f"{name}-0"))
    for name in ("driving-night", "driving-fog"):
        made.append(replace(known["driving"], name=name, cohort=name))
    for name in ("polyps-blur", "polyps-gamma", "polyps-jpeg", "polyps-color"):
        made.append(replace(known["polyps-0"], name=name, cohort=name))
    return {shift.name: shift for shift in made}


def train_source(source: str, data: Path, out: Path) -> None:
    """Train a source model, such as "fundus-0", where it is not there yet."""
    folder = out / "sources"
    if any((folder / name).exists() for name in (source, f"{source}.safetensors")):
        return
    script = ["-m", "benchmarks.source_training", source, "--data", data, "-o", folder]
    short = () if small_run(out) is None else chain.from_iterable(SMALL_TRAINING)
    subprocess.run(
        [sys.executable, *map(str, script), *map(str, short)], cwd=HOME.parent, check=True, stdout=sys.stderr
    )


def cases_of(folder: Path, ending: str) -> list[CaseFiles]:
    """Return the cases of a plain folder with their labels, groups and clusters."""
    return with_groups(
        with_labels(list_cases(folder / "images", ending=ending), folder / "labels"), folder / "cases.csv"
    )

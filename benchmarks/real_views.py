"""Views on the real shifts: record them against M0, several ladders in one pass.

    python benchmarks/real_views.py hearts-views --data DATA -o OUT     goes on where it was interrupted

Recording needs about an hour of CPU time on the hearts; ``--only`` takes some of the ladders.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from real_folders import SPLITS, write_cardiac, write_driving

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, load_backbone
from casewise.adapt.proposers import SharedSource, pipeline_of, readings_of
from casewise.archive.store import create_archive
from casewise.data.folders import list_cases, with_groups, with_labels


@dataclass(frozen=True)
class Arm:
    """A model as it is configured, and the ladders of views that are recorded against its M0."""

    shift: str
    model: tuple[str, Mapping[str, Any]]
    ladders: Mapping[str, Adaptation]
    configuration: Mapping[str, Any]


def arms(weights: Path) -> dict[str, Arm]:
    """What can be recorded; the archives are named after these."""
    heart = str(weights / "nnunet_mnms_vendorA")
    mri = {
        "random12": Adaptation("views:random(12)", keep_ballots=True),
        "mri": Adaptation("views:mri,gamma(0.8),clip,blur", keep_ballots=True),
    }
    small = {"mri": Adaptation("views:gamma(1.4),bias(30),random(5)", keep_ballots=True)}
    plain = {"metric": "dice", "min_area": 16, "foreground": True, "classes": [1, 2, 3]}
    city = {"metric": "miou", "min_area": 51, "foreground": False, "ignore": 255}
    driving = {"driving": Adaptation("views:driving", keep_ballots=True, min_area=51, foreground=False)}
    vit = {"weights": weights / "efficientvit_b0_cityscapes.pth"}
    return {
        "hearts-views": Arm("cardiac", (heart, {"mirroring": False}), mri, plain),
        "hearts-mirrored": Arm("cardiac", (heart, {"mirroring": True}), small, plain),
        "driving-views": Arm("driving", ("benchmarks.efficientvit:model", vit), driving, city),
    }


WRITERS = {"cardiac": write_cardiac, "driving": write_driving}


def record(arm: Arm, data: Path, out: Path, only: list[str] | None) -> None:
    """Every case that lacks a ladder; M0 is predicted once for all of them."""
    folders = out.parent / f"{arm.shift}-folders"
    WRITERS[arm.shift](data, folders)
    spec, options = arm.model
    backbone = load_backbone(spec, **options)
    ladders = {name: views for name, views in arm.ladders.items() if not only or name in only}
    for split in SPLITS:
        home = folders / split
        cases = with_labels(list_cases(home / "images", ending=backbone.ending), home / "labels")
        cases = with_groups(cases, home / "cases.csv")
        archives = {
            name: create_archive(
                out / split, binding=views.binding(backbone), steps=views.horizon(backbone), ladder=name,
                configuration={**arm.configuration, "dataset": arm.shift, "model": backbone.name},
            )
            for name, views in ladders.items()
        }  # fmt: skip
        for files in cases:
            missing = {name: views for name, views in ladders.items() if files.id not in archives[name].entries}
            if missing:
                _record_case(backbone, files, missing, archives)
        for archive in archives.values():
            archive.seal()


def _record_case(
    backbone: Backbone, files: Any, missing: Mapping[str, Adaptation], archives: Mapping[str, Any]
) -> None:
    case = backbone.read(files).case
    prepared = backbone.prepare(case)
    source = SharedSource(pipeline_of(prepared, backbone))
    for name, views in missing.items():
        made = readings_of(backbone, prepared, case, views, source)
        archives[name].add(case, made, backbone.read_label(files.label))
        print(f"{case.id}: {name}, {sum(made.seconds):.0f} s", flush=True)


def main() -> None:
    """Record one arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", help="hearts-views, hearts-mirrored, driving-views")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    os.environ.setdefault("nnUNet_compile", "f")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    known = arms((options.weights or options.data.parent / "weights").resolve())
    if options.arm not in known:
        parser.error(f"no arm is called {options.arm!r}; there are {', '.join(known)}")
    record(known[options.arm], options.data.resolve(), options.out.resolve() / options.arm, options.only)


if __name__ == "__main__":
    main()

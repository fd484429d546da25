"""Seconds a case for M0, for the fixed horizon and for the router, and the share of them that the decision takes.

Needs what ``real.py`` left in its output folder: models, folders and policies. Contestants take turns on each case.

    python benchmarks/throughput.py --data DATA -o bench-real [--cases 6]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from real import Shift, shifts

from casewise import fragmentation
from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, load_backbone
from casewise.core.records import Controller, Observation
from casewise.data.folders import CaseFiles, list_cases, with_groups
from casewise.guard import Guarded, guard
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.policy import controller_of, read_policy


def backbone_of(shift: Shift) -> Backbone:
    """The model of a shift from its command-line options."""
    options = dict(zip(shift.model[::2], (*shift.model[1::2], ""), strict=False))
    weights = options.get("--weights")
    return load_backbone(
        options["-m"], weights=None if weights is None else Path(weights), mirroring="--disable_tta" not in shift.model
    )


def timed(
    files: CaseFiles, backbone: Backbone, how: Adaptation, controller: Controller, steps: int
) -> tuple[float, Guarded]:
    """Wall seconds from the file to the deployed mask."""
    began = time.perf_counter()
    case = backbone.read(files).case
    guarded = guard(case, backbone, controller, how, steps=steps)
    return time.perf_counter() - began, guarded


def deciding(guarded: Guarded, controller: Controller, how: Adaptation, group: str | None) -> float:
    """Seconds for the fragmentation of every executed step and for the decision itself, timed again on the masks."""
    masks = guarded.trajectory.masks
    began = time.perf_counter()
    for mask in masks[1:]:
        fragmentation(masks[0], mask, min_area=how.min_area, foreground=how.foreground)
    for step in range(len(masks)):
        controller.decide(Observation(guarded.trajectory.case_id, group, guarded.trajectory.signals[: step + 1]))
    return time.perf_counter() - began


def measured(shift: Shift, arm: str, out: Path, cases: int) -> Mapping[str, list[float]]:
    """Seconds of every contestant on the first development cases."""
    from casewise.archive.store import open_archive

    archive = open_archive(out / shift.name / arm / "calibration")
    how, steps = Adaptation.from_plain(archive.configuration["adaptation"]), archive.steps
    backbone = backbone_of(shift)
    router = controller_of(read_policy(out / shift.name / arm / f"policy-{shift.policy}.json"))
    contestants = {"M0": CONTROLLERS.build("m0"), f"fixed-{steps}": CONTROLLERS.build("fixed-k", step=steps)}
    seconds: dict[str, list[float]] = {name: [] for name in (*contestants, "router", "deciding", "executed")}
    folder = out / shift.name / "folders" / "development"
    for files in with_groups(list_cases(folder / "images")[:cases], folder / "cases.csv"):
        for name, controller in contestants.items():
            seconds[name].append(timed(files, backbone, how, controller, steps)[0])
        took, guarded = timed(files, backbone, how, router, steps)
        seconds["router"].append(took)
        seconds["deciding"].append(deciding(guarded, router, how, files.group))
        seconds["executed"].append(float(guarded.decision.executed))
    return seconds


def spread(values: list[float]) -> str:
    """mean [least, most]"""
    return f"{np.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    """Print one row a shift."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--cases", type=int, default=6)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent))
    out = options.out.resolve()
    print(f"{torch.get_num_threads()} threads, seconds a case: mean [least, most]")
    print(
        "| shift, arm | n | M0 | fixed horizon | router | steps the router executed | decision, share of the router |"
    )
    print("|---|---|---|---|---|---|---|")
    for shift in shifts(options.data.resolve().parent / "weights", out).values():
        for arm in shift.arms[:1]:
            seconds = measured(shift, arm.name, out, options.cases)
            fixed = next(values for name, values in seconds.items() if name.startswith("fixed"))
            share = np.sum(seconds["deciding"]) / np.sum(seconds["router"])
            print(
                f"| {shift.name}, {arm.name} | {len(fixed)} | {spread(seconds['M0'])} | {spread(fixed)} | "
                f"{spread(seconds['router'])} | {np.mean(seconds['executed']):.2f} | {share:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

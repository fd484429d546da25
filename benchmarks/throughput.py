"""Seconds per case from the file to the deployed mask: M0, nnU-Net's mirroring, consensus, sequential, TENT, router.

Needs what ``real_ladders.py`` left in its output folder. Contestants take turns on each case; CPU seconds (of all
threads) stand beside wall seconds, because another load on the machine changes only the latter.

    python benchmarks/throughput.py --data DATA -o bench-real [--cases 6] [--threads 2] [hearts driving ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from real_folders import SPLITS, print_small
from real_ladders import HOME, Shift, cases_of, shifts

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone
from casewise.archive.store import open_archive
from casewise.core.errors import CasewiseError
from casewise.core.records import Controller, State
from casewise.data.folders import CaseFiles
from casewise.guard import guard
from casewise.judge.calibration.fit import calibrate
from casewise.judge.controllers.depth import FixedK, Settled, Source
from casewise.judge.policy import controller_of

SETS = {"cardiac": "mri", "fundus": "photo", "polyps": "photo", "driving": "driving"}
SHIFTS = ("hearts", "fundus-0", "polyps-0", "driving")


def deployed(files: CaseFiles, backbone: Backbone, how: Adaptation, controller: Controller) -> None:
    """One case under a controller."""
    guard(backbone.read(files).case, backbone, controller, how)


def contestants(shift: Shift, out: Path, refused: list[str]) -> Mapping[str, Callable[[CaseFiles], None]]:
    """What is timed, by name; what could not be calibrated goes to ``refused``."""
    names, tent = SETS[shift.cohort], replace(shift.ladders["tent"], shrink=())
    plain = shift.model.load()
    amount = Adaptation(f"views:{names}").horizon(plain)
    recorded = open_archive(shift.archive(out, SPLITS[0]))
    found: dict[str, tuple[Backbone, Adaptation, Controller]] = {
        "M0": (plain, tent, Source()),
        f"consensus of `{names}`": (plain, Adaptation(f"views:{names}", steps=amount), FixedK(amount)),
        "the same, sequential": (
            plain, Adaptation(f"running:{names}", steps=amount - 1), Settled(amount - 1)
        ),
        "TENT, four updates": (plain, tent, FixedK(4)),
    }  # fmt: skip
    if "tent" in recorded.ladders:
        try:
            router = controller_of(calibrate(recorded.on("tent"), "cardiac"))
            found["router of the paper on TENT"] = (plain, replace(tent, shrink=(State(2, 0.5),)), router)
        except CasewiseError as error:
            refused.append(f"{shift.name}: router of the paper: {error}")
    if shift.cohort == "cardiac":
        found["M0 with nnU-Net's mirroring"] = (replace(shift.model, mirroring=True).load(), tent, Source())
    return {name: lambda files, parts=parts: deployed(files, *parts) for name, parts in found.items()}  # type: ignore[misc]


def measured(shift: Shift, out: Path, cases: int, refused: list[str]) -> Mapping[str, list[tuple[float, float]]]:
    """(wall seconds, CPU seconds) of every contestant on the first development cases."""
    files = cases_of(out / shift.cohort / "folders" / SPLITS[1], shift.model.load().ending)[:cases]
    named = contestants(shift, out, refused)
    found: dict[str, list[tuple[float, float]]] = {}
    for name in (name for name in named if name.startswith("M0")):
        named[name](files[0])  # loads the model
    for one in files:
        for name, run in named.items():
            began, busy = time.perf_counter(), time.process_time()
            run(one)
            found.setdefault(name, []).append((time.perf_counter() - began, time.process_time() - busy))
    return found


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shifts", nargs="*", metavar="SHIFT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("nnUNet_compile", "f")
    sys.path.insert(0, str(HOME.parent))
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    known = shifts((options.weights or options.data.resolve().parent / "weights").resolve(), out)
    print_small(out)
    load = os.getloadavg()[0]
    print(
        f"{options.threads} threads, load of the machine {load:.1f}; mean [least, most]; CPU seconds are of all threads"
    )
    print("\n| shift | what | n | wall seconds | CPU seconds | times M0 (CPU) |\n|---|---|---|---|---|---|")
    refused: list[str] = []
    for name in options.shifts or SHIFTS:
        found = measured(known[name], out, options.cases, refused)
        base = np.mean([busy for _, busy in found["M0"]])
        for what, pairs in found.items():
            wall, busy = (np.array(column) for column in zip(*pairs, strict=True))
            print(
                f"| {name} | {what} | {len(wall)} | {wall.mean():.2f} [{wall.min():.2f}, {wall.max():.2f}] | "
                f"{busy.mean():.2f} [{busy.min():.2f}, {busy.max():.2f}] | {busy.mean() / base:.1f} |",
                flush=True,
            )
    if refused:
        print(f"\nRefused: {'; '.join(refused)}.")


if __name__ == "__main__":
    main()

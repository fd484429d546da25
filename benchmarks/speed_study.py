"""A whole study, bootstrap, pictures and page included, at two sizes. Prints figures; ``--check`` fails above targets.

    python benchmarks/speed_study.py [--cases 250] [--check]

Targets: 250 cases x 4 steps of 12 x 192 x 192 in under 60 s of processor time, and twice the cases in at most 2.4 times
the time (linear, with room for noise).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from speed_replay import PATTERNS, ragged
from worlds.cohorts import SYNTHETIC

from casewise.archive.store import Archive, create_archive
from casewise.core.errors import DegenerateTertiles
from casewise.core.records import Case
from casewise.judge.calibration.calibrate import calibrate
from casewise.report.study_report import build

SHAPE = (12, 192, 192)
LIMIT_S, GROWTH = 60, 2.4


def cohort(path: Path, cases: int, *, prefix: str, seed: int) -> Archive:
    """Heart-sized objects of three classes with ragged edits, in two groups, two cases a patient."""
    made = [ragged(SHAPE, np.random.default_rng([seed, number])) for number in range(PATTERNS)]
    configuration = {"metric": "dice", "min_area": 16, "foreground": True}
    archive = create_archive(path, binding=SYNTHETIC, steps=4, configuration=configuration)
    for number in range(cases):
        trajectory, label = made[number % PATTERNS]
        case = Case(
            f"{prefix}-{number:04d}", np.empty((1, 0)), group="AB"[number % 2], cluster=f"{prefix}-{number // 2}"
        )
        archive.add(case, trajectory, label)
    return archive.seal()


def studied(folder: Path, cases: int) -> tuple[float, float]:
    """Wall and processor seconds of one study; recording is not counted."""
    holdout = cohort(folder / "holdout", 20, prefix="held", seed=1)
    stream = cohort(folder / "stream", cases, prefix="case", seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        policy = calibrate(holdout, "cardiac")
    wall, processor = time.perf_counter(), time.process_time()
    build(stream, holdout, policy, folder / "report", progress=False)
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> int:
    """Print the figures; 1 if ``--check`` and a target is missed by processor time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    took = {}
    for cases in (asked.cases // 2, asked.cases):
        with tempfile.TemporaryDirectory() as folder:
            took[cases] = studied(Path(folder), cases)
        wall, processor = took[cases]
        print(f"{cases} cases x 4 steps of {'x'.join(map(str, SHAPE))}: {wall:.1f} s wall, {processor:.1f} s processor")
    small, large = (processor for _, processor in took.values())
    print(f"target < {LIMIT_S} s; twice the cases take {large / small:.2f} times as long (target <= {GROWTH})")
    return int(asked.check and (large >= LIMIT_S or large > GROWTH * small))


if __name__ == "__main__":
    sys.exit(main())

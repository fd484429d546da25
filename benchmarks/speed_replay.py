"""Archive and replay at the size of a study, 1,000 cases x 4 steps. Prints figures; ``--check`` fails below targets.

    python benchmarks/speed_replay.py [--cases 1000] [--check]

Targets: every controller over 1,000 cases in under 2 s in all; fragmentation and harm at another min_area at 500
case-steps a second at 12 x 192 x 192; 1,000 cases of 12 x 320 x 320 in under 300 MB, opened in under 1 s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from scipy import ndimage

from casewise import open_archive, replay
from casewise.archive.store import Archive, create_archive
from casewise.core.records import Case, Controller, Mask, State, Trajectory
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.controllers.router import Bucket, Router
from casewise.judge.outcomes import outcomes
from casewise.measure.metrics.harm import harm
from casewise.measure.signals.fragmentation import fragmentation, summary
from casewise.measure.signals.risk import region_drops

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.cohorts import SYNTHETIC

PATTERNS = 16  # distinct trajectories; every case still has files of its own


def recorded(path: Path, cases: int, shape: tuple[int, ...]) -> Archive:
    """An archive of many cases with three classes and ragged edits."""
    made = [ragged(shape, np.random.default_rng(number)) for number in range(PATTERNS)]
    configuration = {"metric": "dice", "min_area": 16, "foreground": True}
    archive = create_archive(path, binding=SYNTHETIC, steps=4, configuration=configuration)
    for number in range(cases):
        trajectory, label = made[number % PATTERNS]
        archive.add(Case(f"case-{number:05d}", np.empty((1, 0)), group="A"), trajectory, label)
    return archive.seal()


def ragged(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Trajectory, Mask]:
    """A heart-sized object with a rough border that moves and crumbles with every step; two to four thousand voxels."""
    rows = np.hypot(*np.meshgrid(*(np.arange(n) - n / 2 for n in shape[1:]), indexing="ij"))
    size = min(shape[1:]) / 6

    def at(shift: float, rough: float) -> Mask:
        noise = ndimage.gaussian_filter(rng.normal(size=shape), (0.5, 2, 2))
        edge = size + shift - rows + rough * noise / noise.std()
        return np.digitize(edge, [0, size / 3, size / 2]).astype(np.uint8)

    label = at(0, 0.5)
    masks = [at(-1, 0.5)]
    for step in range(1, 5):
        crumbs = ndimage.gaussian_filter(rng.normal(size=shape), (0.5, 1.5, 1.5))
        moved = np.where(crumbs > 1.5 * crumbs.std(), at(step / 2 - 1, 1.0), masks[-1])
        masks.append(np.where(rows < size + 8, moved, masks[0]).astype(np.uint8))
    shrunk = {State(2, 0.5): masks[1]}
    extra = {"entropy": 0.1, "msp": 0.9, "gradient_norm": 1.0}
    signals = [{**fragmentation(masks[0], mask).as_signals(), **extra} for mask in masks]
    signals[1].update(region_drops(masks[0], masks[1], rng.normal(size=shape)))
    return Trajectory("c", tuple(masks), tuple(signals), shrunk, {State(2, 0.5): signals[1]}), label


def controllers(archive: Archive) -> Iterator[Controller]:
    """Every controller of the registry, and the three ready routers."""
    signals = archive.signals()
    first = signals.loc[(signals["step"] == 1) & (signals["shrink"] == 0)]
    low, high = np.percentile(first["delta"], [33.33, 66.67])
    shrunk = Bucket("depth", 2, shrink=0.5)
    yield CONTROLLERS.build("m0")
    yield CONTROLLERS.build("fixed-k", step=4)
    for name in ("frag-stop", "entropy-stop", "msp-stop", "gradient-stop"):
        yield CONTROLLERS.build(name, cap=4)
    yield CONTROLLERS.build("tau-stop", mean=1.0, sigma=1.0, tau=0.0, cap=4)
    yield Router("delta", low, high, Bucket("depth", 3), shrunk)
    yield Router("regions", 1, 2, Bucket("depth", 1), Bucket("depth", 1))
    yield Router("delta", low, high, Bucket("stop", 4), Bucket("stop", 2))
    yield CONTROLLERS.build("stop-router", coordinate="delta", cut_low=low, cut_high=high, low_cap=4, mid_cap=2)
    yield CONTROLLERS.build("region-gate", threshold=0.0)


def size_mb(folder: Path) -> float:
    """Megabytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def rederived(archive: Archive, min_area: int) -> int:
    """Fragmentation and harm of every case-step at another min_area, read from the archive's masks."""
    done = 0
    for case_id in archive.ids:
        masks, label = archive.masks(case_id), archive.label(case_id)
        for step in range(1, archive.steps + 1):
            judged = harm(masks[State(0)], masks[State(step)], label, min_area=min_area)
            summary(judged.found, foreground_voxels=int(np.count_nonzero(masks[State(0)])))
            done += 1
    return done


@contextmanager
def timed(seconds: dict[str, tuple[float, float]], name: str) -> Iterator[None]:
    """Wall and processor seconds of a block; on a busy machine only the second says what the code costs."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    seconds[name] = (time.perf_counter() - wall, time.process_time() - processor)


def main() -> int:
    """Print the figures; 1 if ``--check`` and a target is missed by processor time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    took: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with timed(took, "write"):
            archive = recorded(Path(folder) / "large", asked.cases, (12, 320, 320))
        size = size_mb(archive.path) * 1000 / asked.cases
        with timed(took, "open"):
            archive = open_archive(archive.path)
        with timed(took, "signals, first reading"):
            archive.signals()
        archive = open_archive(archive.path)
        with timed(took, "signals, later"):
            archive.signals()
        chosen = list(controllers(archive))
        with timed(took, "replay"):
            for number, controller in enumerate(chosen):
                with timed(took, f"replay {number} {controller.name}"):
                    replay(archive, controller)
        middle = recorded(Path(folder) / "middle", 100, (12, 192, 192))
        with timed(took, "rederive"):
            steps = rederived(middle, 32)
        with timed(took, "outcomes"):
            rows = len(outcomes(middle))
    for name, (wall, processor) in took.items():
        print(f"{name:28s} {wall:8.3f} s wall {processor:8.3f} s processor")
    rate = steps / took["rederive"][1]
    print(f"{asked.cases} cases of 12x320x320 x 4 steps; size for 1,000: {size:.1f} MB (target < 300)")
    replayed = took["replay"][1]
    print(f"open {took['open'][1]:.3f} s (target < 1); {len(chosen)} controllers {replayed:.2f} s (target < 2)")
    print(f"fragmentation and harm, 12x192x192: {rate:.0f} case-steps/s (target >= 500), {steps} case-steps")
    print(f"outcomes with Dice, 12x192x192: {rows / took['outcomes'][1]:.0f} states/s")
    missed = size >= 300 or took["open"][1] >= 1 or took["replay"][1] >= 2 or rate < 500
    return int(asked.check and missed)


if __name__ == "__main__":
    sys.exit(main())

"""How fast is ``casewise compare``? 1,000 pairs of 12 x 320 x 320 with labels, one process, ratios within one run.

What a user of the default gets, surface distances and a declared measure included and pictures left out, is compared,
summed up with intervals and written, with and without the distances. Beside it stand two yardsticks: reading and
decompressing the same files with nibabel, one pair at a time, and the loop that people write today (nibabel,
``scipy.ndimage.label``, ``binary_fill_holes`` and MedPy, label by label), timed on some pairs. Time is CPU time of this
process; they take turns, some pairs each, so that a machine that is busy with other things is as busy for all.

Two scenes, fixed by what recorded pairs of real hearts look like (nnU-Net's masks of 10 to 12 x 192 x 192: M0 against a
consensus of views, 60 volumes; without against with mirroring, 20 and 20 volumes) and not by what they cost:

    median (nine in ten below)         | recorded                              | scene
    foreground, share of the volume    | .046 (.081), .074 (.095), .044 (.083) | .061
    changed share of the foreground    | .049 (.138), .053 (.073), .081 (.163) | .069
    box of all masks, share of volume  | .159 (.219), .197 (.250), .133 (.195) | .185
    pieces of labels in a mask         | 6 (10), 6 (9), 5 (9)                  | 7
    components of the change           | 360 (513), 510 (659), 393 (671)       | 961
    of them, at least 16 voxels        | 5 (10), 8 (14), 9 (12)                | 76
    runs of the change                 | 580 (846), 873 (1030), 716 (1078)     | 2875

Borders are 1.7 times as long at 320 x 320; the scene has more pieces of the change still, so it is the harder one.
*near*: as recorded, strays lie around the heart. *strays*: 12 voxels more in each mask, anywhere in the volume, which
no recording had.

The exit code is 1 when a promised ratio is missed in either scene: at most 7 times reading, at most 2.5 times without
surface distances, at least 5 times faster than the loop, and memory that does not grow with the rows of the pairs: they
are read back from cases.jsonl, and at most 3 kB more per pair are allowed for file names, ids and a few numbers (a row
as records takes 8 kB and more).

    python benchmarks/speed_compare.py [--pairs 1000]
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from scipy import ndimage

from casewise.core.durable import write_json
from casewise.data.pairs import find_pairs
from casewise.measure.measures import declared_measures
from casewise.run.local import LocalEngine
from casewise.study.compare import Outcome, csv_rows, outcome_of
from casewise.study.compared_cohort import MANY
from casewise.study.compared_pairs import CompareCase, Settings, case_log, compare_pairs

SHAPE = (12, 320, 320)
DISTINCT = 25  # triples of masks; further pairs are copies under other names
SCENES = {"near": 0, "strays": 12}  # voxels anywhere in the volume
MOST_OF_READING = {"casewise": 7.0, "without distances": 2.5}
LEAST_OVER_LOOP, MOST_KB_PER_PAIR = 5.0, 3.0


def heart(draw: np.random.Generator, *, ragged: float = 0.05, strays: int = 0) -> np.ndarray:
    """A chamber in a ring of muscle and a second chamber, tilted through the slices, with ragged borders and crumbs."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    y, x = y - 160 - 5 * (z - 6) + draw.normal(0, 0.5), x - 160 + 5 * (z - 6) + draw.normal(0, 0.5)
    wave = np.sin(5 * np.arctan2(y, x) + draw.normal() + 0.4 * z) + draw.normal(0, ragged, SHAPE)
    radius = np.hypot(y, x) + wave
    inside = (z > 0) & (z < 11)
    mask = np.zeros(SHAPE, np.uint8)
    mask[(radius < 36) & inside] = 2
    mask[(radius < 25) & inside] = 1
    mask[(np.hypot(y / 1.3, x - 60) + wave < 29) & (mask == 0) & inside] = 3
    for _ in range(4):
        corner = [int(draw.integers(low, high)) for low, high in ((1, 11), (90, 230), (90, 280))]
        mask[corner[0], corner[1] : corner[1] + 3, corner[2] : corner[2] + 4] = draw.integers(1, 4)
    mask[tuple(draw.integers(0, side, strays) for side in SHAPE)] = draw.integers(1, 4, strays)
    return mask


def write_pairs(root: Path, pairs: int, *, strays: int = 0) -> None:
    """ROOT/{old,new,labels} with so many NIfTI files each."""
    draw = np.random.default_rng(0)
    for number in range(pairs):
        for name in ("old", "new", "labels"):
            path = root / name / f"case{number:04d}.nii.gz"
            if number < DISTINCT:
                path.parent.mkdir(parents=True, exist_ok=True)
                drawn = heart(draw, ragged=0.0 if name == "labels" else 0.05, strays=strays)
                nibabel.save(nibabel.Nifti1Image(np.ascontiguousarray(drawn.T), np.diag([1.25, 1.25, 10, 1])), path)
            else:
                shutil.copyfile(root / name / f"case{number % DISTINCT:04d}.nii.gz", path)


def compared(root: Path, out: Path, *, surfaces: str = "moved") -> None:
    """The whole command but for the pictures."""
    pairs = {pair.id: pair for pair in find_pairs(root / "old", root / "new", labels=root / "labels")}
    work = CompareCase(pairs, Settings(surfaces=surfaces, labels_given=True, hashed=True))
    written(work, out)


def written(work: CompareCase, out: Path) -> None:
    """Every pair compared, summed up, and every row of the tables made."""
    for _ in compare_pairs(work, LocalEngine(), out, fresh=True):
        pass
    declared = declared_measures({"ratio": {"formula": "volume(1) / (volume(1) + volume(2))", "decision": "< 0.5"}})
    outcome: Outcome = outcome_of(case_log(out), declared=declared)
    write_json(out / "summary.json", outcome.as_dict())
    for _ in csv_rows(outcome):
        pass


def read(root: Path, number: int) -> list[np.ndarray]:
    """Old, new and label of a pair, as everybody reads them."""
    names = ("old", "new", "labels")
    return [np.asarray(nibabel.load(root / name / f"case{number:04d}.nii.gz").dataobj) for name in names]


def unpacked(root: Path, number: int) -> None:
    """Bytes in, bytes out: the least that reading can cost."""
    for name in ("old", "new", "labels"):
        gzip.decompress((root / name / f"case{number:04d}.nii.gz").read_bytes())


def looped(root: Path, number: int) -> list[Any]:
    """The loop of today for one pair: Dice, volumes, components, holes, and regions of the change judged one by one."""
    from medpy.metric import binary

    old, new, label = read(root, number)
    found: list[Any] = []
    for c in (1, 2, 3):
        a, b, y = old == c, new == c, label == c
        found += [binary.dc(a, y), binary.dc(b, y), int(a.sum()), int(b.sum()), int((a != b).sum())]
        for mask in (a, b):
            found.append(ndimage.label(mask)[1])
            found.append(ndimage.label(ndimage.binary_fill_holes(mask) & ~mask)[1])
    pieces, count = ndimage.label(old != new)
    for piece, box in enumerate(ndimage.find_objects(pieces), start=1):
        inside = pieces[box] == piece
        if inside.sum() >= 16:
            found.append(int((new[box] != label[box])[inside].sum()) - int((old[box] != label[box])[inside].sum()))
    return [*found, count]


def seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    call()
    return time.process_time() - start


def each(call: Callable[[Path, int], Any], root: Path, numbers: Iterable[int]) -> Callable[[], None]:
    """One pair after the other; nothing is kept, so no memory is paid for that a pair alone would not need."""

    def run() -> None:
        for number in numbers:
            call(root, number)

    return run


def peak_mb(root: Path, pairs: int) -> float:
    """Peak memory of a process that compares so many pairs."""
    words = [sys.executable, __file__, "--pairs", str(pairs), "--memory-of", str(root)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def memory_of(root: Path, pairs: int) -> float:
    """What :func:`peak_mb` runs: the first pairs of a folder."""
    with tempfile.TemporaryDirectory() as out:
        found = find_pairs(root / "old", root / "new", labels=root / "labels")[:pairs]
        work = CompareCase({pair.id: pair for pair in found}, Settings(labels_given=True, hashed=True))
        written(work, Path(out))
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measured(root: Path, pairs: int, *, rounds: int = 4) -> dict[str, float]:
    """Milliseconds of CPU per pair: ours over all pairs, the others in between, on a part of the pairs each time."""
    memory_of(root, 8)  # warm: imports, and files in the cache
    read(root, 0), unpacked(root, 0), looped(root, 0)
    spent = dict.fromkeys(("casewise", "without distances", "reading", "gunzip only", "the loop"), 0.0)
    for part in range(rounds):
        numbers = range(part, pairs, rounds)
        spent["casewise"] += seconds(lambda: compared(root, root / "out")) / rounds
        spent["without distances"] += seconds(lambda: compared(root, root / "out", surfaces="none")) / rounds
        spent["reading"] += seconds(each(read, root, numbers))
        spent["gunzip only"] += seconds(each(unpacked, root, numbers))
        some = numbers[:10]
        spent["the loop"] += seconds(each(looped, root, some)) / len(some) * len(numbers)
    return {name: 1e3 * total / pairs for name, total in spent.items()}


def main() -> int:
    """Print the ratios; 1 if a promise was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.memory_of is not None:
        print(memory_of(chosen.memory_of, chosen.pairs))
        return 0
    pairs, held = chosen.pairs, []
    print(f"{pairs} pairs with labels of {' x '.join(map(str, SHAPE))}, milliseconds of CPU per pair")
    for scene, strays in SCENES.items():
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_pairs(root, pairs, strays=strays)
            spent = measured(root, pairs)
            fewer = max(3 * MANY, pairs // 4)  # so that a third, a class of sizes, has MANY patients too
            small, large = peak_mb(root, min(fewer, pairs)), peak_mb(root, pairs)
        ours = spent["casewise"]
        print(f"{scene}: " + ", ".join(f"{name} {value:.2f}" for name, value in spent.items()))
        slower = {name: spent[name] / spent["reading"] for name in MOST_OF_READING}
        faster = spent["the loop"] / ours
        growth = 1024 * (large - small) / max(1, pairs - fewer)
        kept_all = [slower[name] <= most for name, most in MOST_OF_READING.items()]
        kept_all += [faster >= LEAST_OVER_LOOP, growth <= MOST_KB_PER_PAIR]
        said = [
            *(f"{name}: {slower[name]:.2f} times reading (at most {most:g})" for name, most in MOST_OF_READING.items()),
            f"{faster:.1f} times faster than the loop (at least {LEAST_OVER_LOOP:g})",
            f"memory {small:.1f} MB for {fewer} pairs, {large:.1f} MB for {pairs}: {growth:.1f} kB per pair "
            f"(at most {MOST_KB_PER_PAIR:g})",
        ]
        if pairs <= fewer:
            del kept_all[-1], said[-1]
            print(f"  memory is judged from {fewer} pairs on: below, tables of sign flips grow, 40 kB a patient")
        held += kept_all
        for kept, sentence in zip(kept_all, said, strict=True):
            print(f"  {'yes   ' if kept else 'MISSED'} {sentence}")
        print(f"         {ours / spent['gunzip only']:.2f} times gunzip alone")
    return int(not all(held))


if __name__ == "__main__":
    raise SystemExit(main())

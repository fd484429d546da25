"""How fast is ``casewise compare``? 1,000 pairs of 12 x 320 x 320 with labels, one process, ratios within one run.

Everything but surface distances is compared, summed up with intervals and written, beside two yardsticks: reading and
decompressing the same files with nibabel, and the loop that people write today (nibabel, ``scipy.ndimage.label``,
``binary_fill_holes`` and MedPy, label by label), timed on some pairs. Time is CPU time of this process. The exit code
is 1 when a promised ratio is missed: at most 2 times reading, at least 5 times faster than the loop, and memory that
does not grow with the number of pairs.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from scipy import ndimage

from casewise.core.durable import write_json
from casewise.data.pairs import find_pairs
from casewise.run.compare import CompareCase, Settings, compare_folders, csv_rows, outcome_of
from casewise.run.local import LocalEngine

SHAPE = (12, 320, 320)
DISTINCT = 25  # triples of masks; further pairs are copies under other names
MOST_OF_READING, LEAST_OVER_LOOP, MOST_GROWTH_MB = 2.0, 5.0, 60.0


def heart(draw: np.random.Generator) -> np.ndarray:
    """A chamber in a ring of muscle and a second chamber, with wavy borders and some crumbs around them."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    y, x = y - 160 + draw.normal(0, 0.7), x - 160 + draw.normal(0, 0.7)
    wave = 1.5 * np.sin(5 * np.arctan2(y, x) + draw.normal() + 0.4 * z)
    radius = np.hypot(y, x) + wave
    inside = (z > 1) & (z < 11)
    mask = np.zeros(SHAPE, np.uint8)
    mask[(radius < 35) & inside] = 2
    mask[(radius < 24) & inside] = 1
    mask[(np.hypot(y / 1.3, x - 60) + wave < 28) & (mask == 0) & inside] = 3
    crumbs = tuple(draw.integers(low, high, 12) for low, high in ((0, 12), (110, 210), (110, 260)))
    mask[crumbs] = draw.integers(0, 4, 12)
    return mask


def write_pairs(root: Path, pairs: int) -> None:
    """ROOT/{old,new,labels} with so many NIfTI files each."""
    draw = np.random.default_rng(0)
    for number in range(pairs):
        for name in ("old", "new", "labels"):
            path = root / name / f"case{number:04d}.nii.gz"
            if number < DISTINCT:
                path.parent.mkdir(parents=True, exist_ok=True)
                volume = np.ascontiguousarray(heart(draw).T)
                nibabel.save(nibabel.Nifti1Image(volume, np.diag([1.25, 1.25, 10, 1])), path)
            else:
                shutil.copyfile(root / name / f"case{number % DISTINCT:04d}.nii.gz", path)


def compared(root: Path, out: Path) -> None:
    """The whole command but for the pictures."""
    pairs = {pair.id: pair for pair in find_pairs(root / "old", root / "new", labels=root / "labels")}
    work = CompareCase(pairs, Settings(surfaces="none", labels_given=True))
    outcome = outcome_of(list(compare_folders(work, LocalEngine(), out, fresh=True)))
    write_json(out / "summary.json", outcome.as_dict())
    csv_rows(outcome)


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


def peak_mb(root: Path, pairs: int) -> float:
    """Peak memory of a process that compares so many pairs."""
    words = [sys.executable, __file__, "--pairs", str(pairs), "--memory-of", str(root)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def memory_of(root: Path, pairs: int) -> float:
    """What :func:`peak_mb` runs: the first pairs of a folder."""
    with tempfile.TemporaryDirectory() as out:
        found = find_pairs(root / "old", root / "new", labels=root / "labels")[:pairs]
        work = CompareCase({pair.id: pair for pair in found}, Settings(surfaces="none", labels_given=True))
        outcome_of(list(compare_folders(work, LocalEngine(), Path(out)))).as_dict()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> int:
    """Print the ratios; 1 if a promise was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.memory_of is not None:
        print(memory_of(chosen.memory_of, chosen.pairs))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root, pairs = Path(folder), chosen.pairs
        write_pairs(root, pairs)
        memory_of(root, 8)  # warm: imports, and files in the cache
        read(root, 0), unpacked(root, 0), looped(root, 0)
        ours = seconds(lambda: compared(root, root / "out"))
        reading = seconds(lambda: [read(root, number) for number in range(pairs)])
        unpacking = seconds(lambda: [unpacked(root, number) for number in range(pairs)])
        some = min(pairs, 40)
        loop = seconds(lambda: [looped(root, number) for number in range(some)]) / some * pairs
        small, large = peak_mb(root, max(1, pairs // 10)), peak_mb(root, pairs)
    print(f"{pairs} pairs with labels of {' x '.join(map(str, SHAPE))}, milliseconds of CPU per pair")
    for name, total in (("casewise", ours), ("reading", reading), ("gunzip only", unpacking), ("the loop", loop)):
        print(f"  {name:12} {1e3 * total / pairs:8.2f}")
    held = {
        f"{ours / reading:.2f} times reading (at most {MOST_OF_READING:g})": ours / reading <= MOST_OF_READING,
        f"{loop / ours:.1f} times faster than the loop (at least {LEAST_OVER_LOOP:g})": loop / ours >= LEAST_OVER_LOOP,
        f"memory {small:.0f} MB for {max(1, pairs // 10)} pairs, {large:.0f} MB for {pairs} (at most "
        f"{MOST_GROWTH_MB:g} MB more)": large - small <= MOST_GROWTH_MB,
    }
    for said, kept in held.items():
        print(f"{'yes   ' if kept else 'MISSED'} {said}")
    print(f"       {ours / unpacking:.2f} times gunzip alone")
    return int(not all(held.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Whether ``casewise predict`` stays as it began: memory, open files and seconds per case over thousands of cases.

    python benchmarks/soak_predict.py                 # 2,000 cases of one small slice each, adapted once
    python benchmarks/soak_predict.py --cases 200     # a look
    python benchmarks/soak_predict.py --cases 10000 --engine ray     # on a Ray cluster of this machine, two workers

Prints one row per block of cases and one line of JSON at the end. The cases are small, so that what grows is seen and
not what a case needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.core.records import Policy
from casewise.data.folders import list_cases
from casewise.deployment import Deployment
from casewise.run.local import Engine, LocalEngine
from casewise.run.predict_folder import predict_folder, prediction_work
from casewise.run.prediction_folder import verify_predictions


def main() -> None:
    """Make the cases, predict them, and say what grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="casewise-soak-") as folder:
        print(json.dumps(soaked(Path(folder), asked.cases, asked.blocks, asked.engine)))


def soaked(folder: Path, cases: int, blocks: int, engine: str) -> dict[str, object]:
    """Rows on the way, and the growth from the second block to the last."""
    _write(folder / "images", cases)
    how = Adaptation("tent", steps=1, min_area=4)
    deployment = Deployment(
        Model("casewise.adapt.networks:phantom_cardiac"), Policy("fixed-k", "fixed-k", {"step": 1}, 1),
        {"": how}, contract="off",
    )  # fmt: skip
    work = prediction_work(deployment, list_cases(folder / "images"), folder / "out")
    every, began, rows = max(1, cases // blocks), time.perf_counter(), []
    done = 0
    for done, entry in enumerate(predict_folder(work, _engine(engine)), start=1):
        assert entry.is_done, entry.error
        if done % every == 0:
            gc.collect()
            now = time.perf_counter()
            rows.append({"cases": done, "s_per_case": (now - began) / every, "rss_mib": _rss_mib(), "files": _files()})
            print(
                "{cases:>6} cases  {s_per_case:.4f} s per case  {rss_mib:.1f} MiB  {files} open files".format(
                    **rows[-1]
                )
            )
            began = time.perf_counter()
    later = rows[1:] or rows
    return {
        "engine": engine,
        "cases": done,
        "masks": len(list((folder / "out").glob("*.nii.gz"))),
        "rss_mib_grown": round(rows[-1]["rss_mib"] - later[0]["rss_mib"], 1),
        "files_grown": rows[-1]["files"] - later[0]["files"],
        "s_per_case": round(statistics.median(row["s_per_case"] for row in rows), 4),
        "s_per_case_last_over_first": round(rows[-1]["s_per_case"] / later[0]["s_per_case"], 2),
        "problems": len(verify_predictions(folder / "out")),
    }


def _engine(name: str) -> Engine:
    if name == "local":
        return LocalEngine()
    from casewise.run.ray import RayEngine

    return RayEngine(jobs=2, threads=1)


def _write(folder: Path, cases: int) -> None:
    folder.mkdir()
    voxels = np.random.default_rng(0).normal(size=(16, 16, 1)).astype(np.float32)
    for number in range(cases):
        nibabel.save(nibabel.Nifti1Image(voxels + number / cases, np.eye(4)), folder / f"c{number:05d}.nii.gz")


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


if __name__ == "__main__":
    main()

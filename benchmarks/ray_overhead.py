"""What Ray costs a case: start-up, the round trip of an empty case, a recorded case, and the driver's serial share.

``python benchmarks/ray_overhead.py`` prints one JSON line; docs/how-to/cluster.md extrapolates from it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.core.records import State
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort
from casewise.run.gather import gathered_cases
from casewise.run.local import LocalEngine
from casewise.run.ray import RayEngine, connected
from casewise.run.record_folder import RecordCase, record_folder

EMPTY = 500
CASES = 6


def empty() -> Callable[[str], None]:
    """Work that does nothing; made here, so that Ray sends it along."""

    def nothing(case_id: str) -> None:
        return None

    return nothing


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_cohort(cardiac_cohort("B", CASES, split="evaluation"), Path(folder))
        model = Model("casewise.adapt.networks:phantom_cardiac")
        cases = {files.id: files for files in gathered_cases(model.load(), Path(folder) / "images")}
        work = RecordCase(model, {"": Adaptation("tent", steps=2, shrink=(State(2, 0.5),))}, cases)
        found["local"] = recorded(work, LocalEngine(), Path(folder) / "local")
        began = time.perf_counter()
        with connected(None):
            found["cluster_start_s"] = time.perf_counter() - began
            found["empty"] = per_empty_case()
            found["ray"] = recorded(work, RayEngine(jobs=1, threads=1), Path(folder) / "ray")
    print(json.dumps(found, indent=1))


def per_empty_case() -> dict[str, float]:
    """Seconds until the first result (the worker's start), then milliseconds a case."""
    began = time.perf_counter()
    results = RayEngine(jobs=1, threads=1).map(empty(), [f"c{i}" for i in range(EMPTY)])
    next(results)
    first = time.perf_counter() - began
    rest = sum(1 for _ in results)
    return {"worker_start_s": first, "round_trip_ms": 1000 * (time.perf_counter() - began - first) / rest}


def recorded(work: RecordCase, engine: Any, path: Path) -> dict[str, float]:
    """Medians over the cases, the first one (which waits for the worker) left out."""
    archive, results = record_folder(work, engine, path)
    spent, inside, driver = [], [], []
    add = archive.add

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        add(*arguments)
        driver.append(time.perf_counter() - start)

    archive.add = timed  # type: ignore[method-assign]
    last = time.perf_counter()
    for result in results:
        now = time.perf_counter()
        spent.append(now - last)
        inside.append(result.seconds)
        last = now
    hidden = isinstance(engine, RayEngine)  # its worker has the next case while the driver adds the last one
    own = [w - s - (0 if hidden else add_s) for w, s, add_s in zip(spent, inside, driver, strict=True)]
    return {
        "case_s": statistics.median(inside[1:]),
        "add_to_archive_ms": 1000 * statistics.median(driver[1:]),
        "engine_ms": 1000 * statistics.median(own[1:]),
    }


if __name__ == "__main__":
    sys.exit(main())

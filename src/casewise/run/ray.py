"""Cases on a Ray cluster: one actor per worker, which loads the model once and runs one case at a time.

The driver has the list of open cases. A worker that dies, with its process or with its node, gives its case back
to the list and is replaced, so nothing is lost; a case that takes its worker down again and again is given up after
``retries`` further attempts and reported. The caller's manifest, not Ray, knows the finished cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from casewise.core.errors import BadInput, in_one_line
from casewise.run.local import GRACE_S, Result, Work, attempt

ADDRESSES = ("CASEWISE_RAY_ADDRESS", "RAY_ADDRESS")
WAIT_S = 0.5  # time between two checks of the time limits


@dataclass(frozen=True)
class RayEngine:
    """``jobs`` workers on a Ray cluster; without an address Ray is started on this machine."""

    jobs: int = 1
    timeout_s: float | None = None
    address: str | None = None  # None: the environment's, see ADDRESSES; where that is empty, this machine
    retries: int = 3
    grace_s: float = GRACE_S
    threads: int | None = None  # of torch in each worker; None: this process's, or fewer where cores are fewer

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise BadInput(f"-j, the number of workers, must be at least 1, got {self.jobs}")
        if self.retries < 0:
            raise BadInput(f"retries must be 0 or more, got {self.retries}")

    def map(self, work: Work, case_ids: Sequence[str]) -> Iterator[Result]:
        """Yield one result per case, also where workers are lost."""
        if not case_ids:
            return
        with connected(self.address or address_from(os.environ)):
            yield from _WorkerPool(self, work, list(case_ids)).results()


def address_from(environment: Mapping[str, str]) -> str | None:
    """The cluster that the environment names; casewise's own variable has priority.

    >>> address_from({"RAY_ADDRESS": "ray://head:10001", "CASEWISE_RAY_ADDRESS": ""})
    'ray://head:10001'
    """
    return next((environment[name] for name in ADDRESSES if environment.get(name)), None)


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Join a cluster, or start one until the end of the block. An existing connection stays."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = {} if address else {"num_cpus": os.cpu_count() or 1, "include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError) as error:  # nothing answers there, or it is no address
        raise BadInput(f"no Ray cluster answers at {address!r} ({in_one_line(error)}); name one that runs") from None
    try:
        yield
    finally:
        ray.shutdown()


class Actor:
    """The work inside a worker, prepared once."""

    def __init__(self, work: Work, threads: int, folder: str) -> None:
        if not Path(folder).is_dir():
            raise BadInput(f"this node has no folder {folder}; workers need the driver's files under the same path")
        os.chdir(folder)
        torch.set_num_threads(threads)
        prepare = getattr(work, "prepare", None)
        if prepare is not None:
            prepare()
        self._work = work

    def ready(self) -> bool:
        """Return True once the model is loaded."""
        return True

    def run(self, case_id: str) -> Result:
        """Run one case; an exception becomes its result."""
        return attempt(self._work, case_id)


@dataclass
class _RemoteWorker:
    """One actor, its pending answer, and the case of that answer (None: the test that it is ready)."""

    actor: Any
    owes: Any
    case_id: str | None = None
    began: float = field(default_factory=time.monotonic)

    def give(self, case_id: str) -> None:
        self.case_id, self.began = case_id, time.monotonic()
        self.owes = self.actor.run.remote(case_id)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class _WorkerPool:
    """Workers, the cases that wait, and how often each case was lost."""

    def __init__(self, engine: RayEngine, work: Work, waiting: list[str]) -> None:
        self.engine = engine
        self.waiting = waiting
        self.lost: dict[str, int] = {}
        self.failed_starts = 0
        self._threads = engine.threads or _threads(engine.jobs)
        self._limit = None if engine.timeout_s is None else engine.timeout_s + engine.grace_s
        self._work = ray.put(work)
        options = {"num_cpus": self._threads, "num_gpus": _gpus(work), "max_restarts": 0}
        self._kind = ray.remote(**options)(Actor)
        self.workers = [self._start_worker() for _ in range(min(engine.jobs, len(waiting)))]
        self.idle: list[_RemoteWorker] = []

    def results(self) -> Iterator[Result]:
        """A worker gets its next case before the caller gets the last result, so writing does not keep it waiting."""
        try:
            while self.waiting or any(worker.case_id for worker in self.workers):
                self._give()
                owed = {worker.owes: worker for worker in self.workers if worker.owes is not None}
                done, _ = ray.wait(list(owed), num_returns=1, timeout=WAIT_S)
                found = [self._collected(owed[answer]) for answer in done] + self._overdue()
                self._give()
                yield from (result for result in found if result is not None)
        finally:
            for worker in self.workers:
                ray.kill(worker.actor)

    def _start_worker(self) -> _RemoteWorker:
        actor = self._kind.remote(self._work, self._threads, str(Path.cwd()))
        return _RemoteWorker(actor, actor.ready.remote())

    def _give(self) -> None:
        while self.waiting and self.idle:
            self.idle.pop().give(self.waiting.pop(0))

    def _collected(self, worker: _RemoteWorker) -> Result | None:
        """The result of a worker: the result of its case; None where it only became ready, or was lost and replaced."""
        try:
            answer = ray.get(worker.owes)
        except RayError as error:  # a new worker; the case of the lost one waits again, unless it was lost too often
            given_up = self._given_up(worker, error)
            self._stop_worker(worker)
            return given_up
        result: Result | None = None if worker.case_id is None else answer
        worker.case_id, worker.owes = None, None
        self.failed_starts = 0
        self.idle.append(worker)
        return result

    def _given_up(self, worker: _RemoteWorker, error: RayError) -> Result | None:
        case_id = worker.case_id
        if case_id is None:
            self.failed_starts += 1
            if self.failed_starts > self.engine.retries + len(self.workers):
                raise BadInput(f"workers cannot start: {_cause(error)}")
            return None
        self.lost[case_id] = self.lost.get(case_id, 0) + 1
        if self.lost[case_id] <= self.engine.retries:
            self.waiting.append(case_id)
            return None
        message = f"its worker was lost {self.lost[case_id]} times ({_cause(error)}); see max-ram"
        return Result(case_id, error=message, kind="Killed", seconds=worker.seconds)

    def _stop_worker(self, worker: _RemoteWorker) -> None:
        self.workers.remove(worker)
        ray.kill(worker.actor)
        if self.waiting:
            self.workers.append(self._start_worker())

    def _overdue(self) -> list[Result]:
        """Stop workers whose case took too long, and return the errors of these cases."""
        if self._limit is None:
            return []
        late = [one for one in self.workers if one.case_id and one.seconds > self._limit]
        for worker in late:
            self._stop_worker(worker)
        message = f"did not finish within {self._limit:g} s and was stopped"
        return [Result(str(one.case_id), error=message, kind="TimeOut", seconds=one.seconds) for one in late]


def _threads(jobs: int) -> int:
    """The local engine's rule, over the cores of the cluster: equal shares, never more than this process uses."""
    cores = int(ray.cluster_resources().get("CPU", 1))
    return max(1, min(torch.get_num_threads(), cores // jobs))


def _gpus(work: Work) -> int:
    """Return one GPU per worker if the model runs on a GPU; a worker sees only its own."""
    model = getattr(getattr(work, "deployment", None), "model", None)
    return int(str(getattr(model, "device", "cpu")).startswith("cuda"))


def _cause(error: RayError) -> str:
    """The last line of a Ray error, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return in_one_line(error) if not lines else f"{type(error).__name__}: {lines[-1][:200]}"

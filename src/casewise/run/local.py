"""Run a picklable function over case ids, in this process or in several, and yield one result per case.

With one job and no time limit everything runs in this process: no worker, no shared memory, nothing to hang. Otherwise
each job is a spawned process that is killed and replaced when a case exceeds its time or the process dies.

``keep_freed_memory`` makes long runs faster. An episode allocates and frees the same large activations at every forward
pass. By default glibc maps each of them anew and the kernel clears every page first. Two settings of glibc change that:
``M_MMAP_MAX = 0`` takes large blocks from the heap, and ``M_TRIM_THRESHOLD = -1`` never returns the end of the heap.
The results do not change; the process stays as large as its largest case. ``CASEWISE_KEEP_MEMORY=0`` turns this off.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from casewise.core.errors import BadInput, MissingExtra, in_one_line, place_of
from casewise.core.processes import spawn
from casewise.core.registry import Registry

Work = Callable[[str], Any]
"""Picklable; takes a case id, returns something picklable."""

ENGINES = Registry("engine", {"local": "casewise.run.local:LocalEngine", "ray": "casewise.run.ray:RayEngine"})
GRACE_S = 30.0  # a worker stops by itself at the time limit; this much later it is killed


@dataclass(frozen=True)
class Result:
    """Result or error of one case."""

    case_id: str
    value: Any = None
    error: str | None = None
    kind: str | None = None  # class name of the error, "Killed" where the process died, "TimeOut" where it was killed
    seconds: float = 0.0


class Engine(Protocol):
    """Runs work over cases, in any order; one result per case, and no exception of one case stops the others."""

    def map(self, work: Work, case_ids: Sequence[str]) -> Iterator[Result]:
        """Stream results as they come."""
        ...


def chosen_engine(name: str, *, address: str | None = None, **options: Any) -> Engine:
    """Return an engine by name, imported when it is needed; only Ray has an address to join."""
    module, _, kind = ENGINES[name].partition(":")
    if address is not None:
        if name != "ray":
            raise BadInput(f"address {address} is a Ray cluster; add --set engine=ray")
        options["address"] = address
    try:
        engine: Engine = getattr(importlib.import_module(module), kind)(**options)
    except ImportError as error:
        raise MissingExtra(f"engine {name} cannot be imported ({error}); pip install 'casewise[{name}]'") from error
    return engine


@dataclass(frozen=True)
class LocalEngine:
    """This process, or ``jobs`` spawned ones."""

    jobs: int = 1
    timeout_s: float | None = None
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise BadInput(f"-j, the number of processes, must be at least 1, got {self.jobs}")

    def map(self, work: Work, case_ids: Sequence[str]) -> Iterator[Result]:
        """Stream results as they come."""
        if self.jobs == 1 and self.timeout_s is None:
            return (attempt(work, case_id) for case_id in case_ids)
        return self._spawned(work, list(case_ids))

    def _spawned(self, work: Work, waiting: list[str]) -> Iterator[Result]:
        limit = None if self.timeout_s is None else self.timeout_s + self.grace_s
        workers = [_Worker(work, self.jobs) for _ in range(min(self.jobs, len(waiting)))]
        try:
            while waiting or any(worker.case_id for worker in workers):
                for index, worker in enumerate(workers):
                    if worker.case_id is None and waiting:
                        if not worker.give(waiting[0]):  # the process died while it waited
                            worker.stop()
                            workers[index] = _Worker(work, self.jobs)
                            workers[index].give(waiting[0])
                        waiting.pop(0)
                wait([worker.pipe for worker in workers if worker.case_id], timeout=0.5)
                for index, worker in enumerate(workers):
                    result = worker.collect(limit)
                    if result is not None:
                        yield result
                        if worker.dead:
                            workers[index] = _Worker(work, self.jobs)
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """One spawned process and the case that it is busy with."""

    def __init__(self, work: Work, jobs: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = spawn(_serve, theirs, work, jobs)
        theirs.close()
        self.case_id: str | None = None
        self.began: float | None = None
        self.dead = False

    def give(self, case_id: str) -> bool:
        """Hand a case over; False if the process has died, which :meth:`collect` then reports."""
        self.case_id, self.began = case_id, None
        try:
            self.pipe.send(case_id)
        except OSError:
            return False
        return True

    def collect(self, limit: float | None) -> Result | None:
        """Return the result if the case ended or was killed; kill it if it took longer than ``limit``."""
        if self.case_id is None:
            return None
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if message != "began":
                    self.case_id = None
                    result: Result = message
                    return result
                self.began = time.monotonic()
        except (EOFError, OSError):
            self.process.join(5)
            return self._end("Killed", _why(self.process.exitcode))
        if limit is not None and self.began is not None and time.monotonic() - self.began > limit:
            self.process.kill()
            return self._end("TimeOut", f"did not finish within {limit:g} s and was stopped")
        return None

    def _end(self, kind: str, message: str) -> Result:
        case_id, self.case_id, self.dead = str(self.case_id), None, True
        seconds = time.monotonic() - self.began if self.began else 0.0
        self.stop()
        return Result(case_id, error=message, kind=kind, seconds=seconds)

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(1 if self.case_id is None else 0)  # the run was interrupted while it is busy
        self.process.kill()
        self.process.join()


def _why(code: int | None) -> str:
    if code == -9:
        return "the process was killed by signal 9, probably because memory ran out; see max-ram"
    return f"the process died with exit code {code}"


def _serve(pipe: Connection, work: Work, jobs: int) -> None:
    """Main loop of a worker: load the model once, then run cases until the pipe closes."""
    torch = sys.modules.get("torch")  # imported with the work, if the work needs it
    if torch is not None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    with suppress(EOFError, ConnectionError):  # the pipe was closed: there is nothing left to do
        while True:
            case_id = pipe.recv()
            getattr(work, "prepare", lambda: None)()
            pipe.send("began")
            pipe.send(attempt(work, case_id))


def attempt(work: Work, case_id: str) -> Result:
    """Run one case; an exception becomes its result, so that only this case fails."""
    began = time.monotonic()
    try:
        return Result(case_id, work(case_id), seconds=time.monotonic() - began)
    except (Exception, SystemExit) as error:  # sys.exit in the code of a network ends its case, not the run
        said = in_one_line(error) + place_of(error)
        return Result(case_id, error=said, kind=type(error).__name__, seconds=time.monotonic() - began)


SWITCH = "CASEWISE_KEEP_MEMORY"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt(3)
_INHERITED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def keep_freed_memory() -> bool:
    """Configure the allocator of this process and of its workers; return True if that was done.

    Only on Linux with glibc, only unless ``CASEWISE_KEEP_MEMORY=0``. Settings in the environment are left as they are.
    """
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    if any(name in os.environ for name in _INHERITED):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))
    os.environ.update(_INHERITED)
    return done

"""One lane to the model: requests wait in line, a full house says so, and what was let in is finished."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Answer = TypeVar("Answer")

SMOOTHING = 0.2  # weight of the newest case in the estimate of a case's time


class Full(Exception):
    """Every place is taken; ``retry_s`` says when to come again."""

    def __init__(self, retry_s: int) -> None:
        super().__init__(f"every place is taken; try again in {retry_s} s")
        self.retry_s = retry_s


class Closing(Exception):
    """The service is shutting down and takes nobody in."""


class Lane:
    """One thread owns the model, so no two cases ever meet adapted weights. Used from one event loop."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self.open = True
        self._case_s = 1.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="casewise-model")

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the house, before the body is read: memory is bounded by places times the largest body."""
        if not self.open:
            raise Closing("the service is shutting down")
        if self.taken >= self.places:
            raise Full(max(1, math.ceil(self._case_s * self.taken)))
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    async def run(self, job: Callable[[], Answer]) -> Answer:
        """The job's result, after those that came before it. A caller that goes away does not stop the job."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._timed, job))

    def _timed(self, job: Callable[[], Answer]) -> Answer:
        began = time.monotonic()
        try:
            return job()
        finally:
            self._case_s += SMOOTHING * (time.monotonic() - began - self._case_s)

    def close(self) -> None:
        """Take nobody in any more, and finish what was let in."""
        self.open = False
        self._thread.shutdown(wait=True)

"""Real ``kill -9``: work runs in a child process, which is killed where it would make a file durable."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any


def killed(work: Callable[[], Any], at: int) -> bool:
    """Run work in a child process that gets SIGKILL before its ``at``-th fsync, counted from 1.

    Args:
        work: What to run; the child is forked, so nothing is imported again.
        at: Which fsync is never reached.

    Returns:
        True if the child was killed, False if it ended before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        child = os.fork()
    if child == 0:
        numbers, sync = count(1), os.fsync

        def until(handle: int) -> None:
            if next(numbers) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(handle)

        os.fsync = until
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed before it could be killed"
    return False


def kills(work: Callable[[], Any], *, every: int = 1, most: int = 40) -> Iterator[int]:
    """Kill work at its first, second, ... fsync until it ends by itself; yields after each kill."""
    for at in range(1, most, every):
        if not killed(work, at):
            return
        yield at

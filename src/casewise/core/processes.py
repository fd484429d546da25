"""Worker processes: they end with their parent, share no memory with it, and do not run the user's script again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def needs_script(work: Any) -> bool:
    """Return True if another process would have to run the user's script to read the work, or cannot read it."""
    try:
        return b"__main__" in pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError):
        return True


def spawn(target: Callable[..., None], pipe: Connection, work: Any, *rest: Any) -> BaseProcess:
    """Start a process that calls ``target(pipe, work, *rest)`` and ends when this process ends.

    The work is pickled here: ``multiprocessing`` would put the tensors of a network into memory that all processes
    share, and an update in one process would move the weights in all of them. A spawned process also runs the script
    that started it, from the top if the script has no ``if __name__ == "__main__":``. Unless the work was defined in
    the script, its path is hidden while the process starts.
    """
    pickled = pickle.dumps((target, work, rest))
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(pipe, pickled), daemon=True)
    names = vars(sys.modules["__main__"])
    hidden = {} if b"__main__" in pickled or "__file__" not in names else {"__file__": names.pop("__file__")}
    safe = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"  # else the process looks for multiprocessing in the working directory first
    try:
        process.start()
    finally:
        names.update(hidden)
        os.environ.pop(_SAFE) if safe is None else os.environ.update({_SAFE: safe})
    return process


_SAFE = "PYTHONSAFEPATH"  # read by Python 3.11 and newer


def _serve(pipe: Connection, pickled: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the parent answers it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target, work, rest = pickle.loads(pickled)
    target(pipe, work, *rest)


def _end_with_parent() -> None:
    """Exit when the parent process was killed: the next run may already work on the same case or fold."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

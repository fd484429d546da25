"""Start processes from a command, a script or a notebook alike.

A spawned process imports the main module first. A script without ``if __name__ == "__main__":`` would start itself
again there, so the main module is hidden while the process starts, unless the work itself is defined in it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any


def _run(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    target(*arguments)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def is_from_main(work: Any) -> bool:
    """True if another process can only read the work if it runs the main module again, or cannot read it at all."""
    try:
        return b"__main__" in pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError):
        return True


def spawn(target: Callable[..., None], *arguments: Any, work: Any) -> Any:
    """Start a process that ends with this one, however this one ends.

    A process that outlives a killed run could overwrite the result of the next one. ``work`` is what the arguments
    hold that may be defined in a script.
    """
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(target, *arguments), daemon=True)
    main = vars(sys.modules["__main__"])
    hidden = {"__file__": main.pop("__file__")} if "__file__" in main and not is_from_main(work) else {}
    try:
        process.start()
    finally:
        main.update(hidden)
    return process

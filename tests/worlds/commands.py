"""``casewise`` typed in a process of its own, which is forked: nothing is imported again, so it takes no seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path


def typed(*words: object, at: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and what it printed.

    Args:
        words: What follows ``casewise``.
        at: The working directory.
        environment: Further variables.
    """
    command = ["casewise", *map(str, words)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
            child = os.fork()
        if child == 0:
            _run(command, out.fileno(), err.fileno(), at, environment)
        status = os.waitpid(child, 0)[1]
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), out.read(), err.read())


def _run(command: list[str], out: int, err: int, at: Path | None, environment: dict[str, str]) -> None:
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        if at is not None:
            os.chdir(at)
        sys.argv = command
        from casewise.cli import main

        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

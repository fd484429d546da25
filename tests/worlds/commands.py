"""``casewise`` typed in a process of its own, forked from a server that has imported torch and started no thread."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")  # a fork of pytest itself, with torch's threads, sometimes crashes
SERVER.set_forkserver_preload(["casewise.cli", "casewise.fit"])


def typed(*words: object, at: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code and what it printed.

    Args:
        words: What follows ``casewise``.
        at: The working directory.
        environment: Further variables.
    """
    command = ["casewise", *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        child = SERVER.Process(target=_run, args=(command, out, err, at or Path.cwd(), {**os.environ, **environment}))
        child.start()
        child.join()
        assert child.exitcode is not None
        return subprocess.CompletedProcess(command, child.exitcode, out.read_text(), err.read_text())


def _run(command: list[str], out: Path, err: Path, at: Path, environment: dict[str, str]) -> None:
    code = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
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

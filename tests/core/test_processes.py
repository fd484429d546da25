"""Processes start from a script without ``if __name__ == "__main__":``, and a class of the script is recognized."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from fractions import Fraction
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from casewise.core.processes import needs_script, spawn
print("the script runs")
class Net: pass
assert needs_script(Net())
assert needs_script(lambda: None)
assert not needs_script(Fraction(1, 2))
ours, theirs = Pipe()
process = spawn(Connection.send, theirs, Fraction(1, 2))
assert ours.recv() == Fraction(1, 2)
process.join()
assert process.exitcode == 0
assert __file__.endswith("script.py")
"""


def test_a_script_is_not_run_again_by_the_processes_that_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the script runs\n"


CHILD = """
import signal
def ask(pipe, work): pipe.send(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
"""
PARENT = """
from multiprocessing import Pipe
from casewise.core.processes import spawn
from child import ask
ours, theirs = Pipe()
spawn(ask, theirs, None)
assert ours.recv()
"""


def test_ctrl_c_is_left_to_the_first_process(tmp_path: Path) -> None:
    """A terminal sends it to all; a traceback of each process would hide what the first one says."""
    for name, text in (("child.py", CHILD), ("parent.py", PARENT)):
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "parent.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_a_process_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """Python starts the process with the working directory first on its path."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("multiprocessing", "pickle", "socket", "numpy"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "import os\nassert 'PYTHONSAFEPATH' not in os.environ\n")
    free = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, script], cwd=here, env=free, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "proof").exists()

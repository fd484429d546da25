"""Processes start from a script without ``if __name__ == "__main__":``, and a class of the script is recognized."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

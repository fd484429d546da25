"""Processes start from a script without ``if __name__ == "__main__":``, and a class of the script is recognized."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
from fractions import Fraction
from casewise.core.processes import is_from_main, spawn
print("the script runs")
class Net: pass
assert is_from_main(Net())
assert is_from_main(lambda: None)
assert not is_from_main(Fraction(1, 2))
process = spawn(os.mkdir, "made", work=None)
process.join()
assert process.exitcode == 0 and os.path.isdir("made")
assert __file__.endswith("script.py")
"""


def test_a_script_is_not_run_again_by_the_processes_that_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the script runs\n"

"""What the command line says when it cannot do what was asked."""

from __future__ import annotations

import subprocess
import sys

import pytest


def told(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("command", ["predict -i in -o out -m model --policy m0", "demo", "record -m m -i in -o out"])
def test_a_missing_extra_is_named_in_one_line(command: str) -> None:
    done = told(
        f"import sys; sys.modules['torch'] = None; sys.argv = ['casewise', *{command.split()!r}]\n"
        "from casewise.cli import main; main()"
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == "casewise: this command needs torch; pip install 'casewise[adapt]'"
    assert "Traceback" not in done.stderr


def test_a_command_that_is_nearly_right_is_suggested() -> None:
    done = told("import sys; sys.argv = ['casewise', 'predct']\nfrom casewise.cli import main; main()")
    assert done.returncode == 2
    assert "Did you mean 'predict'?" in done.stderr


def test_the_version_is_printed() -> None:
    import casewise

    done = told("import sys; sys.argv = ['casewise', '--version']\nfrom casewise.cli import main; main()")
    assert done.stdout.strip() == f"casewise {casewise.__version__}"

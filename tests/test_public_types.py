"""Type checkers see the real type of every public name, and no name that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import casewise

ROOT = Path(__file__).parent.parent
STUB = ROOT / "src" / "casewise" / "__init__.pyi"
NAMES = [name for name in casewise.__all__ if name != "__version__"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy --strict says of a client that names everything, and one thing that is not there."""
    client = tmp_path_factory.mktemp("client") / "client.py"
    lines = ["import casewise", *(f"reveal_type(casewise.{name})" for name in NAMES), "casewise.dize"]
    lines += ["reveal_type(casewise.monai.GuardedInferer)", 'casewise.harm("a")']
    client.write_text("\n".join(lines) + "\n")
    words = ["--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache"), str(client)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=client.parent, env=environment, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_public_name_has_its_real_type(told: str) -> None:
    revealed = re.findall(r'Revealed type is "(.*)"', told)
    assert len(revealed) == len(NAMES) + 1, told
    for name, kind in zip(NAMES, revealed, strict=False):
        assert kind != "Any", f"{name} is Any"
        assert "def (" in kind or name[0].isupper(), f"{name}: {kind}"


@pytest.mark.slow
def test_a_wrong_name_and_a_wrong_argument_are_errors(told: str) -> None:
    assert 'Module has no attribute "dize"' in told
    assert "[arg-type]" in told or "[call-arg]" in told


def test_the_stub_names_what_the_package_has() -> None:
    named = {name: home for home, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", STUB.read_text(), re.M)}
    assert named == {**casewise._HOME, "monai": "casewise"}  # type: ignore[attr-defined]


def test_the_function_wins_over_the_file_of_its_name() -> None:
    program = (
        "import casewise.guard, casewise.replay, casewise; "
        "assert callable(casewise.guard) and callable(casewise.replay); import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

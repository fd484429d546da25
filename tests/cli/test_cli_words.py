"""What the command line says when it cannot do what was asked."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from casewise.cli import COMMANDS, app
from casewise.cli.options import SECTIONS

Context: Any = next(kind for kind in typer.Context.__mro__ if kind.__name__ == "Context")


def told(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("command", ["predict -i in -o out -m model --policy m0", "demo", "record -m m -i in -o out"])
def test_a_missing_extra_is_named_in_one_line(command: str) -> None:
    done = told(
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ModuleNotFoundError(name, name=name)\n"
        f"sys.meta_path.insert(0, Without()); sys.argv = ['casewise', *{command.split()!r}]\n"
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


@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_option_off_on_a_narrow_terminal(command: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}, catch_exceptions=False).output
    group: Any = typer.main.get_command(app)
    for one in group.get_command(Context(group, resilient_parsing=True), command).params:
        if getattr(one, "hidden", False) is False and one.param_type_name == "option":
            assert all(name in text for name in one.opts), one.opts
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_predict_has_sections_and_says_first_what_is_its_own() -> None:
    text = CliRunner().invoke(app, ["predict", "--help"], env={"COLUMNS": "80"}, catch_exceptions=False).output
    headings = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[:-1] == ["Options", *(title for title in SECTIONS if not title.startswith("Candidates"))]
    assert headings[-1].startswith("Settings")
    assert text.index("-o, --out <path>") < text.index("--policy") < text.index("-i <path>") < text.index("-chk")


def shown_help(command: str) -> str:
    return str(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}, catch_exceptions=False).output)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_no_python_types_and_writes_arguments_in_capitals(command: str) -> None:
    text = shown_help(command)
    assert not re.search(r"list\[|<int range>|\{\w+\}", text)
    usage = text.splitlines()[0].partition(f" {command} ")[2]
    assert usage == usage.upper()


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_help_can_be_copied_into_a_shell(command: str) -> None:
    lines = shown_help(command).splitlines()
    at = lines.index(next(line for line in lines if line.strip().startswith("Example")))
    end = lines.index("", at + 2)
    example = lines[at + 2 : end]
    assert all(line.endswith(" \\") for line in example[:-1]), example
    words = shlex.split("\n".join(example))
    assert words[:2] == ["casewise", command]
    known = {word for one in _parameters(command) for word in (*one.opts, *one.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= known


def _parameters(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    return list(group.get_command(Context(group, resilient_parsing=True), command).params)


def test_help_breaks_no_name_at_its_hyphen() -> None:
    from casewise.judge.policy import READY

    text = shown_help("calibrate")
    assert all(name in text for name in READY)


def test_an_unknown_setting_lists_settings_and_no_options() -> None:
    done = told(
        "import sys; sys.argv = ['casewise', 'predict', '--set', 'overlay=1', '-i', 'a', '-o', 'b']\n"
        "from casewise.cli import main; main()"
    )
    assert "Did you mean 'overlays'?" in done.stderr
    assert not {"o", "i", "disable-tta"} & set(done.stderr.partition("Known: ")[2].split(", "))

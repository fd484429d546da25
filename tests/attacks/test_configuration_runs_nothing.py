"""A casewise.toml that is found in the working directory runs no code and names no path outside of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from casewise.cli import COMMANDS, HOMES
from casewise.cli.config import defaults
from casewise.core.errors import BadInput, Refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parameters(command: str) -> Any:
    """The options of a command, as the command line has them."""
    made: Any = typer.main.get_command(importlib.import_module(f"casewise.cli.{HOMES.get(command, command)}").app)
    return getattr(made, "commands", {command: made})[command].params


def read(text: str, command: str, *, named: bool = False) -> dict[str, Any]:
    return defaults(Path("casewise.toml"), tomllib.loads(text), command, parameters(command), named=named)


CODE = {
    "model": 'model = "evil:Net"',
    "a module called views": 'model = "views:Net"',
    "a module called members": 'model = "members:Net"',
    "a letter that is not ASCII": 'model = "évil:Net"',
    "objective": 'objective = "evil:Obj"',
    "a named ladder": 'propose = ["x=evil:Obj"]',
    "a member": 'propose = ["members:evil:Net"]',
    "a view": 'propose = ["views:evil:fn"]',
    "a view after others": 'objective = "views:mri, evil:fn"',
    "a signal after others": 'signals = "dropout_disagreement,evil:sig"',
}


@pytest.mark.parametrize("line", CODE.values(), ids=CODE)
@pytest.mark.parametrize("table", ["all", "record"])
def test_a_found_file_names_no_code(line: str, table: str) -> None:
    with pytest.raises(Refused, match="names code to run"):
        read(f"[{table}]\n{line}\n", "record")
    assert read(f"[{table}]\n{line}\n", "record", named=True)


OUTSIDE = [
    'report = "/tmp/log"', 'report = "../log"', 'report = "~/.bashrc"', 'report = "/tmp/report.json"',
    'model = "/models/heart"', 'propose = ["members:/models/heart"]', 'propose = ["x=members:a,../../heart"]',
    'propose = ["imported:/masks"]', 'propose = ["x=imported:../masks"]',
]  # fmt: skip


@pytest.mark.parametrize("line", OUTSIDE)
def test_a_found_file_names_no_path_outside_of_its_folder(line: str) -> None:
    command = "predict" if "report" in line else "record"
    with pytest.raises(Refused, match="outside of this folder"):
        read(f"[all]\n{line}\n", command)
    assert read(f"[all]\n{line}\n", command, named=True)


def test_a_link_does_not_lead_outside_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "report.json").symlink_to(tmp_path / "elsewhere.json")
    monkeypatch.chdir(tmp_path / "project")
    with pytest.raises(Refused, match="outside of this folder"):
        read('[predict]\nreport = "report.json"\n', "predict")


@pytest.mark.parametrize(("command", "option"), [("predict", "report"), ("replay", "out"), ("calibrate", "o")])
def test_a_found_file_writes_over_no_file(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label of the project, or the plans of its model, as the name of a report."""
    monkeypatch.chdir(tmp_path)
    text = f'[{command}]\n{option} = "plans.json"\n'
    assert read(text, command)
    (tmp_path / "plans.json").write_text("{}")
    with pytest.raises(Refused, match="would overwrite a file"):
        read(text, command)
    assert read(text, command, named=True)


@pytest.mark.parametrize("line", ["overwrite = true", "force = true"])
def test_a_found_file_overrides_nothing(line: str) -> None:
    with pytest.raises(Refused, match="overrides a refusal"):
        read(f"[predict]\n{line}\n", "predict")
    assert read(f"[predict]\n{line}\n", "predict", named=True)


@pytest.mark.parametrize(
    ("command", "line"),
    [("predict", 'address = "ray://elsewhere:10001"'), ("serve", 'host = "0.0.0.0"'), ("serve", "allow-host = ['x']")],
)
def test_a_found_file_connects_with_no_other_computer(command: str, line: str) -> None:
    """A Ray cluster gets the images, and what it sends back is unpickled."""
    with pytest.raises(Refused, match="connects this computer with others"):
        read(f"[{command}]\n{line}\n", command)
    assert read(f"[{command}]\n{line}\n", command, named=True)


@pytest.mark.parametrize("named", [False, True])
def test_no_file_trusts(named: bool) -> None:
    with pytest.raises(Refused, match="allows code to run"):
        read("[predict]\ntrust = ['checkpoint']\n", "predict", named=named)


def test_every_option_of_every_command_refuses_an_address() -> None:
    """Whatever an option means, a found file cannot put an address into it."""
    for command in COMMANDS:
        for parameter in parameters(command):
            with pytest.raises((Refused, BadInput)):
                read(f'[{command}]\n"{str(parameter.name).replace("_", "-")}" = ["evil:Net"]\n', command)


def test_what_belongs_to_a_project_is_taken_and_the_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = read('[all]\nmodel = "models/heart"\npropose = ["views:mri", "x=members:folds"]\n', "record")
    assert found == {"model": "models/heart", "propose": ["views:mri", "x=members:folds"]}
    assert capsys.readouterr().err == "casewise: options from casewise.toml: model, propose\n"
    read('[record]\nmodel = "models/heart"\n', "monitor")
    assert "options from casewise.toml: none for monitor" in capsys.readouterr().err

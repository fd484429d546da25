"""The table of commands and options, and its limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from casewise.cli import COMMANDS, GROUPS, app
from casewise.cli.config import setting_values
from casewise.cli.options import is_setting, listed

SOURCE = Path(__file__).parents[2] / "src" / "casewise"
SETTINGS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
Context: Any = next(kind for kind in typer.Context.__mro__ if kind.__name__ == "Context")
MOST_COMMANDS, MOST_OPTIONS, MOST_EVERYDAY = 16, 220, 25


def parameters(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    found = group.get_command(Context(group, resilient_parsing=True), command).params
    return [one for one in found if one.param_type_name == "option"]


def options(command: str) -> list[Any]:
    """What can be typed, hidden or not; settings cannot."""
    return [one for one in parameters(command) if not is_setting(one)]


def shown_options(command: str) -> list[str]:
    """The rows of options on the help page, --help included."""
    text = CliRunner().invoke(app, [command, "--help"], catch_exceptions=False).output
    return re.findall(r"^  (-[\w-]+)", text[text.index("\nOptions:") :], re.MULTILINE)


def test_there_are_few_commands_and_few_options(capsys: pytest.CaptureFixture[str]) -> None:
    table = {name: len(options(name)) for name in COMMANDS}
    shown = {name: len(shown_options(name)) for name in COMMANDS}
    with capsys.disabled():
        print()
        for title, group in GROUPS.items():
            print(f"{title}: {', '.join(f'{name} {shown[name]}' for name in group)}")
        hidden = sum(table.values()) - sum(map(len, map(shown_options, COMMANDS))) + len(COMMANDS)
        print(f"{len(table)} commands, {sum(table.values())} options with {hidden} of nnU-Net that no help page shows")
    assert len(table) <= MOST_COMMANDS
    assert sum(table.values()) <= MOST_OPTIONS
    assert max(shown[name] for name in GROUPS["Every day"]) <= MOST_EVERYDAY, shown


def test_help_shows_the_three_groups() -> None:
    text = CliRunner().invoke(app, ["--help"], catch_exceptions=False).output
    assert list(GROUPS) == ["Every day", "Research", "Expert"]
    assert [text.index(f"\n{title}:\n") for title in GROUPS] == sorted(text.index(f"\n{title}:\n") for title in GROUPS)
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in COMMANDS)


def test_every_option_that_a_message_names_exists() -> None:
    known = {word for name in COMMANDS for one in options(name) for word in (*one.opts, *one.secondary_opts)}
    known |= {"--config", "--version", "--help", "--show-completion", "--"}
    wrong = {
        f"{file.relative_to(SOURCE)}:{number}: {word}"
        for file in SOURCE.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"var\(--\w+\)|--\w+:", "", line))
        if word not in known and "setting(" not in line and not line.strip().startswith('"--')
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_setting_is_on_its_page() -> None:
    text = SETTINGS_PAGE.read_text(encoding="utf-8")
    made = settings_page()
    assert text == made, "write it again: python tests/cli/test_command_table.py"


def settings_page() -> str:
    """One row for each setting; commands that take the same setting share it."""
    commands: dict[tuple[str, str, str], list[str]] = {}
    for command in COMMANDS:
        for one in filter(is_setting, parameters(command)):
            words = [word.lstrip("-") for word in (one.opts[0], *one.secondary_opts) if "--no-" not in word]
            default = "" if one.default in (None, (), [], "") else f"`{one.default}`"
            names = ", ".join(f"`{word}`" for word in words)
            commands.setdefault((names, default, listed(one.help)), []).append(command)
    lines = [
        "# Settings",
        "",
        "A setting is an option that few people need. Give it as `--set NAME=VALUE`, repeated for several,",
        "or as a key in [casewise.toml](../how-to/configure.md), in the table of its command. This page is generated:",
        "`python tests/cli/test_command_table.py`.",
        "",
        "| setting | default | commands | meaning |",
        "|---|---|---|---|",
    ]
    for (names, default, meaning), users in sorted(commands.items()):
        lines.append(f"| {names} | {default} | {', '.join(users)} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    SETTINGS_PAGE.write_text(settings_page(), encoding="utf-8")


@pytest.mark.parametrize("command", ["fit", "calibrate"])
def test_the_setting_that_a_refusal_of_harm_names_can_be_typed(command: str) -> None:
    values = setting_values(command, parameters(command), ["allowed-hurt=0.15"])
    assert float(values["allowed_hurt"][1]) == 0.15

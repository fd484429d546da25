"""Pages of the site that are generated from the code while ``make docs`` builds it; no file holds them.

``commands.md`` lists every command, option and setting of the command line. ``names.md`` lists the registered names:
gradient methods, views, policies, signals and so on.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from casewise.adapt.objectives import OBJECTIVES
from casewise.adapt.views import SETS, VIEWS
from casewise.cli import COMMANDS, GROUPS, app
from casewise.cli.options import is_setting, listed
from casewise.data.datasets import DATASETS
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.monitors.watch import MONITORS
from casewise.judge.policy import READY
from casewise.measure.metrics import METRICS
from casewise.measure.signals import SIGNALS
from casewise.study.analyses import ANALYSES

Context: Any = next(kind for kind in typer.Context.__mro__ if kind.__name__ == "Context")


def pages() -> dict[str, str]:
    """Return the generated pages by file name."""
    return {"commands.md": commands_page(), "names.md": names_page()}


def commands_page() -> str:
    """Every command with its arguments and options; what several commands share stands once, at the end."""
    program: Any = typer.main.get_command(app)
    found = {name: program.get_command(Context(program, resilient_parsing=True), name).params for name in COMMANDS}
    rows = {name: [(is_setting(one), row(one)) for one in found[name] if one.name != "help"] for name in COMMANDS}
    homes: dict[Any, list[str]] = {}
    for name, own in rows.items():
        for one in own:
            homes.setdefault(one, []).append(name)
    lines = [
        "# Commands, options and settings", "",
        "`casewise COMMAND --help` prints the same. A setting is an option that few people need: give it as",
        "`--set NAME=VALUE`, or as a key in [casewise.toml](../how-to/configure.md). Options and settings that several",
        "commands share are listed [once, at the end](#shared-options).",
    ]  # fmt: skip
    for title, group in GROUPS.items():
        lines += ["", f"## {title}"]
        for name, sentence in group.items():
            lines += ["", f"### {name}", "", sentence]
            own = [(what, cells) for what, cells in rows[name] if len(homes[what, cells]) == 1]
            lines += table(("option", "default", "meaning"), [cells for what, cells in own if not what])
            lines += table(("setting", "default", "meaning"), [cells for what, cells in own if what])
    for title, kind, word in (("Shared options", False, "option"), ("Shared settings", True, "setting")):
        shared = sorted((cells, names) for (what, cells), names in homes.items() if what == kind and len(names) > 1)
        lines += ["", f"## {title}"]
        lines += table((word, "default", "commands", "meaning"),
                       [(cells[0], cells[1], ", ".join(names), cells[2]) for cells, names in shared])  # fmt: skip
    return "\n".join(lines) + "\n"


def row(option: Any) -> tuple[str, str, str]:
    """Names, default and help of one argument or option."""
    if option.param_type_name == "argument":
        names = [str(option.metavar or option.name).upper().strip("[]")]
    else:
        names = [word for word in (*option.opts, *option.secondary_opts) if not word.startswith("--no-")]
    if is_setting(option):
        names = [word.lstrip("-") for word in names]
    empty = option.default in (None, (), [], "", False) or callable(option.default)
    default = "" if empty else f"`{option.default}`"
    return ", ".join(f"`{word}`" for word in names), default, cell(listed(option.help or ""))


def names_page() -> str:
    """The registries, each as a table."""
    lines = [
        "# Names", "",
        "What you can type where a name is asked for. Formulas are in [definitions](definitions.md), the gradient",
        "methods in [objectives](objectives.md), the policies in [policies](policies.md).",
    ]  # fmt: skip
    lines += section("Gradient methods", "`--propose NAME`, `objective=`", first_lines(OBJECTIVES))
    lines += section("Views", "`--propose 'views:NAME(...),NAME'`; `a+b` chains two views", first_lines(VIEWS))
    lines += section("Sets of views", "`--propose views:SET`, `fit --views SET`",
                     ((name, ", ".join(f"`{one}`" for one in SETS[name])) for name in SETS))  # fmt: skip
    lines += section("Policies", "`--policy NAME`, `casewise.calibrate(archive, NAME)`",
                     ((name, f"controller `{READY[name].controller}`, up to {READY[name].steps} steps")
                      for name in READY))  # fmt: skip
    lines += section("Controllers", "`casewise.guard(image, network, NAME)`", first_lines(CONTROLLERS))
    lines += section("Signals", "label-free numbers of a candidate; forward and backward passes that they need",
                     ((info.name, f"{info.meaning} ({'higher' if info.higher_is_riskier else 'lower'} is riskier; "
                       f"{info.forwards}, {info.backwards})") for info in SIGNALS.values()))  # fmt: skip
    lines += section("Metrics", "`--metric NAME`", ((name, METRICS[name].title) for name in METRICS))
    lines += section("Monitors", "`casewise monitor --monitors NAME`", first_lines(MONITORS))
    lines += section("Analyses", "`casewise study --only NAME`", first_lines(ANALYSES))
    lines += section("Datasets", "`casewise inspect FOLDER --dataset NAME`", first_lines(DATASETS))
    return "\n".join(lines) + "\n"


def section(title: str, used: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """One registry: where its names are used, and a row for each."""
    return ["", f"## {title}", "", f"Used in: {used}.", *table(("name", "meaning"), [(f"`{a}`", b) for a, b in rows])]


def first_lines(registry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each name with the first sentence of its docstring; a partial shows the options that it fixes."""
    found = []
    for name, item in registry.items():
        made = getattr(item, "func", item)
        fixed = ", ".join(f"{key}={value}" for key, value in getattr(item, "keywords", {}).items())
        text = (inspect.getdoc(made) or "").split("\n\n")[0]
        found.append((name, cell(text) + (f" Here: {fixed}." if fixed else "")))
    return found


def cell(text: str) -> str:
    """A text that fits into a table: one line, no ids of definitions, no markup of Sphinx."""
    text = re.sub(r":math:`([^`]*)`", r"\1", " ".join(text.split())).replace("``", "`")
    return re.sub(r"\s*\((?:tab|fig|app|sec):[^)]*\)", "", text).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown; nothing where there is no row."""
    if not rows:
        return []
    return ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(one)} |" for one in rows)]

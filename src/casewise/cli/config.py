"""``casewise.toml``: options that a project repeats, so that commands stay short; the command line overrides every
line of it.

    [all]                      # for every command that has the option
    model = "models/heart"
    device = "cpu"

    [record]
    lr = 2e-3                  # an option's own spelling, without its dashes
    steps = 4

A key that no option has is an error, and so is a trust flag: those are given on the command line only. A
``casewise.toml`` that was found in the working directory, and not named with ``--config``, can also set no address
(``package.module:Name``), no path outside the working directory, no connection with other computers, and no flag that
overwrites files or overrides a refusal. One line on stderr says which file was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from casewise.core.errors import BadInput, Refused
from casewise.core.formats import read_toml
from casewise.core.registry import Registry, addresses_in

CONFIG = "casewise.toml"
ALL = "all"
_PROPOSALS = frozenset({"objective", "propose"})  # options in which "views:mri" names registered views
_WRITTEN = frozenset({"out", "report", "export"})
_REFUSED = {
    **dict.fromkeys(("overwrite", "force", "ignore_geometry"), "overrides a refusal"),
    **dict.fromkeys(("address", "host", "allow_host"), "connects this computer with others"),
}


def read_config(path: Path | None) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The tables of a configuration file: the one that was named, else ``casewise.toml`` here, else none."""
    file = path if path is not None else Path(CONFIG)
    if path is None and not file.is_file():
        return None, {}
    tables, _ = read_toml(file, "name a TOML file with --config")
    loose = sorted(key for key, table in tables.items() if not isinstance(table, dict))
    if loose:
        raise BadInput(f"{file}: {', '.join(loose)} must stand below a table such as [{ALL}] or [predict]")
    return file, tables


def defaults(
    file: Path, tables: Mapping[str, Mapping[str, Any]], command: str, parameters: Any, *, named: bool
) -> dict[str, Any]:
    """Return the values of the file for one command, by parameter; of [all] only options that the command has; the
    table of the command has priority."""
    spellings = _by_spelling(parameters)
    known = Registry(f"option of casewise {command}", spellings)
    shared = {key: value for key, value in tables.get(ALL, {}).items() if _plain(key) in spellings}
    chosen = {}
    for key, value in (*shared.items(), *tables.get(command, {}).items()):
        parameter = known[_plain(key)]
        _check_harmless(file, key, str(parameter.name), value, named=named)
        chosen[str(parameter.name)] = _as_option(parameter, value, key)
    typer.echo(f"casewise: options from {file}: {', '.join(sorted(chosen)) or f'none for {command}'}", err=True)
    return chosen


def setting_values(command: str, parameters: Any, pairs: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Values after ``--set NAME=VALUE``: (the name as it was typed, the value) by parameter."""
    spellings = _by_spelling(parameters)
    named = {_plain(one.opts[0]): one for one in parameters if one.hidden}
    known = Registry(f"setting of casewise {command}", named, spellings)
    values: dict[str, tuple[str, Any]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise BadInput(f"--set takes NAME=VALUE, got {pair!r}")
        parameter = spellings.get(_plain(key)) or known[_plain(key)]
        said = {"true": True, "false": False}.get(text.lower(), text) if parameter.is_flag else text
        value = _as_option(parameter, said, key)
        if parameter.nargs > 1:
            value = text.replace(",", " ").split()
        elif parameter.multiple:
            value = [*values.get(str(parameter.name), ("", []))[1], *value]
        values[str(parameter.name)] = (key, value)
    return values


def _by_spelling(parameters: Any) -> dict[str, Any]:
    """Parameters by each of their spellings; without ``--set``, whose values are not checked as a file is."""
    return {
        _plain(word): one
        for one in parameters
        if "--set" not in one.opts
        for word in (str(one.name), *one.opts, *one.secondary_opts)
    }


def _plain(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _check_harmless(file: Path, key: str, option: str, value: Any, *, named: bool) -> None:
    """Refuse trust flags, and in a file that was found (not named) also code, outside paths and overrides."""
    if option.startswith("trust"):
        raise Refused(f"{file}: {key} allows code to run, so give it on the command line, not in a file")
    if named:
        return
    code = next(addresses_in(value, proposers=option in _PROPOSALS), None)
    outside = next((text for text in _texts(value) if _leaves_folder(text, proposers=option in _PROPOSALS)), None)
    if code is not None:
        wrong = f"{key} = {value!r} names code to run ({code})"
    elif outside is not None:
        wrong = f"{key} = {value!r} is a path outside of this folder"
    elif option in _WRITTEN and any(Path(text).is_file() for text in _texts(value)):
        wrong = f"{key} = {value!r} would overwrite a file"
    elif option in _REFUSED:
        wrong = f"{key} {_REFUSED[option]}"
    else:
        return
    raise Refused(f"{file} was found automatically, and {wrong}; to allow this, use --config {file}")


def _texts(value: Any) -> Iterator[str]:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            yield part


def _leaves_folder(text: str, *, proposers: bool) -> bool:
    """True if the text, or a part of it behind a comma, an equals sign or a proposer's prefix, is a path outside."""
    here = Path.cwd().resolve()
    for word in map(str.strip, re.split(r"[,=@]", text)):
        place = (proposers and word.partition(":")[2]) or word  # imported:/masks is a path, too
        try:
            outside = place.startswith("~") or not (here / place).resolve().is_relative_to(here)
        except (OSError, ValueError):  # not a path: too long, or with a null byte
            outside = True
        if outside:
            return True
    return False


def _as_option(parameter: Any, value: Any, key: str) -> Any:
    """A list for an option that is given once becomes words, as on the command line: ``folds = [0, 1]``.

    One value for an option that is repeated becomes a list of one.

    The other word of a pair of flags says the opposite: ``classes = true`` is ``foreground = false``.
    """
    if isinstance(value, bool) and _plain(key) in map(_plain, parameter.secondary_opts):
        return not value
    if isinstance(value, list) and not parameter.multiple and parameter.nargs == 1:
        return " ".join(str(part) for part in value)
    if isinstance(value, (bool, list)):
        return value
    return [str(value)] if parameter.multiple else str(value)


def check_tables(file: Path, tables: Mapping[str, Any], commands: Mapping[str, str]) -> None:
    """Refuse a table that is named after no command."""
    known = Registry("table of a casewise.toml", {ALL: "", **commands})
    for name in tables:
        try:
            known[name]
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None

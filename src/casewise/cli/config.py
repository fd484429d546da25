"""``casewise.toml``: what a project repeats, so that commands stay short; the command line overrides every line of it.

    [all]                      # for every command that has the option
    model = "models/heart"
    device = "cpu"

    [record]
    lr = 2e-3                  # an option's own spelling, without its dashes
    steps = 4

A key that no option has is an error, and so is trust: what lets code run is said on the command line. A file that was
merely found here may not name code either (``package.module:Name``); name the file with ``--config`` to allow it.

``--preset NAME``: options that belong together, so that nobody has to know them all before the first run.

What the command line or casewise.toml says wins over a preset.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.core.errors import BadInput, Refused
from casewise.core.registry import Registry

if TYPE_CHECKING:
    from casewise.data.folders import CaseFiles


CONFIG = "casewise.toml"
ALL = "all"
_ADDRESS = re.compile(r"(?P<module>[A-Za-z_][\w.]*):[A-Za-z_]\w*")
_NOT_MODULES = frozenset({"views", "members"})  # "views:mri" names a set of views of our own


def read_config(path: Path | None) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The tables of a configuration file: the one that was named, else ``casewise.toml`` here, else none."""
    file = path if path is not None else Path(CONFIG)
    if path is None and not file.is_file():
        return None, {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{file} cannot be read ({error}); it must be a TOML file") from error
    loose = sorted(key for key, table in tables.items() if not isinstance(table, dict))
    if loose:
        raise BadInput(f"{file}: {', '.join(loose)} must stand below a table such as [{ALL}] or [predict]")
    return file, tables


def defaults(
    file: Path, tables: Mapping[str, Mapping[str, Any]], command: str, parameters: Any, *, named: bool
) -> dict[str, Any]:
    """What the file says for one command, by parameter; [all] gives only what the command has, its own table wins."""
    spellings = {spelling: parameter for parameter in parameters for spelling in _spellings(parameter)}
    known = Registry(f"option of casewise {command}", spellings)
    shared = {key: value for key, value in tables.get(ALL, {}).items() if _plain(key) in spellings}
    chosen = {}
    for key, value in (*shared.items(), *tables.get(command, {}).items()):
        parameter = known[_plain(key)]
        _check_harmless(file, key, parameter, value, named=named)
        chosen[str(parameter.name)] = _as_option(parameter, value, key)
    return chosen


def _spellings(parameter: Any) -> Iterator[str]:
    yield _plain(str(parameter.name))
    for option in (*parameter.opts, *parameter.secondary_opts):
        yield _plain(option)


def _plain(key: str) -> str:
    return key.lstrip("-").replace("_", "-")


def _check_harmless(file: Path, key: str, parameter: Any, value: Any, *, named: bool) -> None:
    if str(parameter.name).startswith("trust"):
        raise Refused(f"{file}: {key} lets code run, so it is said on the command line, never in a file")
    values = value if isinstance(value, list) else [value]
    codes = [text for text in values if isinstance(text, str) and (found := _ADDRESS.fullmatch(text))
             and found["module"] not in _NOT_MODULES]  # fmt: skip
    if codes and not named:
        raise Refused(f"{file}: {key} = {codes[0]!r} names code to run; allow it with --config {file}")


def _as_option(parameter: Any, value: Any, key: str) -> Any:
    """A list for an option that is given once becomes words, as on the command line: ``folds = [0, 1]``.

    The other word of a pair of flags says the opposite: ``classes = true`` is ``foreground = false``.
    """
    if isinstance(value, bool) and _plain(key) in map(_plain, parameter.secondary_opts):
        return not value
    if isinstance(value, list) and not parameter.multiple and parameter.nargs == 1:
        return " ".join(str(part) for part in value)
    return value if isinstance(value, (bool, list)) else str(value)


def check_tables(file: Path, tables: Mapping[str, Any], commands: Mapping[str, str]) -> None:
    """Refuse a table that is named after no command."""
    known = Registry("table of a casewise.toml", {ALL: "", **commands})
    for name in tables:
        try:
            known[name]
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None


PRESETS: Registry[Mapping[str, Any]] = Registry(
    "preset",
    {
        "driving": {  # SegFormer's encoder has LayerNorm only; a street has no background; frames of a drive are alike
            "objective": "tent",
            "learning_rate": 1e-4,
            "parameters": "encoder-norm",
            "steps": 8,
            "foreground": False,
            "metric": "miou",
            "shrink": "",
        },
    },
)
SMALLEST_REGION = 200  # pixels of a frame of 1080 x 1920, as in the paper
FRAME = 1080 * 1920
_FRAME_NUMBER = re.compile(r"(?:_frame)?_\d+$")
_ENDINGS = ("_leftImg8bit", "_rgb_anon", "_rgb_ref_anon")


def apply_preset(ctx: typer.Context, name: str | None) -> str | None:
    """The values of a preset become the defaults of the command that takes them."""
    if name is not None and not ctx.resilient_parsing:
        taken = {parameter.name for parameter in ctx.command.params}
        values = {key: value for key, value in PRESETS[name].items() if key in taken}
        ctx.default_map = {**values, **(ctx.default_map or {})}
    return name


def driving_cases(cases: Sequence[CaseFiles], asked: Mapping[str, Any]) -> tuple[tuple[CaseFiles, ...], dict[str, Any]]:
    """Frames with their drive as the cluster, and the smallest region that counts by the size of the first frame."""
    placed = tuple(one if one.cluster else replace(one, cluster=sequence_of(one.id)) for one in cases)
    if "min_area" in asked:
        return placed, dict(asked)
    from casewise.data.inspection import grid_of

    rows, columns = grid_of(cases[0].images[0]).shape[:2]
    return placed, {**asked, "min_area": max(1, round(SMALLEST_REGION * rows * columns / FRAME))}


def sequence_of(case_id: str) -> str:
    """The drive that a frame belongs to, from its name; the name itself where it holds no frame number.

    >>> sequence_of("GOPR0122_frame_000161_rgb_anon"), sequence_of("aachen_000000_000019_leftImg8bit")
    ('GOPR0122', 'aachen_000000')
    """
    for ending in _ENDINGS:
        case_id = case_id.removesuffix(ending)
    return _FRAME_NUMBER.sub("", case_id) or case_id

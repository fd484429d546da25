"""The command line: each command a sentence over library calls.

``COMMANDS`` is the list. A command's file is imported when that command runs, so ``casewise --help`` stays fast and
imports no torch. A file has the command's name, unless ``HOMES`` says that a related command holds it. It defines
``app = typer.Typer()`` with an ``@app.command()`` for each command; the docstrings are the help texts.
"""

from __future__ import annotations

import errno
import importlib
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

COMMANDS = {
    "demo": "Show the whole system on an embedded phantom cohort and leave a report to look at.",
    "inspect": "Say what is in a folder: layout, cases, groups, labels, geometry, and what would go wrong.",
    "predict": "Segment a folder with adaptation under guard; nnUNetv2_predict with one word changed.",
    "compare": "New masks against old ones, case by case: what changed, who was hurt, accepted or not.",
    "merge": "Take over new masks case by case: keep new, keep old, or ask, as a calibrated policy says.",
    "qc": "How good is each mask at least, without a label: from how far folds, views, raters or models agree.",
    "tune": "Try learning rates on a few images, without labels, and recommend one.",
    "record": "Adapt a model to every case and keep all candidates in an archive.",
    "source-statistics": "What source images look like to a model, for the views that imitate them.",
    "import": "Make an archive from masks that anybody else produced.",
    "verify": "Check an archive or a prediction folder against its hashes and its audit log.",
    "calibrate": "Fit a policy's cut-points on a labelled (or unlabelled) holdout archive.",
    "choose-views": "Which recorded views should enter the consensus, and its worth on patients or sequences left out.",
    "replay": "Let a controller decide again on recorded trajectories; no network, no GPU.",
    "study": "Every table and figure of the paper, on your own archive.",
    "bench": "What proposals and policies gain on your data, decided before labels are opened; others can check it.",
    "plan": "How many labelled cases a certificate needs, and what the ones you have can buy.",
    "certify": "A bound on the harm that is really deployed, refused where it does not hold.",
    "monitor": "Watch a stream of decisions; alarm when calibration no longer applies.",
    "convert": "Turn a checkpoint into safetensors and JSON, once, without running its code.",
    "review": "A local page on which a person keeps M0, keeps the adaptation, or flags a case.",
    "serve": "Guarded segmentation over HTTP (Open Inference Protocol v2).",
}

HOMES = {
    "import": "import_",
    "merge": "compare",
    "plan": "certify",
    "choose-views": "calibrate",
    "source-statistics": "tune",
    "verify": "inspect",
    "convert": "inspect",
    "qc": "review",
}
"""The file of a command that has not its name."""

EXTRAS = {
    "torch": "adapt",
    "safetensors": "adapt",
    "nnunetv2": "nnunet",
    "transformers": "segformer",
    "monai": "monai",
    "ray": "ray",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "pydicom": "dicom",
    "highdicom": "dicom",
}
"""Which extra brings a library that is not there."""


COMPLETION = ("install_completion", "show_completion")


class _Commands(TyperGroup):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"casewise.cli.{HOMES.get(name, name)}")
        command: Any = typer.main.get_command(module.app)
        command = getattr(command, "commands", {name: command})[name]
        command.rich_markup_mode = None  # tables of rich cut the names of options off at 80 columns
        command.params = [one for one in command.params if one.name not in COMPLETION]  # casewise --help has them
        _take_defaults(ctx, name, command)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from casewise.core.registry import Registry

            Registry("command", COMMANDS)[args[0]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _take_defaults(ctx: Any, name: str, command: Any) -> None:
    """Options of casewise.toml become the defaults of the command that is about to run."""
    if ctx.resilient_parsing or "config" not in ctx.params:  # completion, or help without a command
        return
    from casewise.cli.config import check_tables, defaults, read_config

    asked = ctx.params["config"]
    file, tables = read_config(asked)
    if file is not None:
        check_tables(file, tables, COMMANDS)
        chosen = defaults(file, tables, name, command.params, named=asked is not None)
        ctx.default_map = {**(ctx.default_map or {}), name: chosen}


def _version(asked: bool) -> None:
    if asked:
        from casewise import __version__

        typer.echo(f"casewise {__version__}")
        raise typer.Exit


@app.callback()
def _casewise(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
    config: Path = typer.Option(
        None, "--config", help="TOML file with options that a project repeats; default: casewise.toml here."
    ),
) -> None:
    """Decide, case by case, whether a segmentation model should keep what test-time adaptation did to it."""


_USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What typer shows by itself: click's own class, or the one of the click that newer versions of typer bring along."""


def main() -> None:
    """Run a command; what casewise refuses, or the machine does, becomes one line and an exit code.

    0 done, 1 a bug (with its traceback), 2 wrong arguments or inputs, or a disk that is full or may not be written to,
    3 finished, but not for every case, 130 interrupted.
    """
    from casewise.core.errors import CasewiseError

    try:
        code = typer.main.get_command(app).main(prog_name="casewise", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except _USAGE as error:
        error.show()
        sys.exit(error.exit_code)
    except CasewiseError as error:
        _stop(str(error), 2)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _stop(f"this command needs {error.name}; pip install 'casewise[{extra}]'", 2)
    except OSError as error:
        if error.errno == errno.ENOENT and str(error.filename) in _named_files():
            _stop(f"there is nothing at {error.filename}; name a file or folder that exists", 2)
        if error.errno not in DISK:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _stop(f"{DISK[error.errno]}{where}; what was finished is whole{_resuming()}", 2)
    if code == INTERRUPTED:
        _stop(f"interrupted; what was finished is whole{_resuming()}", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


INTERRUPTED = 130  # by Ctrl-C, as shells count it

DISK = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the quota of the disk is used up: free some space",
    errno.EROFS: "the disk can only be read: choose another place",
    errno.EACCES: "this may not be read or written by you: choose another place",
    errno.EPERM: "this may not be changed by you: choose another place",
    errno.EEXIST: "this is a file where a folder is needed: choose another place",
    errno.ENOTDIR: "this is a file where a folder is needed: choose another place",
    errno.EISDIR: "this is a folder where a file is needed: choose another place",
    errno.ENAMETOOLONG: "this name is too long for the disk: choose a shorter one",
}
"""What a machine says that a person can mend, in words."""

RESUME = {
    "predict": "run the same command with --continue_prediction to go on",
    "record": "run the same command again to go on",
    "import": "run the same command again to go on",
    "bench": "run the same command again to go on",
}


def _named_files() -> set[str]:
    """Every word of the command line, and what stands behind the = of an option."""
    return {part for word in sys.argv[1:] for part in (word, word.partition("=")[2])}


def _resuming() -> str:
    named = next((word for word in sys.argv[1:] if word in RESUME), None)
    return f"; {RESUME[named]}" if named else ""


def _stop(sentence: str, code: int) -> NoReturn:
    typer.echo(f"casewise: {sentence}", err=True)
    sys.exit(code)

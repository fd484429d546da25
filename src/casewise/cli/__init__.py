"""The command line; each command calls functions of the library.

``GROUPS`` is the list. A command's file is imported when that command runs, so ``casewise --help`` stays fast and
imports no torch. A file has the command's name, unless ``HOMES`` says that a related command holds it. It defines
``app = typer.Typer()`` with an ``@app.command()`` for each command; the docstrings are the help texts.
"""

from __future__ import annotations

import errno
import importlib
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from casewise.cli.printing import colored

EVERYDAY = {
    "demo": "Try casewise on simulated hearts: fit, predict and a report, in a few minutes.",
    "fit": "Build a deployment from a model and a few labelled cases.",
    "predict": "Segment a folder of images; takes the options of nnUNetv2_predict.",
    "compare": "Compare new masks with old ones, case by case, and accept or reject them.",
    "qc": "Estimate the quality of masks without labels, from the agreement of several masks.",
    "review": "Open a local page to look at masks and to choose which one to keep.",
    "serve": "Segment images over HTTP.",
}
RESEARCH = {
    "record": "Make candidate masks for every case and store them in an archive.",
    "import": "Make an archive from masks that other software produced.",
    "replay": "Apply a controller to recorded cases; needs no network and no GPU.",
    "study": "Make the tables and figures of the paper from your own archive.",
    "bench": "Compare methods and policies on your labelled data; tables as CSV and LaTeX.",
}
EXPERT = {
    "calibrate": "Fit a policy on an archive of labelled calibration cases.",
    "certify": "Compute an upper bound on the harm of a policy, or the number of labels it needs.",
    "monitor": "Watch new decisions and raise an alarm when calibration no longer applies.",
    "inspect": "Describe a folder (images, archive, model, masks) and list its problems.",
}

HOMES = {"import": "import_", "qc": "review"}
"""Files of commands that have another name."""

GROUPS = {"Every day": EVERYDAY, "Research": RESEARCH, "Expert": EXPERT}
"""The commands as ``casewise --help`` shows them."""
COMMANDS = {name: said for group in GROUPS.values() for name, said in group.items()}

EXTRAS = {
    **dict.fromkeys(("torch", "safetensors"), "adapt"),
    "nnunetv2": "nnunet",
    "transformers": "segformer",
    "monai": "monai",
    "ray": "ray",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), "serve"),
    **dict.fromkeys(("pydicom", "highdicom"), "dicom"),
}
"""The extra that installs a missing library."""


COMPLETION = ("install_completion", "show_completion")


class _Commands(TyperGroup):
    """Group that imports the file of a command when the command runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"casewise.cli.{HOMES.get(name, name)}")
        command: Any = typer.main.get_command(module.app)
        command = getattr(command, "commands", {name: command})[name]
        command.rich_markup_mode = None  # rich cuts off the names of options at 80 columns
        command.params = [one for one in command.params if one.name not in COMPLETION]  # in casewise --help
        _take_defaults(ctx, name, command)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, group in GROUPS.items():
            with formatter.section(colored(title, "cyan")):
                formatter.write_dl(list(group.items()))

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
        None, "--config", help="TOML file with default options; default: casewise.toml in this folder."
    ),
) -> None:
    """Get better masks from a segmentation model on new data, with a bound on the harm."""


_USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base class of usage errors, of click or of the copy of click inside typer."""


def main() -> None:
    """Run a command; errors that a user can correct become one line and an exit code.

    0 done, 1 a bug (with its traceback), 2 wrong arguments or inputs, or a disk that is full or may not be written to,
    3 finished, but not for every case, 130 interrupted.
    """
    from casewise.core.errors import CasewiseError

    warnings.formatwarning = _in_one_line  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers end, temporary files are removed
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
            _stop(f"{error.filename} does not exist; name an existing file or folder", 2)
        if error.errno not in DISK:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _stop(f"{DISK[error.errno]}{where}; finished cases are complete{_resuming()}", 2)
    if code == INTERRUPTED:
        _stop(f"interrupted; finished cases are complete{_resuming()}", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _in_one_line(message: Any, category: Any, *place: Any, _plain: Any = warnings.formatwarning) -> str:
    """Show a warning of casewise without the line of its source."""
    known = category.__module__.startswith("casewise.")
    return f"{colored(f'! {message}', 'yellow')}\n" if known else _plain(message, category, *place)


INTERRUPTED = 130  # the exit code that shells use for Ctrl-C

DISK = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EROFS: "the disk is read-only: choose another place",
    errno.EACCES: "you have no permission to read or write this: choose another place",
    errno.EPERM: "you have no permission to change this: choose another place",
    errno.EEXIST: "this is a file, and a folder is needed: choose another place",
    errno.ENOTDIR: "this is a file, and a folder is needed: choose another place",
    errno.EISDIR: "this is a folder, and a file is needed: choose another place",
    errno.EFBIG: "the file is larger than this account may write: raise its limit",
    errno.ENAMETOOLONG: "this name is too long for the disk: choose a shorter one",
}
"""Errors of the operating system that a user can correct, in words."""

RESUME = dict.fromkeys(COMMANDS, "; repeat the command to continue") | dict.fromkeys(("serve", "review"), "")
RESUME["predict"] = "; repeat the command with --continue_prediction to continue"


def _named_files() -> set[str]:
    """Return every word of the command line, and every value after an equals sign."""
    return {part for word in sys.argv[1:] for part in (word, word.partition("=")[2])}


def _resuming() -> str:
    return next((RESUME[word] for word in sys.argv[1:] if word in RESUME), "")


def _stop(sentence: str, code: int) -> NoReturn:
    typer.echo(f"{colored('casewise:', 'red')} {sentence}", err=True)
    sys.exit(code)

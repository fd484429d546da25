"""Every error that casewise raises on purpose.

    CasewiseError
    ├── BadInput                an argument or file cannot be used (shape, dtype, range, NaN, empty); also a ValueError
    │   ├── UnknownName         a name that is not registered; suggests the nearest name
    │   ├── NotAMask            a file with several channels or fractions, where one label per voxel is needed
    │   └── BadPair             an old and a new mask (or a label) that cannot be compared; names the kind of problem
    ├── UnsafeInput             refused before it was opened: size bomb, pickle, path outside its root
    ├── NothingToAdapt          the parameter selection is empty; lists the normalization layers that were seen
    ├── NotFinite               logits, losses or signals became NaN or infinite; the network was restored
    ├── DegenerateStatistic     a calibration statistic has no spread (sigma = 0) and there is no fallback
    ├── TooFewCases             calibration refused; names the number that is needed
    ├── Refused                 valid input that does not belong here
    │   ├── MovedUnselected     an objective changed weights that were not selected; they were restored
    │   ├── Mismatch            policy or certificate belongs to another model, objective, loader or calibration
    │   ├── Overlap             calibration and evaluation share cases, or cases of one patient or sequence
    │   └── Locked              evaluation labels, before the exposure ledger says why they are read
    ├── OutOfTime               the time limit of a case was reached between two forward passes
    ├── DamagedArchive          truncated, edited or incomplete; names the file and the case
    └── MissingExtra            an optional dependency is not installed; names the extra to install

    CasewiseWarning (UserWarning)
    └── DegenerateTertiles      cut-points coincide, so one bucket is empty (E9)

The command line turns a CasewiseError into one line and exit code 2. Anything else is a bug and keeps its traceback.
A message says what must hold, what was found, and what to do.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class CasewiseError(Exception):
    """Root of all errors that casewise raises on purpose."""


class OutOfTime(CasewiseError):
    """The time limit of a case was reached between two forward passes."""


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error, or its class name; file errors without the folder.

    >>> in_one_line(FileNotFoundError(2, "No such file or directory", "/home/jane/scans/heart.nii.gz"))
    'No such file or directory: heart.nii.gz'
    """
    if isinstance(error, SystemExit):
        return f"its code called sys.exit({error.code})"
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, os.PathLike)):
        return f"{error.strerror}: {Path(error.filename).name}"[:300]
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def place_of(error: BaseException) -> str:
    """Return the line of the user's own code that an unexpected error passed last; "" if it passed none."""
    if isinstance(error, (CasewiseError, OSError)):
        return ""
    library = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platlib", "purelib")))
    passed = traceback.extract_tb(error.__traceback__)
    own = [one for one in passed if not one.filename.startswith((*library, "<")) and "-packages" not in one.filename]
    return f" ({type(error).__name__} in {Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def without_folders(text: str, folders: Iterable[Path]) -> str:
    """Strip these folders from the paths in a message, so that reports do not show the folders of a machine.

    >>> without_folders("/home/jane/scans/heart.nii.gz is not a file", [Path("/home/jane/scans")])
    'heart.nii.gz is not a file'
    """
    known = {str(place) for folder in folders for place in (folder, folder.resolve())} - {os.curdir, os.sep}
    for folder in sorted(known, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./\\-]){re.escape(folder + os.sep)}", "", text)
    return text


class BadInput(CasewiseError, ValueError):
    """An argument or file cannot be used."""


class UnknownName(BadInput):
    """A name that is not registered."""


class NotAMask(BadInput):
    """A file with several channels or fractions, where one label per voxel is needed."""


class BadPair(BadInput):
    """Masks that cannot be compared; ``kind`` is the kind of problem, a word that ``--allow`` takes."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[BadPair], tuple[str, str]]:
        return type(self), (self.kind, str(self))


class UnsafeInput(CasewiseError):
    """Refused before it was opened."""


class NothingToAdapt(CasewiseError):
    """The parameter selection is empty."""


class NotFinite(CasewiseError):
    """Logits, a loss or a signal became NaN or infinite."""


class DegenerateStatistic(CasewiseError):
    """A calibration statistic has no spread."""


class TooFewCases(CasewiseError):
    """Too few calibration cases."""


class Refused(CasewiseError):
    """Valid input that does not belong to this model, policy or archive."""


class MovedUnselected(Refused):
    """An objective changed weights that were not selected; the network was restored, its predictions are discarded."""


class Mismatch(Refused):
    """A policy or certificate that belongs to something else."""


class Overlap(Refused):
    """Calibration and evaluation share cases, or cases of one patient or sequence."""


class Locked(Refused):
    """Evaluation labels are read through the exposure ledger only."""


class DamagedArchive(CasewiseError):
    """An archive that is truncated, edited or incomplete."""


class MissingExtra(CasewiseError):
    """An optional dependency is not installed."""


class CasewiseWarning(UserWarning):
    """The root of casewise's warnings."""


class DegenerateTertiles(CasewiseWarning):
    """The two cut-points coincide, so the middle bucket is empty (E9)."""

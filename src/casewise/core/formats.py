"""File formats: strict JSON, TOML, NumPy arrays from untrusted files, CSV.

In JSON, infinity is the word "inf" or "-inf", and NaN is null. Arrays are read without pickle, and a header that claims
more values than the file holds is refused. CSV cells are escaped so that a spreadsheet runs no formula.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, UnsafeInput, in_one_line

_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def json_text(value: Any, **options: Any) -> str:
    """Strict JSON of plain types; ``options`` are those of ``json.dumps``.

    >>> json_text({"cut": float("-inf"), "mean": float("nan")})
    '{"cut": "-inf", "mean": null}'
    """
    return json.dumps(worded(value), allow_nan=False, **options)


def json_bytes(value: Any) -> bytes:
    """Return a value as strict JSON, indented, keys in order."""
    return f"{json_text(value, indent=1, sort_keys=True)}\n".encode()


_UNCHANGED = frozenset({str, int, bool})


def parsed_json(text: str | bytes) -> Any:
    """Return the value of a JSON text from anywhere.

    Raises:
        ValueError: If it is not JSON, or is nested deeper than any file of casewise or nnU-Net.
    """
    try:
        found = json.loads(text)
        _check_depth(found)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return found


def _check_depth(value: Any, left: int = 64) -> None:
    if not left:
        raise RecursionError("it is nested more than 64 levels deep")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(part, dict | list):
            _check_depth(part, left - 1)


def worded(value: Any) -> Any:
    """Replace infinities by words, NaN by None, and NumPy numbers by Python numbers."""
    if value is None or type(value) in _UNCHANGED:  # most values; the checks below are slower
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: worded(item) for key, item in value.items()}
    return [worded(item) for item in value] if isinstance(value, list | tuple) else value


def numbered(value: Any) -> Any:
    """Invert :func:`worded` for a part of a file that holds numbers."""
    if isinstance(value, str):
        return _INFINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: numbered(item) for key, item in value.items()}
    return [numbered(item) for item in value] if isinstance(value, list) else value


def read_npy(path: Path) -> NDArray[Any]:
    """The array of an .npy file; an array that is larger than the file is refused before memory is allocated."""
    return npy_array(path.read_bytes(), path.name)


def npy_array(content: bytes, name: str) -> NDArray[Any]:
    """The array in the bytes of an .npy file; ``name`` is its name in errors."""
    file = io.BytesIO(content)
    try:
        _check_claim(file, len(content), name)
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise BadInput(f"{name} is not a plain NumPy array ({error}); save numbers with numpy.save") from error


def _check_claim(file: BinaryIO, size: int, name: str) -> None:
    """Refuse a header that claims more values than the file holds; rewinds the file."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if any(side < 0 for side in shape) or claimed > held:
        raise UnsafeInput(f"{name} claims {claimed:,} bytes of numbers and holds {held:,}; it is truncated or forged")
    file.seek(0)


LARGEST_TOML = 256 * 1024  # bytes


def read_toml(path: Path, remedy: str) -> tuple[dict[str, Any], str]:
    """Read a small TOML file; return its tables and its text. ``remedy`` says what to do if there is no such file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= LARGEST_TOML else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({in_one_line(error)}); {remedy}") from None
    if size > LARGEST_TOML:
        raise BadInput(f"{path.name} is {size / 2**20:.1f} MB; it may have at most {LARGEST_TOML // 1024} kB")
    try:
        return tomllib.loads(text), text
    except (ValueError, RecursionError) as error:  # ValueError: also a whole number of more than 4,300 digits
        raise BadInput(f"{path.name} is not TOML ({str(error)[:200]})") from None


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe in front; numbers stay numbers.

    >>> csv_cell("=HYPERLINK(1)"), csv_cell("-0.5"), csv_cell("case_1"), csv_cell(-2)
    ("'=HYPERLINK(1)", '-0.5', 'case_1', -2)
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def from_csv_cell(text: str) -> str:
    """The inverse of :func:`csv_cell`, for tables that are read again."""
    return text[1:] if text.startswith("'") and text[1:].startswith(_FORMULA) else text


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table that a person or a spreadsheet wrote: commas, semicolons or tabs, UTF-8 with or without BOM.

    The separator is found in the header. Blanks around cells and rows without any text are left out.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(f"there is no table at {path}; name an existing CSV file") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8; save it as CSV UTF-8") from None
    header = text.partition("\n")[0]
    separator = next((one for one in ",;\t" if one in header), ",")
    try:
        read = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))
    except csv.Error as error:
        raise BadInput(f"{path} cannot be read as CSV ({error}); save it again") from None
    rows = [{name.strip(): (cell or "").strip() for name, cell in row.items() if name} for row in read]
    return [row for row in rows if any(row.values())]


def as_shaped(label: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    """Return a label in the shape of a mask if only axes of length 1 differ: a volume of one slice."""
    same = [size for size in label.shape if size != 1] == [size for size in mask.shape if size != 1]
    return label.reshape(mask.shape) if same else label

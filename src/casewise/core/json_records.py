"""Records from JSON files: the type of every field is checked, so that a wrong file raises an error of one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import EnumMeta
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from casewise.core.durable import write_json
from casewise.core.errors import BadInput, Mismatch, in_one_line
from casewise.core.formats import json_text, numbered, parsed_json

Record = TypeVar("Record")
LARGEST_JSON = 32 * 2**20  # bytes; an archive of 20,000 cases with ten ladders each has a list of 21 MB


def read_json(path: Path, remedy: str = "make it again") -> dict[str, Any]:
    """Return the object of a JSON file in UTF-8 or UTF-16, with or without BOM.

    Raises:
        BadInput: If it is too large, not JSON, not an object, or nested too deeply.
    """
    if (size := path.stat().st_size) > LARGEST_JSON:
        raise BadInput(f"{path} is {size / 2**20:.0f} MB; it may have at most {LARGEST_JSON // 2**20} MB; {remedy}")
    try:
        found = parsed_json(path.read_bytes())
    except ValueError as error:
        raise BadInput(f"{path} cannot be read as JSON ({in_one_line(error)}); {remedy}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} should hold a JSON object, got {type(found).__name__}; {remedy}")
    return found


BEGUN = ("lock", "plan.json", "folds.json")  # files of a run that has made nothing yet
UNFINISHED = "incomplete: casewise fit was killed or is still running; repeat its command to continue"


def begin_or_continue(file: Path, options: Mapping[str, Any]) -> bool:
    """Write the options of a run into a file; True if an earlier run with the same options did so.

    An earlier run that was refused before it made anything is forgotten, so that its options can be corrected.

    Raises:
        Mismatch: If the earlier run had other options.
    """
    plain = json.loads(json_text(options, default=list))
    if not file.is_file() or not any(path.is_file() and path.name not in BEGUN for path in file.parent.rglob("*")):
        write_json(file, plain)
        return False
    there = read_json(file)
    if wrong := [name for name in plain if there.get(name) != plain[name]]:
        raise Mismatch(
            f"{file.parent} was started with other options ({', '.join(wrong)}); repeat the first ones to continue, or "
            f"choose another folder"
        )
    return True


def from_plain(kind: type[Record], plain: Any, where: str, remedy: str = "make it again") -> Record:
    """Build a dataclass from the plain types of a JSON file, lists as tuples and words of infinities as numbers.

    Args:
        kind: A dataclass whose fields are annotated.
        plain: The fields as the file holds them.
        where: What an error calls the file.
        remedy: What to do about it.

    Raises:
        BadInput: If a field is missing, unknown, or not of its type.

    Example:
        >>> from casewise.core.records import State
        >>> from_plain(State, {"step": "one"}, "policy.json")
        Traceback (most recent call last):
        casewise.core.errors.BadInput: policy.json: step must be int, got 'one'; make it again
    """
    try:
        return _record(kind, plain, where)
    except _Unfit as error:
        raise BadInput(f"{error}; {remedy}") from None


class _Unfit(Exception):
    """A value is not of the type that its field has."""


def _record(kind: type[Record], plain: Any, where: str) -> Record:
    if not isinstance(plain, Mapping):
        raise _Unfit(f"{where} must hold the fields of {kind.__name__}, got {plain!r:.60}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}  # type: ignore[arg-type]
    if wrong := sorted({*(set(plain) - set(hints)), *(needed - set(plain))}):
        raise _Unfit(f"{where} {'has an unknown' if wrong[0] in plain else 'lacks the'} field {wrong[0]!r:.60}")
    return kind(**{name: _typed(hints[name], value, f"{where}: {name}") for name, value in plain.items()})


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.init}


def _typed(hint: Any, value: Any, where: str) -> Any:
    """Return a value as its annotation says; NaN is null in JSON. Annotations of other kinds are not checked."""
    origin, inner = get_origin(hint), get_args(hint)
    if type(value) is int and value.bit_length() > 64:  # no array holds it
        raise _Unfit(f"{where} must be a number of at most 64 bits, got {value!r:.60}")
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        return _first(tuple(one for one in inner if one is not NoneType), value, where)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list | tuple) and (inner[-1] is ... or len(inner) == len(value)):
        kinds = (inner[0],) * len(value) if inner[-1] is ... else inner
        return tuple(_typed(one, part, where) for one, part in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {name: _typed(inner[1], part, f"{where}: {name!r:.60}") for name, part in value.items()}
    if hint is float:
        number = math.nan if value is None else numbered(value)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return number
    elif is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else _record(hint, value, where)
    elif isinstance(hint, EnumMeta) and value in list(hint):
        return hint(value)
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint is Any:
        return numbered(value)
    elif type(value) is hint or not (isinstance(hint, type) or origin):
        return value
    raise _Unfit(f"{where} must be {getattr(hint, '__name__', hint)}, got {value!r:.60}")


def _first(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return the value as the first of several annotations that it fits."""
    for kind in kinds[:-1]:
        try:
            return _typed(kind, value, where)
        except _Unfit:
            continue
    return _typed(kinds[-1], value, where)

"""Registries: explicit dictionaries of names, and imports of addresses that a person typed."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from casewise.core.errors import BadInput, UnknownName, UnsafeInput

Item = TypeVar("Item")


class Registry(dict[str, Item]):
    """A dictionary of named objects of one kind; an unknown name raises an error that suggests a known one.

    >>> fruit = Registry("fruit", {"apple": 1, "pear": 2})
    >>> fruit["aple"]
    Traceback (most recent call last):
    casewise.core.errors.UnknownName: no fruit is called 'aple'. Did you mean 'apple'? Known: apple, pear
    """

    def __init__(self, kind: str, items: Mapping[str, Item], also: Collection[str] = ()) -> None:
        super().__init__(items)
        self.kind, self.also = kind, also

    def __missing__(self, name: str) -> Item:
        near = 0.7 if len(str(name)) > 4 else 0.5  # one letter of a short name weighs more
        known = {one.lower(): one for one in (*self, *self.also)}
        close = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=near)
        hint = f" Did you mean '{known[close[0]]}'?" if close else ""
        raise UnknownName(f"no {self.kind} is called '{name}'.{hint} Known: {', '.join(self)}")

    def build(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Look a class up by name and build it; arguments and options are its own."""
        made: Any = self[name]
        return made(*arguments, **options)


_ADDRESS = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.:]*")  # identifiers of Python; nothing else is ever imported
_SEPARATORS = re.compile(r"[,;+=@()\[\]]")
PROPOSERS = ("views", "running", "members")  # "views:mri" names registered views, not code
_DATA = frozenset(
    {"binding", "calibration_clusters", "cohort", "audited_patients", "decided_patients", "exposures", "labels",
     "names", "waiting"}
)  # fmt: skip
"""Fields of records that hold names of patients, sites and classes or sentences; casewise looks none of them up."""


def is_address(text: str) -> bool:
    """True if a text is one address ``package.module:Name``, which :func:`from_address` would import."""
    return _ADDRESS.fullmatch(text) is not None


def addresses_in(value: Any, *, proposers: bool = True) -> Iterator[str]:
    """Yield every ``package.module:Name`` in a text or in nested lists and mappings, keys included.

    Args:
        value: Anything that JSON or TOML can hold.
        proposers: Accept the prefixes ``views:``, ``running:`` and ``members:`` in front of registered names.

    Example:
        >>> list(addresses_in({"objective": "views:mri", "signals": ["adic, evil:sig"], "propose": "x=views:evil:fn"}))
        ['evil:sig', 'evil:fn']
    """
    if isinstance(value, Mapping):
        for part in (*value.keys(), *value.values()):
            yield from addresses_in(part, proposers=proposers)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from addresses_in(part, proposers=proposers)
    elif isinstance(value, str):
        for word in map(str.strip, _SEPARATORS.split(value)):
            kind, _, rest = word.partition(":")
            name = rest if proposers and kind in PROPOSERS else word
            if is_address(name):
                yield name


def check_names_no_code(record: Mapping[str, Any], *, where: str, typed: Collection[str] = ()) -> None:
    """Refuse a record from a file that names code by address in any field, nested fields included.

    A file may name registered things only. Names of patients, groups and classes are free: nothing looks them up.

    Args:
        record: The record as its file holds it.
        where: Name of the file in the error.
        typed: Addresses that the person who runs casewise gave; these are accepted.

    Raises:
        UnsafeInput: If the record has an address that was not typed.
    """
    for field, value in record.items():
        if field in _DATA:
            continue
        if field == "groups":  # the names of groups are free, what is fitted for each of them is not
            value = tuple(value.values()) if isinstance(value, Mapping) else ()
        found = next((one for one in addresses_in((field, value)) if one not in typed), None)
        if found is not None:
            raise UnsafeInput(
                f"{where} names code in {field}: {found[:100]!r}; a file may name only registered things; make "
                f"the file again, or get it from somebody you trust"
            )


def from_address(address: str, kind: str) -> Any:
    """Import the object at ``package.module:Name``; call this only with an address that a person typed."""
    module, _, name = address.partition(":")
    try:
        if not is_address(address):  # Python would import a file of any name, which addresses_in would not find
            raise ImportError("the module and the name must be names of Python")
        with importable_from_here():
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"no {kind} at '{address}': {error}; an address is 'package.module:Name', importable from here"
        ) from error


@contextmanager
def importable_from_here() -> Iterator[None]:
    """The working directory at the end of Python's path, for an address ``package.module:Name`` that a person typed.

    It comes last, so that a file in this directory never replaces an installed package. It stays on the path if
    something was imported from it.
    """
    here = os.getcwd()
    if here in sys.path:
        yield
        return
    before = set(sys.modules)
    sys.path.append(here)
    try:
        yield
    finally:
        files = (getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before)
        if not any(os.path.abspath(file).startswith(os.path.join(here, "")) for file in files):
            sys.path.remove(here)

"""A registry is a dict that you can read; nothing registers itself."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from casewise.core.errors import BadInput, UnknownName

Item = TypeVar("Item")


class Registry(Mapping[str, Item], Generic[Item]):
    """Names to things of one kind, with an error that says what was probably meant.

    >>> fruit = Registry("fruit", {"apple": 1, "pear": 2})
    >>> fruit["aple"]
    Traceback (most recent call last):
    casewise.core.errors.UnknownName: no fruit is called 'aple'. Did you mean 'apple'? Known: apple, pear
    """

    def __init__(self, kind: str, items: Mapping[str, Item]) -> None:
        self.kind = kind
        self._items = dict(items)

    def __getitem__(self, name: str) -> Item:
        if name in self._items:
            return self._items[name]
        close = difflib.get_close_matches(str(name), self._items, n=1, cutoff=0.5)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise UnknownName(f"no {self.kind} is called '{name}'.{hint} Known: {', '.join(self._items)}")

    def get(self, name: str, default: Any = None) -> Any:
        """The item, or the default where nothing is called so."""
        return self._items.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def build(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Look a class up by name and build it; arguments and options are its own."""
        made: Any = self[name]
        return made(*arguments, **options)


def from_address(address: str, kind: str) -> Any:
    """What a person's ``package.module:Name`` names, imported; never call it with an address that a file holds."""
    module, _, name = address.partition(":")
    try:
        with importable_from_here():
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"no {kind} at '{address}': {error}; an address is 'package.module:Name', importable from here"
        ) from error


@contextmanager
def importable_from_here() -> Iterator[None]:
    """The working directory at the end of Python's path, for an address ``package.module:Name`` that a person typed.

    At the end, so that a file that lies here by accident never stands for an installed package. It stays on the path
    where something was imported from here, which may import its neighbours later.
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

"""Merge or rename the classes of any backbone by a line of text such as ``disc=rim+cup``.

The network and its adaptation do not change; masks and labels are renumbered after the argmax. A policy is bound to the
lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from casewise.adapt.backbones import Backbone, OwnPrediction, Pipeline, Prepared, pipeline_of
from casewise.core.errors import BadInput, UnknownName
from casewise.core.records import Case, Mask
from casewise.core.registry import Registry

LARGEST = 255


@dataclass(frozen=True, eq=False)
class Merged:
    """A backbone whose masks and labels are renumbered; everything else is that of the backbone ``plain``."""

    plain: Backbone
    labels: Mapping[int, str]
    table: NDArray[np.uint8]  # from the network's label numbers to the new ones
    lines: tuple[str, ...]

    @property
    def loader(self) -> str:
        """Description of the preprocessing and of the merged classes."""
        return f"{self.plain.loader} merge({', '.join(self.lines)})"

    def read_label(self, path: Path) -> Mask:
        """Read a label in the classes of the network, and renumber it."""
        return self._renumbered(self.plain.read_label(path))

    def prepare(self, case: Case) -> Prepared:
        """Prepare a case with the backbone; predicted masks are renumbered."""
        prepared = self.plain.prepare(case)
        pipeline = None if prepared.pipeline is None else self._renumbering(prepared.pipeline)
        plain = prepared.predict or (lambda: pipeline_of(prepared, self.plain).source()[0])
        predict = OwnPrediction.instead(prepared.predict, lambda: self._renumbered(plain()))
        return replace(prepared, predict=predict, pipeline=pipeline)

    def _renumbering(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with renumbered masks; probabilities stay in the classes of the network."""

        def source() -> tuple[Mask, torch.Tensor]:
            mask, probabilities = pipeline.source()
            return self._renumbered(mask), probabilities

        return replace(pipeline, source=source, mask=lambda seen: self._renumbered(pipeline.mask(seen)))

    def _renumbered(self, mask: Mask) -> Mask:
        held = np.asarray(mask)
        if held.size and (int(held.min()) < 0 or int(held.max()) >= self.table.size):
            raise BadInput(f"labels must be between 0 and {self.table.size - 1}, got {held.min()} to {held.max()}")
        return np.asarray(self.table[held.astype(np.intp)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "plain":
            raise AttributeError(name)
        return getattr(self.plain, name)


def unmerged(backbone: Backbone) -> Backbone:
    """Return the backbone without merged classes."""
    return backbone.plain if isinstance(backbone, Merged) else backbone


def merged(backbone: Backbone, lines: Sequence[str]) -> Backbone:
    """Merge or rename classes of a backbone by lines such as ``disc=rim+cup``; without lines, return the backbone.

    Merged classes get the new name and the number of their first class; later classes get smaller numbers. Classes are
    given by name or number.
    """
    if not lines:
        return backbone
    names = {**{value: str(value) for value in range(backbone.classes)}, **backbone.labels}
    named: dict[int, str] = {}
    for line in lines:
        new, parts = _parsed(line)
        members = [_value(part, names) for part in parts]
        for value in members:
            if value in named:
                raise BadInput(f"class {names[value]!r} is merged twice, by merge={line} too; name it once")
            if value == backbone.ignore:
                raise BadInput(f"class {names[value]!r} is the ignored label and cannot be merged")
        named |= dict.fromkeys(members, new)
    order: dict[str, int] = {}
    table = np.arange(LARGEST + 1, dtype=np.uint8)
    for value in sorted(names):
        if value == backbone.ignore:
            continue
        order.setdefault(named.get(value, names[value]), len(order))
        table[value] = order[named.get(value, names[value])]
    ignored = {} if backbone.ignore not in names else {backbone.ignore: names[backbone.ignore]}
    made = Merged(backbone, {number: name for name, number in order.items()} | ignored, table, tuple(lines))
    return cast(Backbone, made)


def _parsed(line: str) -> tuple[str, list[str]]:
    new, equals, old = line.partition("=")
    parts = [part.strip() for part in old.split("+")]
    if not equals or not new.strip() or not all(parts):
        raise BadInput(f"a merge must be NEW=OLD or NEW=OLD+OLD, such as disc=rim+cup, got {line!r}")
    return new.strip(), parts


def _value(part: str, names: Mapping[int, str]) -> int:
    if part.isdigit() and int(part) in names:
        return int(part)
    by_name = {name: value for value, name in names.items()}
    try:
        return Registry("class", by_name)[part]
    except UnknownName as error:
        raise UnknownName(f"{error}; merge names classes of the model by name or number") from None

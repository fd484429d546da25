"""Classes merged or renamed by a line of text, ``disc=rim+cup``, for any backbone and without a factory.

The network and its adaptation stay as they are; masks and labels are renumbered after the argmax. So the merged M0 is
the plain model's mask with its labels merged, voxel by voxel, and the line is part of what a policy is bound to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from casewise.adapt.backbones import Backbone, Expectation, OwnPrediction, Pipeline, Prepared, Reading
from casewise.adapt.logits import at_resolution, logits_of
from casewise.adapt.logits import labels as labels_of
from casewise.core.errors import BadInput, UnknownName
from casewise.core.records import Case, Mask
from casewise.core.registry import Registry
from casewise.data.folders import CaseFiles

LARGEST = 255


@dataclass(frozen=True, eq=False)
class Merged:
    """A backbone whose masks have other label numbers than its network has classes."""

    plain: Backbone
    labels: Mapping[int, str]
    table: NDArray[np.uint8]  # from the network's label numbers to the new ones
    lines: tuple[str, ...]

    @property
    def network(self) -> torch.nn.Module:
        """The network that is adapted."""
        return self.plain.network

    @property
    def name(self) -> str:
        """What to call it in a report."""
        return self.plain.name

    @property
    def fingerprint(self) -> str:
        """sha256 of the source weights."""
        return self.plain.fingerprint

    @property
    def loader(self) -> str:
        """How images become inputs and masks get their numbers: another merge is another loader."""
        return f"{self.plain.loader} merge({', '.join(self.lines)})"

    @property
    def classes(self) -> int:
        """Channels of the logits, which are not merged."""
        return self.plain.classes

    @property
    def head(self) -> str:
        """ "softmax" or "sigmoid"."""
        return self.plain.head

    @property
    def ignore(self) -> int | None:
        """Value of the label that is not scored; it keeps its number."""
        return self.plain.ignore

    @property
    def ending(self) -> str | None:
        """The only file ending that it reads and writes."""
        return self.plain.ending

    @property
    def expects(self) -> Expectation:
        """The input contract."""
        return self.plain.expects

    def read(self, files: CaseFiles) -> Reading:
        """Open the image files of a case."""
        return self.plain.read(files)

    def read_label(self, path: Path) -> Mask:
        """Open a label in the numbers of the network's classes, and renumber it."""
        return self._renumbered(self.plain.read_label(path))

    def write(self, mask: Mask, reading: Reading, path: Path) -> None:
        """Write a mask with the new numbers."""
        self.plain.write(mask, reading, path)

    def prepare(self, case: Case) -> Prepared:
        """The backbone's own preparation; only the way from logits to a mask is longer by one table."""
        prepared = self.plain.prepare(case)
        pipeline = None if prepared.pipeline is None else self._renumbering(prepared.pipeline)
        predict = OwnPrediction.instead(prepared.predict, lambda: self._renumbered(self._mask(prepared)))
        return replace(prepared, predict=predict, pipeline=pipeline)

    def _renumbering(self, pipeline: Pipeline) -> Pipeline:
        """The same readings, in the classes of the network; masks of them get the new numbers."""

        def source() -> tuple[Mask, torch.Tensor]:
            mask, probabilities = pipeline.source()
            return self._renumbered(mask), probabilities

        return replace(pipeline, source=source, mask=lambda seen: self._renumbered(pipeline.mask(seen)))

    def _mask(self, prepared: Prepared) -> Mask:
        if prepared.predict is not None:
            return prepared.predict()
        inputs = prepared.inputs
        with torch.inference_mode():
            logits = (prepared.forward or self._forward)(inputs)
        found = labels_of(logits, self.head)
        return np.asarray(found[0] if len(found) == 1 else found)

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return at_resolution(logits_of(self.network(inputs)), inputs.shape[2:])

    def _renumbered(self, mask: Mask) -> Mask:
        held = np.asarray(mask)
        if held.size and (int(held.min()) < 0 or int(held.max()) >= self.table.size):
            raise BadInput(f"labels lie between 0 and {self.table.size - 1}, got {held.min()} to {held.max()}")
        return np.asarray(self.table[held.astype(np.intp)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "plain":
            raise AttributeError(name)
        return getattr(self.plain, name)


def unmerged(backbone: Backbone) -> Backbone:
    """The backbone in the classes of its network."""
    return backbone.plain if isinstance(backbone, Merged) else backbone


def merged(backbone: Backbone, lines: Sequence[str]) -> Backbone:
    """The backbone with classes merged or renamed by lines such as ``disc=rim+cup``; without lines, itself.

    The classes of a line get the name and the place of their first; the others move up. Numbers stand for names.
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
                raise BadInput(f"class {names[value]!r} is merged twice, by --merge {line} too; name it once")
            if value == backbone.ignore:
                raise BadInput(f"class {names[value]!r} is the label that is not scored; it cannot be merged")
        named |= dict.fromkeys(members, new)
    order: dict[str, int] = {}
    table = np.arange(LARGEST + 1, dtype=np.uint8)
    for value in sorted(names):
        if value == backbone.ignore:
            continue
        order.setdefault(named.get(value, names[value]), len(order))
        table[value] = order[named.get(value, names[value])]
    ignored = {} if backbone.ignore not in names else {backbone.ignore: names[backbone.ignore]}
    return Merged(backbone, {number: name for name, number in order.items()} | ignored, table, tuple(lines))


def _parsed(line: str) -> tuple[str, list[str]]:
    new, equals, old = line.partition("=")
    parts = [part.strip() for part in old.split("+")]
    if not equals or not new.strip() or not all(parts):
        raise BadInput(f"a merge is NEW=OLD or NEW=OLD+OLD, such as disc=rim+cup, got {line!r}")
    return new.strip(), parts


def _value(part: str, names: Mapping[int, str]) -> int:
    if part.isdigit() and int(part) in names:
        return int(part)
    by_name = {name: value for value, name in names.items()}
    try:
        return Registry("class", by_name)[part]
    except UnknownName as error:
        raise UnknownName(f"{error}; --merge names classes of the model by name or number") from None

"""Cleanup of masks: keep the largest component, remove small islands, fill holes. Removed voxels become background.

A cleanup is written as text, steps in order: ``largest(1,2)+islands(2:50)+fill(3)``. Components are
connected through faces, in three dimensions where the mask has three.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from casewise.core.errors import BadInput
from casewise.core.records import Mask
from casewise.core.registry import Registry
from casewise.measure.masks import bounding_box

_STEP = re.compile(r"(\w+)(?:\(([\d:,\s]*)\))?")


@dataclass(frozen=True)
class CleanupStep:
    """One step: the operation, its labels, and for islands the smallest volume to keep."""

    kind: str  # "largest", "islands" or "fill"
    labels: tuple[tuple[int, int], ...]  # (label, smallest volume in voxels; 0 where the step needs none)

    def __post_init__(self) -> None:
        CLEANUPS[self.kind]
        labels = [label for label, _ in self.labels]
        wrong = [label for label in labels if label < 1]
        if wrong or len(set(labels)) < len(labels) or not labels:
            raise BadInput(f"{self.kind} must name each foreground label once, such as {self.kind}(1,2), got {labels}")
        if (self.kind == "islands") != all(voxels > 0 for _, voxels in self.labels):
            raise BadInput(
                f"islands needs a volume in voxels for each label, as in islands(2:50), and other steps must "
                f"have none; got {self}"
            )

    def __str__(self) -> str:
        return f"{self.kind}({','.join(f'{label}:{least}' if least else str(label) for label, least in self.labels)})"


@dataclass(frozen=True)
class Cleanup:
    """Steps that are applied to a mask in order.

    Example:
        >>> import numpy as np
        >>> Cleanup.parse("largest(1)").apply(np.array([[1, 1, 0, 1]])).tolist()
        [[1, 1, 0, 0]]
    """

    steps: tuple[CleanupStep, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Cleanup:
        """Read a cleanup from its text; an empty text changes nothing.

        Args:
            text: Steps joined by ``+``: ``largest(1,2)``, ``islands(2:50)`` (label:voxels), ``fill(3)``.

        Returns:
            The cleanup; ``Cleanup.parse(made.text) == made`` holds for every one.

        Raises:
            BadInput: The text is not a cleanup.
        """
        return cls(tuple(_step(part) for part in text.split("+"))) if text.strip() else cls()

    @property
    def text(self) -> str:
        """The steps as :meth:`parse` reads them."""
        return "+".join(map(str, self.steps))

    def apply(self, mask: Mask) -> Mask:
        """Clean a mask.

        Args:
            mask: Labels, (rows, columns) or (slices, rows, columns).

        Returns:
            A new mask of the same type and shape.
        """
        made = np.array(mask)
        for step in self.steps:
            for label, least in step.labels:
                CLEANUPS[step.kind](made, label, least)
        return made


def _step(text: str) -> CleanupStep:
    found = _STEP.fullmatch(text.strip())
    pairs = [] if found is None else [part.split(":") for part in (found[2] or "").split(",") if part.strip()]
    if found is None or any(not 1 <= len(pair) <= 2 or not all(map(str.strip, pair)) for pair in pairs):
        raise BadInput(f"a step of a cleanup must be like largest(1,2), islands(2:50) or fill(3), got {text!r}")
    return CleanupStep(found[1], tuple((int(pair[0]), int(pair[1]) if len(pair) > 1 else 0) for pair in pairs))


def _keep_largest(mask: Mask, label: int, _: int) -> None:
    """Of components with equal volumes the first one in memory stays."""
    part, numbers, sizes = _components(mask, label)
    if len(sizes) > 1:
        part[(numbers > 0) & (numbers != np.argmax(sizes) + 1)] = 0


def _remove_islands(mask: Mask, label: int, least: int) -> None:
    part, numbers, sizes = _components(mask, label)
    if (sizes < least).any():
        part[np.concatenate([[False], sizes < least])[numbers]] = 0


def _fill_holes(mask: Mask, label: int, _: int) -> None:
    """Background that cannot reach the border of the mask without crossing the label becomes the label."""
    part = mask[bounding_box(mask == label)]
    part[ndimage.binary_fill_holes(part == label) & (part == 0)] = label


def _components(mask: Mask, label: int) -> tuple[Mask, NDArray[Any], NDArray[np.int64]]:
    """The part of the mask that holds a label, the component number of each of its voxels, and the volumes."""
    part = mask[bounding_box(mask == label)]
    numbers, count = ndimage.label(part == label)
    return part, numbers, np.bincount(numbers.ravel(), minlength=count + 1)[1:]


CLEANUPS = Registry("cleanup", {"largest": _keep_largest, "islands": _remove_islands, "fill": _fill_holes})
"""What can be done to a mask, by name: (mask, label, smallest volume), in place."""

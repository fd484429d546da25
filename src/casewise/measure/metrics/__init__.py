"""Metrics, which need a label: harm, overlap, surface distances.

``METRICS`` lists the metrics that an archive may be scored with: ``record --metric`` takes its names and nothing else.
A metric of your own is one file with a function of a mask and a label, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from casewise.core.records import Mask
from casewise.core.registry import Registry
from casewise.measure.metrics.overlap import dice, dice_of_counts, micro_miou, miou, miou_of_counts


class ScoreFunction(Protocol):
    """Function that scores one mask: higher is better, NaN if undefined."""

    def __call__(self, mask: Mask, label: Mask, *, ignore: int | None, spacing_mm: tuple[float, ...] | None) -> float:
        """Return the score of a mask."""


@dataclass(frozen=True)
class Metric:
    """A score of a mask against its label by which cases are better or worse; it must rise with quality.

    A distance such as HD95 falls with quality, so it cannot be a metric here; analyses measure it separately.
    """

    title: str  # as tables print it
    of: ScoreFunction
    micro: Callable[..., float] | None = None  # the same over all voxels of many (mask, label) pairs, where it has one
    of_counts: Callable[[Any, Any, Any], float] | None = None  # from voxels of each class: shared, in mask, in label


METRICS: Registry[Metric] = Registry(
    "metric",
    {
        "dice": Metric(
            "Dice",
            lambda mask, label, *, ignore, spacing_mm: dice(mask, label, ignore=ignore),
            of_counts=dice_of_counts,
        ),
        "miou": Metric(
            "mIoU",
            lambda mask, label, *, ignore, spacing_mm: miou(mask, label, ignore=ignore),
            micro_miou,
            miou_of_counts,
        ),
    },
)
"""Every metric by the name that an archive's configuration holds."""

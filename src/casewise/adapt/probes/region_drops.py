"""Region scores of a live episode, for the region gate (L1, L2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from casewise.core.records import Signals
from casewise.measure.signals.risk import region_drops

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode


def drop(episode: Episode) -> Signals:
    """Return the mean entropy drop in each region of the edit of step 1; None if logits and mask differ in grid."""
    record = episode.record
    first, now = record.entropies["entropy_0"], record.entropies[f"entropy_{episode.step}"]
    if episode.step != 1 or now.shape != record.masks[1].shape:
        return {"drop": None}
    return region_drops(record.masks[0], record.masks[1], first - now, min_area=record.min_area)

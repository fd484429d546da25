"""Region scores of the step-1 edit, for the region gate: how much surer the network became in each (L1, L2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from casewise.core.records import Signals
from casewise.measure.regions import regions_of

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode


def drop(episode: Episode) -> Signals:
    r"""Mean entropy drop of D (``drop``) and of each kept region of the raw multi-class edit (``drop.0``, ...).

    .. math:: s_j = \frac{1}{|R_j|} \sum_{x \in R_j} H_{M_0}(x) - H_{M_1}(x)

    Only step 1 has them, and only where logits and mask share a grid.
    """
    record = episode.record
    first, now = record.entropies["entropy_0"], record.entropies[f"entropy_{episode.step}"]
    if episode.step != 1 or now.shape != record.masks[1].shape:
        return {"drop": None}
    found = regions_of(record.masks[0], record.masks[1], min_area=record.min_area, foreground=False)
    if not found.area:
        return {"drop": 0.0}
    drops = (first.reshape(-1)[found.voxels] - now.reshape(-1)[found.voxels]).astype(np.float64)
    means = np.bincount(found.number, weights=drops, minlength=len(found.sizes)) / found.sizes
    scores = {f"drop.{number}": float(score) for number, score in enumerate(means[found.kept])}
    return {"drop": float(drops.mean()), **scores}

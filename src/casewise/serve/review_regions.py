"""The regions of an edit for a person: how large, what kind of change, surer or less sure, deployed or not, and where.

Raw labels are compared, as the region gate does (L1), so a change of class is listed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.records import Mask
from casewise.judge.controllers.region_gate import gate_regions
from casewise.serve.review_cases import Masks

LISTED = 200

Drops = Mapping[int, float] | NDArray[Any] | None
"""Entropy of M0 minus entropy of the adapted mask: by region number, or of every voxel."""


def listed_regions(masks: Masks, *, min_area: int, drops: Drops = None) -> dict[str, Any]:
    """Regions of M0 against adapted: those that became less sure first where that is known, else the largest first."""
    if masks.adapted is None:
        return {"area": 0, "total": 0, "crumbs": 0, "regions": []}
    found = gate_regions(masks.source, masks.adapted, min_area=min_area)
    order = np.argsort(found.number, kind="stable")
    groups = np.split(found.voxels[order], np.cumsum(found.sizes)[:-1]) if found.area else []
    kept = np.flatnonzero(found.kept)
    rows = [
        _row(number, groups[component], masks, found.area, _drop(drops, number, groups[component]))
        for number, component in enumerate(kept)
    ]
    rows.sort(key=lambda row: (row["drop"] is None, row["drop"] or 0.0, -row["voxels"]))
    return {
        "area": found.area,
        "total": len(rows),
        "crumbs": int(found.sizes[~found.kept].sum()),
        "regions": rows[:LISTED],
    }


def _drop(drops: Drops, number: int, voxels: NDArray[np.int64]) -> float | None:
    if drops is None:
        return None
    if isinstance(drops, Mapping):
        return drops.get(number)
    mean = float(np.mean(drops.reshape(-1)[voxels]))
    return mean if np.isfinite(mean) else None


def _row(number: int, voxels: NDArray[np.int64], masks: Masks, area: int, drop: float | None) -> dict[str, Any]:
    assert masks.adapted is not None
    source, adapted = masks.source.reshape(-1)[voxels], masks.adapted.reshape(-1)[voxels]
    places = np.unravel_index(voxels, masks.source.shape)
    return {
        "number": number,
        "voxels": len(voxels),
        "share": len(voxels) / area,
        "added": int(((source == 0) & (adapted != 0)).sum()),
        "removed": int(((source != 0) & (adapted == 0)).sum()),
        "relabeled": int(((source != 0) & (adapted != 0)).sum()),
        "drop": drop,
        "deployed": _deployed(masks.deployed, voxels, adapted),
        "box": [[int(axis.min()), int(axis.max())] for axis in places],
        "at": [int(np.bincount(axis).argmax()) for axis in places],  # the slice of each axis that shows most of it
    }


def _deployed(deployed: Mask | None, voxels: NDArray[np.int64], adapted: NDArray[Any]) -> float | None:
    """The share of the region that is deployed; None where nothing was decided."""
    return None if deployed is None else float((deployed.reshape(-1)[voxels] == adapted).mean())


def changes_by_slice(masks: Masks) -> list[list[int]]:
    """For each axis, how many voxels of each slice changed; M0's foreground where nothing did."""
    adapted = masks.source if masks.adapted is None else masks.adapted
    changed = masks.source != adapted
    if not changed.any() and masks.deployed is not None:
        changed = masks.source != masks.deployed
    weight = changed if changed.any() else masks.source > 0
    axes = range(weight.ndim)
    return [weight.sum(axis=tuple(other for other in axes if other != axis)).tolist() for axis in axes]

"""Is HA about more than overlap? HA against the Hausdorff distance of the mask and its change (M9, M10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.measure.metrics.surface import hd95
from casewise.study.finding import Finding
from casewise.study.statistics.ranks import spearman, spearman_p
from casewise.study.trajectories import horizon, unshrunk


def distances(archive: Archive, *, step: int | None = None) -> pd.DataFrame:
    """HD95 of M0 and of ``step`` (the last unless given) against the label, foreground, in mm where spacing is known.

    An empty mask has no surface: its distance is NaN and ``empty`` is true (M9).
    """
    state = State(archive.steps if step is None else step)
    records = []
    for case in archive.ids:
        if archive.entries[case].labelled:
            masks, label = archive.masks(case), archive.label(case)
            spacing = archive.entries[case].spacing_mm
            pair = [hd95(masks[which], label, spacing_mm=spacing) for which in (SOURCE, state)]
            records.append({"case": case, "hd95_source": pair[0], "hd95": pair[1], "empty": bool(np.isnan(pair).any())})
    return pd.DataFrame(records, columns=["case", "hd95_source", "hd95", "empty"])


def harm_and_distance(outcomes: pd.DataFrame, measured: pd.DataFrame, *, step: int | None = None) -> Finding:
    """Spearman of HA with HD95(M_k) and with its change, over all cases and where both move (M10)."""
    ladder = unshrunk(outcomes)
    depth = horizon(ladder) if step is None else step
    harm = ladder.loc[ladder["step"] == depth, ["case", "ha"]]
    joined = harm.merge(measured, on="case")
    kept = joined.dropna(subset=["ha", "hd95", "hd95_source"])
    ha, after = kept["ha"].to_numpy(float), kept["hd95"].to_numpy(float)
    change = after - kept["hd95_source"].to_numpy(float)
    moving = (ha > 0) & (change != 0)
    pairs = {"HA, HD95": (ha, after), "HA, change of HD95": (ha, change), "both move": (ha[moving], change[moving])}
    records = [_row(name, *pair) for name, pair in pairs.items()]
    made = {
        "step": depth,
        "excluded": len(joined) - len(kept),
        "zero_ha": int((ha == 0).sum()),
        "unmoved": int((change == 0).sum()),
        "both_move": int(moving.sum()),
        "mean_change": float(change.mean()) if len(change) else float("nan"),
        "median_change": float(np.median(change)) if len(change) else float("nan"),
    }
    return Finding("distance", pd.DataFrame(records), len(kept), "M9, M10", made)


def _row(name: str, first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    rho = spearman(first, second)
    reason = "fewer than three cases, or one side does not vary" if np.isnan(rho) else ""
    return {"pairing": name, "rho": rho, "p": spearman_p(rho, len(first)), "n": len(first), "reason": reason}

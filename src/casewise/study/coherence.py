"""Do edits have a core? Largest component and singleton share across backbones, at matched source quality (O4, O5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from casewise.study.finding import Finding
from casewise.study.statistics.ranks import spearman
from casewise.study.trajectories import horizon, mean_or_nan, unshrunk

USABLE_MARGIN = 0.05  # a source is usable when it is at most this far below the reference source (O4)
WANTED_RHO = 0.4


def coherence(
    outcomes_by_backbone: Mapping[str, pd.DataFrame],
    *,
    source_metric: float | None = None,
    band: tuple[float, float] = (0.60, 0.80),
    step: int | None = None,
) -> Finding:
    """One row per backbone: usability, edit coherence inside the M0 band, and whether both coordinates follow HA.

    ``source_metric`` is the reference source's metric on its own domain; the usability line is 0.05 below it. Coherence
    is read at ``step`` (the last unless given) over cases whose M0 metric lies in the band. A backbone meets the
    criterion when rho with HA is at least 0.4 for regions *and* delta.
    """
    records = [
        {"backbone": name, **_row(frame, source_metric, band, step)} for name, frame in outcomes_by_backbone.items()
    ]
    n = max((record["n"] for record in records), default=0)
    return Finding(
        "coherence", pd.DataFrame(records), int(n), "O4, O5", {"band": list(band), "step": step}, _notes(records)
    )


def _row(frame: pd.DataFrame, line: float | None, band: tuple[float, float], step: int | None) -> dict[str, Any]:
    ladder = unshrunk(frame)
    source = ladder[ladder["step"] == 0].set_index("case")["metric"]
    inside = source.index[source.between(*band)]
    at = ladder[(ladder["step"] == (horizon(ladder) if step is None else step)) & ladder["case"].isin(inside)]
    adapted = ladder[ladder["step"] >= 1]
    rho = {name: _rho(adapted, name) for name in ("regions", "delta")}
    mean = mean_or_nan(source)
    return {
        "n": len(source),
        "in_band": len(inside),
        "metric_source": mean,
        "usable": None if line is None else bool(mean >= line - USABLE_MARGIN),
        "largest": _mean(at, "largest"),
        "singleton_share": _mean(at, "singleton_share"),
        "rho_regions": rho["regions"],
        "rho_delta": rho["delta"],
        "meets": all(value >= WANTED_RHO for value in rho.values()),
        "reason": "" if len(inside) else f"no case has M0 in [{band[0]}, {band[1]}]",
    }


def _rho(adapted: pd.DataFrame, name: str) -> float:
    both = adapted[[name, "ha"]].dropna()
    return spearman(both[name].to_numpy(float), both["ha"].to_numpy(float))


def _mean(at: pd.DataFrame, name: str) -> float:
    return mean_or_nan(at[name]) if name in at.columns else float("nan")


def _notes(records: list[dict[str, Any]]) -> tuple[str, ...]:
    """The factor between the most and the least coherent backbone."""
    sizes = [(record["largest"], record["backbone"]) for record in records if record["largest"] > 0]
    if len(sizes) < 2:
        return ()
    (small, scattered), (large, solid) = min(sizes), max(sizes)
    return (f"the largest component of {solid} is {large / small:.1f} times that of {scattered}",)

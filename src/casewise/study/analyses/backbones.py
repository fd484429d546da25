"""Do the edits of another backbone have a core, so that regions can judge them? And one case under both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.judge.outcomes import outcomes
from casewise.measure.regions import Regions, regions_of
from casewise.render.ink import Picture
from casewise.render.masks import WORSE, View, draw_masks, painted
from casewise.study.finding import Finding, Section, plain_table
from casewise.study.statistics.ranks import spearman
from casewise.study.study import Study
from casewise.study.trajectories import horizon, mean_or_nan, unshrunk


def section(study: Study) -> Section:
    """Is the edit of another backbone coherent enough to be judged by regions? (O4, O5)"""
    if not study.extras.backbones:
        reason = "needs an archive of another backbone on the same cohort; give --backbone NAME=ARCHIVE"
        return Section("backbones", "Other backbones", missing={"edit coherence and fig:swin-geom": reason})
    frames = {
        "this": study.outcomes,
        **{name: outcomes(archive) for name, archive in study.extras.backbones.items()},
    }
    found = coherence(frames)
    made = plain_table("coherence", "Coherence of the edits", found, caption="Means over cases with M0 in the band.")
    name, other = next(iter(study.extras.backbones.items()))
    picture = backbone_picture(study, name, other)
    missing = {} if picture else {"fig:swin-geom": f"no case has M0 in {BAND} under both backbones"}
    pictures = (picture,) if picture else ()
    return Section("backbones", "Other backbones", found.reason, (made,), pictures, (found,), found.notes, missing)


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


BAND = (0.60, 0.80)


_CHANGED = (240, 160, 60)


def backbone_picture(study: Study, name: str, other: Archive) -> Picture | None:
    """M0, the full horizon and their disagreement for both backbones; None when no case is in both bands."""
    case = chosen_case(study.outcomes, outcomes(other))
    if case is None:
        return None
    regions = {title: _regions(study, archive, case) for title, archive in (("this", study.evaluation), (name, other))}
    index = _slice(regions["this"])
    panels: list[tuple[str, Any]] = []
    for title, archive in (("this backbone", study.evaluation), (name, other)):
        panels += _panels(archive, case, title, index, regions["this" if title == "this backbone" else name])
    figure = draw_masks(panels, rows=2)
    where = "" if index is None else f", slice {index + 1}"
    caption = (
        f"Case {case}{where}. Orange: changed voxels; red: components of at least {study.measure['min_area']} "
        f"voxels. Both M0 lie in [{BAND[0]}, {BAND[1]}]; among such cases this one has the median changed volume under "
        f"{name}. The slice holds most changed area in components that count."
    )
    return Picture("backbone-edits", "Edits of two backbones", figure, caption, "fig:swin-geom")


def chosen_case(home: pd.DataFrame, other: pd.DataFrame) -> str | None:
    """Both M0 in the band, and the median |D| of the other backbone at the full horizon among those."""
    last = int(other["step"].max())
    frames = [frame[frame["shrink"] == 0].set_index("case") for frame in (home, other)]
    inside = [frame[(frame["step"] == 0) & frame["metric"].between(*BAND)].index for frame in frames]
    shared = sorted(set(inside[0]) & set(inside[1]))
    if not shared:
        return None
    area = frames[1][frames[1]["step"] == last].loc[shared, "area"].sort_values(kind="stable")
    return str(area.index[(len(area) - 1) // 2])


def _regions(study: Study, archive: Archive, case: str) -> Regions:
    measure = {name: study.measure[name] for name in ("min_area", "foreground")}
    return regions_of(archive.mask(case, SOURCE), archive.mask(case, State(archive.steps)), **measure)


def _slice(found: Regions) -> int | None:
    if len(found.shape) == 2:
        return None
    counted = found.voxels[found.kept[found.number]]
    slices = (counted if counted.size else found.voxels) // int(np.prod(found.shape[1:]))
    return int(np.bincount(slices, minlength=found.shape[0]).argmax())


def _panels(archive: Archive, case: str, title: str, index: int | None, found: Regions) -> list[tuple[str, Any]]:
    masks = [archive.mask(case, SOURCE), archive.mask(case, State(archive.steps))]
    view = View(index, slice(0, found.shape[-2]), slice(0, found.shape[-1]))
    flags = []
    for voxels in (found.voxels, found.voxels[found.kept[found.number]]):
        plane = np.zeros(int(np.prod(found.shape)), np.uint8)
        plane[voxels] = 1
        flags.append(plane.reshape(found.shape))
    return [
        (f"{title}: M0", painted(masks[0], view, side=320)),
        (f"{title}: step {archive.steps}", painted(masks[1], view, side=320)),
        (f"{found.area} voxels changed, {int(found.kept.sum())} components count", _edit(flags, view)),
    ]


def _edit(flags: list[Any], view: View) -> Any:
    """Changed voxels in orange, those in components that count in red."""
    changed, counted = (painted(plane, view, side=320)[..., 0] > 100 for plane in flags)
    picture = np.full((*changed.shape, 3), 13, np.uint8)
    picture[changed] = _CHANGED
    picture[counted] = WORSE
    return picture

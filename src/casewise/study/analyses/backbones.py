"""Coherence of the edits of several backbones, and one case under two of them."""

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
from casewise.render.mask_pictures import WORSE, SliceView, draw_masks, painted
from casewise.study.finding import Finding, Section, not_run, show
from casewise.study.statistics.ranks import spearman
from casewise.study.study import Study
from casewise.study.trajectories import adapted_rows, horizon, mean_or_nan, unshrunk

BAND = (0.60, 0.80)  # of the metric of M0 in which edits are compared (O4)
USABLE_MARGIN = 0.05  # a source is usable if it is at most this far below the reference source (O4)
WANTED_RHO = 0.4
SIDE = 320
_CHANGED = (240, 160, 60)


def section(study: Study) -> Section:
    """Edit coherence of other backbones (O4, O5) and fig:swin-geom."""
    title, what = "Other backbones", "edit coherence and fig:swin-geom"
    if not study.extras.backbones:
        reason = "needs an archive of another backbone on the same cohort: --backbone NAME=ARCHIVE"
        return not_run("backbones", title, what, reason)
    others = {name: outcomes(archive) for name, archive in study.extras.backbones.items()}
    found = coherence({"this": study.outcomes, **others})
    made = show("coherence", "Coherence of the edits", found, caption=f"Means over cases with M0 in {list(BAND)}.")
    name, other = next(iter(study.extras.backbones.items()))
    picture = backbone_picture(study, name, other)
    missing = {} if picture else {"fig:swin-geom": f"no case has M0 in {list(BAND)} under both backbones"}
    pictures = (picture,) if picture else ()
    return Section("backbones", title, found.reason, (made,), pictures, (found,), found.notes, missing)


def coherence(frames: Mapping[str, pd.DataFrame], *, source_metric: float | None = None) -> Finding:
    """One row per backbone: usability, edit coherence at the last step, and whether both coordinates follow HA.

    ``source_metric`` is the metric of the reference source on its own domain; the usability line is 0.05 below it.
    Coherence is read over cases whose M0 metric lies in the band. A backbone meets the criterion if rho with HA is at
    least 0.4 for regions and for delta.
    """
    records = [{"backbone": name, **_row(frame, source_metric)} for name, frame in frames.items()]
    sizes = [(record["largest"], record["backbone"]) for record in records if record["largest"] > 0]
    notes = []
    if len(sizes) > 1:
        (small, scattered), (large, solid) = min(sizes), max(sizes)
        notes.append(f"the largest component of {solid} is {large / small:.1f} times that of {scattered}")
    n = max((int(record["n"]) for record in records), default=0)
    return Finding("coherence", pd.DataFrame(records), n, "O4, O5", {"band": list(BAND)}, tuple(notes))


def _row(frame: pd.DataFrame, line: float | None) -> dict[str, Any]:
    ladder, adapted = unshrunk(frame), adapted_rows(frame)
    source = ladder[ladder["step"] == 0].set_index("case")["metric"]
    inside = source.index[source.between(*BAND)]
    at = ladder[(ladder["step"] == horizon(ladder)) & ladder["case"].isin(inside)]
    rho = {}
    for name in ("regions", "delta"):
        both = adapted[[name, "ha"]].dropna().to_numpy(float)
        rho[f"rho_{name}"] = spearman(both[:, 0], both[:, 1])
    mean = mean_or_nan(source)
    return {
        "n": len(source),
        "in_band": len(inside),
        "metric_source": mean,
        "usable": None if line is None else bool(mean >= line - USABLE_MARGIN),
        **{name: mean_or_nan(at[name]) if name in at else np.nan for name in ("largest", "singleton_share")},
        **rho,
        "meets": all(value >= WANTED_RHO for value in rho.values()),
        "reason": "" if len(inside) else f"no case has M0 in {list(BAND)}",
    }


def backbone_picture(study: Study, name: str, other: Archive) -> Picture | None:
    """M0, the full horizon and their disagreement for both backbones; None if no case is in both bands."""
    case = chosen_case(study.outcomes, outcomes(other))
    if case is None:
        return None
    archives = {"this backbone": study.evaluation, name: other}
    measure = {key: study.measure[key] for key in ("min_area", "foreground")}
    regions = {
        title: regions_of(one.mask(case, SOURCE), one.mask(case, State(one.steps)), **measure)
        for title, one in archives.items()
    }
    index = _slice(regions["this backbone"])
    panels: list[tuple[str, Any]] = []
    for title, archive in archives.items():
        panels += _panels(archive, case, title, index, regions[title])
    where = "" if index is None else f", slice {index + 1}"
    caption = (
        f"Case {case}{where}. Orange: changed voxels; red: components of at least {study.measure['min_area']} "
        f"voxels. Both M0 lie in {list(BAND)}; among such cases this one has the median changed volume under {name}. "
        "The slice holds most changed area in components that count."
    )
    return Picture("backbone-edits", "Edits of two backbones", draw_masks(panels, rows=2), caption, "fig:swin-geom")


def chosen_case(home: pd.DataFrame, other: pd.DataFrame) -> str | None:
    """The case with both M0 in the band that has the median |D| of the other backbone at the full horizon."""
    frames = [unshrunk(frame).set_index("case") for frame in (home, other)]
    inside = [frame[(frame["step"] == 0) & frame["metric"].between(*BAND)].index for frame in frames]
    shared = sorted(set(inside[0]) & set(inside[1]))
    if not shared:
        return None
    last = frames[1][frames[1]["step"] == frames[1]["step"].max()]
    area = last.loc[shared, "area"].sort_values(kind="stable")
    return str(area.index[(len(area) - 1) // 2])


def _slice(found: Regions) -> int | None:
    """The slice with most changed area in components that count."""
    if len(found.shape) == 2:
        return None
    counted = found.voxels[found.kept[found.number]]
    slices = (counted if counted.size else found.voxels) // int(np.prod(found.shape[1:]))
    return int(np.bincount(slices, minlength=found.shape[0]).argmax())


def _panels(archive: Archive, case: str, title: str, index: int | None, found: Regions) -> list[tuple[str, Any]]:
    view = SliceView(index, slice(0, found.shape[-2]), slice(0, found.shape[-1]))
    edit: Any = None
    for voxels, color in ((found.voxels, _CHANGED), (found.voxels[found.kept[found.number]], WORSE)):
        plane = np.zeros(int(np.prod(found.shape)), np.uint8)
        plane[voxels] = 1
        marked = painted(plane.reshape(found.shape), view, side=SIDE)[..., 0] > 100
        edit = np.full((*marked.shape, 3), 13, np.uint8) if edit is None else edit
        edit[marked] = color
    return [
        (f"{title}: M0", painted(archive.mask(case, SOURCE), view, side=SIDE)),
        (f"{title}: step {archive.steps}", painted(archive.mask(case, State(archive.steps)), view, side=SIDE)),
        (f"{found.area} voxels changed, {int(found.kept.sum())} components count", edit),
    ]

"""fig:swin-geom: one case under two backbones, chosen by the cross-backbone rule of sec:supp-qual-select."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, State
from casewise.judge.outcomes import outcomes
from casewise.measure.regions import Regions, regions_of
from casewise.render.masks import WORSE, View, draw_masks, painted
from casewise.report.material import Material
from casewise.report.section import Picture

BAND = (0.60, 0.80)
_CHANGED = (240, 160, 60)


def backbone_picture(material: Material, name: str, other: Archive) -> Picture | None:
    """M0, the full horizon and their disagreement for both backbones; None when no case is in both bands."""
    case = chosen_case(material.outcomes, outcomes(other))
    if case is None:
        return None
    regions = {
        title: _regions(material, archive, case) for title, archive in (("this", material.evaluation), (name, other))
    }
    index = _slice(regions["this"])
    panels: list[tuple[str, Any]] = []
    for title, archive in (("this backbone", material.evaluation), (name, other)):
        panels += _row(archive, case, title, index, regions["this" if title == "this backbone" else name])
    figure = draw_masks(panels, rows=2)
    where = "" if index is None else f", slice {index + 1}"
    caption = (
        f"Case {case}{where}. Orange: changed voxels; red: components of at least {material.measure['min_area']} "
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


def _regions(material: Material, archive: Archive, case: str) -> Regions:
    measure = {name: material.measure[name] for name in ("min_area", "foreground")}
    return regions_of(archive.mask(case, SOURCE), archive.mask(case, State(archive.steps)), **measure)


def _slice(found: Regions) -> int | None:
    if len(found.shape) == 2:
        return None
    counted = found.voxels[found.kept[found.number]]
    slices = (counted if counted.size else found.voxels) // int(np.prod(found.shape[1:]))
    return int(np.bincount(slices, minlength=found.shape[0]).argmax())


def _row(archive: Archive, case: str, title: str, index: int | None, found: Regions) -> list[tuple[str, Any]]:
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

"""Pictures chosen by a rule that was fixed before looking, with the number of slices that met each part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import CasewiseError
from casewise.render.cells import Cell
from casewise.render.masks import Edits, Pixels, View, draw_masks, view_of
from casewise.render.tables import Column, Table, table
from casewise.report.inputs import input_plane
from casewise.report.inventory import INPUT_COLUMN
from casewise.report.mask_columns import mask_columns, metric_of, whole
from casewise.report.material import Material
from casewise.report.recorded import recorded
from casewise.report.section import Picture, Section
from casewise.study.finding import Finding

DESIDERATA = {
    "harmful": "(i) HA of the slice ≥ 0.5 under the full horizon",
    "flat": "(ii) the slice's metric moves by at most 0.02",
    "mixed": "(iii) regions made worse and regions made better are both visible",
    "good_source": "(iv) M0 is close to the label: the slice's metric ≥ 0.9",
}


def qualitative(material: Material) -> Section:
    """fig:med-qual, fig:med-qual-prostate and fig:acdc-qual-supp in the shape that this archive allows."""
    slices = pd.DataFrame(
        list(_slices(material)), columns=["case", "slice", "ha", "change", "source", "worse", "better", "area"]
    )
    if slices.empty:
        return Section("qualitative", "Pictures", missing={"qualitative panels": "no slice has a change that counts"})
    judged = slices.assign(**wanted(slices))
    picks = chosen(judged)
    drawn = [_picture(material, row, at) for at, row in enumerate(picks)]
    finding = Finding(
        "qualitative.selection",
        pd.DataFrame(picks),
        int(slices["case"].nunique()),
        "sec:supp-qual-select",
        {"slices": len(slices), **{name: int(judged[name].sum()) for name in DESIDERATA}, "all": _all(judged)},
    )
    lead = (
        f"Of {len(slices)} slices with a change, {_all(judged)} meet all four desiderata; (i) and (ii) have priority, "
        "then (iii), then (iv), then the larger HA. The second picture is the best slice of another case, one with a "
        "good M0 where there is one."
    )
    problems = dict.fromkeys(problem for _, problem in drawn if problem)
    missing = {INPUT_COLUMN: "; ".join(problems)} if problems else {}
    pictures = tuple(picture for picture, _ in drawn)
    return Section("qualitative", "Pictures", lead, (_table(judged),), pictures, (finding,), missing=missing)


def wanted(slices: pd.DataFrame) -> dict[str, pd.Series]:
    """Which slices meet which desideratum (sec:supp-qual-select)."""
    return {
        "harmful": slices["ha"] >= 0.5,
        "flat": slices["change"].abs() <= 0.02,
        "mixed": (slices["worse"] > 0) & (slices["better"] > 0),
        "good_source": slices["source"] >= 0.9,
    }


def chosen(judged: pd.DataFrame) -> list[Mapping[str, Any]]:
    """The best slice, and the best slice of another case among those with a good M0 (or simply the next case)."""
    order = judged.assign(first=judged["harmful"] & judged["flat"]).sort_values(
        ["first", "mixed", "good_source", "ha", "area"], ascending=False, kind="stable"
    )
    best = order.iloc[0]
    others = order[order["case"] != best["case"]]
    complement = others[others["good_source"]] if others["good_source"].any() else others
    return [dict(best), *(dict(row) for _, row in complement.head(1).iterrows())]


def _all(judged: pd.DataFrame) -> int:
    return int(judged[list(DESIDERATA)].all(axis=1).sum())


def _slices(material: Material) -> Iterator[tuple[Any, ...]]:
    """Every slice that holds a region which counts, with slice-level HA and metric."""
    reference = material.decisions[material.reference]
    for decision in reference:
        found = recorded(material, decision.case_id, reference=decision)
        if found is None or not (found.reference_edits.worse.any() or found.reference_edits.better.any()):
            continue
        for index in _indices(found.reference_edits):
            view = whole(found.label, index)
            worse, better, area = (
                int(view.of(flags).sum())
                for flags in (found.reference_edits.worse, found.reference_edits.better, found.reference_edits.changed)
            )
            source, adapted = (metric_of(material, view, mask, found.label) for mask in (found.source, found.reference))
            yield found.case_id, index, worse / area, adapted - source, source, worse, better, area


def _indices(change: Edits) -> list[int | None]:
    if change.changed.ndim == 2:
        return [None]
    return [int(index) for index in np.flatnonzero((change.worse | change.better).any(axis=(1, 2)))]


def _table(judged: pd.DataFrame) -> Table:
    columns = (Column("what", "Desideratum", text=True), Column("met", "slices"), Column("cases", "cases"))
    rows: list[dict[str, Cell]] = [
        {"what": words, "met": int(judged[name].sum()), "cases": int(judged.loc[judged[name], "case"].nunique())}
        for name, words in DESIDERATA.items()
    ]
    both = judged["harmful"] & judged["flat"]
    rows.append({"what": "(i) and (ii)", "met": int(both.sum()), "cases": int(judged.loc[both, "case"].nunique())})
    every = judged[list(DESIDERATA)].all(axis=1)
    rows.append({"what": "all four", "met": int(every.sum()), "cases": int(judged.loc[every, "case"].nunique())})
    caption = (
        f"Of {len(judged)} slices of {judged['case'].nunique()} cases. The thresholds are part of the rule, not tuned."
    )
    return table("qualitative", "How many slices met the rule", columns, rows, caption=caption, rules={len(DESIDERATA)})


def _input(material: Material, case: str, view: View, shape: tuple[int, ...]) -> tuple[Pixels | None, str]:
    """The image of a case, or None and why it is not shown."""
    if material.extras.images is None:
        return None, "needs the images that were recorded; give --images DIR"
    try:
        return input_plane(material.extras.images, case, shape, view.index), ""
    except CasewiseError as error:
        return None, str(error)


def _picture(material: Material, row: Mapping[str, Any], at: int) -> tuple[Picture, str]:
    """The picture of one slice, and why it has no input column ("" where it has one)."""
    decisions = {
        name: {one.case_id: one for one in material.decisions[name]} for name in (material.reference, material.ours)
    }
    case = str(row["case"])
    found = recorded(
        material, case, reference=decisions[material.reference][case], deployed=decisions[material.ours][case]
    )
    if found is None:
        raise RuntimeError(f"case {case} had a label when the slices were judged")
    index = None if row["slice"] is None or pd.isna(row["slice"]) else int(row["slice"])
    view = view_of(found.reference_edits, found.label, found.source, found.reference, index=index)
    image, problem = _input(material, case, view, found.label.shape)
    figure = draw_masks(list(mask_columns(material, found, view, image)))
    bucket = decisions[material.ours][case].bucket
    routed = f" The router puts it into the {bucket} bucket." if bucket else ""
    driving = not material.measure["foreground"]
    boxes = " Boxes: around the regions made worse." if driving and image is not None else ""
    without = f" No input column: {problem}." if problem else ""
    caption = (
        f"Case {case}, {view.words(found.label.shape)}. HA and {material.metric} are those of the slice, not of the "
        f"case. Red outlines: regions made worse; blue: made better.{boxes}{routed}{without}"
    )
    paper = "fig:acdc-qual-supp" if driving else ("fig:med-qual", "fig:med-qual-prostate")[at]
    title = "Harm that the mean does not show" if row["harmful"] and row["flat"] else "The best that the rule found"
    id = f"{'driving' if driving else 'qualitative'}-{at + 1}"
    return Picture(id, title, figure, caption, paper), problem

"""Pictures of slices that a fixed rule chooses, and how many slices meet each part of the rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput, CasewiseError, Mismatch
from casewise.core.records import SOURCE, Mask, State
from casewise.data.folders import CaseFiles
from casewise.data.pairs import read_image
from casewise.data.pictures import is_picture
from casewise.judge.controllers.depth import TauStop
from casewise.render.ink import Picture
from casewise.render.mask_pictures import (
    Pixels,
    SliceView,
    as_rgb,
    draw_masks,
    edits,
    fitted,
    painted,
    view_of,
    windowed,
)
from casewise.render.tables import Table, number
from casewise.study.finding import Finding, Section, not_run, show
from casewise.study.study import CaseMasks, Study, case_masks

SIDE = 320
Titled = tuple[str, Pixels]
Images = Mapping[str, CaseFiles]
DESIDERATA = {
    "harmful": "(i) HA of the slice ≥ 0.5 under the full horizon",
    "flat": "(ii) the slice's metric moves by at most 0.02",
    "mixed": "(iii) regions made worse and regions made better are both visible",
    "good_source": "(iv) M0 is close to the label: the slice's metric ≥ 0.9",
}


def section(study: Study) -> Section:
    """fig:med-qual, fig:med-qual-prostate and fig:acdc-qual-supp in the shape that this archive allows."""
    slices = pd.DataFrame(
        list(_slices(study)), columns=["case", "slice", "ha", "change", "source", "worse", "better", "area"]
    )
    if slices.empty:
        return not_run("qualitative", "Pictures", "qualitative panels", "no slice has a change that counts")
    judged = slices.assign(**wanted(slices))
    picks = chosen(judged)
    drawn = [_picture(study, row, at) for at, row in enumerate(picks)]
    made = {"slices": len(slices), **{name: int(judged[name].sum()) for name in DESIDERATA}, "all": _all(judged)}
    finding = Finding("qualitative.selection", pd.DataFrame(picks), int(slices["case"].nunique()), "P", made)
    lead = (
        f"Of {len(slices)} slices with a change, {_all(judged)} have all four properties; (i) and (ii) have priority, "
        "then (iii), then (iv), then the larger HA. The second picture is the best slice of another case, one with a "
        "good M0 where there is one."
    )
    problems = dict.fromkeys(problem for _, problem in drawn if problem)
    missing = {"input column of the pictures": "; ".join(problems)} if problems else {}
    pictures = tuple(picture for picture, _ in drawn)
    return Section("qualitative", "Pictures", lead, (_table(judged),), pictures, (finding,), missing=missing)


def wanted(slices: pd.DataFrame) -> dict[str, pd.Series]:
    """Find the properties of each slice (sec:supp-qual-select)."""
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


def _slices(study: Study) -> Iterator[tuple[Any, ...]]:
    """Every slice that holds a region which counts, with slice-level HA and metric."""
    reference = study.decisions[study.reference]
    for decision in reference:
        found = case_masks(study, decision.case_id, reference=decision)
        change = None if found is None else found.reference_edits
        if found is None or change is None or not (change.worse.any() or change.better.any()):
            continue
        judged = change.worse | change.better
        for index in [None] if judged.ndim == 2 else np.flatnonzero(judged.any(axis=(1, 2))).tolist():
            view = SliceView(index)
            worse, better, area = (int(view.of(one).sum()) for one in (change.worse, change.better, change.changed))
            source, adapted = (metric_of(study, view, mask, found.label) for mask in (found.source, found.reference))
            yield found.case_id, index, worse / area, adapted - source, source, worse, better, area


def _table(judged: pd.DataFrame) -> Table:
    asked = {words: judged[name] for name, words in DESIDERATA.items()}
    asked["(i) and (ii)"] = judged["harmful"] & judged["flat"]
    asked["all four"] = judged[list(DESIDERATA)].all(axis=1)
    found = pd.DataFrame(
        [
            {"what": words, "met": int(flags.sum()), "cases": int(judged.loc[flags, "case"].nunique())}
            for words, flags in asked.items()
        ]
    )
    caption = (
        f"Of {len(judged)} slices of {judged['case'].nunique()} cases. The thresholds are part of the rule, not tuned."
    )
    heads, title = {"what": "Property", "met": "slices"}, "How many slices met the rule"
    return show("qualitative", title, found, heads=heads, caption=caption, rules={len(DESIDERATA)})


def _input(study: Study, case: str, view: SliceView, shape: tuple[int, ...]) -> tuple[Pixels | None, str]:
    """The image of a case, or None and why it is not shown."""
    if study.extras.images is None:
        return None, "needs the images that were recorded; give --images DIR"
    try:
        return input_plane(study.extras.images, case, shape, view.index), ""
    except CasewiseError as error:
        return None, str(error)


def _picture(study: Study, row: Mapping[str, Any], at: int) -> tuple[Picture, str]:
    """The picture of one slice, and why it has no input column ("" where it has one)."""
    decisions = {name: {one.case_id: one for one in study.decisions[name]} for name in (study.reference, study.ours)}
    case = str(row["case"])
    found = case_masks(study, case, reference=decisions[study.reference][case], deployed=decisions[study.ours][case])
    if found is None:
        raise RuntimeError(f"the label of case {case} is missing")
    index = None if row["slice"] is None or pd.isna(row["slice"]) else int(row["slice"])
    view = view_of(found.reference_edits, found.label, found.source, found.reference, index=index)
    image, problem = _input(study, case, view, found.label.shape)
    figure = draw_masks(list(mask_columns(study, found, view, image)))
    bucket = decisions[study.ours][case].bucket
    routed = f" The router puts it into the {bucket} bucket." if bucket else ""
    driving = not study.measure["foreground"]
    boxes = " Boxes: around the regions made worse." if driving and image is not None else ""
    without = f" No input column: {problem}." if problem else ""
    caption = (
        f"Case {case}, {view.words(found.label.shape)}. HA and {study.metric} are those of the slice, not of the "
        f"case. Red outlines: regions made worse; blue: made better.{boxes}{routed}{without}"
    )
    paper = "fig:acdc-qual-supp" if driving else ("fig:med-qual", "fig:med-qual-prostate")[at]
    title = "Harm that the mean does not show" if row["harmful"] and row["flat"] else "The best slice by the rule"
    id = f"{'driving' if driving else 'qualitative'}-{at + 1}"
    return Picture(id, title, figure, caption, paper), problem


def mask_columns(study: Study, found: CaseMasks, view: SliceView, image: Pixels | None) -> Iterator[Titled]:
    """label | M0 | full horizon | deployed (fig:med-qual), after the input where there is one.

    Of driving scenes with their image: input | M0 | full horizon with boxes | τ-stop | others (fig:acdc-qual-supp).
    """
    if image is not None:
        yield "input", as_rgb(fitted(image[view.rows, view.columns], SIDE))
    driving = image is not None and not study.measure["foreground"]
    if not driving:
        yield "label", painted(found.label, view, side=SIDE, classes=study.classes)
    value = number(metric_of(study, SliceView(view.index), found.source, found.label), 2)
    yield f"M0\n{study.metric} {value}", painted(found.source, view, side=SIDE, classes=study.classes)
    yield _judged(study, found, view, study.reference, found.source, found.reference, boxes=driving)
    if driving:
        yield from _rivals(study, found, view)
    else:
        yield _judged(study, found, view, study.title(study.ours), found.source, found.deployed)


def _rivals(study: Study, found: CaseMasks, view: SliceView) -> Iterator[Titled]:
    """τ-stop where it was run, and the full horizon of every other objective."""
    for decision in study.decisions.get(TauStop.name, ()):
        if decision.case_id == found.case_id:
            stopped = study.evaluation.mask(found.case_id, decision.state)
            yield _judged(study, found, view, study.title(TauStop.name), found.source, stopped)
    for name, archive in study.extras.others.items():
        masks = archive.masks(found.case_id, (State(archive.steps),))
        yield _judged(study, found, view, name, masks[SOURCE], masks[State(archive.steps)])


def _judged(
    study: Study, found: CaseMasks, view: SliceView, name: str, source: Mask, mask: Mask, *, boxes: bool = False
) -> Titled:
    change, everything = edits(source, mask, found.label, measure=study.measure), SliceView(view.index)
    value = number(metric_of(study, everything, mask, found.label), 2)
    words = f"{name}\n{study.metric} {value} · HA {change.ha_of(everything):.2f}"
    return words, painted(mask, view, change=change, side=SIDE, boxes=boxes, classes=study.classes)


def metric_of(study: Study, view: SliceView, mask: Any, label: Any) -> float:
    """The archive's metric on the visible part; NaN when the label has nothing there."""
    shown, truth = view.of(mask), view.of(label)
    return float(study.scored_by.of(shown, truth, ignore=study.measure["ignore"], spacing_mm=None))


def input_plane(images: Images, case_id: str, shape: tuple[int, ...], index: int | None) -> Pixels:
    """The plane that is shown, in 8 bits: a slice of a volume's first channel, or a picture in its colors."""
    if case_id not in images:
        raise BadInput(f"the image folder has no case {case_id}; name the files as in the recording")
    path = images[case_id].images[0]
    image = read_image(path)
    space = image.shape[:2] if is_picture(path) else image.shape
    if [length for length in space if length > 1] != [length for length in shape if length > 1]:
        raise Mismatch(f"{path.name} has shape {space}, its mask {shape}; give the images that were recorded")
    if is_picture(path):
        return image
    volume = image.reshape(shape)  # a volume of one slice lies where a picture lies
    return windowed(volume if index is None else volume[index])

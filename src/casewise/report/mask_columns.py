"""The columns of a qualitative picture, each a title and pixels: the input where there is one, then masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from casewise.core.records import SOURCE, Mask, State
from casewise.measure.metrics.overlap import dice, miou
from casewise.render.masks import Pixels, View, edits, painted, photographed
from casewise.report.material import Material
from casewise.report.recorded import Recorded

SIDE = 320

Titled = tuple[str, Pixels]


def mask_columns(material: Material, found: Recorded, view: View, image: Pixels | None) -> Iterator[Titled]:
    """label | M0 | full horizon | deployed (fig:med-qual), after the input where there is one.

    Of driving scenes with their image: input | M0 | full horizon with boxes | τ-stop | others (fig:acdc-qual-supp).
    """
    if image is not None:
        yield "input", photographed(image, view, side=SIDE)
    driving = image is not None and not material.measure["foreground"]
    if not driving:
        yield "label", painted(found.label, view, side=SIDE)
    value = _number(metric_of(material, whole(found.label, view.index), found.source, found.label))
    yield f"M0\n{material.metric} {value}", painted(found.source, view, side=SIDE)
    yield _judged(material, found, view, material.reference, found.source, found.reference, boxes=driving)
    if driving:
        yield from _rivals(material, found, view)
    else:
        yield _judged(material, found, view, material.title(material.ours), found.source, found.deployed)


def _rivals(material: Material, found: Recorded, view: View) -> Iterator[Titled]:
    """τ-stop where it was run, and the full horizon of every other objective."""
    for decision in material.decisions.get("tau-stop", ()):
        if decision.case_id == found.case_id:
            stopped = material.evaluation.mask(found.case_id, decision.state)
            yield _judged(material, found, view, material.title("tau-stop"), found.source, stopped)
    for name, archive in material.extras.others.items():
        masks = archive.masks(found.case_id, (State(archive.steps),))
        yield _judged(material, found, view, name, masks[SOURCE], masks[State(archive.steps)])


def _judged(
    material: Material, found: Recorded, view: View, name: str, source: Mask, mask: Mask, *, boxes: bool = False
) -> Titled:
    change, everything = edits(source, mask, found.label, measure=material.measure), whole(found.label, view.index)
    value = _number(metric_of(material, everything, mask, found.label))
    words = f"{name}\n{material.metric} {value} · HA {change.ha_of(everything):.2f}"
    return words, painted(mask, view, change=change, side=SIDE, boxes=boxes)


def whole(mask: Any, index: int | None) -> View:
    """A slice without cropping."""
    return View(index, slice(0, mask.shape[-2]), slice(0, mask.shape[-1]))


def metric_of(material: Material, view: View, mask: Any, label: Any) -> float:
    """The archive's metric on what is in view; NaN when the label has nothing there."""
    shown, truth = view.of(mask), view.of(label)
    if material.metric == "mIoU":
        return float(miou(shown, truth, ignore=material.measure["ignore"]))
    return float(dice(shown, truth, ignore=material.measure["ignore"]))


def _number(value: float) -> str:
    return "undefined" if value != value else f"{value:.2f}"

"""The page of a comparison (with a plan, the dossier), and every other file that it leaves in its folder.

The page is one file, loads nothing, prints on A4, and escapes everything that came from files. ``summary.json`` says
the same for machines.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.durable import replacing, write_durably, write_json
from casewise.core.errors import BadPair, CasewiseError
from casewise.core.formats import csv_cell
from casewise.core.records import Mask
from casewise.data.pairs import Pair, read_image, read_pair
from casewise.judge.outcomes import judged_sentence
from casewise.measure.changes import NOTABLE, label_name
from casewise.measure.metrics import METRICS
from casewise.render.mask_pictures import (
    BETTER,
    WORSE,
    Pixels,
    Preview,
    SliceView,
    as_rgb,
    color_of,
    data_uri,
    edits_over,
    fitted,
    grey_levels,
    painted_over,
    window_of,
)
from casewise.report import comparison_text as text
from casewise.report.page import render_page
from casewise.study.compare import Outcome, csv_rows


def write_comparison(out: Path, outcome: Outcome, *, old: str, new: str, pictures: int = 10) -> None:
    """Write the page, the tables, Markdown, JUnit XML and summary.json of a comparison.

    Args:
        out: The folder.
        outcome: Result of :func:`casewise.study.compare.compare_folders`.
        old: Name of the old masks on the page.
        new: Name of the new masks.
        pictures: Number of cases with pictures, most suspicious first.
    """
    summary = outcome.as_dict()
    write_tables(out, outcome)
    write_durably(out / "summary.md", text.markdown_summary(summary).encode())
    write_durably(out / "junit.xml", text.junit_xml(summary, list(outcome.files)).encode())
    facts = {
        "old": old,
        "new": new,
        "unit": "mm" if any(case.found.spacing_known for case in outcome.cases) else "voxels",
        "hd95": outcome.settings.surfaces == "all",
        "min_area": outcome.settings.min_area,
        "zero_is_label": outcome.settings.zero_is_label,
    }
    shown = shown_cases(outcome, pictures)
    write_durably(out / "report.html", comparison_page(summary, shown, facts).encode())
    plain = [{name: value for name, value in case.items() if name != "pictures"} for case in shown]
    twin = {**summary, "facts": facts, "limits": text.known_limits(summary), "shown": plain}
    write_json(out / "summary.json", twin)  # last: it vouches for the rest


def write_tables(out: Path, outcome: Outcome) -> None:
    """cases.csv, labels.csv and regions.csv, row by row; a table without rows is an empty file."""
    with ExitStack() as opened:
        files = {}
        for name in ("cases.csv", "labels.csv", "regions.csv"):
            unfinished = opened.enter_context(replacing(out / name))
            files[name] = opened.enter_context(unfinished.open("w", encoding="utf-8", newline=""))
        tables: dict[str, Any] = {}
        for name, row in csv_rows(outcome):
            if name not in tables:
                tables[name] = csv.DictWriter(files[name], fieldnames=list(row), lineterminator="\n")
                tables[name].writeheader()
            known = {column: None if value != value else value for column, value in row.items()}  # NaN: an empty cell
            tables[name].writerow({column: csv_cell(value) for column, value in known.items()})


def shown_cases(outcome: Outcome, most: int) -> list[dict[str, Any]]:
    """The first cases of the page with their pictures; unchanged ones are not shown."""
    at = {case_id: number for number, case_id in enumerate(outcome.found.cohort.ids)}
    crossed: dict[str, list[str]] = {}
    for one in outcome.measures:
        for crossing in one.crossings:
            words = f"{one.name} {crossing.decision} changed: {crossing.old:.3g} -> {crossing.new:.3g}"
            truth = "" if crossing.label is None else f", label {crossing.label:.3g} ({crossing.right} is right)"
            for case_id in crossing.cases:
                crossed.setdefault(case_id, []).append(words + truth)
    shown: list[dict[str, Any]] = []
    for case_id in outcome.first_shown:
        if len(shown) >= most:
            break
        case = outcome.cases[at[case_id]]
        found = case.found
        if found.changed:
            change = found.change if found.labelled and found.change == found.change else None
            facts = {**found.as_dict(), "change": change, "warnings": found.warned(outcome.names), "id": case.id}
            drawn = {"pictures": _drawn(outcome.files[case.id], outcome), "crossings": crossed.get(case_id, [])}
            shown.append({**facts, "group": case.group, **drawn})
    return shown


def _drawn(pair: Pair, outcome: Outcome) -> list[tuple[str, str]]:
    settings = outcome.settings
    try:
        old, new, label = read_pair(pair, resample=settings.resample)
    except BadPair:  # the file changed after the comparison
        return []
    try:
        image = None if pair.image is None else read_image(pair.image)
    except (CasewiseError, OSError, ValueError):
        image = None  # the masks are shown without it
    truth = None if label is None else label.mask
    return case_pictures(old.mask, new.mask, truth, image, names=outcome.names, zero_is_label=settings.zero_is_label)


SIDE = 208  # pixels of the longer side of a picture
DARK = 22  # background of masks without an image


def case_pictures(
    old: Mask, new: Mask, label: Mask | None = None, image: NDArray[Any] | None = None, *,
    names: Mapping[int, str] | None = None, zero_is_label: bool = False,
) -> list[tuple[str, str]]:  # fmt: skip
    """(title, data URI) of pictures of one slice: image, old, new, the change and, with a label, whether it is right.

    The slice is the one with most voxels that became wrong, else that changed. If label 0 is a class it is painted,
    too, and a change is a change of class.
    """
    changed = old != new
    worse, better = (None if label is None else changed & (one == label) for one in (old, new))
    shown = next(flags for flags in (worse, changed, (old > 0) | (new > 0)) if flags is not None and flags.any())
    index = int(np.argmax(shown.sum(axis=(1, 2)))) if old.ndim == 3 else None
    whole = SliceView(index)
    view = SliceView(index, *window_of(whole.of(changed | (old > 0) | (new > 0)), 8))
    ground = _ground(image, view, whole.of(old).shape)

    def seen(mask: NDArray[Any]) -> NDArray[Any]:
        return fitted(view.of(mask), SIDE)

    def painted(mask: Mask) -> Pixels:
        return painted_over(ground, seen(mask), names or {}, not zero_is_label)

    change = Preview(ground, seen(old), seen(new), seen(new), index, background=not zero_is_label)
    where = "" if index is None else f", slice {index + 1} of {old.shape[0]}"
    panels = [] if image is None else [(f"image{where}", ground)]
    panels += [(f"old{where if image is None else ''}", painted(old)), ("new", painted(new))]
    panels.append(("change", edits_over((ground * 0.75).astype(np.uint8), change)))
    if label is not None and worse is not None and better is not None:
        judged = ground.copy()
        judged[seen(better)], judged[seen(worse)] = BETTER, WORSE
        panels += [("label", painted(label)), ("judgement", judged)]
    return [(title, data_uri(picture)) for title, picture in panels]


def _ground(image: NDArray[Any] | None, view: SliceView, shape: tuple[int, ...]) -> Pixels:
    """The image behind the masks, in color; dark without one, or where it does not fit."""
    plane = image if image is None or view.index is None or image.ndim < 3 else image[view.index]
    if plane is None or plane.shape[:2] != shape:
        return as_rgb(fitted(np.full(shape, DARK, np.uint8)[view.rows, view.columns], SIDE))
    channels = np.moveaxis(plane[..., :3], -1, 0).astype(np.uint8) if plane.ndim == 3 else plane[None]
    return as_rgb(fitted(grey_levels(channels)[view.rows, view.columns], SIDE))


def comparison_page(summary: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page from summary.json, the cases in the order to show them (with pictures) and the facts of the run."""
    names = {int(key): name for key, name in summary.get("names", {}).items()}
    filters: dict[str, Any] = {
        "number": text.plain_number, "interval": text.plain_interval, "percent": text.plain_percent,
        "agreement": lambda found: text.plain_agreement(found, "").replace(" to ", "\u00a0to\u00a0"),
        "box": _box, "short": text.short_number,
        "signed": partial(text.plain_number, signed=True), "metric": lambda name: METRICS[name].title,
        "color": lambda label: "#{:02x}{:02x}{:02x}".format(*color_of(label, names)),
        "called": lambda label: label_name(label, names),
    }  # fmt: skip
    return render_page(
        "comparison.html.j2", filters=filters, said=text.headline(summary), words=text.WORDS,
        why=text.verdict_reason(summary) if summary["checks"] else "", counts=text.change_counts(summary),
        worse=text.worse_parts(summary), whose=text.of_whom(summary["summary"], named=summary["summary"]["named"]),
        result=summary, cohort=summary["summary"], judged=judged_sentence(summary["summary"].get("judged")),
        not_met=[line[5:] for line in text.check_lines(summary) if not line.startswith("ok")],
        limits=text.known_limits(summary), cases=cases, facts={"notable": NOTABLE, **facts},
    )  # fmt: skip


def _box(region: Mapping[str, Any]) -> str:
    """Return the bounding box of a region, counted from 1 as in the titles of the pictures, both ends inside."""
    names = ("slices", "rows", "columns")[-len(region["low"]) :]
    sides = zip(names, region["low"], region["high"], strict=True)
    return ", ".join(
        f"{name} {low + 1} to {high}" if high > low + 1 else f"{name[:-1]} {high}" for name, low, high in sides
    )

"""What a person and a pull request read of a comparison: a page with pictures, a Markdown summary, JUnit XML.

The page is one file, loads nothing, and escapes everything that came from files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from casewise.core.brief import UNIT, counted
from casewise.core.records import Mask
from casewise.judge.outcomes import judged_sentence
from casewise.measure.changes import label_name
from casewise.render.masks import STREET
from casewise.render.tables import interval, number

Pixels = NDArray[np.uint8]
Flags = NDArray[np.bool_]

METRICS = {"dice": "Dice", "miou": "mIoU"}
ADDED, REMOVED, RELABELED = (74, 144, 226), (226, 84, 48), (214, 120, 190)
WORSE, BETTER = (255, 92, 60), (96, 176, 255)
_LABELS = np.array(
    [[230, 175, 60], [110, 190, 160], [150, 140, 215], [215, 205, 120], [120, 170, 215], [215, 140, 110]], np.uint8
)  # quiet, apart from each other without red against green
_SIDE = 208  # pixels of a panel's longer side


def comparison_page(summary: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page from summary.json, the cases in the order to show them (with pictures) and the facts of the run."""
    templates = resources.files("casewise.report") / "templates"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "signed": _signed, "interval": _interval, "percent": _percent}
    names = {int(key): name for key, name in summary.get("names", {}).items()}
    environment.filters |= {"metric": METRICS.__getitem__, "box": _box}
    environment.filters["color"] = lambda label: "rgb({}, {}, {})".format(*_colors(names)[label % 256])
    environment.filters["called"] = lambda label: label_name(label, names)
    return environment.from_string((templates / "comparison.html.j2").read_text(encoding="utf-8")).render(
        said=headline(summary),
        counted=counted,
        whose=_of_whom(summary["summary"], named=summary["summary"]["named"]),
        result=summary,
        cohort=summary["summary"],
        judged=judged_sentence(summary["summary"].get("judged")),
        not_shown=_not_shown(summary["checks"]),
        cases=cases,
        facts=facts,
        style=Markup((templates / "prediction.css").read_text(encoding="utf-8")),
    )


def headline(summary: Mapping[str, Any]) -> str:
    """One sentence: how much changed and, with labels, for whom."""
    cohort = summary["summary"]
    said = f"{cohort['changed']} of {cohort['cases']} cases changed"
    if "helped" in cohort:
        said += f"; {cohort['helped']} became better, {cohort['hurt']} worse"
        if cohort["flips"]:
            said += f", and {cohort['flips']} fell below {cohort['good']:g}"
    elif cohort["warned"]:
        said += f"; {cohort['warned']} should be looked at"
    return f"{said}."


def _not_shown(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why criteria without a bound do not hold, each reason once: their row alone looks as if it held."""
    seem = [one for one in checks if not one["holds"] and one["bound"] is None]
    seem = [one for one in seem if one["value"] is None or one["value"] <= one["limit"]]
    return list(dict.fromkeys(one["reason"][:1].upper() + one["reason"][1:] for one in seem))


def change_sentence(cohort: Mapping[str, Any]) -> str:
    """The metric before and now, with the interval of its change."""
    before, now = _number(cohort["metric_old"]), _number(cohort["metric_new"])
    return f"Mean {METRICS[cohort['metric']]} {before} → {now}, change {_interval(cohort['change'], signed=True)}"


def _of_whom(counts: Mapping[str, Any], *, named: int) -> str:
    """How many cases, and of how many patients where any is named."""
    cases = counted(counts["cases"], "case")
    if not named:
        return f"{cases} (no {UNIT[0]} is named: each case counts as one)"
    return f"{cases} of {counted(counts['clusters'], *UNIT)}"


def markdown_summary(summary: Mapping[str, Any], *, shown: int = 10) -> str:
    """The outcome for a pull request."""
    cohort = summary["summary"]
    mark = {"accepted": "✅ accepted", "rejected": "❌ rejected"}.get(summary["verdict"], "compared")
    lines = [f"### New against old: {mark}", "", headline(summary), ""]
    if "metric_old" in cohort:
        change = cohort["change"]
        lines += [
            f"{change_sentence(cohort)}; "
            f"HA {_interval(cohort['ha'])} ({judged_sentence(cohort.get('judged'))}), BA {_interval(cohort['ba'])}, "
            f"worse-voxels {_interval(cohort['worse_voxels'])}. "
            f"Cases that became better {_interval(cohort['helped_share'])}, worse {_interval(cohort['hurt_share'])}. "
            f"{_of_whom(change, named=cohort['named'])}.",
            "",
        ]
    if summary["checks"]:
        lines += ["| | criterion | on | limit | observed | bound | clusters |", "|---|---|---|---|---|---|---|"]
        for check in summary["checks"]:
            cells = ["✅" if check["holds"] else "❌", f"`{check['name']}`", _cell(check["scope"])]
            values = [f"{check['limit']:g}", _number(check["value"]), _number(check["bound"]), str(check["patients"])]
            lines.append(f"| {' | '.join([*cells, *values])} |")
        lines.append("")
        lines += [line for reason in _not_shown(summary["checks"]) for line in (f"{_cell(reason)}.", "")]
    lines += _label_lines(cohort["labels"], summary.get("names", {}))
    if summary["problems"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["problems_by_kind"].items())
        lines += [f"**Problems: {kinds}.**", ""]
        lines += [f"- {_cell(problem['message'])}" for problem in summary["problems"][:shown]]
        if len(summary["problems"]) > shown:
            lines.append(f"- and {len(summary['problems']) - shown} more, in summary.json")
        lines.append("")
    worst = ", ".join(_cell(case_id) for case_id in summary["worst_first"][:shown])
    return "\n".join([*lines, f"Look first at: {worst}.", ""])


def _label_lines(labels: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    scored = any("metric_old" in row for row in labels)
    head = ["label", "cases", "volume drift", "holes +/−", "pieces +/−"] + (["Dice old → new", "HA"] if scored else [])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in labels:
        cells = [
            _cell(label_name(row["label"], {int(key): name for key, name in names.items()})),
            str(row["cases"]),
            _percent(row["drift"]),
            f"{row['holes_gained']} / {row['holes_lost']}",
            f"{row['components_gained']} / {row['components_lost']}",
        ]
        if scored:
            cells += [f"{_number(row.get('metric_old'))} → {_number(row.get('metric_new'))}", _interval(row.get("ha"))]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def junit_xml(summary: Mapping[str, Any], cases: Sequence[str]) -> str:
    """JUnit XML: a test for each criterion and for each pair; pairs with problems that were not allowed are errors."""
    criteria = [
        _test(
            "criteria", f"{check['name']} on {check['scope']}", None if check["holds"] else ("failure", check["reason"])
        )
        for check in summary["checks"]
    ]
    wrong: dict[str, list[str]] = {}
    for problem in summary["problems"]:
        if not problem["allowed"]:
            wrong.setdefault(problem["case"], []).append(problem["message"])
    pairs = [
        _test("pairs", case_id, ("error", "; ".join(wrong[case_id])) if case_id in wrong else None)
        for case_id in sorted({*cases, *wrong})
    ]
    failures = sum(not check["holds"] for check in summary["checks"])
    suite = (
        f'<testsuite name="casewise compare" tests="{len(criteria) + len(pairs)}" failures="{failures}" '
        f'errors="{len(wrong)}" skipped="0">'
    )
    body = "\n".join([*criteria, *pairs])
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n{suite}\n{body}\n</testsuite>\n</testsuites>\n'


def _test(group: str, name: str, trouble: tuple[str, str] | None) -> str:
    opening = f"<testcase classname={quoteattr(f'casewise.compare.{group}')} name={quoteattr(name)}"
    if trouble is None:
        return f"{opening}/>"
    kind, message = trouble
    return f"{opening}><{kind} message={quoteattr(message)}>{escape(message)}</{kind}></testcase>"


def _cell(text: str) -> str:
    """Text that cannot end a table cell, begin markup or mention somebody."""
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>@#" else letter for letter in " ".join(text.split()))


def _number(value: Any) -> str:
    return "—" if value is None else number(float(value))


def _signed(value: Any) -> str:
    return "—" if value is None else number(float(value), signed=True)


def _interval(found: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    if _lacks(found):
        return "—"
    assert found is not None
    estimate, low, high = (float(found[name]) for name in ("estimate", "low", "high"))
    return interval(estimate, low, high, signed=signed)


def _lacks(found: Mapping[str, Any] | None) -> bool:
    return found is None or found["estimate"] is None or found["estimate"] != found["estimate"]


def _percent(found: Mapping[str, Any] | None) -> str:
    if _lacks(found):
        return "—"
    assert found is not None
    return f"{100 * found['estimate']:+.1f} %".replace("-", "−")


def _colors(names: Mapping[int, str]) -> Pixels:
    """The color that pictures and legend give to the labels 0 to 255: the street's own by name, else quiet ones."""
    table = _LABELS[(np.arange(256) - 1) % len(_LABELS)]
    for label, name in names.items():
        if 0 <= label < 256 and str(name).lower() in STREET:
            table[label] = STREET[str(name).lower()]
    return table


def _box(region: Mapping[str, Any]) -> str:
    """Where a region lies, counted from 1 as in the titles of the pictures, both ends inside."""
    names = ("slices", "rows", "columns")[-len(region["low"]) :]
    sides = zip(names, region["low"], region["high"], strict=True)
    return ", ".join(
        f"{name} {low + 1} to {high}" if high > low + 1 else f"{name[:-1]} {high}" for name, low, high in sides
    )


def case_pictures(
    old: Mask,
    new: Mask,
    label: Mask | None = None,
    image: NDArray[Any] | None = None,
    *,
    names: Mapping[int, str] | None = None,
    zero_is_label: bool = False,
) -> list[tuple[str, str]]:
    """(title, data URI) of the slice with the most trouble: image, old, new, what changed and, with a label, how.

    Where label 0 is a class it is painted too, and nothing is added or removed: a change is another class.
    """
    colors, lowest = _colors(names or {}), 0 if zero_is_label else 1
    changed = old != new
    wrong_now = None if label is None else changed & (old == label)
    right_now = None if label is None else changed & (new == label)
    trouble = next(flags for flags in (wrong_now, changed, (old > 0) | (new > 0)) if flags is not None and flags.any())
    at = int(np.argmax(trouble.sum(axis=(1, 2)))) if old.ndim == 3 else None
    planes = {name: _plane(flags, at) for name, flags in (("old", old), ("new", new), ("changed", changed))}
    truth = None if label is None else _plane(label, at)
    window = _window(np.logical_or.reduce([planes["old"] > 0, planes["new"] > 0, planes["changed"]]))
    ground = _grey(image, at, planes["old"].shape)[window]
    before, after = planes["old"][window], planes["new"][window]
    where = "" if at is None else f", slice {at + 1} of {old.shape[0]}"
    shown = [] if image is None else [(f"image{where}", ground)]
    shown += [
        (f"old{where if image is None else ''}", _tinted(ground, before, colors, lowest)),
        ("new", _tinted(ground, after, colors, lowest)),
        ("change", _change(ground, before, after, lowest)),
    ]
    if truth is not None and wrong_now is not None and right_now is not None:
        shown.append(("label", _tinted(ground, truth[window], colors, lowest)))
        judged = _painted(ground, _plane(right_now, at)[window], BETTER)
        shown.append(("judgement", _painted(judged, _plane(wrong_now, at)[window], WORSE)))
    return [(title, _data_uri(_fitted(picture))) for title, picture in shown]


def _plane(mask: NDArray[Any], at: int | None) -> NDArray[Any]:
    return mask if at is None else mask[at]


def _window(present: Flags, margin: int = 8) -> tuple[slice, slice]:
    sides = []
    for axis, size in ((1, present.shape[0]), (0, present.shape[1])):
        hit = np.flatnonzero(present.any(axis=axis))
        sides.append(slice(max(0, hit[0] - margin), min(size, hit[-1] + 1 + margin)) if hit.size else slice(0, size))
    return sides[0], sides[1]


def _grey(image: NDArray[Any] | None, at: int | None, shape: tuple[int, ...]) -> Pixels:
    """The image behind the masks as (rows, columns, 3); near-black without one, or where it does not fit."""
    plane = None if image is None else np.asarray(image if at is None else image[at] if image.ndim > 2 else image)
    if plane is None or plane.shape[:2] != shape:
        return np.full((*shape, 3), 22, np.uint8)
    if plane.ndim == 3:
        return np.ascontiguousarray(plane[..., :3], np.uint8)
    low, high = np.percentile(plane, (1, 99.5))
    scaled = np.clip((plane - low) / max(float(high - low), 1e-6), 0, 1)
    return np.repeat(np.asarray(255 * scaled, np.uint8)[..., None], 3, axis=-1)


def _tinted(ground: Pixels, mask: NDArray[Any], colors: Pixels, lowest: int, weight: float = 0.45) -> Pixels:
    """The labels from ``lowest`` on in color over the image, with a line where each ends."""
    color, shown = colors[mask.astype(np.int64) % 256], (mask >= lowest) & (mask != 255)
    mixed = np.where(shown[..., None], ground * (1 - weight) + color * weight, ground)
    edge = shown & (ndimage.grey_erosion(mask, size=3) != ndimage.grey_dilation(mask, size=3))
    return np.where(edge[..., None], color, mixed).astype(np.uint8)


def _painted(ground: Pixels, where: Flags, color: tuple[int, int, int]) -> Pixels:
    return np.where(where[..., None], np.array(color, np.uint8), ground).astype(np.uint8)


def _change(ground: Pixels, old: NDArray[Any], new: NDArray[Any], lowest: int) -> Pixels:
    drawn = (ground * 0.75).astype(np.uint8)
    if lowest == 0:
        return _painted(drawn, old != new, RELABELED)
    drawn = _painted(drawn, (old != new) & (old > 0) & (new > 0), RELABELED)
    return _painted(_painted(drawn, (old == 0) & (new > 0), ADDED), (old > 0) & (new == 0), REMOVED)


def _fitted(picture: Pixels) -> Pixels:
    """Enlarged by a whole factor, or thinned by a whole stride, to about the side of a panel."""
    longest = max(picture.shape[:2])
    if longest > 2 * _SIDE:
        return picture[:: longest // _SIDE, :: longest // _SIDE]
    factor = max(1, round(_SIDE / longest))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


def _data_uri(picture: Pixels) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).quantize(128, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

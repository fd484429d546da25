"""report.html of a prediction folder: cases to check first, then every case with its picture and decision.

The page loads nothing from anywhere but its own folder, and everything that came from files is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from casewise.core.prediction_record import OUTSIDE, REGIONS_LISTED, PredictedCase
from casewise.core.text import pluralize
from casewise.judge.outcomes import judged_sentence
from casewise.render.mask_pictures import legend
from casewise.report.page import render_page
from casewise.study.deployed_measures import measure_text

NEW, ORIGINAL, NONE = "new mask", "original mask", "no mask"
ORDER = {"failed": 0, "fallback": 1, "done": 2}
SIGNALS = {
    "regions": "separate changes",
    "delta": "share of all voxels that changed",
    "delta_foreground": "changed voxels divided by the original foreground",
    "entropy": "mean entropy of the model (nats)",
    "msp": "mean largest probability",
    "gradient_norm": "norm of the gradient",
}


def prediction_page(entries: Sequence[PredictedCase], facts: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        entries: Records of the cases.
        facts: Facts of the run: model, policy, versions, scores, classes, warnings, promise.
    """
    background = bool(facts.get("background", True))
    metric = "Dice" if background else "mIoU"
    rows = sorted(
        (_row(entry, metric, facts.get("classes", {})) for entry in entries), key=lambda row: (row["rank"], row["case"])
    )
    scores, key = facts["scores"], "Dice" if background else "IoU"
    return render_page(
        "prediction.html.j2",
        rows=rows,
        counts=_counts(rows),
        check=[row for row in rows if row["why"]],
        facts=facts,
        scored=f"Mean {metric} {scores[key]:.3f}, original masks {scores[f'source_{key}']:.3f}" if scores else "",
        judged=judged_sentence(scores["judged"]) if "judged" in scores else "",
        legend=legend(facts.get("classes", {}), background=background),
        background=background,
    )


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    said = [row["mask"] for row in rows]
    parts = [pluralize(said.count(kind), kind) for kind in (NEW, ORIGINAL) if kind in said]
    parts += [f"{said.count(NONE)} without a mask"] if NONE in said else []
    return f"{pluralize(len(rows), 'case')}: {', '.join(parts)}" if rows else "No case"


def _row(entry: PredictedCase, metric: str, classes: Mapping[int, str]) -> dict[str, Any]:
    decision, last = entry.decision, max(filter(str.isdigit, entry.signals), key=int, default="")
    signals = entry.signals.get(last, {})
    shown = {name: signals[name] for name in SIGNALS if name in signals}
    flagged = decision is not None and decision.flagged
    kept = decision is None or decision.rolled_back
    return {
        "case": entry.case,
        "group": entry.group or "",
        "status": entry.status,
        "flagged": flagged,
        "rank": (ORDER[entry.status], not flagged, entry.lowest_quality if flagged else 0.0, not entry.warnings),
        "mask": NONE if not entry.has_output else ORIGINAL if kept else NEW,
        "changed": _changed(entry),
        "quality": _quality(entry, metric),
        "why": _named(_why(entry, metric), classes) if flagged or entry.status != "done" else "",
        "warnings": [_named(said, classes) for said in entry.warnings],
        "measures": [measure_text(name, found) for name, found in entry.measures.items()],
        "details": [
            *([("decision", entry.reason)] if entry.reason else ()),
            *([("mask", f"{entry.candidate}; {pluralize(decision.executed, 'candidate')} made")] if decision else ()),
            *_routing(entry),
            *((("candidates" if not at else ""), said) for at, said in enumerate(_ladders(entry))),
            *((f"{name}: {SIGNALS[name]}", _number(value) or "not computable") for name, value in shown.items()),
            ("seconds", _number(entry.timing.get("total_s"))),
        ],
        "overlay": next((path for path in entry.outputs if path.endswith(f"overlays/{entry.case}.png")), None),
    }  # fmt: skip


def _named(said: str, classes: Mapping[int, str]) -> str:
    """Write names of classes for their numbers."""
    return re.sub(r"(?<=of )label (\d+)", lambda found: classes.get(int(found[1]), found[0]), said)


def _changed(entry: PredictedCase) -> str:
    """Return how much the written mask differs from M0; an entry lists the largest regions only."""
    large = sum(bool(region.get("counts", True)) for region in entry.regions)
    places = f"{'at least ' if large >= REGIONS_LISTED else ''}{pluralize(large, 'place')}" if large else "tiny places"
    places += " and tiny ones" * (0 < large < len(entry.regions))
    share = "" if entry.changed is None else f"{entry.changed:.1%} of the original segmentation, in "
    return f"{share}{places}" if entry.regions else "nothing"


def _quality(entry: PredictedCase, metric: str) -> str:
    decision = entry.decision
    if decision is None or decision.quality is None or entry.uncovered:
        return ""
    low = "" if decision.quality_low is None else f", at least {decision.quality_low:.2f}"
    return f"{metric} about {decision.quality:.2f}{low}"


def _why(entry: PredictedCase, metric: str) -> str:
    """Return why a person should check a case."""
    if entry.error:
        return f"no mask: {entry.error}" if not entry.has_output else f"original mask after an error: {entry.error}"
    if unlike := entry.noted(OUTSIDE):
        return unlike[0].removeprefix(f"{OUTSIDE}: ")
    low = None if entry.decision is None else entry.decision.quality_low
    return f"the estimated {metric} may be as low as {low:.2f}" if low is not None else "its quality is unknown"


def _routing(entry: PredictedCase) -> list[tuple[str, str]]:
    """The value that a router decided on, with its cut-points."""
    decision = entry.decision
    if decision is None or not decision.coordinate:
        return []
    cuts = " and ".join(_number(cut) for cut in (decision.cut_low, decision.cut_high) if cut not in (None, inf))
    said = f"{_number(decision.value)}{f' (cut-points {cuts})' if cuts else ''}"
    return [(decision.coordinate, f"{said}{f', {decision.bucket}' if decision.bucket else ''}")]


def _ladders(entry: PredictedCase) -> list[str]:
    """If several ladders were read: the candidates of each, and how much its last one changes M0."""
    read = entry.policy.get("ladders", ())
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, signals in entry.signals.items():
        ladder, _, step = name.rpartition(":")
        if step.isdigit() and step != "0":
            found.setdefault(ladder, []).append(signals)
    unnamed = next((name for name in read if name not in found), "")  # the one that is deployed, or the first
    steps = [(name, found.get("" if name == unnamed else name, [])) for name in read]
    return [
        f"{name}: {pluralize(len(made), 'candidate')}, the last one changes "
        f"{_number(made[-1].get('delta')) or 'an unknown share'} of the voxels"
        for name, made in steps
        if made
    ]


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"

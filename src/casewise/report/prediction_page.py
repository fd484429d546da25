"""report.html of a prediction folder: one row per case, flagged ones first, with its picture and its reasons.

The page loads nothing from anywhere but its own folder, and everything that came from files is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from casewise.core.brief import counted
from casewise.core.predicted import PredictedCase
from casewise.core.records import Decision
from casewise.judge.outcomes import judged_sentence
from casewise.render.masks import legend

ORDER = {"failed": 0, "fallback": 1, "done": 2}
SHOWN = ("regions", "delta", "delta_foreground", "entropy", "msp", "gradient_norm")


def prediction_page(entries: Sequence[PredictedCase], facts: Mapping[str, Any]) -> str:
    """The page from the cases' entries and the facts of the run (model, policy, versions, summary)."""
    rows = sorted((_row(entry) for entry in entries), key=lambda row: (row["rank"], row["case"]))
    template = (resources.files("casewise.report") / "templates" / "prediction.html.j2").read_text(encoding="utf-8")
    style = (resources.files("casewise.report") / "templates" / "prediction.css").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        rows=rows,
        counted=counted,
        counts=sorted(Counter(row["action"] for row in rows).items()),
        flagged=sum(row["flagged"] for row in rows),
        facts=facts,
        judged=judged_sentence(facts["scores"]["judged"]) if "judged" in facts["scores"] else "",
        legend=legend(facts.get("classes", {}), background=bool(facts.get("background", True))),
        background=bool(facts.get("background", True)),
        style=Markup(style),
    )


def _row(entry: PredictedCase) -> dict[str, Any]:
    decision, signals = entry.decision, _last_signals(entry.signals)
    shown = [name for name in SHOWN if decision is None or name != decision.coordinate]
    return {
        "case": entry.case,
        "group": entry.group or "",
        "status": entry.status,
        "flagged": decision is not None and decision.flagged,
        "rank": (ORDER[entry.status], not (decision is not None and decision.flagged), not entry.warnings),
        "action": entry.action or "no output",
        "state": entry.candidate or _state(decision),  # entries of before had no name for it
        "made": "" if decision is None else counted(decision.executed, "candidate"),
        "bucket": (decision and decision.bucket) or "",
        "coordinate": (decision and decision.coordinate) or "",
        "value": _number(decision and decision.value),
        "cut_low": _number(decision and decision.cut_low),
        "cut_high": _number(decision and decision.cut_high),
        "reason": "" if decision is None else decision.reason,
        "error": entry.error or "",
        "warnings": list(entry.warnings),
        "signals": [(name, _number(signals.get(name))) for name in shown if name in signals],
        "ladders": _ladders(entry),
        "regions": len(entry.regions),
        "overlay": next((path for path in entry.outputs if path.endswith(f"overlays/{entry.case}.png")), None),
        "seconds": _number(entry.timing.get("total_s")),
    }


def _last_signals(signals: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    steps = [name for name in signals if name.isdigit()]
    return signals[max(steps, key=int)] if steps else {}


def _ladders(entry: PredictedCase) -> list[str]:
    """Where several ladders were read: the candidates of each, and how much its last one changes M0."""
    read = entry.policy.get("ladders", ())
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, signals in entry.signals.items():
        ladder, _, step = name.rpartition(":")
        if step.isdigit() and step != "0":
            found.setdefault(ladder, []).append(signals)
    unnamed = next((name for name in read if name not in found), "")  # the one that is deployed, or the first
    steps = [(name, found.get("" if name == unnamed else name, [])) for name in read]
    return [
        f"{name}: {counted(len(made), 'candidate')}, the last one changes "
        f"{_number(made[-1].get('delta')) or 'an unknown share'} of the voxels"
        for name, made in steps
        if made
    ]


def _state(decision: Decision | None) -> str:
    if decision is None:
        return ""
    state = decision.state
    return f"candidate {state.step}" + (f", {state.shrink:.0%} back" if state.shrink else "") if state.step else "M0"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"

"""report.html of a prediction folder: one row a case, flagged ones first, with its picture and its reasons.

The page loads nothing from anywhere but its own folder, and everything that came from files is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

ORDER = {"failed": 0, "fallback": 1, "done": 2}
SHOWN = ("regions", "delta", "delta_foreground", "entropy", "msp", "gradient_norm")


def prediction_page(entries: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page from the cases' entries and the facts of the run (model, policy, versions, summary)."""
    rows = sorted((_row(entry) for entry in entries), key=lambda row: (row["rank"], row["case"]))
    template = (resources.files("casewise.report") / "templates" / "prediction.html.j2").read_text(encoding="utf-8")
    style = (resources.files("casewise.report") / "templates" / "prediction.css").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        rows=rows,
        counts=sorted(Counter(row["action"] for row in rows).items()),
        facts=facts,
        style=Markup(style),
    )


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    decision = entry.get("decision") or {}
    status = str(entry.get("status"))
    case = str(entry["case"])
    warned = [finding["message"] for finding in entry.get("contract") or ()]
    signals = _last_signals(entry.get("signals") or {})
    return {
        "case": case,
        "group": entry.get("group") or "",
        "status": status,
        "rank": (ORDER.get(status, 0), not warned),
        "action": str(decision.get("action") or "no output"),
        "state": _state(decision),
        "executed": decision.get("executed"),
        "bucket": decision.get("bucket") or "",
        "coordinate": decision.get("coordinate") or "",
        "value": _number(decision.get("value")),
        "cut_low": _number(decision.get("cut_low")),
        "cut_high": _number(decision.get("cut_high")),
        "reason": decision.get("reason") or "",
        "error": entry.get("error") or "",
        "warnings": warned,
        "signals": [(name, _number(signals.get(name))) for name in SHOWN if name in signals],
        "regions": len(entry.get("regions") or ()),
        "overlay": next((path for path in entry.get("outputs", {}) if path.endswith(f"overlays/{case}.png")), None),
        "seconds": _number((entry.get("timing") or {}).get("total_s")),
    }


def _last_signals(signals: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    steps = [name for name in signals if name.isdigit()]
    return signals[max(steps, key=int)] if steps else {}


def _state(decision: Mapping[str, Any]) -> str:
    state = decision.get("state") or {}
    if not state:
        return ""
    return f"{state['step']}" + (f", {state['shrink']:.0%} back" if state.get("shrink") else "")


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"

"""How a controller reads a signal: by name, at a step, and with an error instead of a stand-in number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Observation
from casewise.measure.signals.risk import RiskStatistics

RISK = "risk"
"""The two-term risk of C6; a coordinate that needs :class:`RiskStatistics`."""


def value_at(seen: Observation, step: int, name: str, statistics: RiskStatistics | None = None) -> float:
    """One signal of one step; ``-name`` turns it round, for signals that fall when risk rises (C12)."""
    if name.startswith("-"):
        return -value_at(seen, step, name[1:])
    if name == RISK:
        if statistics is None:
            raise BadInput("the coordinate 'risk' needs z-statistics; calibrate first")
        return float(statistics.risk(value_at(seen, step, "regions"), value_at(seen, step, "delta")))
    value = seen.signals[step].get(name)
    if value is None:
        have = ", ".join(sorted(key for key, known in seen.signals[step].items() if known is not None))
        raise BadInput(
            f"signal {name!r} of case {seen.case_id} at step {step} is not there; it has {have or 'none'}. "
            f"Record with that signal, or choose another coordinate"
        )
    if not math.isfinite(value):
        raise NotFinite(f"signal {name!r} of case {seen.case_id} at step {step} is {value}; record the case again")
    return float(value)


def needed(coordinate: str) -> frozenset[str]:
    """The signals that a coordinate is read from."""
    return frozenset({"regions", "delta"}) if coordinate == RISK else frozenset({coordinate.removeprefix("-")})


def statistics_of(options: Mapping[str, float] | RiskStatistics | None) -> RiskStatistics | None:
    """Statistics from plain JSON."""
    return RiskStatistics(**options) if isinstance(options, Mapping) else options

"""How a controller reads a signal: by name, at a step, and with an error instead of a stand-in number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from casewise.core.errors import BadInput, DegenerateStatistic, NotFinite
from casewise.core.records import Observation

RISK = "risk"
"""The two-term risk of C6; a coordinate that needs :class:`Statistics`."""


@dataclass(frozen=True)
class Statistics:
    """Means and deviations (ddof 0) of the step-1 signals of the calibration cases (C6)."""

    mean_regions: float
    sigma_regions: float
    mean_delta: float
    sigma_delta: float

    def __post_init__(self) -> None:
        if not (self.sigma_regions > 0 and self.sigma_delta > 0):
            raise DegenerateStatistic(
                f"z-scores need a spread, got sigma {self.sigma_regions} for regions and {self.sigma_delta} for delta; "
                f"use a coordinate that varies on the calibration cases"
            )

    def risk(self, regions: Any, delta: Any) -> Any:
        """r = z(n)/2 + z(delta)/2 (C6).

        >>> round(Statistics(0.70, 0.781, 0.00028, 0.00020).risk(0, 0), 3)
        -1.148
        """
        return (regions - self.mean_regions) / self.sigma_regions / 2 + (delta - self.mean_delta) / self.sigma_delta / 2


def value_at(seen: Observation, step: int, name: str, statistics: Statistics | None = None) -> float:
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


def statistics_of(options: Mapping[str, float] | Statistics | None) -> Statistics | None:
    """Statistics from plain JSON."""
    return Statistics(**options) if isinstance(options, Mapping) else options

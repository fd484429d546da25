"""Metadata of controllers, and functions that read a signal of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import Controller, Observation
from casewise.measure.signals.risk import RiskStatistics


@dataclass(frozen=True)
class Metadata:
    """Facts about a kind of controller, as its class attribute ``metadata``; the defaults hold without one."""

    title: str = ""  # name in tables and figures; empty: the name of the controller
    is_router: bool = False  # reads a coordinate and sorts cases into low, mid and hard by cut_low and cut_high
    is_ours: bool = False  # a method of the paper: colored in figures, compared with every budget
    is_compared: bool = False  # every study replays it beside the policy
    adapts: bool = True  # False: M0 at once, so no update is ever made
    among_candidates: bool = False  # sees every candidate of a case at once; certified by the size of its edit
    gates: bool = False  # keeps or reverts single regions of one edit; certified by a threshold of their scores
    fitted_by: str = ""  # how calibration finds its numbers: "cuts", "budget", "tau"; "" where there are none


def metadata_of(controller: Controller | type | object) -> Metadata:
    """Return the metadata of a controller or of its class."""
    kind = getattr(controller, "func", controller)  # a registry may hold a class with some of its options given
    said = getattr(kind, "metadata", None)
    if isinstance(said, Mapping):  # one class for several registered rules
        said = said[getattr(controller, "signal", None) or getattr(controller, "keywords", {})["signal"]]
    said = said if isinstance(said, Metadata) else Metadata()
    if said.title:
        return said
    given = ", ".join(str(value) for value in getattr(controller, "keywords", {}).values())
    name = given or getattr(kind, "name", None)
    return replace(said, title=name if isinstance(name, str) else getattr(kind, "__name__", str(kind)))


RISK = "risk"
"""The two-term risk of C6; a coordinate that needs :class:`RiskStatistics`."""


def value_at(seen: Observation, step: int, name: str, statistics: RiskStatistics | None = None) -> float:
    """Return one signal of one step; ``-name`` is its negative, for signals that fall when risk rises (C12)."""
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
            f"signal {name!r} of case {seen.case_id} at step {step} was not recorded; recorded are {have or 'none'}. "
            f"Record with that signal, or choose another coordinate"
        )
    if not math.isfinite(value):
        raise NotFinite(f"signal {name!r} of case {seen.case_id} at step {step} is {value}; record the case again")
    return float(value)


def needed(coordinate: str) -> frozenset[str]:
    """Return the signals that a coordinate is computed from."""
    return frozenset({"regions", "delta"}) if coordinate == RISK else frozenset({coordinate.removeprefix("-")})

"""Extra signals of an episode, by name: read-only functions of the episode, evaluated after each prediction.

A probe is a callable ``(episode) -> float | None``; None means "not computable here". It may return a mapping of
several signals instead. It may run forwards and compute gradients of its own, but leaves the weights as they are.
Probes that are named here are imported when they are asked for; any other function is recorded under its own name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from casewise.core.records import Signals
from casewise.core.registry import Registry, from_address
from casewise.measure.signals import REGION_SCORES, SIGNALS, check_registered

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode

Probe = Callable[["Episode"], "float | Signals | None"]

PROBES: Registry[str] = Registry(
    "signal",
    {
        **{name: f"casewise.adapt.{info.probe}" for name, info in SIGNALS.items() if info.probe},
        REGION_SCORES: "casewise.adapt.probes.criteria:drop",
    },
)
"""Addresses by name, from the lines of ``SIGNALS`` that name a probe; and the region gate's scores."""


def probes_of(asked: Sequence[str | Probe]) -> dict[str, Probe]:
    """Probes by name: names of PROBES, addresses ``package.module:name``, or functions of your own.

    An address is recorded under the name behind its colon. Call this before anything is recorded: a wrong name is an
    error here, not in the middle of the first case.
    """
    probes: dict[str, Probe] = {}
    for one in asked:
        if not isinstance(one, str):
            probes[one.__name__] = one
        elif ":" in one:
            probes[one.partition(":")[2]] = from_address(one, "signal")
        else:
            probes[one] = _imported(PROBES[one])
    return probes


def probed(probes: Mapping[str, Probe], episode: Episode) -> Signals:
    """The signals of all probes at the current step; those of a probe that is named here must be registered."""
    signals: dict[str, float | None] = {}
    for name, probe in probes.items():
        with episode.record.metered(name):
            value = probe(episode)
        found = value if isinstance(value, Mapping) else {name: value}
        if name in PROBES:
            check_registered(found)
        signals.update(found)
    return signals


def _imported(address: str) -> Probe:
    module, name = address.split(":")
    found: Probe = getattr(importlib.import_module(module), name)
    return found

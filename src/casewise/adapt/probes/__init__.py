"""Probes: extra signals that are computed from an episode after each prediction.

A probe is a callable ``(episode) -> float | None``; None means "not computable". It may also return a mapping of
several signals. It may run forward passes and compute gradients, but must not change the weights. The probes in
``PROBES`` are imported when they are used; any other function is recorded under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from casewise.core.records import Signals
from casewise.core.registry import Registry, from_address
from casewise.measure.signals import REGION_SCORES, SIGNALS, check_registered
from casewise.measure.signals.risk import region_drops

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode

Probe = Callable[["Episode"], "float | Signals | None"]

PROBES: Registry[str] = Registry(
    "signal",
    {
        **{name: f"casewise.adapt.{info.probe}:{name}" for name, info in SIGNALS.items() if info.probe},
        REGION_SCORES: "casewise.adapt.probes:drop",
    },
)
"""Addresses of probes by name: those of ``SIGNALS``, and the scores of the region gate."""


def probes_of(asked: Sequence[str | Probe]) -> dict[str, Probe]:
    """Return probes by name, from names of PROBES, addresses ``package.module:name`` or functions.

    An address is recorded under the name after its colon. Call this function before recording, so that a wrong name is
    an error before the first case.
    """
    probes: dict[str, Probe] = {}
    for one in asked:
        if not isinstance(one, str):
            probes[one.__name__] = one
        elif ":" in one:
            probes[one.partition(":")[2]] = from_address(one, "signal")
        else:
            probes[one] = from_address(PROBES[one], "signal")
    return probes


def probed(probes: Mapping[str, Probe], episode: Episode) -> Signals:
    """Return the signals of all probes at the current step; signals of ``PROBES`` must be registered."""
    signals: dict[str, float | None] = {}
    for name, probe in probes.items():
        with episode.record.metered(name):
            value = probe(episode)
        found = value if isinstance(value, Mapping) else {name: value}
        if name in PROBES:
            check_registered(found)
        signals.update(found)
    return signals


def drop(episode: Episode) -> Signals:
    """Return the mean entropy drop in each region of the edit of step 1 (L1, L2), for the region gate.

    It is None if logits and mask differ in grid.
    """
    record = episode.record
    first, now = record.entropies["entropy_0"], record.entropies[f"entropy_{episode.step}"]
    if episode.step != 1 or now.shape != record.masks[1].shape:
        return {"drop": None}
    return region_drops(record.masks[0], record.masks[1], first - now, min_area=record.min_area)

"""Extra signals of an episode, by name: read-only functions of the episode, evaluated after each prediction.

A probe is a callable ``(episode) -> float | None``; None means "not computable here". It may run forwards and compute
gradients of its own, but leaves weights and ``.grad`` as they are. Probes are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from casewise.core.registry import Registry

if TYPE_CHECKING:
    from casewise.adapt.episode import Episode

Probe = Callable[["Episode"], "float | None"]

PROBES: Registry[str] = Registry(
    "probe",
    {
        "augmentation_disagreement": "casewise.adapt.agreement:augmentation_disagreement",
        "dropout_disagreement": "casewise.adapt.agreement:dropout_disagreement",
        "grata_cosine": "casewise.adapt.cosine:grata_cosine",
        "aetta": "casewise.adapt.aetta:aetta",
        "adic": "casewise.adapt.adic:adic",
    },
)


def probes_of(asked: Sequence[str] | Mapping[str, Probe]) -> dict[str, Probe]:
    """Probes by signal name: names of PROBES, or a mapping of your own."""
    if isinstance(asked, Mapping):
        return dict(asked)
    return {name: _imported(PROBES[name]) for name in asked}


def _imported(address: str) -> Probe:
    module, name = address.split(":")
    found: Probe = getattr(importlib.import_module(module), name)
    return found

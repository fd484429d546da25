"""Controllers: choose a state of the ladder from label-free signals. Nothing here can see a label."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from casewise.core.records import Controller
from casewise.core.registry import Registry
from casewise.judge.controllers.choose import AgreementRule, Choose
from casewise.judge.controllers.depth import FixedK, Settled, Source, StopRule, TauStop
from casewise.judge.controllers.merge import Merge
from casewise.judge.controllers.region_gate import RegionGate
from casewise.judge.controllers.router import Router, StopRouter

CONTROLLERS: Registry[Callable[..., Controller]] = Registry(
    "controller",
    {
        "m0": Source,
        "fixed-k": FixedK,
        "settled": Settled,
        "frag-stop": partial(StopRule, signal="regions"),
        "entropy-stop": partial(StopRule, signal="entropy"),
        "msp-stop": partial(StopRule, signal="msp"),
        "gradient-stop": partial(StopRule, signal="gradient"),
        "tau-stop": TauStop,
        "router": Router,
        "stop-router": StopRouter,
        "region-gate": RegionGate,
        "consensus": partial(AgreementRule, rule="consensus"),
        "consensus-where-low": partial(AgreementRule, rule="low-agreement"),
        "highest-agreement": partial(AgreementRule, rule="agreement"),
        "medoid": partial(AgreementRule, rule="medoid"),
        "fixed-candidate": partial(AgreementRule, rule="fixed"),
        "choose": Choose,
        "merge": Merge,
    },
)


def takes(kind: Any, option: str) -> bool:
    """Return True if a kind of controller has an argument of this name."""
    return callable(kind) and option in inspect.signature(kind).parameters

"""The sections in the order of the page. ``SECTIONS`` is the list; ``--only`` takes its names."""

from __future__ import annotations

from collections.abc import Callable

from casewise.core.registry import Registry
from casewise.report.material import Material
from casewise.report.section import Section
from casewise.report.sections.accounting import accounting
from casewise.report.sections.archives import backbones, frozen, rerun, scale, sweep
from casewise.report.sections.association import association
from casewise.report.sections.budget import budget
from casewise.report.sections.certificate import certificate
from casewise.report.sections.controls import controls
from casewise.report.sections.criteria import criteria
from casewise.report.sections.deployment import deployment
from casewise.report.sections.extensions import balance, early, learned, search
from casewise.report.sections.geometry import distance, geometry
from casewise.report.sections.helphurt import helphurt
from casewise.report.sections.qualitative import qualitative
from casewise.report.sections.routing import routing
from casewise.report.sections.sensitivity import sensitivity

SECTIONS: Registry[Callable[[Material], Section]] = Registry(
    "analysis",
    {
        "deployment": deployment,
        "helphurt": helphurt,
        "qualitative": qualitative,
        "routing": routing,
        "controls": controls,
        "budget": budget,
        "association": association,
        "accounting": accounting,
        "sensitivity": sensitivity,
        "geometry": geometry,
        "distance": distance,
        "criteria": criteria,
        "certificate": certificate,
        "early": early,
        "learned": learned,
        "search": search,
        "balance": balance,
        "frozen": frozen,
        "rerun": rerun,
        "sweep": sweep,
        "backbones": backbones,
        "scale": scale,
    },
)

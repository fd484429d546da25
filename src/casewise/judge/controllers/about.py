"""What calibration, certificates and reports must know of a kind of controller, said by the controller itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from casewise.core.records import Controller


@dataclass(frozen=True)
class About:
    """A class attribute ``about`` of a controller. One that has none is known by its name and assumed to be yours."""

    title: str = ""  # as tables and figures print it; its name where it is empty
    is_router: bool = False  # reads a coordinate and sorts cases into low, mid and hard by cut_low and cut_high
    is_ours: bool = False  # a method of the paper: colored in figures, compared with every budget
    is_compared: bool = False  # every study replays it beside the policy
    adapts: bool = True  # False: M0 at once, so no update is ever made
    among_candidates: bool = False  # sees every candidate of a case at once; certified by the size of its edit
    gates: bool = False  # keeps or reverts single regions of one edit; certified by a threshold of their scores
    fitted_by: str = ""  # how calibration finds its numbers: "cuts", "budget", "tau"; "" where there are none


def about(controller: Controller | type | object) -> About:
    """What a controller, or its class, says of itself."""
    kind = getattr(controller, "func", controller)  # a registry may hold a class with some of its options given
    said = getattr(kind, "about", None)
    said = said if isinstance(said, About) else About()
    if said.title:
        return said
    given = ", ".join(str(value) for value in getattr(controller, "keywords", {}).values())
    name = given or getattr(kind, "name", None)
    return replace(said, title=name if isinstance(name, str) else getattr(kind, "__name__", str(kind)))

"""One controller for each known group, where cut-points depend on the group (S2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from casewise.core.errors import BadInput
from casewise.core.records import Controller, Decision, Mask, Observation, State, Verdict, deployed
from casewise.judge.controllers.metadata import Metadata, metadata_of


@dataclass(frozen=True)
class ByGroup:
    """One controller for each known group."""

    controllers: Mapping[str, Controller]

    @property
    def name(self) -> str:
        """Name of the controllers, which all groups share."""
        return next(iter(self.controllers.values())).name

    @property
    def metadata(self) -> Metadata:
        """Metadata of the controllers."""
        return metadata_of(next(iter(self.controllers.values())))

    @property
    def needs(self) -> frozenset[str]:
        """Signals that any of the controllers needs."""
        return frozenset().union(*(one.needs for one in self.controllers.values()))

    @property
    def states(self) -> frozenset[State]:
        """Shrunk states that any of the controllers may deploy."""
        return frozenset().union(*(one.states for one in self.controllers.values()))

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the verdict of the controller of the case's group."""
        if seen.group is None or seen.group not in self.controllers:
            raise BadInput(
                f"case {seen.case_id} is of group {seen.group!r}, cut-points exist for "
                f"{', '.join(sorted(self.controllers))}; calibrate with mode union or robust"
            )
        return self.controllers[seen.group].decide(seen)

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """Return the mask that the controller of the case's group deploys."""
        return deployed(self.controllers[decision.group or ""], mask, decision)

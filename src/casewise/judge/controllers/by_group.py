"""Cut-points that depend on the group: the one that is known, or the nearest one by statistics of M0 (S2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from casewise.core.errors import BadInput
from casewise.core.records import Controller, Decision, Mask, Observation, State, Verdict, deployed
from casewise.judge.controllers.about import About, about, value_at


@dataclass(frozen=True)
class ByGroup:
    """One controller for each known group."""

    controllers: Mapping[str, Controller]

    @property
    def name(self) -> str:
        """The name of the controllers that it chooses from."""
        return next(iter(self.controllers.values())).name

    @property
    def about(self) -> About:
        """What the controllers that it chooses from say of themselves."""
        return about(next(iter(self.controllers.values())))

    @property
    def needs(self) -> frozenset[str]:
        """What any of them needs."""
        return frozenset().union(*(one.needs for one in self.controllers.values()))

    @property
    def states(self) -> frozenset[State]:
        """What any of them may deploy."""
        return frozenset().union(*(one.states for one in self.controllers.values()))

    def decide(self, seen: Observation) -> Verdict | None:
        """The verdict of the case's own group."""
        if seen.group is None or seen.group not in self.controllers:
            raise BadInput(
                f"case {seen.case_id} is of group {seen.group!r}, cut-points exist for "
                f"{', '.join(sorted(self.controllers))}; calibrate with mode pooled, robust or inferred"
            )
        return self.controllers[seen.group].decide(seen)

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """What the controller of the case's own group deploys."""
        return deployed(self.controllers[decision.group or ""], mask, decision)


@dataclass(frozen=True)
class InferredGroup:
    """The controller of the group whose M0 looks most like this case's M0; the robust one where two are about as near.

    Distance is Euclidean over step-0 signals in units of their spread. Abstains to ``robust`` when the second nearest
    centroid is less than ``1 + margin`` times as far as the nearest.
    """

    controllers: Mapping[str, Controller]
    robust: Controller
    centroids: Mapping[str, Mapping[str, float]]
    scales: Mapping[str, float]
    margin: float = 0.25

    @property
    def name(self) -> str:
        """The name of the controllers that it chooses from."""
        return self.robust.name

    @property
    def about(self) -> About:
        """What the controllers that it chooses from say of themselves."""
        return about(self.robust)

    @property
    def needs(self) -> frozenset[str]:
        """What the controllers and the distance need."""
        return self.robust.needs.union(self.scales, *(one.needs for one in self.controllers.values()))

    @property
    def states(self) -> frozenset[State]:
        """What any of them may deploy."""
        return self.robust.states.union(*(one.states for one in self.controllers.values()))

    def group(self, seen: Observation) -> str | None:
        """The nearest group, or None where two are about as near."""
        distances = sorted((self._distance(seen, name), name) for name in self.centroids)
        if len(distances) > 1 and distances[1][0] < (1 + self.margin) * distances[0][0]:
            return None
        return distances[0][1]

    def decide(self, seen: Observation) -> Verdict | None:
        """The verdict of the inferred group."""
        group = self.group(seen)
        verdict = (self.robust if group is None else self.controllers[group]).decide(seen)
        if verdict is None:
            return None
        which = "no group is clearly nearest, robust cut-points" if group is None else f"inferred group {group}"
        return Verdict(**{**vars(verdict), "reason": f"{which}: {verdict.reason}"})

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """What a decision deploys; how that is composed does not differ by group."""
        return deployed(self.robust, mask, decision)

    def _distance(self, seen: Observation, group: str) -> float:
        centroid = self.centroids[group]
        return math.dist(
            [value_at(seen, 0, name) / scale for name, scale in self.scales.items()],
            [centroid[name] / scale for name, scale in self.scales.items()],
        )

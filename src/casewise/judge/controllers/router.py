"""Routers: the paper's Algorithm 1 with a fixed action per bucket (E6-E9), and the corrected stop router (S7).

The stop rule inside the paper's medical router can never fire, so that router deploys a fixed depth per bucket. The
stop router tests n_k after it is known: a bucket runs to the first rise or to its cap and deploys the step before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Controller, Decision, Mask, Observation, State, Verdict, deployed
from casewise.judge.controllers.depth import TURNS, last_before_turn
from casewise.judge.controllers.metadata import Metadata, metadata_of, needed, value_at
from casewise.measure.signals.risk import RiskStatistics


@dataclass(frozen=True)
class Bucket:
    """One of: roll back; ask a person, M0 until then; run to a depth, then go part of the way back; run a stop rule
    up to a cap (E7).

    >>> print(Bucket("depth", 3), Bucket("depth", 2, shrink=0.5), Bucket("stop", 8), Bucket("rollback"), sep=", ")
    depth 3, depth 2 then shrink 0.5, stop on regions, cap 8, rollback
    """

    action: Literal["rollback", "ask", "depth", "stop"]
    depth: int = 0  # the depth, or the cap of the stop rule
    shrink: float = 0.0  # share of the way back to M0 (D10)
    rule: str = "regions"

    def __post_init__(self) -> None:
        if self.action not in ("rollback", "ask", "depth", "stop"):
            raise BadInput(f"the action of a bucket must be rollback, ask, depth or stop, got {self.action!r}")
        if self.action in ("depth", "stop") and self.depth < 1:
            raise BadInput(f"action {self.action} needs a depth of at least 1, got {self.depth}")
        if self.shrink and self.action != "depth":
            raise BadInput(f"only the action depth can have shrink, got action {self.action} with shrink {self.shrink}")
        if not 0 <= self.shrink < 1:
            raise BadInput(f"shrink, the share of the way back to M0, must be in [0, 1), got {self.shrink}")
        TURNS[self.rule]

    @property
    def needs(self) -> frozenset[str]:
        """Signals that the action reads."""
        return frozenset({TURNS[self.rule].signal}) if self.action == "stop" else frozenset()

    @property
    def states(self) -> frozenset[State]:
        """Shrunk states that the action deploys."""
        return frozenset({State(self.depth, self.shrink)}) if self.shrink else frozenset()

    def choose(self, seen: Observation) -> tuple[State, Action, str] | None:
        """Return state, action and reason for a case of this bucket; None for one more step."""
        if self.action == "rollback":
            return SOURCE, Action.ROLLBACK, "M0 is deployed"
        if self.action == "ask":
            return SOURCE, Action.ROLLBACK, "a person must decide; M0 is used until then"
        if self.action == "stop":
            found = last_before_turn(seen, TURNS[self.rule], self.depth)
            return None if found is None else (State(found[0]), Action.KEEP, found[1])
        if seen.step < self.depth:
            return None
        action = Action.SHRINK if self.shrink else Action.KEEP
        return State(self.depth, self.shrink), action, f"{self} is deployed"

    def __str__(self) -> str:
        if self.action in ("rollback", "ask"):
            return self.action
        if self.action == "stop":
            return f"stop on {self.rule}, cap {self.depth}"
        return f"depth {self.depth}" + (f" then shrink {self.shrink:g}" if self.shrink else "")


ROLLBACK = Bucket("rollback")


def bucket_of(plain: Mapping[str, Any] | Bucket) -> Bucket:
    """Return a bucket from plain JSON."""
    return Bucket(**plain) if isinstance(plain, Mapping) else plain


@dataclass(frozen=True)
class Router:
    """Probe one step, read one coordinate u of it, and act by bucket.

    u >= cut_high is hard, otherwise u > cut_low is mid, otherwise low (E6).
    """

    coordinate: str
    cut_low: float
    cut_high: float
    low: Bucket
    mid: Bucket
    hard: Bucket = ROLLBACK
    statistics: RiskStatistics | None = None  # for the coordinate "risk" only (C6)

    name: str = field(default="router", init=False, repr=False)
    metadata = Metadata("COQR router", is_router=True, is_ours=True, fitted_by="cuts")

    def __post_init__(self) -> None:
        for bucket in ("low", "mid", "hard"):
            object.__setattr__(self, bucket, bucket_of(getattr(self, bucket)))
        if isinstance(self.statistics, Mapping):  # from JSON
            object.__setattr__(self, "statistics", RiskStatistics(**self.statistics))
        if math.isnan(self.cut_low) or math.isnan(self.cut_high) or self.cut_low > self.cut_high:
            raise BadInput(f"need cut_low <= cut_high, got {self.cut_low} and {self.cut_high}")

    @property
    def needs(self) -> frozenset[str]:
        """The coordinate, and the signals of the stop rules of its buckets."""
        return needed(self.coordinate).union(*(bucket.needs for bucket in (self.low, self.mid, self.hard)))

    @property
    def states(self) -> frozenset[State]:
        """Shrunk states that a bucket deploys."""
        return frozenset().union(*(bucket.states for bucket in (self.low, self.mid, self.hard)))

    def bucket(self, value: float) -> str:
        """Return the bucket of a value: low, mid or hard."""
        if value >= self.cut_high:
            return "hard"
        return "mid" if value > self.cut_low else "low"

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the action of the case's bucket; None until its steps were made."""
        if seen.step < 1:
            return None
        value = value_at(seen, 1, self.coordinate, self.statistics)
        bucket = self.bucket(value)
        chosen = getattr(self, bucket).choose(seen)
        if chosen is None:
            return None
        state, action, reason = chosen
        return Verdict(
            state,
            action,
            bucket=bucket,
            coordinate=self.coordinate,
            value=value,
            cut_low=self.cut_low,
            cut_high=self.cut_high,
            reason=f"{self.coordinate} {value:.4g} {self._place(bucket)}, so {bucket}: {reason}",
            flagged=getattr(self, bucket).action == "ask",
        )

    def _place(self, bucket: str) -> str:
        return {
            "low": f"<= {self.cut_low:.4g}",
            "mid": f"> {self.cut_low:.4g} and < {self.cut_high:.4g}",
            "hard": f">= {self.cut_high:.4g}",
        }[bucket]


@dataclass(frozen=True)
class StopRouter:
    """Tertiles as in the router; low and mid stop at the first rise of regions, mid goes part of the way back."""

    coordinate: str
    cut_low: float
    cut_high: float
    low_cap: int
    mid_cap: int
    mid_shrink: float = 0.0

    name: str = field(default="stop-router", init=False, repr=False)
    metadata = Metadata("stop router", is_router=True, is_ours=True, fitted_by="cuts")

    def __post_init__(self) -> None:
        self._router()
        for step in range(1, self.mid_cap + 1):
            State(step, self.mid_shrink)

    @property
    def needs(self) -> frozenset[str]:
        """The coordinate and the number of regions."""
        return self._router().needs

    @property
    def states(self) -> frozenset[State]:
        """Every depth that mid may be shrunk from."""
        if not self.mid_shrink:
            return frozenset()
        return frozenset(State(step, self.mid_shrink) for step in range(1, self.mid_cap + 1))

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the router's verdict with stop rules; a mid case is then shrunk."""
        verdict = self._router().decide(seen)
        if verdict is None or verdict.bucket != "mid" or not self.mid_shrink:
            return verdict
        state, reason = State(verdict.state.step, self.mid_shrink), f"{verdict.reason}, then shrink {self.mid_shrink:g}"
        return replace(verdict, state=state, action=Action.SHRINK, reason=reason)

    def _router(self) -> Router:
        low, mid = Bucket("stop", self.low_cap), Bucket("stop", self.mid_cap)
        return Router(self.coordinate, self.cut_low, self.cut_high, low, mid)


@dataclass(frozen=True)
class ByGroup:
    """One controller for each known group, where cut-points depend on the group (S2)."""

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

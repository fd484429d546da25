"""What a router does with the cases of one bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Observation, State
from casewise.judge.controllers.stop import TURNS, last_before_turn


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
            raise BadInput(f"a bucket's action is rollback, ask, depth or stop, got {self.action!r}")
        if self.action in ("depth", "stop") and self.depth < 1:
            raise BadInput(f"action {self.action} needs a depth of at least 1, got {self.depth}")
        if self.shrink and self.action != "depth":
            raise BadInput(f"only a fixed depth can be shrunk, got action {self.action} with shrink {self.shrink}")
        if not 0 <= self.shrink < 1:
            raise BadInput(f"shrink is the share of the way back to M0, in [0, 1), got {self.shrink}")
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
        """State, action and reason for a case of this bucket; None for one more step."""
        if self.action == "rollback":
            return SOURCE, Action.ROLLBACK, "M0 is deployed"
        if self.action == "ask":
            return SOURCE, Action.ROLLBACK, "a person is asked, and M0 is deployed until then"
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
    """A bucket from plain JSON."""
    return Bucket(**plain) if isinstance(plain, Mapping) else plain

"""The corrected stop-index router: a controller of its own, not the paper's (S7, E11).

The paper's medical router holds a stop rule that can never fire, so it deploys a fixed depth per bucket. Here n_k is
known before it is tested: a bucket runs to the first rise or to its cap, and deploys the step before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from casewise.core.records import Action, Observation, State, Verdict
from casewise.judge.controllers.about import About
from casewise.judge.controllers.bucket import Bucket
from casewise.judge.controllers.router import Router


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
    about = About("stop router", is_router=True, is_ours=True, fitted_by="cuts")

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
        """The router's verdict with stop rules; a mid case is then shrunk."""
        verdict = self._router().decide(seen)
        if verdict is None or verdict.bucket != "mid" or not self.mid_shrink:
            return verdict
        shrunk = {**vars(verdict), "state": State(verdict.state.step, self.mid_shrink), "action": Action.SHRINK}
        return Verdict(**{**shrunk, "reason": f"{verdict.reason}, then shrink {self.mid_shrink:g}"})

    def _router(self) -> Router:
        low, mid = Bucket("stop", self.low_cap), Bucket("stop", self.mid_cap)
        return Router(self.coordinate, self.cut_low, self.cut_high, low, mid)

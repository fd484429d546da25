"""Reference controllers that read nothing: the source model, and a fixed budget."""

from __future__ import annotations

from dataclasses import dataclass

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Observation, State, Verdict
from casewise.judge.controllers.about import About


@dataclass(frozen=True)
class Source:
    """Never adapt: deploy M0, executing no update."""

    reason: str = "the source model, without adaptation"

    name = "m0"
    about = About("M0 (no adaptation)", adapts=False)
    needs = frozenset[str]()
    states = frozenset[State]()

    def decide(self, seen: Observation) -> Verdict | None:
        """M0, at once."""
        return Verdict(SOURCE, Action.ROLLBACK, reason=self.reason)


@dataclass(frozen=True)
class FixedK:
    """Deploy step k of the trajectory, whatever it looks like (E1)."""

    step: int

    name = "fixed-k"
    about = About("fixed budget", fitted_by="budget")
    needs = frozenset[str]()
    states = frozenset[State]()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise BadInput(f"fixed-k deploys a step >= 0, got {self.step}")

    def decide(self, seen: Observation) -> Verdict | None:
        """Step k once it is there."""
        if seen.step < self.step:
            return None
        action = Action.KEEP if self.step else Action.ROLLBACK
        return Verdict(State(self.step), action, reason=f"a fixed budget of {self.step} updates")

"""Controllers that read nothing, or next to nothing: M0, a fixed budget, and a consensus that has settled."""

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


@dataclass(frozen=True)
class Settled:
    """Read one view after the other until the consensus has settled, and deploy it: easy cases stay cheap.

    Settled: ``patience`` views in a row left it as it was, with a foreground agreement of ``agreement`` or more between
    the consensus before and after. It reads ladders whose steps are running consensuses (``running:mri``).
    """

    cap: int  # views at most
    agreement: float = 0.985
    patience: int = 2

    name = "settled"
    about = About("consensus, until settled")
    needs = frozenset({"settled"})
    states = frozenset[State]()

    def __post_init__(self) -> None:
        if self.cap < 1 or self.patience < 1 or not 0 <= self.agreement <= 1:
            raise BadInput(
                f"need cap and patience of at least 1 and agreement in 0..1, got {self.cap}, {self.patience} and "
                f"{self.agreement}"
            )

    def decide(self, seen: Observation) -> Verdict | None:
        """The consensus so far once it has settled, or at the cap."""
        latest = seen.signals[1:][-self.patience :]
        quiet = [value is not None and value >= self.agreement for value in (one.get("settled") for one in latest)]
        settled = len(quiet) == self.patience and all(quiet)
        if not settled and seen.step < self.cap:
            return None
        why = f"the consensus settled after {seen.step} views" if settled else f"{seen.step} views are all there are"
        return Verdict(State(seen.step), Action.KEEP, coordinate="settled", reason=why)

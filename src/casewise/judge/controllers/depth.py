"""Controllers that choose a number of steps: M0, a fixed budget, and rules that stop (E1, E2, E4, E5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from casewise.core.errors import BadInput, DegenerateStatistic
from casewise.core.records import SOURCE, Action, Observation, State, Verdict
from casewise.core.registry import Registry
from casewise.core.text import pluralize
from casewise.judge.controllers.metadata import Metadata, value_at


@dataclass(frozen=True)
class SignalTurn:
    """A signal and the direction in which it gets worse."""

    signal: str
    rising: bool = True

    def turned(self, seen: Observation, step: int) -> bool:
        """Return True if the signal is strictly worse at ``step`` than one step before."""
        before, now = value_at(seen, step - 1, self.signal), value_at(seen, step, self.signal)
        return now > before if self.rising else now < before

    def __str__(self) -> str:
        return f"{self.signal} {'rose' if self.rising else 'fell'}"


FRAG_STOP = "frag-stop"
TURNS = Registry(
    "stop rule",
    {
        "regions": SignalTurn("regions"),
        "entropy": SignalTurn("entropy"),
        "msp": SignalTurn("msp", rising=False),
        "gradient": SignalTurn("gradient_norm"),
    },
)


def last_before_turn(seen: Observation, turn: SignalTurn, cap: int) -> tuple[int, str] | None:
    """Return the last step before the signal first gets worse at k >= 2, or the cap; None before that (E2, E8)."""
    for step in range(2, min(seen.step, cap) + 1):
        if turn.turned(seen, step):
            return step - 1, f"{turn} at step {step}, so step {step - 1} is deployed"
    if seen.step < cap:
        return None
    return cap, f"{turn.signal} did not change direction within {pluralize(cap, 'step')}"


@dataclass(frozen=True)
class StopRule:
    """Stop when a signal first gets worse, and deploy the step before (E2, E5).

    Args:
        cap: Largest number of steps.
        signal: Key of :data:`TURNS`: regions (FragStop), entropy, msp or gradient.
    """

    cap: int
    signal: str = "regions"

    metadata: ClassVar[Mapping[str, Metadata]] = {
        "regions": Metadata("FragStop", is_ours=True, is_compared=True),
        "entropy": Metadata("entropy stop", is_compared=True),
        "msp": Metadata("MSP stop", is_compared=True),
        "gradient": Metadata("gradient stop", is_compared=True),
    }
    states: ClassVar[frozenset[State]] = frozenset()

    def __post_init__(self) -> None:
        TURNS[self.signal]
        if self.cap < 1:
            raise BadInput(f"a stop rule needs a cap of at least 1 step, got {self.cap}")

    @property
    def name(self) -> str:
        """Name in the registry, such as ``frag-stop``."""
        return FRAG_STOP if self.signal == "regions" else f"{self.signal}-stop"

    @property
    def needs(self) -> frozenset[str]:
        """The signal that stops the case."""
        return frozenset({TURNS[self.signal].signal})

    def decide(self, seen: Observation) -> Verdict | None:
        """Keep the step before the first turn; None if another step is needed."""
        found = last_before_turn(seen, TURNS[self.signal], self.cap)
        if found is None:
            return None
        step, reason = found
        return Verdict(State(step), Action.KEEP, coordinate=TURNS[self.signal].signal, reason=reason)


@dataclass(frozen=True)
class TauStop:
    """Stop at the first k with z(n_k) > tau and deploy max(1, k - 1); never rolls back (E4).

    >>> TauStop(mean=20.1, sigma=6.8, tau=-0.16, cap=8).count
    19.012
    """

    mean: float
    sigma: float
    tau: float
    cap: int
    signal: str = "regions"

    name = "tau-stop"
    metadata = Metadata("τ-stop", is_ours=True, is_compared=True, fitted_by="tau")
    states = frozenset[State]()

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise DegenerateStatistic(f"tau-stop needs a spread of {self.signal}, got sigma {self.sigma}")
        if self.cap < 1:
            raise BadInput(f"tau-stop needs a cap of at least 1 step, got {self.cap}")

    @property
    def needs(self) -> frozenset[str]:
        """The signal that is standardized."""
        return frozenset({self.signal})

    @property
    def count(self) -> float:
        """The threshold in units of the signal."""
        return round(self.mean + self.tau * self.sigma, 12)

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the step before the threshold is exceeded, but at least step 1; None for one more step."""
        for step in range(1, min(seen.step, self.cap) + 1):
            z = (value_at(seen, step, self.signal) - self.mean) / self.sigma
            if z > self.tau:
                return self._verdict(max(1, step - 1), z, f"z({self.signal}) = {z:.3g} > {self.tau:.3g} at step {step}")
        if seen.step < self.cap:
            return None
        return self._verdict(self.cap, None, f"z({self.signal}) stayed at or below {self.tau:.3g}")

    def _verdict(self, step: int, z: float | None, reason: str) -> Verdict:
        why = f"{reason}; step {step}"
        return Verdict(State(step), Action.KEEP, coordinate=self.signal, value=z, cut_high=self.tau, reason=why)


@dataclass(frozen=True)
class Source:
    """Never adapt: deploy M0, executing no update."""

    reason: str = "the source model, without adaptation"

    name = "m0"
    metadata = Metadata("M0 (no adaptation)", adapts=False)
    needs = frozenset[str]()
    states = frozenset[State]()

    def decide(self, seen: Observation) -> Verdict | None:
        """Return M0 without waiting for a step."""
        return Verdict(SOURCE, Action.ROLLBACK, reason=self.reason)


@dataclass(frozen=True)
class FixedK:
    """Deploy step k of the trajectory for every case (E1)."""

    step: int

    name = "fixed-k"
    metadata = Metadata("fixed budget", fitted_by="budget")
    needs = frozenset[str]()
    states = frozenset[State]()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise BadInput(f"fixed-k needs a step of at least 0, got {self.step}")

    def decide(self, seen: Observation) -> Verdict | None:
        """Return step k; None until it was made."""
        if seen.step < self.step:
            return None
        action = Action.KEEP if self.step else Action.ROLLBACK
        made = pluralize(self.step, "candidate" if seen.rungs.get("") else "update")
        return Verdict(State(self.step), action, reason=f"every case gets {made}")


@dataclass(frozen=True)
class Settled:
    """Predict one view after the other until their consensus stops changing, and deploy it.

    The consensus has settled if each of the last ``patience`` views left a foreground agreement of at least
    ``agreement`` between the consensus before and after it. For ladders of running consensuses (``running:mri``).
    """

    cap: int  # views at most
    agreement: float = 0.985
    patience: int = 2

    name = "settled"
    metadata = Metadata("consensus, until settled")
    needs = frozenset({"settled"})
    states = frozenset[State]()

    def __post_init__(self) -> None:
        if self.cap < 1 or self.patience < 1 or not 0 <= self.agreement <= 1:
            raise BadInput(
                f"need cap and patience of at least 1 and agreement in 0..1, got {self.cap}, {self.patience} and "
                f"{self.agreement}"
            )

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the consensus so far if it has settled or the cap is reached; else None."""
        latest = seen.signals[1:][-self.patience :]
        quiet = [value is not None and value >= self.agreement for value in (one.get("settled") for one in latest)]
        settled = len(quiet) == self.patience and all(quiet)
        if not settled and seen.step < self.cap:
            return None
        why = f"the consensus was stable after {seen.step} views" if settled else f"all {seen.step} views were used"
        return Verdict(State(seen.step), Action.KEEP, coordinate="settled", reason=why)

"""tau-stop: halt when the standardized region count first exceeds a calibrated threshold (E4)."""

from __future__ import annotations

from dataclasses import dataclass

from casewise.core.errors import BadInput, DegenerateStatistic
from casewise.core.records import Action, Observation, State, Verdict
from casewise.judge.controllers.about import About
from casewise.judge.controllers.signal_value import value_at


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
    about = About("τ-stop", is_ours=True, is_compared=True, fitted_by="tau")
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
        """The step before the threshold is exceeded, but at least step 1."""
        for step in range(1, min(seen.step, self.cap) + 1):
            z = (value_at(seen, step, self.signal) - self.mean) / self.sigma
            if z > self.tau:
                return self._verdict(max(1, step - 1), z, f"z({self.signal}) = {z:.3g} > {self.tau:.3g} at step {step}")
        if seen.step < self.cap:
            return None
        return self._verdict(self.cap, None, f"z({self.signal}) stayed at or below {self.tau:.3g}")

    def _verdict(self, step: int, z: float | None, reason: str) -> Verdict:
        return Verdict(
            State(step),
            Action.KEEP,
            coordinate=self.signal,
            value=z,
            cut_high=self.tau,
            reason=f"{reason}; step {step}",
        )

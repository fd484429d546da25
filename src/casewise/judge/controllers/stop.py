"""Parameter-free stop rules: halt when a signal first turns bad, and deploy the step before (E2, E5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from casewise.core.errors import BadInput
from casewise.core.records import Action, Observation, State, Verdict
from casewise.core.registry import Registry
from casewise.judge.controllers.about import About
from casewise.judge.controllers.signal_value import value_at


@dataclass(frozen=True)
class Turn:
    """A signal, and the direction in which it turns bad."""

    signal: str
    rising: bool = True

    def turned(self, seen: Observation, step: int) -> bool:
        """Whether the signal is strictly worse at ``step`` than one step before."""
        before, now = value_at(seen, step - 1, self.signal), value_at(seen, step, self.signal)
        return now > before if self.rising else now < before

    def __str__(self) -> str:
        return f"{self.signal} {'rose' if self.rising else 'fell'}"


TURNS = Registry(
    "stop rule",
    {
        "regions": Turn("regions"),
        "entropy": Turn("entropy"),
        "msp": Turn("msp", rising=False),
        "gradient": Turn("gradient_norm"),
    },
)


def last_before_turn(seen: Observation, turn: Turn, cap: int) -> tuple[int, str] | None:
    """The last step before the first turn at k >= 2, or the cap; None while neither is reached (E2, E8)."""
    for step in range(2, min(seen.step, cap) + 1):
        if turn.turned(seen, step):
            return step - 1, f"{turn} at step {step}, so step {step - 1} is deployed"
    if seen.step < cap:
        return None
    return cap, f"{turn.signal} did not turn within {cap} steps"


@dataclass(frozen=True)
class Stop:
    """Abstract: run while the signal of ``rule`` does not turn, at most ``cap`` steps; step 1 is always kept."""

    cap: int

    rule: ClassVar[str]
    name: ClassVar[str]
    states: ClassVar[frozenset[State]] = frozenset()

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise BadInput(f"a stop rule needs a cap of at least 1 step, got {self.cap}")

    @property
    def needs(self) -> frozenset[str]:
        """The signal that is watched."""
        return frozenset({TURNS[self.rule].signal})

    def decide(self, seen: Observation) -> Verdict | None:
        """The step before the first turn."""
        found = last_before_turn(seen, TURNS[self.rule], self.cap)
        if found is None:
            return None
        step, reason = found
        return Verdict(State(step), Action.KEEP, coordinate=TURNS[self.rule].signal, reason=reason)


@final
@dataclass(frozen=True)
class FragStop(Stop):
    """Halt when the number of regions first rises."""

    rule = "regions"
    name = "frag-stop"
    about = About("FragStop", is_ours=True, is_compared=True)


@final
@dataclass(frozen=True)
class EntropyStop(Stop):
    """Halt when the mean entropy first rises."""

    rule = "entropy"
    name = "entropy-stop"
    about = About("entropy stop", is_compared=True)


@final
@dataclass(frozen=True)
class MspStop(Stop):
    """Halt when the mean maximum softmax probability first falls."""

    rule = "msp"
    name = "msp-stop"
    about = About("MSP stop", is_compared=True)


@final
@dataclass(frozen=True)
class GradientStop(Stop):
    """Halt when the gradient norm first rises."""

    rule = "gradient"
    name = "gradient-stop"
    about = About("gradient stop", is_compared=True)

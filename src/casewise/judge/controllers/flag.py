"""The third answer: keep M0, take a candidate, or ask a person, with a quality that no label was needed for.

A policy of any controller may carry a flag. The deployed mask then gets an estimate of its metric and a conformal lower
bound of it; below the line that was asked for, the case is flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from casewise.core.errors import BadInput
from casewise.core.records import (
    SOURCE,
    Action,
    Controller,
    Decision,
    Mask,
    Observation,
    Signals,
    State,
    Verdict,
    deployed,
)
from casewise.judge.controllers.about import About, about
from casewise.judge.controllers.choose import board, state_of, with_agreement


@dataclass(frozen=True)
class Quality:
    r"""What the metric of a mask is expected to be, and what it is at least, from how far the candidates agree.

    .. math:: \hat q = 1 - \kappa_{1/2} (1 - a + s), \qquad \underline q = 1 - \kappa_{\ell} (1 - a + s)

    with a the agreement and :math:`\kappa` quantiles of :math:`(1 - q)/(1 - a + s)` over calibration clusters: nothing
    else is fitted, so the lower bound is split-conformal on all of them. Without a signal a is 1 for every case.
    """

    middle: float  # the median ratio
    ratio: float  # the conformal quantile of the ratio, at ``level``
    level: float  # chance that the metric of a new case is at least its lower bound
    signal: str | None = "agreement"  # None where no signal carried on the calibration cases
    softening: float = 0.02  # s

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise BadInput(f"a lower bound holds at a level between 0 and 1, got {self.level}")
        if self.softening <= 0:
            raise BadInput(f"the softening is above 0, got {self.softening}")

    def of(self, agreement: float | None) -> tuple[float, float] | None:
        """(estimate, lower bound), both in 0..1; None where the signal is missing."""
        if self.signal is not None and agreement is None:
            return None
        gap = self.softening + (0.0 if self.signal is None or agreement is None else 1 - agreement)
        return _share(1 - self.middle * gap), _share(1 - self.ratio * gap)


@dataclass(frozen=True)
class Flagging:
    """Any controller, and beside its verdict the quality of what it deploys and whether a person should look.

    A mask between M0 and a candidate (gated, shrunk) agrees with the others as M0 or the candidate, whichever is less.
    """

    inner: Controller
    quality: Quality
    below: float  # a case is flagged where the lower bound is below this
    steps: int  # rungs beyond M0: agreement needs all of them
    silent: tuple[str, ...] = ()
    ladders: tuple[str, ...] = ()
    background: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ladders", tuple(self.ladders))
        object.__setattr__(self, "silent", tuple(self.silent))
        if not 0 <= self.below <= 1:
            raise BadInput(f"cases are flagged below a metric between 0 and 1, got {self.below}")

    @property
    def learned(self) -> bool:
        """Whether labels fitted something of what is deployed; a flag deploys nothing else."""
        return bool(getattr(self.inner, "learned", True))

    @property
    def name(self) -> str:
        """The controller that decides what is deployed."""
        return self.inner.name

    @property
    def about(self) -> About:
        """What that controller says of itself."""
        return about(self.inner)

    @property
    def needs(self) -> frozenset[str]:
        """What that controller needs."""
        return self.inner.needs

    @property
    def states(self) -> frozenset[State]:
        """What that controller may deploy."""
        return self.inner.states

    def compared(self, seen: Observation, masks: Mapping[State, Mask]) -> Observation:
        """The observation with the signals of disagreement, and with what the controller itself compares."""
        own = getattr(self.inner, "compared", None)
        if own is not None:
            shown: Observation = own(seen, masks)
            return shown
        return with_agreement(seen, masks, silent=self.silent, background=self.background)

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """What the controller itself deploys."""
        return deployed(self.inner, mask, decision)

    def decide(self, seen: Observation) -> Verdict | None:
        """The verdict of the controller, with a quality and perhaps a flag."""
        if not seen.ladders and seen.step < self.steps:
            return None
        verdict = _last_verdict(self.inner, seen)
        if verdict is None:
            return None
        found = self.quality.of(self._agreement(seen, verdict))
        if found is None:
            said = f"{verdict.reason}; flagged: its quality cannot be estimated"
            return replace(verdict, flagged=True, reason=said)
        estimate, low = found
        flagged = low < self.below
        sign = f"flagged: its quality may be as low as {low:.3f}" if flagged else f"quality at least {low:.3f}"
        return replace(verdict, flagged=flagged, quality=estimate, quality_low=low, reason=f"{verdict.reason}; {sign}")

    def _agreement(self, seen: Observation, verdict: Verdict) -> float | None:
        if self.quality.signal is None:
            return None
        candidates = board(seen)
        state = verdict.state if seen.ladders else verdict.state.on("")
        return deployed_signal(candidates, state, self.quality.signal, gated=verdict.action is Action.GATE)


def deployed_signal(
    candidates: Mapping[State, Signals], state: State, name: str, *, gated: bool = False
) -> float | None:
    """A signal of what is deployed; the smaller of a candidate's and M0's where the mask lies between the two."""
    whole = replace(state, shrink=0.0)
    values = [candidates.get(one, {}).get(name) for one in ([whole, SOURCE] if gated or state.shrink else [whole])]
    return None if any(value is None for value in values) else min(value for value in values if value is not None)


def _last_verdict(controller: Controller, seen: Observation) -> Verdict | None:
    """What a controller says that was shown one step after the other; the first verdict counts, as live."""
    for step in range(seen.step + 1):
        shown = seen if step == seen.step else replace(seen, signals=seen.signals[: step + 1], ladders={})
        verdict = controller.decide(shown)
        if verdict is not None:
            return verdict
    return None


def flagging(controller: Controller, plain: Mapping[str, Any]) -> Flagging:
    """A controller with the flag that a policy's options describe."""
    options = dict(plain)
    for name in options.get("silent", ()):
        state_of(name)
    return Flagging(controller, Quality(**options.pop("quality")), **options)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))

"""Flags: estimate the quality of a deployed mask without a label, and ask a person where it may be low.

Any policy may carry a flag. The deployed mask then gets an estimate of its metric and a conformal lower bound of it. A
case is flagged if the lower bound is below the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Mask, Observation, Signals, State, Verdict
from casewise.judge.controllers.choose import candidate_signals, state_of, with_agreement

QUALITY_SIGNALS = ("agreement", "weighted_agreement")
"""Signals that may stand behind a flag; calibration takes the one that predicts the metric better."""


@dataclass(frozen=True)
class Quality:
    r"""Estimate of the metric of a mask, and a lower bound of it, from the agreement of the candidates.

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
            raise BadInput(f"the level of a lower bound must be between 0 and 1, got {self.level}")
        if self.softening <= 0:
            raise BadInput(f"the softening must be above 0, got {self.softening}")

    def of(self, agreement: float | None) -> tuple[float, float] | None:
        """Return (estimate, lower bound), both in 0..1; None if the signal is missing."""
        if self.signal is not None and agreement is None:
            return None
        gap = self.softening + (0.0 if self.signal is None or agreement is None else 1 - agreement)
        return _share(1 - self.middle * gap), _share(1 - self.ratio * gap)


@dataclass(frozen=True)
class Flag:
    """The step after a decision: estimate the quality of the deployed mask and flag the case where it may be low.

    A mask between M0 and a candidate (merged or shrunk) agrees with the others as M0 or the candidate does, whichever
    agrees less.
    """

    quality: Quality
    below: float  # a case is flagged where the lower bound is below this
    steps: int  # states beyond M0: agreement needs all of them
    silent: tuple[str, ...] = ()
    ladders: tuple[str, ...] = ()
    background: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ladders", tuple(self.ladders))
        object.__setattr__(self, "silent", tuple(self.silent))
        if not 0 <= self.below <= 1:
            raise BadInput(f"a flag needs a metric between 0 and 1, got {self.below}")

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Flag:
        """Build a flag from the plain types that a policy file holds."""
        options = dict(plain)
        for name in options.get("silent", ()):
            state_of(name)
        return cls(Quality(**options.pop("quality")), **options)

    def with_agreement(self, seen: Observation, masks: Mapping[State, Mask]) -> Observation:
        """Add the agreement of all states to an observation."""
        return with_agreement(seen, masks, silent=self.silent, background=self.background)

    def applied(self, verdict: Verdict, seen: Observation) -> Verdict:
        """Return the verdict with an estimate of quality, its lower bound, and perhaps a flag."""
        found = self.quality.of(self._signal(seen, verdict))
        if found is None:
            said = f"{verdict.reason}; flagged: its quality cannot be estimated"
            return replace(verdict, flagged=True, reason=said)
        estimate, low = found
        flagged = low < self.below
        sign = f"flagged: its quality may be as low as {low:.3f}" if flagged else f"quality at least {low:.3f}"
        return replace(verdict, flagged=flagged, quality=estimate, quality_low=low, reason=f"{verdict.reason}; {sign}")

    def _signal(self, seen: Observation, verdict: Verdict) -> float | None:
        if self.quality.signal is None:
            return None
        state = verdict.state if seen.ladders else verdict.state.on("")
        gated = verdict.action is Action.GATE
        return deployed_signal(candidate_signals(seen), state, self.quality.signal, gated=gated)


def deployed_signal(
    candidates: Mapping[State, Signals], state: State, name: str, *, gated: bool = False
) -> float | None:
    """Return a signal of the deployed mask; the smaller of the candidate's and M0's if the mask lies between them."""
    whole = replace(state, shrink=0.0)
    values = [candidates.get(one, {}).get(name) for one in ([whole, SOURCE] if gated or state.shrink else [whole])]
    return None if any(value is None for value in values) else min(value for value in values if value is not None)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))

"""Controllers that choose among all candidates of a case: by agreement, or by a fitted expected gain.

A candidate is a state of the case's ladder, or of several named ladders. :func:`with_agreement` compares the masks of
all candidates and adds the agreement signals to the observation; a controller itself reads numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Action, Mask, Observation, Signals, State, Verdict
from casewise.judge.controllers.metadata import Metadata
from casewise.measure.signals.agreement import Candidates, candidates_of

RULES = ("consensus", "agreement", "medoid", "low-agreement", "fixed")
"""Rules without a fitted model: always the consensus; the candidate that agrees most with the others; the same among
single opinions; the consensus only where M0 agrees less with the others than a threshold says; always one candidate."""

_STATE = re.compile(r"(?:(?P<ladder>[a-z0-9][a-z0-9_+.-]*):)?(?P<step>\d+)(?:~(?P<shrink>0?\.\d+))?")


def state_of(text: str) -> State:
    """Return the state that a text names: the inverse of ``str(state)``.

    >>> state_of("3"), state_of("2~0.5") == State(2, 0.5)
    (State(step=3, shrink=0.0, ladder=''), True)
    """
    found = _STATE.fullmatch(text)
    if found is None:
        raise BadInput(f"a candidate must be named like '3', '2~0.5' or 'views:3', got {text!r}")
    state = State(int(found["step"]), float(found["shrink"] or 0))
    return state.on(found["ladder"]) if found["ladder"] else state


def candidate_signals(seen: Observation) -> dict[State, Signals]:
    """Return the signals of every candidate of a case, M0 first; of one ladder, or of all named ones."""
    if not seen.ladders:
        return {State(step): signals for step, signals in enumerate(seen.signals)}
    found: dict[State, Signals] = {SOURCE: next(iter(seen.ladders.values()))[0]}
    for name, ladder in seen.ladders.items():
        found |= {State(step).on(name): signals for step, signals in enumerate(ladder) if step}
    return found


def with_agreement(
    seen: Observation, masks: Mapping[State, Mask], *, silent: Sequence[str] = (), background: bool = False
) -> Observation:
    """Add the signals of disagreement of every candidate to an observation; ``silent`` ones have no vote."""
    found = compared_masks(seen, masks, silent=silent, background=background)
    return added(seen, dict(zip(candidate_signals(seen), found.signals(), strict=True)))


def compared_masks(
    seen: Observation, masks: Mapping[State, Mask], *, silent: Sequence[str] = (), background: bool = False
) -> Candidates:
    """Compare the masks of all candidates of an observation, in its order."""
    states = list(candidate_signals(seen))
    lost = [state for state in states if state not in masks]
    if lost:
        raise BadInput(f"case {seen.case_id} has no mask of candidate {lost[0]}; give the masks of all candidates")
    mute = non_voting(seen, silent)
    voters = [k for k, state in enumerate(states) if str(state) not in mute]
    return candidates_of([masks[state] for state in states], voters=voters, background=background)


def non_voting(seen: Observation, silent: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the candidates without a vote: the ``silent`` ones, and failed views, whose masks repeat M0."""
    return (*silent, *(str(state) for state, signals in candidate_signals(seen).items() if signals.get("left_out")))


def added(seen: Observation, more: Mapping[State, Signals]) -> Observation:
    """Return the observation with further signals of its candidates."""
    signals = [{**one, **more.get(State(step), {})} for step, one in enumerate(seen.signals)]
    ladders = {
        name: [{**one, **more.get(State(step).on(name), {})} for step, one in enumerate(ladder)]
        for name, ladder in seen.ladders.items()
    }
    return replace(seen, signals=signals, ladders=ladders)


@dataclass(frozen=True)
class _AmongAll:
    """Base of the controllers that decide when all candidates of a case are known."""

    steps: int  # rungs of the ladder beyond M0; where several named ladders are shown they are complete anyway
    consensus: str  # the candidate made of the others, such as "17" or "views:17"
    ladders: tuple[str, ...] = ()  # named ladders that are read together; empty: the ladder in view
    silent: tuple[str, ...] = ()  # candidates without a vote; the consensus never has one
    background: bool = False
    cut_high: float = float("inf")  # from this size of the edit on, 1 - Dice(candidate, M0), M0 is deployed

    states = frozenset[State]()
    metadata = Metadata(among_candidates=True)

    def __post_init__(self) -> None:
        state_of(self.consensus)
        object.__setattr__(self, "silent", tuple(self.silent))
        object.__setattr__(self, "ladders", tuple(self.ladders))

    def compared(self, seen: Observation, masks: Mapping[State, Mask]) -> Observation:
        """Return the observation with the agreement signals added."""
        silent = (*self.silent, self.consensus)
        return with_agreement(seen, masks, silent=silent, background=self.background)

    def complete(self, seen: Observation) -> bool:
        """Return True if all candidates are known."""
        return bool(seen.ladders) or seen.step >= self.steps

    def _value(self, seen: Observation, signals: Signals, name: str) -> float:
        value = signals.get(name)
        if value is None:
            raise BadInput(f"case {seen.case_id} has no signal {name!r}; show the masks of all (compared), two or more")
        return float(value)

    def _verdict(
        self, seen: Observation, state: State, reason: str, *, action: Action = Action.KEEP, **more: Any
    ) -> Verdict:
        """Return the verdict: the candidate, or M0 if its edit is at least ``cut_high`` large."""
        same = candidate_signals(seen)[state].get("agreement_source")
        edit = None if same is None else 1 - same
        found: dict[str, Any] = {"coordinate": "edit", "value": edit, "cut_high": self.cut_high}
        if state == SOURCE:
            return Verdict(SOURCE, Action.ROLLBACK, reason=reason, **found)
        if self.cut_high < float("inf"):
            if edit is None:
                raise BadInput(f"case {seen.case_id} has no size of its edit; show the masks of all (compared)")
            if edit >= self.cut_high:
                why = f"M0: the edit of {seen.called(state)} ({edit:.4f}) is not below the cut {self.cut_high:.4f}"
                return Verdict(SOURCE, Action.ROLLBACK, reason=why, **found)
        return Verdict(state, action, reason=reason, **found, **more)


@dataclass(frozen=True)
class AgreementRule(_AmongAll):
    """A rule without a fitted model; ``low-agreement`` has one threshold, below which M0 is not kept."""

    rule: Literal["consensus", "agreement", "medoid", "low-agreement", "fixed"] = "consensus"
    threshold: float = float("inf")
    candidate: str = ""  # for the rule "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise BadInput(f"the rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.rule == "fixed":
            state_of(self.candidate)

    @property
    def learned(self) -> bool:
        """True if labels were used to fit the rule."""
        return self.rule == "low-agreement"

    @property
    def name(self) -> str:
        """Name in the registry of controllers."""
        names = {"agreement": "highest-agreement", "low-agreement": "consensus-where-low", "fixed": "fixed-candidate"}
        return names.get(self.rule, self.rule)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the ladders that the rule needs: a fixed candidate needs its own only."""
        return (state_of(self.candidate).ladder,) if self.rule == "fixed" and self.ladders else self.ladders

    @property
    def needs(self) -> frozenset[str]:
        """The signals that are read."""
        read = {"consensus": set[str](), "fixed": set[str](), "low-agreement": {"agreement"}}.get(
            self.rule, {"likeness"}
        )
        return frozenset({"agreement_source", *read})

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the candidate that the rule chooses; None until all are known."""
        if not self.complete(seen):
            return None
        consensus = state_of(self.consensus)
        candidates, mute = candidate_signals(seen), non_voting(seen, self.silent)
        single = [state for state in candidates if state != consensus and str(state) not in mute]
        if single == [SOURCE] and mute != self.silent:
            return self._verdict(seen, SOURCE, "M0: there is no other candidate")
        if self.rule == "consensus":
            return self._verdict(seen, consensus, "the consensus of the candidates")
        if self.rule == "fixed":
            state = state_of(self.candidate)
            return self._verdict(seen, state, f"{seen.called(state)} for every case")
        if self.rule == "low-agreement":
            own = candidates[SOURCE].get("agreement")
            if own is None:
                return self._verdict(seen, SOURCE, "all candidates are empty")
            if own < self.threshold:
                return self._verdict(seen, consensus, f"M0 agrees with the others with Dice {own:.3f} only")
            return self._verdict(seen, SOURCE, f"M0 agrees with the others with Dice {own:.3f}")
        likeness = {state: self._value(seen, signals, "likeness") for state, signals in candidates.items()}
        among = single if self.rule == "medoid" else list(candidates)
        best = max(among, key=lambda state: likeness[state])
        return self._verdict(seen, best, f"{seen.called(best)} agrees most with the others ({likeness[best]:.3f})")


FEATURES = ("agreement_gain", "edit", "supported_edit")
"""Of a candidate k against M0: agreement(k) - agreement(M0); 1 - Dice(k, M0); that times the support of its edit. All
are 0 for M0 itself, so a model without intercept expects no gain of no change."""


def features(signals: Signals, source: Signals) -> list[float] | None:
    """Return the features of one candidate; None if a signal is missing. A candidate equal to M0 has only zeros."""
    own, base, same = signals.get("agreement"), source.get("agreement"), signals.get("agreement_source")
    if own is None or base is None or same is None:
        return None
    edit = 1 - same
    return [own - base, edit, edit * (signals.get("support") or 0.0)]


@dataclass(frozen=True)
class Choose(_AmongAll):
    """Deploy the anchor, unless the lower bound of another candidate's gain over it is positive on this case.

    The anchor is the fixed candidate that surely gains on the calibration cases, or M0. gain(k) = weights . features(k)
    + own[k], fitted with shrinkage; ``replicates`` are the same numbers fitted without each calibration cluster in
    turn. The lower bound of gain(k) - gain(anchor) is the estimate minus ``spread`` jackknife standard errors; an
    infinite spread never leaves the anchor.
    """

    weights: tuple[float, ...] = ()
    own: tuple[tuple[str, float], ...] = ()  # gain of single candidates beyond the model, shrunk to 0
    replicates: tuple[tuple[tuple[float, ...], tuple[tuple[str, float], ...]], ...] = ()
    spread: float = 1.3
    anchor: str = "0"

    name = "choose"
    needs = frozenset({"agreement", "agreement_source", "support"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "own", "replicates"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        if len(self.weights) != len(FEATURES):
            raise BadInput(f"choose needs {len(FEATURES)} weights, got {len(self.weights)}; run casewise calibrate")
        if not self.spread >= 0:
            raise BadInput(f"the spread must be 0 or more, or infinite to always keep the anchor; got {self.spread}")
        state_of(self.anchor)

    def expected(self, seen: Observation) -> dict[State, tuple[float, float]]:
        """Gain over the anchor, and its lower bound, of every other candidate with known signals; M0 among them.

        Nothing where the signals of the anchor are missing, or where it is never left.
        """
        candidates, anchor = candidate_signals(seen), state_of(self.anchor)
        models = [(weights, dict(own)) for weights, own in ((self.weights, self.own), *self.replicates)]
        gains = {}
        for state, signals in candidates.items():
            x = features(signals, candidates[SOURCE])
            if state == SOURCE:
                gains[state] = np.zeros(len(models))
            elif x is not None:
                gains[state] = np.array([_gain(x, weights, own, str(state)) for weights, own in models])
        if anchor not in gains or self.spread == float("inf"):
            return {}
        found = {}
        for state in gains.keys() - {anchor}:
            gain, *drawn = gains[state] - gains[anchor]
            low = gain - self.spread * _jackknife_error(np.array(drawn))
            found[state] = (float(gain), float(low))
        return {state: found[state] for state in candidates if state in found}  # in the order of the candidates

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the anchor, or a candidate with a positive lower bound of gain; None until all are known."""
        if not self.complete(seen):
            return None
        expected, anchor = self.expected(seen), state_of(self.anchor)
        said = seen.called(anchor)
        best = max(expected, key=lambda state: expected[state][1], default=anchor)
        gain, low = expected.get(best, (0.0, 0.0))
        if low > 0:
            why = f"{seen.called(best)} is expected to gain {gain:+.4f} over {said}, at least {low:+.4f}"
            return self._verdict(seen, best, why)
        return self._verdict(seen, anchor, f"{said}: no other candidate is surely better on this case")


def _jackknife_error(drawn: Any) -> float:
    """sqrt((n - 1) / n * sum (x_i - mean)^2) of estimates that leave one cluster out each; 0 without any."""
    amount = len(drawn)
    return float(np.sqrt((amount - 1) / amount * ((drawn - drawn.mean()) ** 2).sum())) if amount else 0.0


def _frozen(value: Any) -> Any:
    """Return nested lists, as read from JSON, as nested tuples."""
    return tuple(_frozen(part) for part in value) if isinstance(value, (list, tuple)) else value


def _gain(x: Sequence[float], weights: Sequence[float], own: Mapping[str, float], name: str) -> float:
    # the own term of a candidate is 0 if the candidate changes nothing
    return float(np.dot(x, weights)) + own.get(name, 0.0) * float(x[1] > 0)

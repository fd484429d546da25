"""The words everyone shares: frozen records, checked when built, that go into archives as they are.

A *case* is one volume or image. Adaptation makes a *trajectory* for it: a ladder of candidate masks, step 0 being the
source model M0. A controller sees an *observation* (label-free signals of the steps so far) and answers with a
*verdict* that names a *state* of the ladder, or None for "one more step". What was decided, and why, is a *decision*.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from casewise.core.brief import brief, counted
from casewise.core.errors import BadInput
from casewise.core.formats import numbered

Mask = NDArray[Any]
"""Integer or bool labels over space: (rows, columns) or (slices, rows, columns)."""

Signals = Mapping[str, float | None]
"""Label-free signals of one step by name; None means "not computable here", never a stand-in number."""

CALIBRATION, EVALUATION = "calibration", "evaluation"
"""Splits with a meaning: what is fitted on, and what is locked until the exposure ledger says why it is read (F12)."""

_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_case_id(case_id: str) -> str:
    """Refuse ids that could leave a folder or a page: letters, digits, dot, dash, underscore; at most 128."""
    if not _SAFE_ID.fullmatch(case_id):
        raise BadInput(
            f"a case id holds 1-128 letters, digits, '.', '_' or '-' and does not begin with '.' or '-', "
            f"got {case_id!r}; rename the file or the row"
        )
    return case_id


_LADDER = re.compile(r"[a-z0-9][a-z0-9_+.-]{0,63}")


def check_ladder(name: str) -> str:
    """Refuse names of ladders that could leave a folder: small letters, digits, '-', '_', '+' and '.'; at most 64."""
    if not _LADDER.fullmatch(name):
        raise BadInput(
            f"a ladder is named by 1-64 small letters, digits, '-', '_', '+' or '.', beginning with a letter or digit, "
            f"got {name!r}"
        )
    return name


def made_case_id(name: str) -> str:
    """An id for whatever a file is called: the name itself where it is one, else a plain form of it and a short hash.

    The hash keeps names apart that look alike without their spaces and accents.

    >>> made_case_id("case_001"), made_case_id("Fall Müller (1)")
    ('case_001', 'Fall_Muller_1-6fd5cf')
    """
    if _SAFE_ID.fullmatch(name):
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("_.-")[:100] or "case"
    return f"{words}-{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """One volume or image, without its label: nothing that decides can see the truth (A1, A9)."""

    __repr__ = brief

    id: str
    image: NDArray[Any]  # (channel, *space)
    spacing_mm: tuple[float, ...] | None = None  # one per spatial axis; None where the header says nothing
    group: str | None = None  # site, vendor or condition: cut-points may differ by group
    cluster: str | None = None  # patient or sequence: cases of one cluster are resampled and split together
    split: str | None = None  # CALIBRATION, EVALUATION, or a name of your own

    def __post_init__(self) -> None:
        check_case_id(self.id)


@dataclass(frozen=True, order=True)
class State:
    """A rung of a case's ladder: step 0 is the source, step k is after update k, then shrunk toward the source.

    theta = theta_0 + (1 - shrink) * (theta_k - theta_0): shrink is the share of the way *back* to M0 (D10).
    """

    step: int
    shrink: float = 0.0
    ladder: str = ""  # which of several ladders of a case; M0 belongs to all of them and names none

    def __post_init__(self) -> None:
        if self.step < 0 or not 0 <= self.shrink < 1:
            raise BadInput(f"need step >= 0 and 0 <= shrink < 1, got step {self.step} and shrink {self.shrink}")
        if self.step == 0 and self.shrink:
            raise BadInput("step 0 is the source itself and cannot be shrunk toward it; use State(0)")
        if self.step == 0 and self.ladder:
            raise BadInput(f"step 0 is the source, which all ladders share; use State(0), not ladder {self.ladder!r}")
        if self.ladder:
            check_ladder(self.ladder)

    def __str__(self) -> str:
        step = f"{self.step}" if not self.shrink else f"{self.step}~{self.shrink:g}"
        return f"{self.ladder}:{step}" if self.ladder else step

    def on(self, ladder: str) -> State:
        """The same rung of a named ladder; M0 stays M0."""
        return replace(self, ladder=ladder if self.step else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; the ladder only where it has a name."""
        return {name: value for name, value in asdict(self).items() if name != "ladder" or value}


SOURCE = State(0)


DONE = "done"  # decided as the policy says
FALLBACK = "fallback"  # adaptation failed; M0 is deployed as it was predicted before
FAILED = "failed"  # there is no output


class Action(str, Enum):
    """What a decision did with the adaptation."""

    ROLLBACK = "rollback"  # deploy the cached M0 (D11)
    KEEP = "keep"  # deploy step k as it is
    SHRINK = "shrink"  # deploy step k, part of the way back to M0 (D10)
    GATE = "gate"  # deploy M0 plus the accepted regions of the step-1 edit (L3)


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """Every candidate of one case, in order, with the label-free signals of each (D14)."""

    __repr__ = brief

    case_id: str
    masks: tuple[Mask, ...]  # masks[0] is M0; masks[k] was predicted after update k
    signals: tuple[Signals, ...]  # signals[k] compares masks[k] with masks[0]
    shrunk: Mapping[State, Mask] = field(default_factory=dict)  # interpolated states that were materialized (D15)
    shrunk_signals: Mapping[State, Signals] = field(default_factory=dict)
    parameters: tuple[Mapping[str, NDArray[Any]], ...] | None = None  # adapted parameters per step, when asked for
    entropies: Mapping[str, NDArray[Any]] | None = None  # of every voxel by step ("entropy_1"), when asked for
    made_by: str = ""  # repr of the objective and its options
    seed: int = 0
    seconds: tuple[float, ...] = ()  # wall time of each step; seconds[0] is M0
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by signal: ms of a reading, MiB of peak
    diagnostics: tuple[Mapping[str, float], ...] = ()  # what the objective reported: loss, kept share, ...
    ladder: str = ""  # the name under which an archive keeps it, where it keeps several
    rungs: tuple[str, ...] = ()  # what each step after M0 is called, where they are not updates: "gamma(1.4)", "mean"
    left_out: Mapping[str, str] = field(default_factory=dict)  # rungs that could not be read and repeat M0: why
    ballots: NDArray[Any] | None = None  # (reading, class, voxel in 255ths) where any state differs from M0, if asked

    def __post_init__(self) -> None:
        if not self.masks or len(self.masks) != len(self.signals):
            raise BadInput(
                f"a trajectory needs one mask and one set of signals per step, beginning with M0; "
                f"got {len(self.masks)} masks and {len(self.signals)} sets of signals"
            )
        if self.rungs and len(self.rungs) != self.steps:
            raise BadInput(
                f"case {self.case_id} has {counted(self.steps, 'step')} after M0 and {len(self.rungs)} names for them"
            )
        shapes = {mask.shape for mask in (*self.masks, *self.shrunk.values())}
        if len(shapes) > 1:
            raise BadInput(f"masks of one case must share one shape, got {sorted(shapes)}; resample before recording")

    @property
    def steps(self) -> int:
        """The number of executed updates K."""
        return len(self.masks) - 1

    def mask(self, state: State) -> Mask:
        """The mask of a state; the very array that was recorded."""
        if state.ladder == self.ladder:
            state = state.on("")
        if state.shrink:
            if state not in self.shrunk:
                raise BadInput(
                    f"state {state} of case {self.case_id} was not recorded; record with shrink={state.shrink}"
                )
            return self.shrunk[state]
        if state.step > self.steps:
            raise BadInput(f"case {self.case_id} has steps 0 to {self.steps}, step {state.step} was asked for")
        return self.masks[state.step]


@dataclass(frozen=True)
class Observation:
    """What a controller may see: the case's name and group, and the signals of steps 0..k. No label, no image."""

    case_id: str
    group: str | None
    signals: Sequence[Signals]  # signals[0] is M0's (regions = delta = 0)
    cluster: str | None = None  # patient or sequence, for the record; monitors count it once
    ladders: Mapping[str, Sequence[Signals]] = field(default_factory=dict)  # whole ladders by name, where several
    rungs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what steps are called, by ladder; "": in view

    @property
    def step(self) -> int:
        """The number of updates made so far."""
        return len(self.signals) - 1

    def called(self, state: State) -> str:
        """What a person reads of a candidate: "M0", "gamma(1.4)", "views: mean", or its number without a name."""
        rungs = self.rungs.get(state.ladder, ())
        if not 0 < state.step <= len(rungs) or state.shrink:
            return f"candidate {state}" if state.step else "M0"
        rung = rungs[state.step - 1]
        return f"{state.ladder}: {rung}" if state.ladder else rung


@dataclass(frozen=True)
class Verdict:
    """A controller's answer: which state to deploy, and the evidence for it."""

    state: State
    action: Action
    bucket: str | None = None  # "low", "mid" or "hard" for routers
    coordinate: str | None = None  # the signal that was read
    value: float | None = None  # its value u
    cut_low: float | None = None
    cut_high: float | None = None
    accepted: tuple[int, ...] | None = None  # region numbers kept by a gate
    reason: str = ""  # one sentence for a person
    flagged: bool = False  # a person should look at what is deployed
    quality: float | None = None  # estimate of its metric, without a label
    quality_low: float | None = None  # conformal lower bound of it


@runtime_checkable
class Controller(Protocol):
    """Chooses a state from label-free signals. Frozen; the same object decides live and in replay."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]:
        """Signal names that must be present in every observation."""
        ...

    @property
    def states(self) -> frozenset[State]:
        """Shrunk states that it may ask for, so that they can be materialized (D15)."""
        ...

    def decide(self, seen: Observation) -> Verdict | None:
        """The verdict after the steps so far, or None for one more step."""
        ...


@dataclass(frozen=True)
class Decision:
    """What was deployed for one case, and why (E13). Goes to JSON as it is, an infinite cut as the word "inf"."""

    case_id: str
    action: Action
    state: State
    executed: int  # updates that were really made; a rollback after the probe counts 1 (A12)
    controller: str
    group: str | None = None
    bucket: str | None = None
    coordinate: str | None = None
    value: float | None = None
    cut_low: float | None = None
    cut_high: float | None = None
    accepted: tuple[int, ...] | None = None
    reason: str = ""
    state_hash: str = ""  # sha256 of the deployed mask
    calibration_id: str = ""  # which calibration the cut-points came from
    cluster: str | None = None  # patient or sequence of the case: what monitors count
    flagged: bool = False  # a person should look at what is deployed
    quality: float | None = None  # estimate of its metric, without a label
    quality_low: float | None = None  # conformal lower bound of it

    @property
    def deployed(self) -> int:
        """The depth of the deployed state: 0 for a rollback (A12)."""
        return self.state.step

    @property
    def rolled_back(self) -> bool:
        """Whether M0 is deployed."""
        return self.action is Action.ROLLBACK

    @classmethod
    def of(cls, seen: Observation, verdict: Verdict, controller: str, **more: Any) -> Decision:
        """The record of a verdict on what was seen."""
        who: dict[str, Any] = {"case_id": seen.case_id, "group": seen.group, "cluster": seen.cluster}
        return cls(**who, executed=seen.step, controller=controller, **vars(verdict), **more)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; what only a flagging policy says is left out where nothing is said."""
        plain = asdict(self)
        if self.quality is None and not self.flagged:
            plain = {name: value for name, value in plain.items() if name not in ("flagged", "quality", "quality_low")}
        plain["action"] = self.action.value
        plain["state"] = self.state.as_dict()
        plain["deployed"] = self.deployed
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Decision:
        """The inverse of :meth:`as_dict`."""
        values = {key: value for key, value in plain.items() if key != "deployed"}
        values |= {name: numbered(values.get(name)) for name in ("value", "cut_low", "cut_high")}
        values["action"] = Action(values["action"])
        values["state"] = State(**values["state"])
        if values.get("accepted") is not None:
            values["accepted"] = tuple(values["accepted"])
        return cls(**values)


@runtime_checkable
class Composer(Protocol):
    """A controller that makes its output from several candidates, such as a gate, rather than choosing one."""

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """The mask of a decision; ``mask`` gives that of any state of the case."""
        ...


def deployed(controller: Controller, mask: Callable[[State], Mask], decision: Decision) -> Mask:
    """The mask that a decision deploys: the one that the controller composes, or that of the state that it named."""
    if isinstance(controller, Composer):
        return controller.output(mask, decision)
    return mask(decision.state)


@dataclass(frozen=True)
class Binding:
    """What a policy or certificate was fitted on; another model, objective or loader refuses it."""

    model: str  # sha256 of the source weights
    objective: str  # repr of the objective, with learning rate, steps and parameter selection
    loader: str  # how images become inputs (backbone and preprocessing)
    measure: str  # min_area, foreground, connectivity

    def differences(self, other: Binding) -> list[str]:
        """Names of the fields that differ; how casewise 0.1 spelled a connectivity makes no difference."""
        pairs = zip(self._words(), other._words(), strict=True)
        return [name for name, (own, theirs) in zip(_BOUND, pairs, strict=True) if own != theirs]

    def _words(self) -> tuple[str, ...]:
        measure = self.measure.replace("connectivity=1", "connectivity=face")
        return self.model, self.objective, self.loader, measure


_BOUND = ("model", "objective", "loader", "measure")


def joint_binding(ladders: Mapping[str, tuple[Binding, int]]) -> Binding:
    """The binding of several ladders that are read together: how each was made, and how many candidates it holds.

    >>> one = Binding("m", "tent", "nifti", "min_area=16")
    >>> joint_binding({"b": (one, 4), "a": (replace(one, objective="views(blur)"), 2)}).objective
    'a (2): views(blur); b (4): tent'
    """
    words = [f"{name} ({steps}): {binding.objective}" for name, (binding, steps) in sorted(ladders.items())]
    return replace(next(iter(ladders.values()))[0], objective="; ".join(words))


@dataclass(frozen=True, repr=False)
class Policy:
    """A calibrated controller as data: all that a decision needs, and what it was fitted on. policy.json is this."""

    __repr__ = brief

    name: str  # "cardiac", "prostate", "driving", "default", "fixed-k", ...
    controller: str  # name in judge.controllers.CONTROLLERS
    options: Mapping[str, Any]  # arguments of that controller, cut-points included
    steps: int  # horizon K of the episodes it was fitted on
    binding: Binding | None = None  # None for policies that need no calibration (m0, fixed-k)
    adaptation: Mapping[str, Any] = field(default_factory=dict)  # how those cases were adapted; empty: see the binding
    calibration_id: str = ""  # sha256 over the calibration case ids and their archive
    calibration_cases: tuple[str, ...] = ()
    calibration_clusters: tuple[str, ...] = ()  # patient or sequence of each of them
    calibration_inputs: tuple[str, ...] = ()  # sha256 of the image of each of them, "" where it is not known
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options that differ by group (S2)
    preflight: Mapping[str, Any] = field(default_factory=dict)
    exposures: tuple[Mapping[str, Any], ...] = ()  # the ledger (F12)
    ladder: str = ""  # the ladder that it was fitted on, where an archive holds several
    ladders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # read together: how each was adapted
    schema: int = 1

    def __post_init__(self) -> None:
        for what, given in (("clusters", self.calibration_clusters), ("images", self.calibration_inputs)):
            if given and len(given) != len(self.calibration_cases):
                raise BadInput(
                    f"policy {self.name!r} names {len(self.calibration_cases)} calibration cases and "
                    f"{len(given)} {what} of them; run casewise calibrate again"
                )

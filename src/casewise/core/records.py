"""Records that all packages share; they are frozen and checked when built.

A *case* is one volume or image. Adaptation makes a *trajectory* for it: a ladder of candidate masks, step 0 being the
source model M0. A controller sees an *observation* (label-free signals of the steps so far) and answers with a
*verdict* that names a *state* of the ladder, or None for "one more step". A *decision* records the result and its
reason.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.core.json_records import from_plain
from casewise.core.text import brief, pluralize

Mask = NDArray[Any]
"""Integer or bool labels over space: (rows, columns) or (slices, rows, columns)."""

Signals = Mapping[str, float | None]
"""Label-free signals of one step by name; None means "not computable here", never a stand-in number."""

CALIBRATION, EVALUATION = "calibration", "evaluation"
"""Splits with a meaning: what is fitted on, and what is locked until the exposure ledger says why it is read (F12)."""

_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_case_id(case_id: str) -> str:
    """Refuse ids that are unsafe as file names: only letters, digits, dot, dash and underscore, at most 128."""
    if not _SAFE_ID.fullmatch(case_id):
        raise BadInput(
            f"a case id must have 1-128 letters, digits, '.', '_' or '-' and does not begin with '.' or '-', "
            f"got {case_id!r}; rename the file or table row"
        )
    return case_id


_LADDER = re.compile(r"[a-z0-9][a-z0-9_+.-]{0,63}")


def check_ladder(name: str) -> str:
    """Refuse ladder names that are unsafe as file names: only lower-case letters, digits and ``-_+.``, at most 64."""
    if not _LADDER.fullmatch(name):
        raise BadInput(
            "the name of a ladder must be 1-64 small letters, digits, '-', '_', '+' or '.', beginning with a letter "
            f"or digit, got {name!r}"
        )
    return name


def check_shares(**shares: float | None) -> None:
    """Refuse numbers that are not from 0 to 1, such as 10 where 10 % are meant; None is allowed."""
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise BadInput(f"{name} must be from 0 to 1, such as 0.1 for 10 %, got {share:g}")


def made_case_id(name: str) -> str:
    """Make a case id from a file name: the name itself if it is valid, else a plain form of it with a hash.

    The 16 hex digits distinguish names that differ only in spaces and accents. :func:`casewise.data.folders.list_cases`
    checks that no two files have the same id.

    >>> made_case_id("case_001"), made_case_id("Fall Müller (1)")
    ('case_001', 'Fall_Muller_1-6fd5cfce8870ed53')
    """
    if _SAFE_ID.fullmatch(name):
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("_.-")[:100] or "case"
    return f"{words}-{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """One volume or image, without its label, so that no code that decides can read the label (A1, A9).

    Args:
        id: Name of the case: letters, digits, ``.``, ``_`` and ``-``.
        image: Array of shape ``(channel, *space)``.
        spacing_mm: Size of a voxel, one number per spatial axis; None if it is unknown.
        group: Site, vendor or condition. Cut-points may differ by group.
        cluster: Patient or sequence. Cases of one cluster are split and resampled together.
        split: ``"calibration"``, ``"evaluation"``, or a name of your own.
        modality: Modality in the header of the image, such as ``"MR"``; None if it says nothing.

    Example:
        >>> import numpy as np
        >>> Case("heart_01", np.zeros((1, 4, 4)), cluster="patient_1").cluster
        'patient_1'
    """

    __repr__ = brief

    id: str
    image: NDArray[Any]
    spacing_mm: tuple[float, ...] | None = None
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    modality: str | None = None

    def __post_init__(self) -> None:
        check_case_id(self.id)
        object.__setattr__(self, "image", as_image(self.image, f"the image of case {self.id}"))


def as_image(given: Any, what: str = "an image") -> NDArray[Any]:
    """Return an image as an array; a tensor may be on another device or need gradients."""
    try:
        found = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (ValueError, TypeError):
        found = np.asarray(None)
    if found.dtype.kind not in "biuf" or found.ndim < 2:
        raise BadInput(f"{what} must be an array of numbers (channel, *space), got {type(given).__name__}")
    return found


@dataclass(frozen=True, order=True)
class State:
    """One candidate of a case: step 0 is M0, step k is after update k, optionally shrunk toward M0.

    The weights of a shrunk state are theta_0 + (1 - shrink) * (theta_k - theta_0) (D10).

    Args:
        step: Number of updates; 0 is M0.
        shrink: Share of the way back to M0, at least 0 and below 1.
        ladder: Name of the ladder if a case has several. M0 belongs to all of them and names none.

    Example:
        >>> str(State(2, shrink=0.5))
        '2~0.5'
    """

    step: int
    shrink: float = 0.0
    ladder: str = ""

    def __post_init__(self) -> None:
        if self.step < 0 or not 0 <= self.shrink < 1:
            raise BadInput(f"need step >= 0 and 0 <= shrink < 1, got step {self.step} and shrink {self.shrink}")
        if self.step == 0 and self.shrink:
            raise BadInput("step 0 is the source and cannot be interpolated toward itself; use State(0)")
        if self.step == 0 and self.ladder:
            raise BadInput(f"step 0 is the source, which all ladders share; use State(0), not ladder {self.ladder!r}")
        if self.ladder:
            check_ladder(self.ladder)

    def __str__(self) -> str:
        step = f"{self.step}" if not self.shrink else f"{self.step}~{self.shrink:g}"
        return f"{self.ladder}:{step}" if self.ladder else step

    def on(self, ladder: str) -> State:
        """Return the same state of a named ladder; M0 stays M0."""
        return replace(self, ladder=ladder if self.step else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; the ladder only where it has a name."""
        return {name: value for name, value in asdict(self).items() if name != "ladder" or value}


SOURCE = State(0)


DONE = "done"  # decided as the policy says
FALLBACK = "fallback"  # adaptation failed; M0 is deployed as it was predicted before
FAILED = "failed"  # there is no output


class Action(str, Enum):
    """The action of a decision."""

    ROLLBACK = "rollback"  # deploy the cached M0 (D11)
    KEEP = "keep"  # deploy step k as it is
    SHRINK = "shrink"  # deploy step k, part of the way back to M0 (D10)
    GATE = "gate"  # deploy M0 plus the accepted regions of the step-1 edit (L3)


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """Every candidate of one case in order, with the label-free signals of each (D14).

    Args:
        case_id: Name of the case.
        masks: Candidates; ``masks[0]`` is M0, ``masks[k]`` was predicted after update k.
        signals: Signals by candidate; ``signals[k]`` compares ``masks[k]`` with M0.
        shrunk: Masks of interpolated states (D15).
        shrunk_signals: Signals of interpolated states.
        parameters: Adapted parameters of each step, if requested.
        made_by: The objective with its options, as text.
        seed: Seed of the run.
        seconds: Wall time of each step; ``seconds[0]`` is M0.
        spent: Cost of each signal: milliseconds per step and MiB of peak memory.
        diagnostics: Values that the objective reported for each step, such as the loss.
        ladder: Name of the ladder in an archive.
        rungs: Names of the candidates after M0 if they are not updates, such as ``"gamma(1.4)"``.
        left_out: Candidates that could not be predicted and repeat M0, with the reason.
        fold: Tuned weights that made the candidates: ``"fold-2"`` or ``"mean"``.
        trained_on: Patients whose labels trained those weights.
        appearance: Appearance of the image for the model, in label-free numbers; empty if it was not measured.

    Example:
        >>> import numpy as np
        >>> Trajectory("heart_01", (np.zeros((2, 2), int), np.ones((2, 2), int)), ({}, {})).steps
        1
    """

    __repr__ = brief

    case_id: str
    masks: tuple[Mask, ...]
    signals: tuple[Signals, ...]
    shrunk: Mapping[State, Mask] = field(default_factory=dict)
    shrunk_signals: Mapping[State, Signals] = field(default_factory=dict)
    parameters: tuple[Mapping[str, NDArray[Any]], ...] | None = None
    made_by: str = ""
    seed: int = 0
    seconds: tuple[float, ...] = ()
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    diagnostics: tuple[Mapping[str, float], ...] = ()
    ladder: str = ""
    rungs: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    fold: str = ""
    trained_on: tuple[str, ...] = ()
    appearance: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.masks or len(self.masks) != len(self.signals):
            raise BadInput(
                f"a trajectory needs one mask and one set of signals per step, beginning with M0; "
                f"got {len(self.masks)} masks and {len(self.signals)} sets of signals"
            )
        if self.rungs and len(self.rungs) != self.steps:
            raise BadInput(
                f"case {self.case_id} has {pluralize(self.steps, 'step')} after M0 and {len(self.rungs)} names for them"
            )
        shapes = {mask.shape for mask in (*self.masks, *self.shrunk.values())}
        if len(shapes) > 1:
            raise BadInput(f"masks of one case must share one shape, got {sorted(shapes)}; resample before recording")

    @property
    def steps(self) -> int:
        """The number of executed updates K."""
        return len(self.masks) - 1

    def mask(self, state: State) -> Mask:
        """Return the recorded mask of a state."""
        if state.ladder == self.ladder:
            state = state.on("")
        if state.shrink:
            if state not in self.shrunk:
                raise BadInput(
                    f"state {state} of case {self.case_id} was not recorded; record with shrink={state.shrink}"
                )
            return self.shrunk[state]
        if state.step > self.steps:
            raise BadInput(f"case {self.case_id} has steps 0 to {self.steps}, got step {state.step}")
        return self.masks[state.step]


@dataclass(frozen=True)
class Observation:
    """The input of a controller: the case's name and group, and the signals of steps 0..k. No label, no image."""

    case_id: str
    group: str | None
    signals: Sequence[Signals]  # signals[0] is M0's (regions = delta = 0)
    cluster: str | None = None  # patient or sequence, for the record; monitors count it once
    ladders: Mapping[str, Sequence[Signals]] = field(default_factory=dict)  # whole ladders by name, where several
    rungs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names of steps by ladder; "": the one in view

    @property
    def step(self) -> int:
        """The number of updates made so far."""
        return len(self.signals) - 1

    def called(self, state: State) -> str:
        """Return the name of a candidate for messages: "M0", "gamma(1.4)", "views: mean", or its number."""
        rungs = self.rungs.get(state.ladder, ())
        if not 0 < state.step <= len(rungs) or state.shrink:
            return f"candidate {state}" if state.step else "M0"
        return candidate_name(state.ladder, rungs[state.step - 1])


def candidate_name(ladder: str, rung: str) -> str:
    """Return the name of a candidate for people, such as "views-mri: mean".

    >>> candidate_name("tuned", "1"), candidate_name("tuned", "average")
    ('tuned: weights as tuned', 'tuned: average with the original')
    """
    words = {"1": "weights as tuned", "average": "average with the original"} if ladder.startswith("tuned") else {}
    return f"{ladder}: {words.get(rung, rung)}" if ladder else rung


@dataclass(frozen=True)
class Verdict:
    """A controller's answer: which state to deploy, and the evidence for it."""

    state: State
    action: Action
    bucket: str | None = None  # "low", "mid" or "hard" for routers
    coordinate: str | None = None  # the signal that was read
    value: float | None = None  # value u of the coordinate
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
    def name(self) -> str:
        """Name in the registry of controllers."""

    @property
    def needs(self) -> frozenset[str]:
        """Signal names that must be present in every observation."""

    @property
    def states(self) -> frozenset[State]:
        """Shrunk states that it may ask for, so that they can be materialized (D15)."""

    def decide(self, seen: Observation) -> Verdict | None:
        """The verdict after the steps so far, or None for one more step."""


@dataclass(frozen=True)
class Decision:
    """The state that was deployed for one case, and why (E13).

    It is written to JSON as it is, with an infinite cut as the word "inf".

    Args:
        case_id: Name of the case.
        action: Roll back, keep, shrink or gate.
        state: The deployed state.
        executed: Number of updates that were made; a rollback after the first step counts 1 (A12).
        controller: Name of the controller.
        group: Site, vendor or condition of the case.
        bucket: ``"low"``, ``"mid"`` or ``"hard"`` for routers.
        coordinate: Signal that the controller read.
        value: Value of that signal.
        cut_low: Cut-point between low and mid.
        cut_high: Cut-point between mid and hard.
        accepted: Numbers of the regions that a gate accepted.
        reason: One sentence for a person.
        state_hash: sha256 of the deployed mask.
        calibration_id: Calibration that the cut-points came from.
        cluster: Patient or sequence, which monitors count once.
        flagged: True if a person should check the deployed mask.
        quality: Estimated metric of the deployed mask, without a label.
        quality_low: Conformal lower bound of that metric.
        cleanup: Cleanup that changed the chosen mask; empty if it changed nothing.
        agreement: Agreement of the deployed mask with the other candidates, where all of them were compared.
        foreground: Share of the image that the deployed mask covers; measured live, for monitors.

    Example:
        >>> Decision("heart_01", Action.ROLLBACK, State(0), executed=1, controller="router").rolled_back
        True
    """

    case_id: str
    action: Action
    state: State
    executed: int
    controller: str
    group: str | None = None
    bucket: str | None = None
    coordinate: str | None = None
    value: float | None = None
    cut_low: float | None = None
    cut_high: float | None = None
    accepted: tuple[int, ...] | None = None
    reason: str = ""
    state_hash: str = ""
    calibration_id: str = ""
    cluster: str | None = None
    flagged: bool = False
    quality: float | None = None
    quality_low: float | None = None
    cleanup: str = ""
    agreement: float | None = None
    foreground: float | None = field(default=None, compare=False)

    @property
    def deployed(self) -> int:
        """The depth of the deployed state: 0 for a rollback (A12)."""
        return self.state.step

    @property
    def rolled_back(self) -> bool:
        """True if M0 is deployed."""
        return self.action is Action.ROLLBACK

    @classmethod
    def of(cls, seen: Observation, verdict: Verdict, controller: str, **more: Any) -> Decision:
        """Make a decision from an observation and a verdict."""
        who: dict[str, Any] = {"case_id": seen.case_id, "group": seen.group, "cluster": seen.cluster}
        return cls(**who, executed=seen.step, controller=controller, **vars(verdict), **more)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; empty flag and cleanup fields are left out."""
        plain = asdict(self)
        if self.quality is None and not self.flagged:
            plain = {name: value for name, value in plain.items() if name not in ("flagged", "quality", "quality_low")}
        for name in ("cleanup", "agreement", "foreground"):
            if not plain[name] and plain[name] != 0:
                plain.pop(name)
        plain["action"] = self.action.value
        plain["state"] = self.state.as_dict()
        plain["deployed"] = self.deployed
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Decision:
        """The inverse of :meth:`as_dict`."""
        if isinstance(plain, Mapping):
            plain = {key: value for key, value in plain.items() if key != "deployed"}
        return from_plain(cls, plain, "a decision")


def deployed(controller: Controller, mask: Callable[[State], Mask], decision: Decision) -> Mask:
    """Return the mask that a decision deploys.

    A controller that composes its mask from several candidates, such as a gate, has ``output(mask, decision)``;
    otherwise it is the mask of the deployed state. ``mask`` gives the mask of any state of the case.
    """
    output: Callable[..., Mask] | None = getattr(controller, "output", None)
    return mask(decision.state) if output is None else output(mask, decision)


@dataclass(frozen=True)
class Binding:
    """Identity of the data that a policy or certificate was fitted on; it is refused for other data."""

    model: str  # sha256 of the source weights
    objective: str  # name of what makes candidates: "Tent", "views", "members", "tuned", or of an imported method
    loader: str  # how images become inputs (backbone and preprocessing)
    measure: str  # min_area, foreground, connectivity
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the objective, as in JSON

    def differences(self, other: Binding) -> list[str]:
        """Return the names of the fields and options that differ."""
        mine, theirs = self.facts, other.facts
        return [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]

    @property
    def facts(self) -> dict[str, Any]:
        """All fields and options by name."""
        return {name: value for name, value in vars(self).items() if name != "options"} | dict(self.options)


def joint_binding(ladders: Mapping[str, tuple[Binding, int]]) -> Binding:
    """Return the binding of several ladders that are read together, with the number of candidates of each.

    >>> one = Binding("m", "Tent", "nifti", "min_area=16")
    >>> joint = joint_binding({"b": (one, 4), "a": (replace(one, objective="views"), 2)})
    >>> joint.objective, joint.options["a"]
    ('a, b', {'objective': 'views', 'steps': 2})
    """
    first = next(iter(ladders.values()))[0]
    options = {
        name: {"objective": binding.objective, "steps": steps, **binding.options}
        for name, (binding, steps) in sorted(ladders.items())
    }
    return replace(first, objective=", ".join(options), options=options)


@dataclass(frozen=True, repr=False)
class Policy:
    """A calibrated controller as data: all numbers that a decision needs, and the data that they were fitted on.

    ``policy.json`` contains a policy.

    Args:
        name: Name of the design, such as ``"cardiac"`` or ``"default"``.
        controller: Name of the controller in ``casewise.judge.controllers.CONTROLLERS``.
        options: Arguments of that controller, cut-points included.
        steps: Number of updates or candidates of the cases that it was fitted on.
        binding: Data that it was fitted on; None for policies without calibration (``m0``, ``fixed-k``).
        adaptation: Adaptation of the calibration cases; empty: see ``binding``.
        calibration_id: sha256 over the ids of the calibration cases and their archive.
        calibration_cases: Ids of the calibration cases.
        calibration_clusters: Patient or sequence of each calibration case.
        calibration_inputs: sha256 of the image of each calibration case; empty if unknown.
        groups: Options that differ by group (S2).
        preflight: Results of calibration on the holdout.
        exposures: Recorded looks at evaluation labels (F12).
        ladder: Ladder that it was fitted on, if an archive has several.
        ladders: For a policy that reads several ladders: how each was made.
        cleanup: Cleanup of the chosen mask, such as ``"largest(1,2)"``; M0 is never cleaned after a rollback.
        appearance: Appearance of the calibration images for the model.
        flag: Quality model, and the limit below which a case is flagged.
        schema: Version of the file format.

    Example:
        >>> Policy("m0", "m0", {}, steps=0).controller
        'm0'
    """

    __repr__ = brief

    name: str
    controller: str
    options: Mapping[str, Any]
    steps: int
    binding: Binding | None = None
    adaptation: Mapping[str, Any] = field(default_factory=dict)
    calibration_id: str = ""
    calibration_cases: tuple[str, ...] = ()
    calibration_clusters: tuple[str, ...] = ()
    calibration_inputs: tuple[str, ...] = ()
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preflight: Mapping[str, Any] = field(default_factory=dict)
    exposures: tuple[Mapping[str, Any], ...] = ()
    ladder: str = ""
    ladders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cleanup: str = ""
    appearance: Mapping[str, Any] = field(default_factory=dict)
    flag: Mapping[str, Any] = field(default_factory=dict)
    schema: int = 2

    def __post_init__(self) -> None:
        for what, given in (("clusters", self.calibration_clusters), ("images", self.calibration_inputs)):
            if given and len(given) != len(self.calibration_cases):
                raise BadInput(
                    f"policy {self.name!r} names {len(self.calibration_cases)} calibration cases and "
                    f"{len(given)} {what} of them; run casewise calibrate again"
                )

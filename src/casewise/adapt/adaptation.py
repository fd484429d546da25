"""Options of candidates: how the candidates of a case are made, measured and stored.

The objective is a gradient method ("tent"), or forward passes of the frozen network: "views:mri" predicts the case
under a set of views, "running:mri" returns the consensus so far at every step, "members:FOLDER" predicts with other
models, "tuned" with weights that were tuned on labelled cases.

Everything that adapts takes an :class:`Adaptation`: ``Episode``, ``guard``, ``Deployment`` and with it ``record``,
``predict``, ``serve`` and workers on other machines. A new option is a field here and, for the command line, a
line in ``cli/options.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise.core.errors import BadInput, UnsafeInput
from casewise.core.json_records import from_plain
from casewise.core.records import Binding, Policy, State
from casewise.core.registry import Registry, check_names_no_code
from casewise.measure.signals.risk import RiskStatistics

if TYPE_CHECKING:
    from torch import nn

    from casewise.adapt.backbones import Backbone
    from casewise.adapt.objective import Objective

DEFAULT_RATE = 5e-4  # default of objectives that name no rate: the medical budget of the paper
STATISTICS = ("source", "batch")
RESETS = ("case", "stream")
CONSENSUSES = ("mean", "vote", "medoid")


@dataclass(frozen=True)
class Adaptation:
    """Options of candidates: how they are made, measured and recorded.

    Args:
        objective: Name of a proposer (``"tent"``, ``"views:mri"``, ``"tuned"``), an address
            ``package.module:Name``, or an object.
        learning_rate: Learning rate; None: the objective's own.
        parameters: Parameters that may move: ``all-norm``, ``decoder-norm``, ``encoder-norm``, ``all``, or
            patterns of names.
        steps: Updates per case; under a policy the largest number.
        seed: Seed of the run.
        min_area: Smallest region, in voxels, that counts.
        foreground: Compare foreground only; False compares every class.
        max_slices: Slices or patches per batch; changes memory, not results.
        modulation: Mode of careful updates after risky edits, such as ``param-subset``.
        statistics: Statistics of calibration cases that the risk of a modulation is measured with.
        batch_statistics: BatchNorm statistics of the ``"source"`` or of the ``"batch"``; M0 always uses the source.
        signals: Further signals, by name or as functions.
        shrink: States between a step and M0 that are predicted too.
        reset: ``"case"``, or ``"stream"`` to carry weights and the state of the objective from case to case
            (record only).
        keep_parameters: Keep the adapted parameters of each step.
        consensus: Consensus of views or members: ``mean``, ``vote`` or ``medoid``.
        mirrored_views: Predict views with the model's own mirroring too; M0 always uses it.
        tuned: Folder with tuned weights, for ``"tuned"`` and ``"tuned+views:..."``.
        ensemble: For tuned weights: the mean of the folds' predictions instead of their mean weights.
        crossfit: For tuned weights: each case gets the fold that left its patient out.

    Example:
        >>> Adaptation("tent", steps=2).steps
        2
    """

    objective: Any = "eata"
    learning_rate: float | None = None
    parameters: str | tuple[str, ...] = "all-norm"
    steps: int = 4
    seed: int = 0
    min_area: int = 16
    foreground: bool = True
    max_slices: int | None = None
    modulation: str | None = None
    statistics: RiskStatistics | None = None
    batch_statistics: str = "source"
    signals: tuple[Any, ...] = ()
    shrink: tuple[State, ...] = ()
    reset: str = "case"
    keep_parameters: bool = False
    consensus: str = "mean"
    mirrored_views: bool = False
    tuned: str | None = None
    ensemble: bool = False
    crossfit: bool = False

    def __post_init__(self) -> None:
        for name in ("signals", "shrink"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.tuned, Path):
            object.__setattr__(self, "tuned", str(self.tuned))
        if isinstance(self.parameters, list):
            object.__setattr__(self, "parameters", tuple(self.parameters))
        if not isinstance(self.steps, Integral) or self.steps < 0:
            raise BadInput(f"steps must be a whole number, 0 or more, got {self.steps!r}")
        rate = self.learning_rate
        if rate is not None and (not isinstance(rate, Real) or not 0 <= rate < float("inf")):
            raise BadInput(f"a learning rate must be a number, 0 or more, got {rate!r}")
        if self.max_slices is not None and self.max_slices < 1:
            raise BadInput(f"max_slices must be at least 1, got {self.max_slices}")
        for name, known in (("batch_statistics", STATISTICS), ("reset", RESETS), ("consensus", CONSENSUSES)):
            if getattr(self, name) not in known:
                raise BadInput(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, objective: Any, /, **knobs: Any) -> Adaptation:
        """Make an adaptation from an objective, or change fields of an existing adaptation.

        >>> Adaptation.of("tent", steps=2).steps
        2
        """
        for name in knobs:
            _KNOBS[name]  # raises UnknownName with a suggestion
        return replace(objective, **knobs) if isinstance(objective, cls) else cls(objective, **knobs)

    def built(self) -> Objective:
        """Return the objective, with its modulation if there is one."""
        from casewise.adapt.modulation import Modulated
        from casewise.adapt.objectives import objective_of

        plain = objective_of(self.objective)
        if self.modulation is None:
            return plain
        if self.statistics is None:
            raise BadInput(
                f"modulation {self.modulation} measures risk with the statistics of calibration cases; record them "
                "without modulation first, and name that archive with --set statistics=ARCHIVE"
            )
        return Modulated(plain, self.modulation, self.statistics)

    @property
    def is_gradient(self) -> bool:
        """True if the objective makes gradient updates; False for views, members and tuned weights."""
        from casewise.adapt.proposers import is_gradient

        return is_gradient(self.objective)

    def horizon(self, network: Backbone | nn.Module) -> int:
        """Return the number of states after M0: updates, or forward passes and their consensus."""
        from casewise.adapt.proposers import proposer_of

        return proposer_of(self).states(network)

    def rate(self, objective: Objective) -> float:
        """Return the given learning rate, else that of the objective."""
        own = getattr(objective, "learning_rate", DEFAULT_RATE)
        return float(own if self.learning_rate is None else self.learning_rate)

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Return the model and options that a policy for these candidates is bound to; not the number of steps."""
        from casewise.adapt.proposers import proposer_of

        return proposer_of(self).binding(network)

    def as_plain(self) -> dict[str, Any]:
        """Return the fields for JSON, without options that only choose what is recorded; unset fields are left out."""
        plain = asdict(replace(self, objective="", signals=(), shrink=()))
        plain["objective"] = self.objective if isinstance(self.objective, str) else address_of(self.objective)
        kept = {name: value for name, value in plain.items() if name not in _KEPT}
        views = str(plain["objective"]).startswith(("views:", "running:", "tuned+views:"))
        said = (*_ALWAYS, "mirrored_views") if views else _ALWAYS
        return {name: value for name, value in kept.items() if name in said or value != _DEFAULTS[name]}

    @classmethod
    def from_plain(
        cls, plain: Mapping[str, Any], *, typed: str | None = None, where: str = "the archive"
    ) -> Adaptation:
        """Make an adaptation from the fields in a file; the inverse of :meth:`as_plain`.

        Args:
            plain: The adaptation as a file holds it.
            typed: Objective that the person gave; an objective by address must be the same.
            where: Name of the file in errors.

        Raises:
            UnsafeInput: If any field names code by address, or a field is one that casewise never writes.
        """
        from casewise.adapt.objectives import check_named_in_file

        if not isinstance(plain, Mapping):
            raise BadInput(f"{where} must describe an adaptation by fields, got {plain!r:.60}; record it again")
        check_named_in_file(plain.get("objective"), typed=typed, where=where)
        check_names_no_code({name: value for name, value in plain.items() if name != "objective"}, where=where)
        if unwritten := [name for name in _KEPT if name in plain]:
            raise UnsafeInput(f"{where} sets {', '.join(unwritten)}, which casewise never writes; record it again")
        return from_plain(cls, plain, where, "record it again")


def address_of(objective: Any) -> str:
    """Return ``package.module:name`` of a function or a class, and the repr of any other object."""
    named = inspect.isfunction(objective) or inspect.isclass(objective)
    return f"{objective.__module__}:{objective.__qualname__}" if named else repr(objective)


def proposers_of(
    policy: Policy, *, typed: str | None = None, folder: str | Path | None = None
) -> dict[str, Adaptation]:
    """Return the proposers that a policy was fitted with, by the names of their ladders; empty for one without.

    Args:
        policy: The policy.
        typed: Address of an objective of the user's own that may be imported, because the user typed it.
        folder: Folder that paths of tuned weights start from; they must be inside it.
    """
    where = f"policy {policy.name!r}"
    one = Adaptation.from_plain(policy.adaptation, typed=typed, where=where) if policy.adaptation else None
    if policy.ladders:
        found = {name: Adaptation.from_plain(how, typed=typed, where=where) for name, how in policy.ladders.items()}
    elif one is not None:
        found = {policy.ladder: replace(one, steps=policy.steps)}
    else:
        return {}
    if folder is None:
        return found
    for how in found.values():
        if how.tuned is not None and (Path(how.tuned).is_absolute() or ".." in Path(how.tuned).parts):
            raise UnsafeInput(f"{where} reads weights at {how.tuned}, outside of {folder}; fit again")
    return {
        name: how if how.tuned is None else replace(how, tuned=str(Path(folder) / how.tuned))
        for name, how in found.items()
    }


_KNOBS = Registry("option of an episode", {field.name: field.name for field in fields(Adaptation)})
_DEFAULTS = {field.name: field.default for field in fields(Adaptation) if field.default is not MISSING}
_KEPT = ("signals", "shrink", "keep_parameters", "crossfit")
_ALWAYS = (
    "objective", "learning_rate", "parameters", "steps", "seed", "min_area", "foreground", "max_slices",
)  # fmt: skip

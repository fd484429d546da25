"""How candidates of a case are proposed: the only place that spells the knobs of an episode.

The objective is a gradient method ("tent"), or forward passes of the frozen network: "views:mri" reads the case under a
set of views, "running:mri" deploys their consensus so far at every step, "members:FOLDER" reads it with other models.

Everything that adapts takes an :class:`Adaptation`: ``Episode``, ``guard``, ``Deployment`` and with it ``record``,
``predict``, ``serve`` and workers on other machines. A new knob is a field here and, where the command line should have
it, a line in ``cli/options.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise.archive.layout import measure_words
from casewise.core.errors import BadInput
from casewise.core.records import Binding, Policy, State
from casewise.core.registry import Registry
from casewise.measure.signals.risk import RiskStatistics

if TYPE_CHECKING:
    from torch import nn

    from casewise.adapt.backbones import Backbone
    from casewise.adapt.objective import Objective

DEFAULT_RATE = 5e-4  # of an objective that names none: the medical budget of the paper
PRIOR = 16.0  # how many samples the source statistics are worth when blended (Schneider et al.; MEMO's 16/17)
STATISTICS = ("source", "batch", "blend")
PRECISIONS = ("bfloat16", "float16")
ARRAYS = "array"  # the loader of a bare network: whoever calls it makes the arrays


@dataclass(frozen=True)
class Adaptation:
    """What an objective does to the network on each case, how that is measured, and what is kept of it."""

    objective: Any = "eata"  # a name, an address "package.module:Name", or an object with begin(subject)
    learning_rate: float | None = None  # None: the objective's own
    parameters: str | tuple[str, ...] = "all-norm"  # which ones may move, see adapt/parameters.py
    steps: int = 4  # updates for each case; under a policy the most that are made
    seed: int = 0
    min_area: int = 16  # voxels of the smallest region that counts
    foreground: bool = True  # compare foreground with foreground, or every class
    max_slices: int | None = None  # slices or patches at once: changes memory, not results
    modulation: str | None = None  # a mode of adapt/optimizers.py: updates that grow careful as edits grow risky
    statistics: RiskStatistics | None = None  # what the risk of a modulation is measured with
    batch_statistics: str = "source"  # "source", "batch" or "blend"; M0 is always predicted in source mode
    blend_prior: float = PRIOR
    group_instance_norm: bool = False  # see adapt/parameters.py
    autocast: str | None = None  # "bfloat16" or "float16"
    channels_last: bool = False
    compile: bool = False
    cache_frozen: bool = False  # see adapt/forwards.py
    signals: tuple[Any, ...] = ()  # extra ones, by name or as functions, see adapt/probes/__init__.py
    shrink: tuple[State, ...] = ()  # states between a step and M0 that are predicted too
    keep_parameters: bool = False
    keep_entropy: bool = False
    consensus: str = "mean"  # of views or members: mean, weighted, vote, medoid or intent
    weights: tuple[tuple[str, float], ...] = ()  # for "weighted": (view, weight); a view that is not named has 1
    mirrored_views: bool = False  # read views with the model's own mirroring too; M0 always is, where it has one
    source_statistics: str | None = None  # file of casewise source-statistics, for the views that need it
    keep_ballots: bool = False  # keep all probabilities where readings differ, so that consensuses can be compared

    def __post_init__(self) -> None:
        for name in ("signals", "shrink"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "weights", tuple((str(name), float(value)) for name, value in self.weights))
        if isinstance(self.source_statistics, Path):
            object.__setattr__(self, "source_statistics", str(self.source_statistics))
        if isinstance(self.parameters, list):
            object.__setattr__(self, "parameters", tuple(self.parameters))
        if self.steps < 0:
            raise BadInput(f"steps is 0 or more, got {self.steps}")
        if self.max_slices is not None and self.max_slices < 1:
            raise BadInput(f"max_slices is at least 1, got {self.max_slices}")
        if self.batch_statistics not in STATISTICS:
            raise BadInput(f"batch_statistics is one of {', '.join(STATISTICS)}, got '{self.batch_statistics}'")
        if self.autocast is not None and self.autocast not in PRECISIONS:
            raise BadInput(f"autocast is one of {', '.join(PRECISIONS)} or None, got '{self.autocast}'")
        if self.compile and self.cache_frozen:
            raise BadInput("compile and cache_frozen exclude each other: caching watches modules that compiling fuses")

    @classmethod
    def of(cls, objective: Any, /, **knobs: Any) -> Adaptation:
        """An adaptation with an objective and further fields by name; an adaptation is taken as it is, plus those.

        >>> Adaptation.of("tent", steps=2).steps
        2
        """
        for name in knobs:
            _KNOBS[name]  # raises UnknownName, which says what was probably meant
        return replace(objective, **knobs) if isinstance(objective, cls) else cls(objective, **knobs)

    def built(self) -> Objective:
        """The objective, under its modulation where there is one."""
        from casewise.adapt.objectives import objective_of
        from casewise.adapt.optimizers import Modulated

        plain = objective_of(self.objective)
        if self.modulation is None:
            return plain
        if self.statistics is None:
            raise BadInput(
                f"modulation {self.modulation} measures risk with the statistics of calibration cases; record them "
                "without modulation first, and name that archive with --statistics"
            )
        return Modulated(plain, self.modulation, self.statistics)

    @property
    def forward_only(self) -> Any:
        """The readings that the objective names, or None where it is a gradient method."""
        from casewise.adapt.proposers import forward_proposer

        return forward_proposer(self)

    @property
    def _names_views(self) -> bool:
        """Whether the objective is a list of views; nothing of it is looked up."""
        return isinstance(self.objective, str) and self.objective.startswith(("views:", "running:"))

    def horizon(self, network: Backbone | nn.Module) -> int:
        """Candidates after M0: updates, or readings and their consensus."""
        readings = self.forward_only
        return self.steps if readings is None else int(readings.steps(network))

    def rate(self, objective: Objective) -> float:
        """The learning rate: the one that was asked for, else the objective's own."""
        own = getattr(objective, "learning_rate", DEFAULT_RATE)
        return float(own if self.learning_rate is None else self.learning_rate)

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """What a policy that was fitted with this may be used with. The number of steps is the policy's own."""
        from torch import nn

        from casewise.adapt.snapshot import fingerprint

        if (readings := self.forward_only) is not None:
            bound: Binding = readings.binding(network)
            return bound
        objective = self.built()
        how = f"{objective!r} learning_rate={self.rate(objective):g} parameters={self.parameters}{self._numerics()}"
        measure = measure_words(min_area=self.min_area, foreground=self.foreground)
        if isinstance(network, nn.Module):
            return Binding(fingerprint(network), how, ARRAYS, measure)
        return Binding(network.fingerprint, how, network.loader, measure)

    def _numerics(self) -> str:
        """Other numerics than usual, which make other candidates; nothing where they are the usual ones."""
        words = [] if self.batch_statistics == "source" else [f" batch_statistics={self.batch_statistics}"]
        words += [f" blend_prior={self.blend_prior:g}"] if self.batch_statistics == "blend" else []
        words += [] if self.autocast is None else [f" autocast={self.autocast}"]
        return "".join(words)

    def as_plain(self) -> dict[str, Any]:
        """For JSON: how the candidates are made, without what is kept of them; later fields only where they are set."""
        plain = asdict(replace(self, objective="", signals=(), shrink=()))
        plain["objective"] = self.objective if isinstance(self.objective, str) else repr(self.objective)
        kept = {name: value for name, value in plain.items() if name not in _KEPT}
        said = (*_ALWAYS, "mirrored_views") if self._names_views else _ALWAYS
        return {name: value for name, value in kept.items() if name in said or value != _DEFAULTS[name]}

    @classmethod
    def from_plain(
        cls, plain: Mapping[str, Any], *, typed: str | None = None, where: str = "the archive"
    ) -> Adaptation:
        """The inverse of :meth:`as_plain`, for what a file says.

        An objective of the user's own, by address, is believed only where the same was ``typed``.
        """
        from casewise.adapt.objectives import check_named_in_file

        check_named_in_file(plain.get("objective"), typed=typed, where=where)
        known = plain.get("statistics")
        values = {**plain, "statistics": None if known is None else RiskStatistics(**known)}
        try:
            found = cls(**values)
        except TypeError as error:
            raise BadInput(
                f"these are not the options of an adaptation ({error}); were they recorded with a later casewise?"
            ) from error
        if found._names_views and "mirrored_views" not in plain:
            found = replace(found, mirrored_views=True)  # what a file meant that did not say, before decision 0027
        return found


def adaptation_of(policy: Policy, *, typed: str | None = None) -> Adaptation | None:
    """How the cases were adapted that a policy was fitted on; None where the policy does not say.

    Policies of casewise 0.1 say it in the words of their binding only; the objective is then found by those words.
    """
    if policy.adaptation:
        found = Adaptation.from_plain(policy.adaptation, typed=typed, where=f"policy {policy.name!r}")
        return replace(found, steps=policy.steps)
    if policy.binding is None:
        return None
    return _from_words(policy.binding, policy.steps)


def _from_words(binding: Binding, steps: int) -> Adaptation | None:
    """The adaptation of a registered objective whose binding has these words; nothing that is read is run as code."""
    from casewise.adapt.objectives import FORMS, OBJECTIVES, objective_of

    words = dict(word.partition("=")[::2] for word in binding.measure.split())
    how, _, rest = binding.objective.partition(" learning_rate=")
    rate, _, parameters = rest.partition(" parameters=")
    named = [name for name in (*OBJECTIVES, *FORMS) if repr(objective_of(name)) == how]
    try:
        found = Adaptation(
            named[0], float(rate), parameters, steps, min_area=int(words["min_area"]),
            foreground={"True": True, "False": False}[words["foreground"]],
        )  # fmt: skip
    except (IndexError, KeyError, ValueError):
        return None
    return found


_KNOBS = Registry("option of an episode", {field.name: field.name for field in fields(Adaptation)})
_DEFAULTS = {field.name: field.default for field in fields(Adaptation) if field.default is not MISSING}
_KEPT = ("signals", "shrink", "keep_parameters", "keep_entropy", "keep_ballots")
_ALWAYS = (
    "objective", "learning_rate", "parameters", "steps", "seed", "min_area", "foreground", "max_slices",
)  # fmt: skip

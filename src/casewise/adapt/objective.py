"""The interface of a gradient method (an objective), and wrappers for functions and published code.

An objective defines one update. The episode (``episode.py``) does the rest: the loop, the reset, the choice of
parameters, precision and micro-batches. An objective is any object with one method::

    def begin(self, subject: Adaptable) -> Callable[[], Mapping[str, float]]

``begin`` is called once per case, after M0 was predicted. The function that it returns makes one update each time it is
called and returns diagnostics (loss, kept share, ...). This function holds the state of a case (an optimizer, a
teacher), so no state passes from case to case.

Every objective must follow three rules:

- ``subject.learning_rate`` scales an update, and a rate of 0 moves nothing; ``begin`` never moves anything;
- the gradient of the update stays in ``parameter.grad``, because its norm is a signal (C8);
- random numbers come from ``subject.generator(salt)``.

Two attributes are optional. ``learning_rate`` is the default rate, which ``run_episode(learning_rate=...)`` overrides.
``moves`` says what may change: "parameters" (the selected ones, the default) or "anything" (the whole network is saved,
and updates run in its original training modes).

:class:`TentStyle` wraps objects with ``forward_and_adapt`` (or ``forward``) and ``reset``, the form of published code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from casewise.core.errors import BadInput
from casewise.core.records import Signals

Update = Callable[[], Mapping[str, float]]
"""Makes one update and reports diagnostics."""

ChunkLoss = Callable[[Tensor, Tensor, slice], "tuple[Tensor, float | Tensor]"]
"""(logits, inputs, rows) of one micro-batch -> (numerator, weight). The loss is sum(numerator) / sum(weight)."""


class Adaptable(Protocol):
    """One case and its network: everything that an objective may read or change."""

    network: nn.Module
    learning_rate: float
    step: int  # number of the update being made, from 1
    active: frozenset[str] | None  # names that may move in this update (param-subset); None means all
    entropy_weight: float  # 1 unless a modulation lowers it (D8); an objective with an entropy term multiplies it
    anchor_weight: float | None  # None: the objective's own; a number where a modulation sets it (D8)

    @property
    def inputs(self) -> Tensor:
        """(n, channel, *space): the slices of a volume, one image, or one 3-D window."""

    @property
    def classes(self) -> int:
        """Channels of the logits."""

    @property
    def head(self) -> str:
        """softmax or sigmoid."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that may move, by name; only these have gradients."""

    @property
    def source(self) -> Mapping[str, Tensor]:
        """Their values in M0, detached."""

    @property
    def signals(self) -> Sequence[Signals]:
        """Signals of steps 0..k-1, known before update k (D9)."""

    def logits(self, inputs: Tensor) -> Tensor:
        """A forward: (n, channel, *space) -> (n, classes, *space), at the resolution of the mask.

        With a graph unless the caller is under ``torch.no_grad()``; a NaN raises NotFinite.
        """

    def padded(self, inputs: Tensor) -> Tensor:
        """Inputs as the network itself sees them: ``logits`` pads by itself, a call of the network does not."""

    def backward(self, loss: ChunkLoss, *, inputs: Tensor | None = None) -> float | None:
        """Clear gradients, then accumulate the gradient of sum(numerator)/sum(weight) over the micro-batches.

        With ``inputs=None`` it runs on the case itself, and the forward that predicted the current mask is used again:
        there is no second forward pass. Returns the loss, or None (and leaves no gradient) where the weights sum to 0.
        The weight carries no gradient.
        """

    def generator(self, salt: int = 0) -> torch.Generator:
        """A CPU generator seeded by (run, case, step, salt)."""

    def moving(self) -> list[nn.Parameter]:
        """The parameters that may move in this update."""

    def changed(self) -> None:
        """Drop the cached forward pass after parameters were moved through ``.data``.

        In-place changes (optimizers, ``copy_``, ``add_``) are noticed without it.
        """


SHAPE = "with forward_and_adapt and reset"


@runtime_checkable
class Objective(Protocol):
    """Defines one update."""

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case; the returned function makes one update."""


def as_objective(objective: Any) -> Objective:
    """Return an objective unchanged; wrap a function, or published code: an object, or what builds it."""
    if isinstance(objective, Objective):
        return objective
    if _call_of(objective) is not None:
        return TentStyle(objective)
    if inspect.isfunction(objective) and len(names := required_arguments(objective)) == 1:
        return TentStyle(objective) if names[0] in ("network", "model", "net") else FunctionObjective(objective)
    got = type(objective).__name__
    if inspect.isfunction(objective):
        got = f"{objective.__name__}({', '.join(inspect.signature(objective).parameters)})"
    raise BadInput(
        "a method must be a function (network, image) that returns a list of masks, a function (subject) that returns "
        f"a function for one update, an object with begin(subject), or one {SHAPE}; got {got}; see "
        "docs/how-to/own-method.md"
    )


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that must be given by place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.items()
    return [name for name, one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]


@dataclass(frozen=True)
class FunctionObjective:
    """A plain function as an objective: it is called with the subject and returns a function that makes one update."""

    function: Callable[[Adaptable], Update]

    def begin(self, subject: Adaptable) -> Update:
        update = self.function(subject)
        if not callable(update):
            raise BadInput(
                f"{self.function.__name__}(subject) must return a function that makes one update, got "
                f"{type(update).__name__}; see docs/how-to/own-method.md"
            )
        return update

    def __repr__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"


@dataclass(frozen=True)
class TentStyle:
    """Published code: an object that adapts when it is called, or its method ``forward_and_adapt``, and a ``reset``.

    One call on the whole case is one update; ``reset`` is called before the first. A class or a function that takes
    the network builds the object for each case, after M0 was predicted. The author configures the network, so updates
    run in the author's training modes, and the whole network is saved. An update makes its own forward pass: K updates
    cost 2K+1 forward passes. The learning rate is that of the object's optimizer.
    """

    wrapped: Any
    moves: ClassVar[str] = "anything"

    def begin(self, subject: Adaptable) -> Update:
        makes = inspect.isclass(self.wrapped) or inspect.isfunction(self.wrapped)
        adapts = self.wrapped(subject.network) if makes else self.wrapped
        call = _call_of(adapts)
        if call is None:
            got = f"{self.wrapped.__name__} returned {type(adapts).__name__}"
            raise BadInput(f"{got}; a function of the network must return an object {SHAPE}")
        self._check(adapts, subject.network, is_new=makes)
        adapts.reset()
        names = list(inspect.signature(call).parameters)[1:]
        arguments = [getattr(adapts, name) for name in names if hasattr(adapts, name)]

        def update() -> Mapping[str, float]:
            call(subject.padded(subject.inputs), *arguments)
            return {}

        return update

    def _check(self, adapts: Any, network: nn.Module, *, is_new: bool) -> None:
        """Refuse an object that cannot adapt the network, or that hides the network's own M0."""
        own = vars(adapts)
        held = [one for one in (*own.values(), *own.get("_modules", {}).values()) if isinstance(one, nn.Module)]
        if held and not any(one is network for one in held):
            raise BadInput("the object adapts another network; build it on the network that is adapted")
        if not hasattr(adapts, "forward_and_adapt") and getattr(adapts, "episodic", False):
            raise BadInput("the object resets itself at each call, so it makes one update at most; use episodic=False")
        if not is_new and any(one.running_mean is None for one in network.modules() if isinstance(one, _BatchNorm)):
            raise BadInput(
                "BatchNorm layers of the network have no running statistics, so M0 would not be the mask of the "
                "original model; pass the class or the function that builds the object from the network"
            )

    def __repr__(self) -> str:
        made = self.wrapped if hasattr(self.wrapped, "__qualname__") else type(self.wrapped)
        return f"TentStyle({made.__module__}.{made.__qualname__})"


def _call_of(adapts: Any) -> Callable[..., Any] | None:
    """Return what adapts the network to its argument; None for an object in another form."""
    return getattr(adapts, "forward_and_adapt", getattr(adapts, "forward", None)) if hasattr(adapts, "reset") else None

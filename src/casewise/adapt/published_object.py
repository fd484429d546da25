"""Any object with ``forward_and_adapt`` and ``reset``, the shape of most published code, as an objective."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from casewise.adapt.objective import Adaptable, Objective, Update
from casewise.core.errors import BadInput


def as_objective(objective: Any) -> Objective:
    """An objective as it is, or a Tent-style object in its wrapper."""
    if isinstance(objective, Objective):
        return objective
    if hasattr(objective, "forward_and_adapt") and hasattr(objective, "reset"):
        return TentStyle(objective)
    raise BadInput(
        f"an objective has begin(subject), or forward_and_adapt and reset; got {type(objective).__name__}; "
        "see docs/explanation/episodes.md"
    )


@dataclass(frozen=True)
class TentStyle:
    """One call of ``forward_and_adapt`` on the whole case is one update; ``reset`` is called before the first.

    The object must hold the very network that is adapted (``.model``). It was configured by its author, so updates run
    in the modes the network was found in, all of the network is saved, and the forward of an update is its own: K
    updates cost 2K+1 forwards. The learning rate is its own optimizer's.
    """

    wrapped: Any
    moves: ClassVar[str] = "anything"

    def begin(self, subject: Adaptable) -> Update:
        held = getattr(self.wrapped, "model", subject.network)
        if held is not subject.network:
            raise BadInput("the object adapts another network than the one that was given; pass its own .model")
        self.wrapped.reset()
        arguments = _arguments(self.wrapped)

        def update() -> Mapping[str, float]:
            self.wrapped.forward_and_adapt(subject.inputs, *arguments)
            return {}

        return update

    def __repr__(self) -> str:
        return f"TentStyle({type(self.wrapped).__module__}.{type(self.wrapped).__qualname__})"


def _arguments(wrapped: Any) -> list[Any]:
    """What ``forward_and_adapt(x, model, optimizer)`` wants beside x, taken from the object's own attributes."""
    names = list(inspect.signature(wrapped.forward_and_adapt).parameters)[1:]
    return [getattr(wrapped, name) for name in names if hasattr(wrapped, name)]

"""Optimizers of one case, and parameters that hold other values for a while.

The paper uses Adam for everything (A6); published forms may use SGD with momentum. SAR evaluates the loss from the
sharpest point nearby, GraTa from one entropy step ahead, CoTTA with its teacher; none of them owns a second network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from casewise.adapt.objective import Adaptable
from casewise.core.errors import UnknownName

OPTIMIZERS = ("adam", "sgd", "sgd-momentum")


def check_optimizer(name: str) -> None:
    """Refuse a name that :func:`optimizer_of` does not know."""
    if name not in OPTIMIZERS:
        raise UnknownName(f"no optimizer is called '{name}'. Known: {', '.join(OPTIMIZERS)}")


def optimizer_of(subject: Adaptable, name: str) -> torch.optim.Optimizer:
    """A new optimizer over all parameters of the case; those without a gradient stay where they are.

    ``adam`` has default betas and no weight decay (A6), ``sgd`` no momentum, ``sgd-momentum`` 0.9.
    """
    check_optimizer(name)
    if name == "adam":
        return torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)
    momentum = 0.9 if name == "sgd-momentum" else 0.0
    return torch.optim.SGD(subject.parameters.values(), lr=subject.learning_rate, momentum=momentum)


Values = Mapping[str, Tensor]
"""Parameter values or gradients by name."""


@contextmanager
def displaced(subject: Adaptable, values: Values) -> Iterator[None]:
    """Hold ``values`` in the parameters of these names; the old storage comes back bit for bit, also after an error.

    Storage is swapped, not written, so a forward that was made before stays valid for its backward.
    """
    held = {name: subject.parameters[name].data for name in values}
    try:
        for name, value in values.items():
            subject.parameters[name].data = value.to(held[name])
        yield
    finally:
        for name, old in held.items():
            subject.parameters[name].data = old


def current(subject: Adaptable) -> dict[str, Tensor]:
    """A copy of the values that the parameters hold now."""
    return {name: parameter.detach().clone() for name, parameter in subject.parameters.items()}


def gradients(subject: Adaptable) -> dict[str, Tensor]:
    """A copy of the gradients of the parameters that may move in this update; a missing one is zero."""
    moving = {id(parameter) for parameter in subject.moving()}
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in subject.parameters.items()
        if id(parameter) in moving
    }


def norm(values: Values) -> float:
    """The Euclidean norm over all of them at once."""
    return float(
        torch.sqrt(sum((value.double().square().sum() for value in values.values()), torch.zeros(()).double()))
    )


def cosine(first: Values, second: Values) -> float:
    """Cosine of the angle between two sets of gradients, 0 where one of them vanishes."""
    dot = sum(float((first[name].double() * second[name].double()).sum()) for name in first)
    return dot / (norm(first) * norm(second) + 1e-12)


def shifted(subject: Adaptable, direction: Values, length: float) -> dict[str, Tensor]:
    """The current values, ``length`` times ``direction`` further."""
    return {name: subject.parameters[name].detach() + length * step for name, step in direction.items()}

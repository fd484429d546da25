"""Optimizers for the updates of one case, and sums over parameters.

The paper uses Adam for every method (A6); published forms may use SGD with momentum. SAR, GraTa and CoTTA evaluate the
loss at other parameter values (a perturbed point, one entropy step ahead, the teacher) without a second network.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from casewise.adapt.objective import Adaptable, ChunkLoss, Update
from casewise.core.errors import UnknownName

OPTIMIZERS = ("adam", "sgd", "sgd-momentum")


def optimizer_of(subject: Adaptable, name: str) -> torch.optim.Optimizer:
    """Return a new optimizer over all parameters of the case; it does not move parameters without a gradient.

    ``adam`` has default betas and no weight decay (A6), ``sgd`` no momentum, ``sgd-momentum`` 0.9.
    """
    if name not in OPTIMIZERS:
        raise UnknownName(f"no optimizer is called '{name}'. Known: {', '.join(OPTIMIZERS)}")
    if name == "adam":
        return torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)
    momentum = 0.9 if name == "sgd-momentum" else 0.0
    return torch.optim.SGD(subject.parameters.values(), lr=subject.learning_rate, momentum=momentum)


def descent(subject: Adaptable, loss: ChunkLoss) -> Update:
    """Return updates that step down the gradient of one loss, and report it."""
    optimizer = optimizer_of(subject, "adam")

    def update() -> Mapping[str, float]:
        value = subject.backward(loss)
        optimizer.step()
        return {} if value is None else {"loss": value}

    return update


Values = Mapping[str, Tensor]
"""Parameter values or gradients by name."""


def current(subject: Adaptable) -> dict[str, Tensor]:
    """Return a copy of the current parameter values."""
    return {name: parameter.detach().clone() for name, parameter in subject.parameters.items()}


def gradients(subject: Adaptable) -> dict[str, Tensor]:
    """Return a copy of the gradients of the parameters that may move in this update; 0 for a missing one."""
    moving = {id(parameter) for parameter in subject.moving()}
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in subject.parameters.items()
        if id(parameter) in moving
    }


def norm(values: Values) -> float:
    r"""Return the Euclidean norm over all tensors, :math:`\sqrt{\sum_i v_i^2}`."""
    return float(torch.sqrt(sum((one.double().square().sum() for one in values.values()), torch.zeros(()).double())))


def cosine(first: Values, second: Values) -> float:
    r"""Return :math:`a \cdot b / (\|a\| \|b\|)` of two sets of gradients; 0 if one of them is 0."""
    dot = sum(float((first[name].double() * second[name].double()).sum()) for name in first)
    return dot / (norm(first) * norm(second) + 1e-12)


def shifted(subject: Adaptable, direction: Values, length: float) -> dict[str, Tensor]:
    """Return the current values plus ``length`` times ``direction``."""
    return {name: subject.parameters[name].detach() + length * step for name, step in direction.items()}

"""One optimizer for one case. The paper moves everything with Adam (A6); published forms may say SGD with momentum."""

from __future__ import annotations

import torch

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

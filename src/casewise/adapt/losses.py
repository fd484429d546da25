"""Entropies and distances, numerically safe, for softmax and sigmoid heads.

Logits are (n, classes, *space). A sigmoid head is a set of independent yes/no questions: its entropy is the sum over
channels, its largest probability the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def probabilities(logits: Tensor, head: str = "softmax") -> Tensor:
    """Softmax over classes, or a sigmoid of each channel."""
    return logits.softmax(1) if head == "softmax" else logits.sigmoid()


def entropy(logits: Tensor, head: str = "softmax") -> Tensor:
    r"""Entropy of each voxel in nats, (n, *space).

    Softmax: :math:`H = -\sum_c p_c \log p_c`. Sigmoid:
    :math:`H = -\sum_c [\sigma_c \log \sigma_c + (1-\sigma_c) \log (1-\sigma_c)]`. Exact at any logit: no epsilon.
    """
    if head == "softmax":
        logs = logits.log_softmax(1)
        return -(logs.exp() * logs).sum(1)
    yes, no = functional.logsigmoid(logits), functional.logsigmoid(-logits)
    return -(yes.exp() * yes + no.exp() * no).sum(1)


def largest_entropy(classes: int, head: str = "softmax") -> float:
    """ln C for a softmax over C classes, C ln 2 for C sigmoids: thresholds are shares of it."""
    return math.log(classes) if head == "softmax" else classes * math.log(2)


@torch.no_grad()
def confidence(logits: Tensor, head: str = "softmax") -> tuple[Tensor, Tensor]:
    """(entropy, largest probability) of each voxel, both (n, *space), from one softmax (C7)."""
    if head == "softmax":
        logs = logits.log_softmax(1)
        surest = logs.amax(1).exp_()
        return -(logs.exp() * logs).sum(1), surest
    surest = functional.logsigmoid(logits.abs()).sum(1).exp_()
    return entropy(logits, head), surest


def slice_means(voxels: Tensor) -> Tensor:
    """Mean over each slice: (n, rows, columns) -> (n,), and (n, slices, rows, columns) -> (n * slices,)."""
    return voxels.flatten(-2).mean(-1).flatten()


def cross_entropy(logits: Tensor, target: Tensor, head: str = "softmax") -> Tensor:
    """Cross-entropy of each voxel with soft targets of the logits' shape, (n, *space)."""
    if head == "softmax":
        return -(target * logits.log_softmax(1)).sum(1)
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)


def anchor(parameters: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> Tensor:
    r"""Squared distance to the source weights, :math:`\sum_\theta \|\theta - \theta_0\|^2` (D2: no Fisher weights)."""
    return torch.stack([(parameter - source[name]).square().sum() for name, parameter in parameters.items()]).sum()

"""MEMO: minimize the entropy of the mean prediction over views (Zhang, Levine and Finn, NeurIPS 2022; D3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.augmentations import light_view
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import optimizer_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Memo:
    r"""Minimize, voxel by voxel, the entropy of the mean prediction over views; logits are mapped back first.

    .. math:: L = w \cdot \frac{1}{|\Omega|} \sum_x H\Big(\frac1B \sum_{b=1}^{B} p_b(x)\Big)

    The paper: B = 4 light views (flips, brightness, noise; see ``augmentations.light_view``), w = 1, Adam on
    normalization parameters.
    Cost of an update: B forward and B backward passes; the forward pass that predicted the mask is not used again.
    """

    views: int = 4
    weight: float = 1.0
    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        if self.views < 1:
            raise BadInput(f"views must be at least 1, got {self.views}")

    @classmethod
    def published(cls, **options: Any) -> Memo:
        """Return the official settings: 32 views (light ones, not AugMix), SGD at 0.005, for ``parameters="all"``."""
        return cls(**{"views": 32, "optimizer": "sgd", "learning_rate": 5e-3, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case."""
        optimizer = optimizer_of(subject, self.optimizer)

        def update() -> Mapping[str, float]:
            generator = subject.generator()
            views = [light_view(generator) for _ in range(self.views)]
            pictures = [view.apply(subject.inputs) for view in views]

            def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
                others = [subject.logits(picture[rows]) for picture in pictures[1:]]
                maps = [view.invert(seen) for view, seen in zip(views, [logits, *others], strict=True)]
                voxels = marginal_entropy(torch.stack(maps), subject.head)
                return subject.entropy_weight * self.weight * voxels.sum(), voxels.numel()

            value = subject.backward(loss, inputs=pictures[0])
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update


def marginal_entropy(logits: Tensor, head: str = "softmax") -> Tensor:
    r"""Return the entropy of the mean probability over views: (view, n, classes, *space) -> (n, *space).

    The mean is computed from logarithms, :math:`\log \bar p = \mathrm{logsumexp}_b \log p_b - \log B`, so that
    voxels with probability 0 or 1 stay finite.
    """
    if head == "softmax":
        sides = [logits.log_softmax(2)]
    else:
        sides = [functional.logsigmoid(logits), functional.logsigmoid(-logits)]
    means = [side.logsumexp(0) - math.log(len(logits)) for side in sides]
    return -torch.stack([(mean.exp() * mean).sum(1) for mean in means]).sum(0)

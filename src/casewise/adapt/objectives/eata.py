"""EATA as the paper runs it: entropy of the confident slices, held near the source weights (D2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from casewise.adapt.losses import anchor, entropy, slice_means
from casewise.adapt.objective import Adaptable, Update


@dataclass(frozen=True)
class Eata:
    r"""Adam on the entropy of slices below a margin plus an unweighted L2 anchor.

    With :math:`H_s` the mean entropy of slice s and :math:`S = \{s : H_s < 0.45\}`,

    .. math:: L = \frac{1}{|S|} \sum_{s \in S} H_s + \lambda \sum_\theta \|\theta - \theta_0\|^2, \qquad \lambda = 1

    No Fisher weights and no redundancy filter: those are ``eata-fisher``. Where no slice is below the margin nothing
    moves, as in the official code. In a 3-D window a slice is a plane of its first axis.
    """

    margin: float = 0.45  # nats
    anchor_weight: float = 1.0
    learning_rate: float = 5e-4

    def begin(self, subject: Adaptable) -> Update:
        optimizer = torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)
        seen = kept = 0

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            nonlocal seen, kept
            slices = slice_means(entropy(logits, subject.head))
            confident = slices.detach() < self.margin
            seen, kept = seen + len(slices), kept + int(confident.sum())
            return subject.entropy_weight * slices[confident].sum(), int(confident.sum())

        def update() -> Mapping[str, float]:
            nonlocal seen, kept
            seen = kept = 0
            value = subject.backward(loss)
            if value is None:
                return {"kept": 0.0}
            weight = self.anchor_weight if subject.anchor_weight is None else subject.anchor_weight
            penalty = weight * anchor(subject.parameters, subject.source)
            torch.autograd.backward(penalty, inputs=subject.moving())
            optimizer.step()
            return {"loss": value + float(penalty.detach()), "kept": kept / seen}

        return update

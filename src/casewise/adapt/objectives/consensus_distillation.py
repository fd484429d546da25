"""Consensus: a few steps toward the mean prediction of many views. The target is fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from casewise.adapt.consensus import Mean
from casewise.adapt.logits import cross_entropy, probabilities
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import descent
from casewise.adapt.views import Drawn, View, inverted, views_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Consensus:
    r"""Train toward the mean probability of the source over the case and its views (Adam, soft cross-entropy).

    .. math:: L = \frac{1}{|A|} \sum_{x \in A} -\sum_c q_c(x) \log p_c(x), \qquad
              q = \frac{1}{V+1} \Big(p_0 + \sum_v v^{-1}\big(p_0(v(x))\big)\Big)

    The target q is computed once, with the source weights, before the first update. A is the set of all voxels, or of
    those with :math:`\max_c q_c(x) \ge` ``agree``. Views that move voxels are used only if logits and inputs have the
    same grid (a bare network, nnU-Net's patches); otherwise they are skipped.

    Cost: V forward passes per case more than TENT.
    """

    views: str = "random(8)"
    agree: float = 0.0
    learning_rate: float = 5e-3
    entropy_weighted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        views_of(self.views)
        if not 0 <= self.agree <= 1:
            raise BadInput(f"agree is a probability and must be from 0 to 1, got {self.agree}")

    def begin(self, subject: Adaptable) -> Update:
        """Compute the target; each update is then one step toward it."""
        target = self._target(subject)
        counts = (target.amax(1) >= self.agree) if self.agree else None

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            voxels = cross_entropy(logits, target[rows], subject.head)
            if counts is None:
                return voxels.sum(), voxels.numel()
            return voxels[counts[rows]].sum(), float(counts[rows].sum())

        return descent(subject, loss)

    @torch.no_grad()
    def _target(self, subject: Adaptable) -> Tensor:
        mean = Mean()
        plain = probabilities(subject.logits(subject.inputs), subject.head).clone()
        one_grid = plain.shape[2:] == subject.inputs.shape[2:]
        mean.add(plain)
        for view in self._drawn(subject):
            seen = view.apply(subject.inputs)
            usable = bool(torch.isfinite(seen).all()) and (one_grid or not _moves_voxels(view))
            if usable:
                mean.add(probabilities(inverted(view, subject.logits(seen)), subject.head))
        return mean.value.clone()

    def _drawn(self, subject: Adaptable) -> list[View]:
        generator = subject.generator()
        found: list[View] = []
        for view in views_of(self.views):
            found += view.with_generator(generator) if isinstance(view, Drawn) else [view]
        return found


def _moves_voxels(view: View) -> bool:
    """True if a view, or a part of it, moves voxels."""
    return any(hasattr(part, "invert") for part in getattr(view, "views", (view,)))

"""EATA: minimize the entropy of reliable samples, stay near the source weights (Niu et al., ICML 2022; D2, S17)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from casewise.adapt.logits import anchor, cross_entropy, entropy, largest_entropy, probabilities, slice_means
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import optimizer_of


@dataclass(frozen=True)
class Eata:
    r"""Minimize the entropy of slices below a margin plus an L2 distance to the source weights (Adam).

    With :math:`H_s` the mean entropy of slice s and :math:`S = \{s : H_s < 0.45\}`,

    .. math:: L = \frac{1}{|S|} \sum_{s \in S} H_s + \lambda \sum_\theta \|\theta - \theta_0\|^2, \qquad \lambda = 1

    Fisher weights and the redundancy filter are in ``eata-fisher``. If no slice is below the margin, nothing is
    updated, as in the official code. In a 3-D window, a slice is a plane along the first axis.
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


@dataclass(frozen=True)
class EataFisher:
    r"""EATA as published: entropy of reliable, non-redundant voxels plus a Fisher-weighted distance to the source.

    A sample is a voxel. With :math:`E_0 = 0.4 \ln C` and :math:`\bar p` a moving mean of the kept predictions,

    .. math::
        S = \{x : H(x) < E_0,\ |\cos(\bar p, p(x))| < d\}, \qquad
        L = \frac{1}{|S|} \sum_{x \in S} e^{E_0 - H(x)} H(x) + \alpha \sum_\theta F_\theta (\theta - \theta_0)^2

    The weight :math:`e^{E_0 - H}` carries no gradient. The first update of a case has no redundancy filter and sets
    :math:`\bar p`; later :math:`\bar p \leftarrow 0.9 \bar p + 0.1 \operatorname{mean}_S p`. If S is empty, nothing is
    updated. The optimizer is SGD with momentum 0.9. The diagonal Fisher information F is estimated on the case before
    its first update (one more forward and backward pass); the published code estimates it on source images.
    """

    margin: float = 0.4  # share of the largest entropy
    redundancy: float = 0.05  # d
    anchor_weight: float = 2000.0  # alpha
    optimizer: str = "sgd-momentum"
    learning_rate: float = 2.5e-4

    def begin(self, subject: Adaptable) -> Update:
        optimizer = optimizer_of(subject, self.optimizer)
        margin = self.margin * largest_entropy(subject.classes, subject.head)
        fisher = _fisher_of_case(subject)
        usual: Tensor | None = None  # the moving mean of kept predictions
        sums: list[tuple[Tensor, int]] = []  # sum and number of kept predictions of each micro-batch
        seen = 0

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, int]:
            nonlocal seen
            voxels = entropy(logits, subject.head)
            predicted = probabilities(logits.detach(), subject.head)
            kept = voxels.detach() < margin
            if usual is not None:
                column = usual.view(1, -1, *[1] * (predicted.ndim - 2))
                kept &= functional.cosine_similarity(predicted, column, dim=1).abs() < self.redundancy
            sums.append(((predicted * kept.unsqueeze(1)).transpose(0, 1).flatten(1).sum(1), int(kept.sum())))
            seen += kept.numel()
            chosen = voxels[kept]
            weighted = (margin - chosen.detach()).exp() * chosen
            return subject.entropy_weight * weighted.sum(), int(kept.sum())

        def update() -> Mapping[str, float]:
            nonlocal usual, seen
            seen = 0
            sums.clear()
            value = subject.backward(loss)
            if value is None:
                return {"kept": 0.0}
            count = sum(number for _, number in sums)
            mean = torch.stack([part for part, _ in sums]).sum(0) / count
            usual = mean if usual is None else 0.9 * usual + 0.1 * mean
            weight = self.anchor_weight if subject.anchor_weight is None else subject.anchor_weight
            penalty = weight * _weighted_anchor(subject, fisher)
            torch.autograd.backward(penalty, inputs=subject.moving())
            optimizer.step()
            return {"loss": value + float(penalty.detach()), "kept": count / seen}

        return update


def _surest(logits: Tensor, head: str) -> Tensor:
    """Return the cross-entropy of each voxel with the hard decision of the network."""
    if head == "softmax":
        return functional.cross_entropy(logits, logits.argmax(1), reduction="none")
    return cross_entropy(logits, (logits.detach() > 0).to(logits), head)


def _fisher_of_case(subject: Adaptable) -> dict[str, Tensor]:
    """Return the squared gradient of each parameter on the case, at the source weights."""

    def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, int]:
        voxels = _surest(logits, subject.head)
        return voxels.sum(), voxels.numel()

    subject.backward(loss)
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.square() for name, p in subject.parameters.items()}
    for parameter in subject.parameters.values():
        parameter.grad = None
    return found


def _weighted_anchor(subject: Adaptable, fisher: Mapping[str, Tensor]) -> Tensor:
    pairs = subject.parameters.items()
    return torch.stack([(fisher[name] * (p - subject.source[name]).square()).sum() for name, p in pairs]).sum()

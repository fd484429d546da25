"""EATA as the paper runs it: entropy of the confident slices, held near the source weights (D2)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.logits import (
    anchor,
    at_resolution,
    cross_entropy,
    entropy,
    largest_entropy,
    logits_of,
    probabilities,
    slice_means,
)
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import check_optimizer, optimizer_of
from casewise.adapt.parameters import Selection, select
from casewise.adapt.snapshot import restored
from casewise.core.errors import BadInput


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


# EATA as published: reliable, non-redundant samples and a Fisher-weighted anchor (Niu et al., ICML 2022).


@dataclass(frozen=True, repr=False)
class Fisher:
    """Diagonal Fisher information of the parameters, by name, estimated on ``batches`` batches of source images."""

    values: Mapping[str, Tensor]
    batches: int

    def __repr__(self) -> str:
        digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for _, value in sorted(self.values.items())))
        return f"Fisher(batches={self.batches}, sha256={digest.hexdigest()[:12]})"


def fisher_information(
    network: nn.Module,
    batches: Iterable[Tensor],
    *,
    parameters: Selection = "all-norm",
    head: str = "softmax",
    multiple: int = 1,
) -> Fisher:
    r"""Mean over batches of the squared batch gradient of CE(z, argmax z), as the official code estimates it (S17).

    .. math::
        F_\theta = \frac{1}{B} \sum_b \big(\nabla_\theta \operatorname{mean}\, \mathrm{CE}(z_b, \arg\max z_b)\big)^2

    ``multiple`` is that of the network's ``Module``: sides are padded to it inside the forward, as for a case.
    """
    from casewise.adapt.backbones.module import PaddedForward

    forward = PaddedForward(lambda given: at_resolution(logits_of(network(given)), given.shape[2:]), multiple)
    chosen = select(network, parameters)
    sums = {name: torch.zeros_like(parameter) for name, parameter in chosen.items()}
    count = 0
    with restored(network, ()):
        network.eval().requires_grad_(False)
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        for count, batch in enumerate(batches, start=1):  # noqa: B007
            gradients = torch.autograd.grad(_surest(forward(batch), head).mean(), list(chosen.values()))
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total += gradient.square()
    if not count:
        raise BadInput("Fisher information needs at least one batch of source images, got none")
    return Fisher({name: total / count for name, total in sums.items()}, count)


@dataclass(frozen=True)
class EataFisher:
    r"""A sample is a voxel. With :math:`E_0 = 0.4 \ln C` and :math:`\bar p` a moving mean of the kept predictions,

    .. math::
        S = \{x : H(x) < E_0,\ |\cos(\bar p, p(x))| < d\}, \qquad
        L = \frac{1}{|S|} \sum_{x \in S} e^{E_0 - H(x)} H(x) + \alpha \sum_\theta F_\theta (\theta - \theta_0)^2

    The weight :math:`e^{E_0 - H}` carries no gradient. :math:`\bar p` begins with the first update of a case (no
    redundancy filter yet), then :math:`\bar p \leftarrow 0.9 \bar p + 0.1 \operatorname{mean}_S p`. Nothing kept:
    nothing moves. SGD with momentum 0.9. Without ``fisher`` it is estimated on the case itself before its first update,
    which costs one more forward and backward; ``fisher_information`` estimates it on source images, as published.
    """

    margin: float = 0.4  # share of the largest entropy
    redundancy: float = 0.05  # d
    anchor_weight: float = 2000.0  # alpha
    fisher: Fisher | None = None
    optimizer: str = "sgd-momentum"
    learning_rate: float = 2.5e-4

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)

    def begin(self, subject: Adaptable) -> Update:
        optimizer = optimizer_of(subject, self.optimizer)
        margin = self.margin * largest_entropy(subject.classes, subject.head)
        fisher = self.fisher.values if self.fisher is not None else _fisher_of_case(subject)
        usual: Tensor | None = None  # the moving mean of kept predictions
        sums: list[tuple[Tensor, int]] = []  # of kept predictions, by micro-batch
        seen = 0

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, int]:
            nonlocal seen
            voxels = entropy(logits, subject.head)
            predicted = probabilities(logits.detach(), subject.head)
            kept = voxels.detach() < margin
            if usual is not None:
                kept &= (
                    functional.cosine_similarity(predicted, _as_column(usual, predicted), dim=1).abs() < self.redundancy
                )
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


def _as_column(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.ndim - 2))


def _surest(logits: Tensor, head: str) -> Tensor:
    """Cross-entropy of each voxel with the network's own hard decision."""
    if head == "softmax":
        return functional.cross_entropy(logits, logits.argmax(1), reduction="none")
    return cross_entropy(logits, (logits.detach() > 0).to(logits), head)


def _fisher_of_case(subject: Adaptable) -> dict[str, Tensor]:
    """One batch: the case itself, at the source weights."""
    subject.backward(lambda logits, inputs, rows: _sum_and_count(_surest(logits, subject.head)))
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.square() for name, p in subject.parameters.items()}
    for parameter in subject.parameters.values():
        parameter.grad = None
    return found


def _sum_and_count(voxels: Tensor) -> tuple[Tensor, int]:
    return voxels.sum(), voxels.numel()


def _weighted_anchor(subject: Adaptable, fisher: Mapping[str, Tensor]) -> Tensor:
    pairs = subject.parameters.items()
    return torch.stack([(fisher[name] * (p - subject.source[name]).square()).sum() for name, p in pairs]).sum()

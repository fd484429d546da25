"""GraTa: a consistency step, as long as it agrees with entropy descent (Chen et al., AAAI 2025; D6, C9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from casewise.adapt.augmentations import WEAK_VIEWS
from casewise.adapt.displacement import Values, cosine, displaced, gradients, shifted
from casewise.adapt.losses import cross_entropy, entropy, probabilities
from casewise.adapt.objective import Adaptable, ChunkLoss, Update
from casewise.adapt.optimizers import check_optimizer, optimizer_of
from casewise.adapt.strong_view import sampled_style


@dataclass(frozen=True)
class Grata:
    r"""Two gradients, one step.

    1. :math:`g_{ent} = \nabla \operatorname{mean} H(\theta)`;
    2. :math:`\theta' = \theta - g_{ent}`: a step of one gradient, without a learning rate;
    3. target = mean over six weak views of the probabilities at theta', geometry inverted;
       :math:`g_{con} = \nabla \operatorname{mean} \mathrm{CE}(\text{target}, p(\text{strong view}))` at theta';
    4. :math:`\eta = \text{rate} \cdot \tfrac14 (\cos(g_{ent}, g_{con}) + 1)^2`;
    5. an Adam step from theta along g_con with eta.

    ``learning_rate`` is the base rate: 1e-4 is the official arm, 5e-4 the paper's shared-rate arm (:meth:`shared`).
    The paper's five deviations: (i) the softmax head is read from the network, and the mean target is not renormalized
    (``renormalize``); (ii) several steps instead of one: ``steps=1`` is native GraTa; (iii) gamma keeps mean and spread
    (``gamma_retains_statistics``); (iv) blur omits the draw by channel (``blur_by_channel``); (v) the strong view acts
    on z-scored intensities instead of [0, 1] (``unit_range``). :meth:`official` undoes (iii) to (v).

    Sigmoid heads use the official losses: :math:`-\sum_k \sigma_k \log(\sigma_k + 10^{-6})`, the positive half only,
    and binary cross-entropy averaged over channels. An update costs two backwards, and seven forwards (six without a
    graph) beyond the forward that predicted the mask. Quarter turns need a network that takes both orientations.
    """

    renormalize: bool = False
    gamma_retains_statistics: bool = True
    blur_by_channel: bool = False
    unit_range: bool = False
    hard_target: bool = False  # one-hot targets: the paper's test of why cos is negative
    optimizer: str = "adam"
    learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)

    @classmethod
    def shared(cls, **options: Any) -> Grata:
        """The paper's supplementary arm: base rate 5e-4, which TENT, EATA and DeYO use."""
        return cls(**{"learning_rate": 5e-4, **options})

    @classmethod
    def official(cls, **options: Any) -> Grata:
        """The official release, for networks that read intensities in [0, 1]; run it with ``steps=1``."""
        release = {"gamma_retains_statistics": False, "blur_by_channel": True, "unit_range": True}
        return cls(**{**release, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case."""
        optimizer = optimizer_of(subject, self.optimizer)

        def update() -> Mapping[str, float]:
            ahead, along, losses = self.gradient_pair(subject)
            agreement = cosine(ahead, along)
            multiplier = 0.25 * (agreement + 1) ** 2
            optimizer.param_groups[0]["lr"] = subject.learning_rate * multiplier
            optimizer.step()
            return losses | {"cosine": agreement, "multiplier": multiplier}

        return update

    def gradient_pair(self, subject: Adaptable) -> tuple[Values, Values, dict[str, float]]:
        """(entropy gradient at theta, consistency gradient at theta', losses); the second is left in ``.grad``."""
        uncertain = subject.backward(_entropy_loss(subject))
        ahead = gradients(subject)
        with displaced(subject, shifted(subject, ahead, -1.0)):
            inconsistent = subject.backward(self._consistency(subject), inputs=self._strong(subject))
        losses = {"entropy_loss": uncertain or 0.0, "consistency_loss": inconsistent or 0.0}
        return ahead, gradients(subject), losses

    def _strong(self, subject: Adaptable) -> Tensor:
        style = sampled_style(
            subject.inputs,
            subject.generator(),
            retain_statistics=self.gamma_retains_statistics,
            blur_by_channel=self.blur_by_channel,
            rescale=self.unit_range,
        )
        return style.apply(subject.inputs)

    def _consistency(self, subject: Adaptable) -> ChunkLoss:
        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            target = self._target(subject, subject.inputs[rows])
            voxels = cross_entropy(logits, target, subject.head)
            channels = 1 if subject.head == "softmax" else logits.shape[1]
            return voxels.sum() / channels, voxels.numel()

        return loss

    @torch.no_grad()
    def _target(self, subject: Adaptable, inputs: Tensor) -> Tensor:
        seen = [view.invert(probabilities(subject.logits(view.apply(inputs)), subject.head)) for view in WEAK_VIEWS]
        target = torch.stack(seen).mean(0)
        if self.renormalize and subject.head == "softmax":
            target = target / target.sum(1, keepdim=True)
        return _hardened(target, subject.head) if self.hard_target else target


def _entropy_loss(subject: Adaptable) -> ChunkLoss:
    def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
        if subject.head == "softmax":
            voxels = entropy(logits, "softmax")
        else:
            yes = logits.sigmoid()
            voxels = -(yes * torch.log(yes + 1e-6)).sum(1)
        return voxels.sum(), voxels.numel()

    return loss


def _hardened(target: Tensor, head: str) -> Tensor:
    if head == "sigmoid":
        return (target > 0.5).to(target)
    return torch.zeros_like(target).scatter_(1, target.argmax(1, keepdim=True), 1.0)

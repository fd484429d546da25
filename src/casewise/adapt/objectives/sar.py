"""SAR: sharpness-aware entropy minimization on reliable samples (Niu et al., ICLR 2023; D5, S9)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from casewise.adapt.logits import entropy, largest_entropy, slice_means
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import gradients, norm, optimizer_of, shifted
from casewise.adapt.snapshot import swapped
from casewise.core.errors import BadInput

PUBLISHED_RECOVERY = 0.2  # nats, hard-coded in the official code, for 1000 classes
RECOVERIES = ("off", "published", "ln-c", "relative")


@dataclass(frozen=True)
class Sar:
    r"""Minimize the entropy of reliable samples at the worst point near the weights (sharpness-aware).

    With :math:`E_0 = 0.4 \ln C` and :math:`k_1 = \{x : H(x) < E_0\}`,

    .. math::
        g = \nabla \operatorname{mean}_{k_1} H(\theta), \qquad \epsilon = \rho\, g / (\|g\|_2 + 10^{-12}), \qquad
        \theta \leftarrow \mathrm{step}\Big(\theta, \nabla \operatorname{mean}_{k_2} H(\theta + \epsilon)\Big)

    where :math:`k_2 \subseteq k_1` is still below E_0 at theta + epsilon. A sample is a voxel as in the official code
    (``sample="voxel"``), or a slice by its mean entropy (``sample="slice"``); the paper does not say which.

    Recovery resets the weights to the source if a moving average of the second loss (0.9 old + 0.1 new) falls below a
    threshold; see :meth:`recovery_threshold`. The paper switches recovery off, because segmentation entropies are so
    small that it would reset at every step. Cost of an update: two backward passes, and one forward pass more than the
    forward pass that predicted the mask.
    """

    margin: float = 0.4  # E_0 as a share of the largest entropy, ln C
    radius: float = 0.05  # rho
    sample: str = "voxel"
    recovery: str = "off"
    kappa: float = 0.1  # of recovery="relative"
    reference_entropy: float | None = None  # of recovery="relative": median entropy of M0 on the calibration cases
    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        if self.recovery not in RECOVERIES:
            raise BadInput(f"recovery must be one of {', '.join(RECOVERIES)}, got {self.recovery!r}")
        if self.recovery == "relative" and self.reference_entropy is None:
            raise BadInput(
                "recovery='relative' needs reference_entropy=, the median entropy of M0 on the calibration cases; "
                "take it from the `entropy` signal at step 0 of a calibration archive"
            )
        if self.sample not in ("voxel", "slice"):
            raise BadInput(f"sample must be 'voxel' or 'slice', got {self.sample!r}")

    @classmethod
    def published(cls, **options: Any) -> Sar:
        """Return the official settings: recovery at 0.2 nats as the code does it, SGD with momentum 0.9 at 2.5e-4."""
        return cls(**{"recovery": "published", "optimizer": "sgd-momentum", "learning_rate": 2.5e-4, **options})

    def recovery_threshold(self, classes: int) -> float | None:
        r"""Return the threshold of the moving average in nats, or None if recovery is off (objectives.md section 4).

        published: 0.2. ln-c: :math:`0.2 \ln C / \ln 1000`. relative: kappa times the median entropy of M0.
        """
        if self.recovery == "published":
            return PUBLISHED_RECOVERY
        if self.recovery == "ln-c":
            return PUBLISHED_RECOVERY * math.log(classes) / math.log(1000)
        if self.recovery == "relative" and self.reference_entropy is not None:
            return self.kappa * self.reference_entropy
        return None

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case."""
        optimizer = optimizer_of(subject, self.optimizer)
        recovery = Recovery(self.recovery_threshold(max(2, subject.classes)), forgets=self.recovery != "published")
        margin = self.margin * largest_entropy(subject.classes, subject.head)

        def update() -> Mapping[str, float]:
            nonlocal optimizer
            reliable: dict[int, Tensor] = {}

            def first(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
                uncertainty = self._uncertainty(logits, subject.head)
                kept = reliable[rows.start] = uncertainty.detach() < margin
                return subject.entropy_weight * uncertainty[kept].sum(), kept.sum()

            def second(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
                uncertainty = self._uncertainty(logits, subject.head)
                kept = reliable[rows.start] & (uncertainty.detach() < margin)
                return subject.entropy_weight * uncertainty[kept].sum(), kept.sum()

            loss = subject.backward(first)
            seen = {"kept": _share(reliable)}
            if loss is None:
                return seen
            slope = gradients(subject)
            with swapped(subject.parameters, shifted(subject, slope, self.radius / (norm(slope) + 1e-12))):
                sharp = subject.backward(second, inputs=subject.inputs)
            if sharp is None:
                return seen | {"loss": loss}
            optimizer.step()
            reset = recovery.fires(sharp / (subject.entropy_weight or 1.0))  # the loss without the entropy weight
            if reset:
                _return_to_source(subject)
                if self.recovery != "published":  # the official code resets the SAM wrapper only; momentum is kept
                    optimizer = optimizer_of(subject, self.optimizer)
            return seen | {"loss": loss, "sharp_loss": sharp, "reset": float(reset)}

        return update

    def _uncertainty(self, logits: Tensor, head: str) -> Tensor:
        voxels = entropy(logits, head)
        return voxels if self.sample == "voxel" else slice_means(voxels)


class Recovery:
    """Moving average of the loss (0.9 old + 0.1 new, starting with the first loss) that triggers a reset.

    The official code clears the average at a reset and then overwrites it with the old value, so resets repeat at
    every step until the average is above the threshold (SAR issue 4); ``forgets=False`` does the same.
    """

    def __init__(self, threshold: float | None, *, forgets: bool = True) -> None:
        self.threshold = threshold
        self.forgets = forgets
        self.average: float | None = None

    def fires(self, loss: float) -> bool:
        """Add a loss; return True if the average is now below the threshold."""
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        below = self.threshold is not None and self.average < self.threshold
        if below and self.forgets:
            self.average = None
        return below


def _share(kept: Mapping[int, Tensor]) -> float:
    return float(sum(part.sum() for part in kept.values())) / sum(part.numel() for part in kept.values())


@torch.no_grad()
def _return_to_source(subject: Adaptable) -> None:
    for name, parameter in subject.parameters.items():
        parameter.copy_(subject.source[name])
    subject.changed()

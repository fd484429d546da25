"""CoTTA: train toward the mean prediction of a slow teacher, reset random weights (Wang et al., CVPR 2022; D4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from casewise.adapt.augmentations import LightView, light_view
from casewise.adapt.logits import confidence, cross_entropy, probabilities
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import current, optimizer_of
from casewise.adapt.snapshot import swapped
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Cotta:
    r"""Train the student toward a teacher, move the teacher toward the student, reset random weights to the source.

    .. math::
        L = w \cdot \frac{1}{|\Omega|} \sum_x -\sum_c q_c \log p_c, \qquad
        q = \mathrm{softmax}\Big(\frac1N \sum_{v=1}^{N} z^{\text{teacher}}_v\Big)

    then :math:`\bar\theta \leftarrow \alpha\bar\theta + (1-\alpha)\theta`, then each element of theta is reset to
    the source with probability p. The mean is over *logits*, after the geometry of each view is inverted.

    The paper: episodic, N = 2 light views, alpha = 0.999, p = 0.01, w = 10, Adam. ``gate`` is the rule
    of the official code: views are used only if the mean largest probability of the source is below ``gate``; otherwise
    the target is the teacher's prediction of the unchanged case. Then the first gradient of a case is exactly 0, and
    Adam turns rounding errors into steps. ``deploy="teacher"`` predicts M_k with the teacher, as the official code does
    (which returns the logits from before the update); the default predicts with the student.

    Cost of an update: one backward pass, and N teacher forward passes without a graph more than the forward pass that
    predicted the mask (``deploy="teacher"``: one more forward pass per update; ``gate``: one more per case).
    """

    views: int = 2
    teacher_decay: float = 0.999
    restore: float = 0.01
    weight: float = 10.0
    gate: float | None = None
    deploy: str = "student"
    entropy_weighted: ClassVar[bool] = False  # the loss has no entropy term that a modulation could scale

    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        if self.deploy not in ("student", "teacher"):
            raise BadInput(f"deploy must be 'student' or 'teacher', got {self.deploy!r}")
        if self.views < 1 or not 0 <= self.teacher_decay <= 1 or not 0 <= self.restore <= 1:
            raise BadInput(
                f"views must be >= 1, teacher_decay and restore must be in [0, 1], "
                f"got {self.views}, {self.teacher_decay} and {self.restore}"
            )

    @classmethod
    def published(cls, **options: Any) -> Cotta:
        """Return the CIFAR-10 settings: 32 views, gate 0.92, weight 1, Adam at 1e-3. Use ``parameters="all"``."""
        official = {"views": 32, "weight": 1.0, "gate": 0.92, "deploy": "teacher", "learning_rate": 1e-3}
        return cls(**{**official, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case; the teacher starts with the source weights."""
        optimizer = optimizer_of(subject, self.optimizer)
        teacher = current(subject)
        student = current(subject)
        uses_views = self.gate is None or _sureness(subject) < self.gate

        def update() -> Mapping[str, float]:
            if self.deploy == "teacher":
                _hold(subject, student)
            generator = subject.generator()
            views = [light_view(generator) for _ in range(self.views)] if uses_views else [LightView()]
            pictures = [view.apply(subject.inputs) for view in views]

            def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
                with torch.no_grad(), swapped(subject.parameters, teacher):
                    seen = [
                        view.invert(subject.logits(picture[rows]))
                        for view, picture in zip(views, pictures, strict=True)
                    ]
                target = probabilities(torch.stack(seen).mean(0), subject.head)
                voxels = cross_entropy(logits, target, subject.head)
                return self.weight * voxels.sum(), voxels.numel()

            value = subject.backward(loss)
            optimizer.step()
            self._follow(subject, teacher)
            restored = self._restore(subject)
            if self.deploy == "teacher":
                student.update(current(subject))
                _hold(subject, teacher)
            return {"restored": restored} if value is None else {"loss": value, "restored": restored}

        return update

    def _follow(self, subject: Adaptable, teacher: dict[str, Tensor]) -> None:
        for name, parameter in subject.parameters.items():
            teacher[name] = torch.lerp(teacher[name], parameter.detach(), 1 - self.teacher_decay)

    @torch.no_grad()
    def _restore(self, subject: Adaptable) -> float:
        """Reset random elements to the source; return their share of all elements."""
        generator = subject.generator(1)
        moving = {id(parameter) for parameter in subject.moving()}
        back = total = 0
        for name, parameter in subject.parameters.items():
            chosen = torch.rand(parameter.shape, generator=generator).to(parameter.device) < self.restore
            if id(parameter) in moving:
                parameter.copy_(torch.where(chosen, subject.source[name], parameter))
                back, total = back + int(chosen.sum()), total + chosen.numel()
        return back / total


@torch.no_grad()
def _hold(subject: Adaptable, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        subject.parameters[name].copy_(value)
    subject.changed()


def _sureness(subject: Adaptable) -> float:
    """Return the mean largest probability of the source on the case (``begin`` runs before the first update)."""
    with torch.no_grad():
        return float(confidence(subject.logits(subject.inputs), subject.head)[1].mean())

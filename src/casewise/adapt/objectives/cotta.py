"""CoTTA: follow a slow teacher that sees several views, and forget a little at random (Wang et al., CVPR 2022; D4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from casewise.adapt.augmentations import View, light_view
from casewise.adapt.logits import confidence, cross_entropy, probabilities
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.optimizers import check_optimizer, current, displaced, optimizer_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Cotta:
    r"""One update: a step toward the teacher, then the teacher follows, then some elements go back to the source.

    .. math::
        L = w \cdot \frac{1}{|\Omega|} \sum_x -\sum_c q_c \log p_c, \qquad
        q = \mathrm{softmax}\Big(\frac1N \sum_{v=1}^{N} z^{\text{teacher}}_v\Big)

    then :math:`\bar\theta \leftarrow \alpha\bar\theta + (1-\alpha)\theta`, then each element of theta returns to the
    source with probability p. The average is over *logits*, with each view's geometry inverted.

    The paper: episodic, N = 2 light views, alpha = 0.999, p = 0.01, w = 10, Adam. ``gate`` is the official rule: views
    are used only where the source is unsure (mean largest probability below it), else the teacher's plain prediction.
    In that regime the first gradient of an episode is exactly 0 and Adam turns rounding noise into steps.
    ``deploy="teacher"`` predicts M_k with the teacher, as the official code does (which returns its logits from before
    the update); the default predicts with the student.

    An update costs one backward, and N teacher forwards without a graph beyond the forward that predicted the mask
    (``deploy="teacher"``: one forward more, with ``gate`` one more a case).
    """

    views: int = 2
    teacher_decay: float = 0.999
    restore: float = 0.01
    weight: float = 10.0
    gate: float | None = None
    deploy: str = "student"
    entropy_weighted: ClassVar[bool] = False  # no term that a modulation of the entropy could weigh

    optimizer: str = "adam"
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.deploy not in ("student", "teacher"):
            raise BadInput(f"deploy is 'student' or 'teacher', got {self.deploy!r}")
        if self.views < 1 or not 0 <= self.teacher_decay <= 1 or not 0 <= self.restore <= 1:
            raise BadInput(
                f"need views >= 1, teacher_decay and restore in [0, 1], "
                f"got {self.views}, {self.teacher_decay} and {self.restore}"
            )

    @classmethod
    def published(cls, **options: Any) -> Cotta:
        """The CIFAR-10 file: 32 views behind a gate of 0.92, weight 1, Adam at 1e-3; for ``parameters="all"``."""
        official = {"views": 32, "weight": 1.0, "gate": 0.92, "deploy": "teacher", "learning_rate": 1e-3}
        return cls(**{**official, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case: the teacher begins as the source."""
        optimizer = optimizer_of(subject, self.optimizer)
        teacher = current(subject)
        student = current(subject)
        uses_views = self.gate is None or _sureness(subject) < self.gate

        def update() -> Mapping[str, float]:
            if self.deploy == "teacher":
                _hold(subject, student)
            generator = subject.generator()
            views = [light_view(generator) for _ in range(self.views)] if uses_views else [View()]
            pictures = [view.apply(subject.inputs) for view in views]

            def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
                with torch.no_grad(), displaced(subject, teacher):
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
        """Send elements back to the source; the share of all elements that went."""
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
    """Mean largest probability of the source on the case; ``begin`` runs before anything moved."""
    with torch.no_grad():
        return float(confidence(subject.logits(subject.inputs), subject.head)[1].mean())

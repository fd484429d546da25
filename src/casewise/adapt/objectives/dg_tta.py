"""DG-TTA: make the predictions of two random views of a case agree (Weihsbach et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from casewise.adapt.logits import probabilities
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.objectives.consensus_distillation import moves_voxels, parts_of
from casewise.adapt.views import Drawn, View, ViewChain, inverted


@dataclass(frozen=True)
class DgTta:
    r"""Minimize one minus the soft Dice of two predictions of the case, each under a random view (Adam).

    .. math:: L = 1 - \frac{1}{|S|} \sum_{(n, c) \in S} \frac{4 \sum_x a_c(x)\, b_c(x)}{\sum_x (a_c(x) + b_c(x))^2}

    a and b are the two probability maps in the geometry of the case. x runs over the voxels that both views show. S
    contains the samples n and foreground classes c that both predictions find there; if S is empty, nothing is updated
    (``absent=True``: S contains all foreground classes of all samples). The published code draws random convolutions
    (GIN), which its source model was trained with. Here the views are those of ``random(n)``: gamma, contrast, offset,
    noise, a small rotation and zoom, mirrors. If logits and inputs have different grids, spatial views are left out.

    Cost of an update: two forward and two backward passes; the forward pass that predicted the mask is not used again.
    """

    photos: bool = False
    absent: bool = False  # also count classes that a prediction does not contain, as the published code does
    learning_rate: float = 5e-3
    entropy_weighted: ClassVar[bool] = False

    @classmethod
    def for_photos(cls, **options: Any) -> DgTta:
        """Return DG-TTA with views for photographs: range kept, no vertical mirrors (``random(n,photos)``)."""
        return cls(**{"photos": True, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case; each update draws two new views."""
        optimizer = torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)
        with torch.no_grad():
            one_grid = subject.logits(subject.inputs[:1]).shape[2:] == subject.inputs.shape[2:]

        def update() -> Mapping[str, float]:
            drawn = Drawn(2, self.photos).with_generator(subject.generator())
            views = (
                drawn if one_grid else [ViewChain(tuple(p for p in parts_of(v) if not moves_voxels(p))) for v in drawn]
            )
            first, second = (view.apply(subject.inputs) for view in views)
            shown = shown_by(views[0], subject.inputs) & shown_by(views[1], subject.inputs) if one_grid else None

            def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
                branches = zip(views, (logits, subject.logits(second[rows])), strict=True)
                a, b = (probabilities(inverted(view, seen), subject.head) for view, seen in branches)
                return disagreement(a, b, shown, head=subject.head, absent=self.absent)

            value = subject.backward(loss, inputs=first)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update


def disagreement(
    a: Tensor, b: Tensor, shown: Tensor | None = None, *, head: str = "softmax", absent: bool = False
) -> tuple[Tensor, float]:
    """Return the sum of 1 - soft Dice over samples and foreground classes that both maps contain, and their number.

    ``a`` and ``b`` are probabilities (n, classes, *space); ``shown``, (1, ..., rows, columns), selects the voxels.

    >>> one = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])[None]  # background, foreground of two voxels
    >>> loss, classes = disagreement(one, one)
    >>> float(loss), classes
    (0.0, 1.0)
    """
    shown = torch.ones((1,) * a.ndim, dtype=torch.bool, device=a.device) if shown is None else shown
    found = torch.stack([(_won(branch, head) & shown).flatten(2).any(2) for branch in (a, b)]).all(0) | absent
    a, b = ((branch * shown).flatten(2) for branch in (a, b))
    dice = 4 * (a * b).sum(2) / (a + b).square().sum(2).clamp(min=1e-8)
    if head == "softmax":
        found[:, 0] = False  # the background
    return (1 - dice)[found].sum(), float(found.sum())


def _won(branch: Tensor, head: str) -> Tensor:
    """Return, for each class, the voxels at which it is predicted."""
    if head != "softmax":
        return branch > 0.5
    return torch.zeros_like(branch, dtype=torch.bool).scatter_(1, branch.argmax(1, keepdim=True), True)


def shown_by(view: View, inputs: Tensor) -> Tensor:
    """Return the pixels that a view followed by its inverse leaves in place: bool (1, ..., rows, columns)."""
    rows, columns = inputs.shape[-2:]
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))[None].float()
    moved, parts = places, [part for part in parts_of(view) if hasattr(part, "invert")]
    for part in parts:
        moved = part.apply(moved)
    for part in reversed(parts):
        moved = inverted(part, moved)
    kept = (moved - places).abs().amax(1, keepdim=True) < 1
    return kept.reshape(*(1,) * (inputs.ndim - 2), rows, columns).to(inputs.device)

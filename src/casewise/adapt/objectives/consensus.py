"""Views of a case should agree: a few steps toward the mean of many (consensus), or of two toward each other (DG-TTA).

The target of the consensus is fixed, so nothing drifts. DG-TTA (Weihsbach et al., 2023) has none: both branches move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from casewise.adapt.consensus import Mean
from casewise.adapt.logits import cross_entropy, probabilities
from casewise.adapt.objective import Adaptable, Update
from casewise.adapt.views import Chain, Drawn, View, inverted, views_of
from casewise.core.errors import BadInput


@dataclass(frozen=True)
class Consensus:
    r"""Adam on the soft cross-entropy to the mean of the source's probabilities over M0 and some views.

    .. math:: L = \frac{1}{|A|} \sum_{x \in A} -\sum_c q_c(x) \log p_c(x), \qquad
              q = \frac{1}{V+1} \Big(p_0 + \sum_v v^{-1}\big(p_0(v(x))\big)\Big)

    The target q is formed once, with the source's weights, before the first update. A is all voxels, or those at which
    the largest q is at least ``agree``. Views that move voxels are used where logits and inputs share one grid (a
    bare network, nnU-Net's patches); elsewhere they would need the backbone's whole pipeline, and are passed over.

    It costs V forwards beyond those of TENT for each case.
    """

    views: str = "random(8)"
    agree: float = 0.0
    learning_rate: float = 5e-3
    entropy_weighted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        views_of(self.views)
        if not 0 <= self.agree <= 1:
            raise BadInput(f"agree is a probability from 0 to 1, got {self.agree}")

    def begin(self, subject: Adaptable) -> Update:
        """Form the target; each update is then a step toward it."""
        target = self._target(subject)
        counts = (target.amax(1) >= self.agree) if self.agree else None
        optimizer = torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)

        def loss(logits: Tensor, inputs: Tensor, rows: slice) -> tuple[Tensor, float]:
            voxels = cross_entropy(logits, target[rows], subject.head)
            if counts is None:
                return voxels.sum(), voxels.numel()
            return voxels[counts[rows]].sum(), float(counts[rows].sum())

        def update() -> Mapping[str, float]:
            value = subject.backward(loss)
            optimizer.step()
            return {} if value is None else {"loss": value}

        return update

    @torch.no_grad()
    def _target(self, subject: Adaptable) -> Tensor:
        mean = Mean()
        plain = probabilities(subject.logits(subject.inputs), subject.head).clone()
        one_grid = plain.shape[2:] == subject.inputs.shape[2:]
        mean.add(plain)
        for view in self._drawn(subject):
            seen = view.apply(subject.inputs)
            usable = bool(torch.isfinite(seen).all()) and (one_grid or not _moves(view))
            if usable:
                mean.add(probabilities(inverted(view, subject.logits(seen)), subject.head))
        return mean.value.clone()

    def _drawn(self, subject: Adaptable) -> list[View]:
        generator = subject.generator()
        found: list[View] = []
        for view in views_of(self.views):
            found += view.with_generator(generator) if isinstance(view, Drawn) else [view]
        return found


@dataclass(frozen=True)
class DgTta:
    r"""Adam on one minus the soft Dice of two branches, each of which sees the case under a view drawn for the update.

    .. math:: L = 1 - \frac{1}{|S|} \sum_{(n, c) \in S} \frac{4 \sum_x a_c(x)\, b_c(x)}{\sum_x (a_c(x) + b_c(x))^2}

    a and b are the probabilities of the branches, turned back to the geometry of the case. x runs over the voxels that
    both views show, S over the samples n and foreground classes c that both branches find in them; where S is empty an
    update moves nothing (``absent=True`` counts all foreground classes of all samples). The published code draws random
    convolutions (GIN), which its source was trained with; these views are those of ``random(n)``: gamma, contrast,
    offset, noise, a small turn and zoom, mirrors. Where logits and inputs do not share one grid, nothing is turned.

    An update costs two forwards and two backwards of its own; the forward that predicted the mask is not used again.
    """

    photos: bool = False
    absent: bool = False  # count classes that a branch does not find, as the published code does
    learning_rate: float = 5e-3
    entropy_weighted: ClassVar[bool] = False

    @classmethod
    def for_photos(cls, **options: Any) -> DgTta:
        """With views that keep the range of photographs, and no mirrors upside down (``random(n,photos)``)."""
        return cls(**{"photos": True, **options})

    def begin(self, subject: Adaptable) -> Update:
        """Prepare one case; two new views for each update."""
        optimizer = torch.optim.Adam(subject.parameters.values(), lr=subject.learning_rate)
        with torch.no_grad():
            one_grid = subject.logits(subject.inputs[:1]).shape[2:] == subject.inputs.shape[2:]

        def update() -> Mapping[str, float]:
            drawn = Drawn(2, self.photos).with_generator(subject.generator())
            views = drawn if one_grid else [Chain(tuple(p for p in _parts(v) if not _moves(p))) for v in drawn]
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
    """Sum of 1 - soft Dice over the samples and foreground classes that both branches find, and how many those are.

    ``a`` and ``b`` are probabilities (n, classes, *space); ``shown``, (1, ..., rows, columns), says where to look.

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
    """Where each class is the prediction."""
    if head != "softmax":
        return branch > 0.5
    return torch.zeros_like(branch, dtype=torch.bool).scatter_(1, branch.argmax(1, keepdim=True), True)


def shown_by(view: View, inputs: Tensor) -> Tensor:
    """(1, ..., rows, columns): where a view, turned back, reads the very place and not a repeated border."""
    rows, columns = inputs.shape[-2:]
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))[None].float()
    moved, parts = places, [part for part in _parts(view) if hasattr(part, "invert")]
    for part in parts:
        moved = part.apply(moved)
    for part in reversed(parts):
        moved = inverted(part, moved)
    kept = (moved - places).abs().amax(1, keepdim=True) < 1
    return kept.reshape(*(1,) * (inputs.ndim - 2), rows, columns).to(inputs.device)


def _parts(view: View) -> tuple[View, ...]:
    parts: tuple[View, ...] = getattr(view, "views", (view,))
    return parts


def _moves(view: View) -> bool:
    """Whether a view, or a part of it, moves voxels."""
    return any(hasattr(part, "invert") for part in _parts(view))

"""Harmful accepted area as a ``torchmetrics.Metric``: log it beside Dice, on one process or on many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from casewise.core.errors import BadInput, MissingExtra
from casewise.measure.metrics.harm import harm

try:
    from torchmetrics import Metric
except ImportError as error:
    raise MissingExtra(f"torchmetrics cannot be imported ({error}); pip install 'casewise[torchmetrics]'") from error


class HarmfulArea(Metric):  # type: ignore[misc]
    r"""Mean over cases of the harmful accepted area of replacing ``source`` by ``adapted`` (B6).

    .. math:: \overline{HA} = \frac 1 n \sum_{i=1}^n HA(\text{source}_i, \text{adapted}_i, \text{label}_i)

    A case without a changed voxel counts 0 (B6). Options are those of :func:`casewise.measure.metrics.harm.harm`.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: Tensor
    cases: Tensor

    def __init__(
        self, *, min_area: int = 16, foreground: bool = True, ignore: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.min_area = min_area
        self.foreground = foreground
        self.ignore = ignore
        self.add_state("total", default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("cases", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, source: Tensor, adapted: Tensor, label: Tensor) -> None:
        """Take in a batch of label maps (n, rows, columns) or (n, slices, rows, columns); every n is a case."""
        if not source.shape == adapted.shape == label.shape or source.ndim not in (3, 4):
            raise BadInput(
                f"source, adapted and label are label maps (n, *space) of one shape, got {tuple(source.shape)}, "
                f"{tuple(adapted.shape)} and {tuple(label.shape)}; take the argmax of logits first"
            )
        for one in zip(source, adapted, label, strict=True):
            before, after, truth = (mask.detach().cpu().numpy() for mask in one)
            found = harm(before, after, truth, min_area=self.min_area, foreground=self.foreground, ignore=self.ignore)
            self.total += found.ha
            self.cases += 1

    def compute(self) -> Tensor:
        """The mean; NaN before the first case, because there is none."""
        return self.total / self.cases

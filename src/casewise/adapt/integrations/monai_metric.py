"""Harmful accepted area as a MONAI ``CumulativeIterationMetric``: one value a case, buffered, then reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from casewise.core.errors import BadInput, MissingExtra
from casewise.measure.metrics.harm import harm

try:
    from monai.metrics import CumulativeIterationMetric
    from monai.metrics.utils import do_metric_reduction
except ImportError as error:
    raise MissingExtra(f"MONAI cannot be imported ({error}); pip install 'casewise[monai]'") from error


class HarmfulArea(CumulativeIterationMetric):  # type: ignore[misc]
    """Harmful accepted area (B6) of replacing ``source`` by ``adapted``, for masks in MONAI's layout.

    Called as ``metric(y_pred=adapted, y=label, source=source)``. Every tensor is (n, 1, *space) of label numbers, or
    (n, class, *space) one-hot, as :class:`monai.metrics.DiceMetric` takes them.
    """

    def __init__(
        self,
        *,
        min_area: int = 16,
        foreground: bool = True,
        ignore: int | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self._options: dict[str, Any] = {"min_area": min_area, "foreground": foreground, "ignore": ignore}

    def _compute_tensor(self, y_pred: Tensor, y: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        """(n, 1): the harmful area of every case of the batch."""
        if y is None or source is None:
            raise BadInput(
                "harmful area compares two masks with a label: metric(y_pred=adapted, y=label, source=source)"
            )
        if not y_pred.shape == y.shape == source.shape or y_pred.ndim not in (4, 5):
            raise BadInput(
                f"masks are (n, 1 or class, *space) of one shape, got y_pred {tuple(y_pred.shape)}, "
                f"y {tuple(y.shape)}, source {tuple(source.shape)}"
            )
        before, after, truth = (_numbers(mask) for mask in (source, y_pred, y))
        areas = [
            harm(*(mask.numpy() for mask in one), **self._options).ha for one in zip(before, after, truth, strict=True)
        ]
        return torch.tensor(areas, dtype=torch.float32).reshape(-1, 1)

    def aggregate(self, reduction: str | None = None) -> Tensor:
        """The buffered values, reduced: "mean", "sum", "none", ... as in other MONAI metrics."""
        data = self.get_buffer()
        if not isinstance(data, Tensor):
            raise BadInput("aggregate() was called before any case; call the metric on a batch first")
        reduced: Tensor = do_metric_reduction(data, reduction or self.reduction)[0]
        return reduced


def _numbers(mask: Tensor) -> Tensor:
    """Label numbers (n, *space) from numbers or one-hot."""
    plain = mask.detach().cpu()
    return plain[:, 0].round().long() if plain.shape[1] == 1 else plain.argmax(1)

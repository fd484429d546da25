"""Harmful accepted area, and new masks against old ones, as MONAI metrics: one row per case, buffered, then reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from casewise.core.errors import BadInput, MissingExtra
from casewise.measure.comparison import comparison
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
        _check_masks(y_pred=y_pred, y=y, source=source)
        before, after, truth = (_numbers(mask) for mask in (source, y_pred, y))
        areas = [
            harm(*(mask.numpy() for mask in one), **self._options).ha for one in zip(before, after, truth, strict=True)
        ]
        return torch.tensor(areas, dtype=torch.float32).reshape(-1, 1)

    def aggregate(self, reduction: str | None = None) -> Tensor:
        """The buffered values, reduced: "mean", "sum", "none", ... as in other MONAI metrics."""
        reduced: Tensor = do_metric_reduction(_buffered(self), reduction or self.reduction)[0]
        return reduced


class NewAgainstOld(CumulativeIterationMetric):  # type: ignore[misc]
    """What a new version does to cases that had an old mask, for masks in MONAI's layout.

    Called as ``metric(y_pred=new, y=label, old=old)``; gives (n, 4) of metric_old, metric_new, ha and ba per case.
    ``aggregate`` gives the same dictionary as :class:`casewise.adapt.torchmetrics_metric.NewAgainstOld`.
    Options are those of :func:`casewise.compare`.
    """

    def __init__(self, *, good: float = 0.7, min_area: int = 16, metric: str = "dice", **options: Any) -> None:
        super().__init__()
        self.good = good
        self._measure: dict[str, Any] = {"min_area": min_area, "metric": metric, "surfaces": "none", **options}

    def _compute_tensor(self, y_pred: Tensor, y: Tensor | None = None, old: Tensor | None = None) -> Tensor:
        """(n, 4): metric_old, metric_new, ha, ba of every case of the batch."""
        if y is None or old is None:
            raise BadInput("new against old needs three masks: metric(y_pred=new, y=label, old=old)")
        _check_masks(y_pred=y_pred, y=y, old=old)
        rows = []
        for one in zip(*(_numbers(mask) for mask in (old, y_pred, y)), strict=True):
            found = comparison(*(mask.numpy() for mask in one), **self._measure)
            rows.append([found.metric_old, found.metric_new, found.ha, found.ba])
        return torch.tensor(rows, dtype=torch.float64)

    def aggregate(self) -> dict[str, Tensor]:
        """Means and counts over the buffered cases."""
        data = _buffered(self)
        before, after = data[:, 0], data[:, 1]
        change = torch.round(after - before, decimals=12)
        return {
            "metric_old": before.nanmean(),
            "metric_new": after.nanmean(),
            "change": change.nanmean(),
            "ha": data[:, 2].mean(),
            "ba": data[:, 3].mean(),
            "helped": (change > 0).sum(),
            "hurt": (change < 0).sum(),
            "unchanged": (change == 0).sum(),
            "flips": ((before >= self.good) & (after < self.good)).sum(),
            "cases": torch.tensor(len(data)),
        }


def _check_masks(**masks: Tensor) -> None:
    """Refuse masks that are not batches of one shape in MONAI's layout."""
    shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
    if len(set(shapes.values())) > 1 or len(shapes["y_pred"]) not in (4, 5):
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise BadInput(f"masks are (n, 1 or class, *space) of one shape, got {said}")


def _buffered(metric: CumulativeIterationMetric) -> Tensor:
    """What the metric kept of every case so far."""
    data = metric.get_buffer()
    if not isinstance(data, Tensor):
        raise BadInput("aggregate() was called before any case; call the metric on a batch first")
    return data


def _numbers(mask: Tensor) -> Tensor:
    """Label numbers (n, *space) from numbers or one-hot."""
    plain = mask.detach().cpu()
    return plain[:, 0].round().long() if plain.shape[1] == 1 else plain.argmax(1)

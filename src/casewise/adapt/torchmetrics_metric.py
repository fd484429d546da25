"""Harmful accepted area, and new masks against old ones, as ``torchmetrics.Metric``: on one process or on many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from casewise.core.errors import BadInput, MissingExtra
from casewise.measure.comparison import comparison
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
        _check_maps(source=source, adapted=adapted, label=label)
        for one in zip(source, adapted, label, strict=True):
            before, after, truth = (mask.detach().cpu().numpy() for mask in one)
            found = harm(before, after, truth, min_area=self.min_area, foreground=self.foreground, ignore=self.ignore)
            self.total += found.ha
            self.cases += 1

    def compute(self) -> Tensor:
        """The mean; NaN before the first case, because there is none."""
        return self.total / self.cases


class NewAgainstOld(Metric):  # type: ignore[misc]
    """What a new version does to cases that had an old mask: helped, hurt, flipped, and the harmful area.

    ``compute`` gives a dictionary of means and counts over cases: ``metric_old``, ``metric_new``, ``change``, ``ha``,
    ``ba``, ``helped``, ``hurt``, ``unchanged``, ``flips`` (at or above ``good`` before, below now) and ``cases``. Cases
    whose metric is undefined count in ``cases``, ``ha`` and ``ba`` only. Further options are those of
    :func:`casewise.compare`.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    totals: Tensor

    _SUMS = ("metric_old", "metric_new", "helped", "hurt", "unchanged", "flips", "defined", "ha", "ba", "cases")

    def __init__(self, *, good: float = 0.7, min_area: int = 16, metric: str = "dice", **options: Any) -> None:
        own: dict[str, Any] = {
            name: options.pop(name) for name in ("foreground", "ignore", "classes") if name in options
        }
        super().__init__(**options)
        self.good = good
        self._measure: dict[str, Any] = {"min_area": min_area, "metric": metric, "surfaces": "none", **own}
        self.add_state("totals", default=torch.zeros(len(self._SUMS), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, old: Tensor, new: Tensor, label: Tensor) -> None:
        """Take in a batch of label maps (n, rows, columns) or (n, slices, rows, columns); every n is a case."""
        _check_maps(old=old, new=new, label=label)
        for one in zip(old, new, label, strict=True):
            self.totals += torch.tensor(sums_of(one, self.good, self._measure), dtype=torch.float64).to(self.totals)

    def compute(self) -> dict[str, Tensor]:
        """Means and counts; NaN where there is no case."""
        totals = dict(zip(self._SUMS, self.totals, strict=True))
        found = {name: totals[name] / totals["defined"] for name in ("metric_old", "metric_new")}
        found["change"] = found["metric_new"] - found["metric_old"]
        found |= {name: totals[name] / totals["cases"] for name in ("ha", "ba")}
        return found | {name: totals[name] for name in ("helped", "hurt", "unchanged", "flips", "cases")}


def sums_of(case: Any, good: float, measure: dict[str, Any]) -> list[float]:
    """What one case (old, new, label) adds to the sums."""
    found = comparison(*(mask.detach().cpu().numpy() for mask in case), **measure)
    old, new, change = float(found.metric_old or 0), float(found.metric_new or 0), round(found.change, 12)
    harmful = [float(found.ha or 0), float(found.ba or 0), 1.0]
    if change != change:
        return [0.0] * 7 + harmful
    return [old, new, float(change > 0), float(change < 0), float(change == 0), float(old >= good > new), 1.0, *harmful]


def _check_maps(**maps: Tensor) -> None:
    """Refuse three batches that are not label maps of one shape."""
    (first, second, third), shapes = maps, [tuple(one.shape) for one in maps.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) not in (3, 4):
        raise BadInput(
            f"{first}, {second} and {third} are label maps (n, *space) of one shape, got {shapes[0]}, {shapes[1]} and "
            f"{shapes[2]}; take the argmax of logits first"
        )

"""Harmful area inside torchmetrics and MONAI: the library's own number, batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from casewise.core.errors import BadInput
from casewise.measure.metrics.harm import harm

Batch = tuple[Tensor, Tensor, Tensor]


def batch(seed: int, *shape: int) -> Batch:
    """Blocky source, adapted and label, of classes 0 to 2; case 0 is not changed at all."""
    generator = torch.Generator().manual_seed(seed)
    tiles = [torch.randint(0, 3, shape, generator=generator) for _ in range(3)]
    source, adapted, label = (tile.repeat_interleave(4, -1).repeat_interleave(4, -2) for tile in tiles)
    adapted[0] = source[0]
    return source, adapted, label


def areas(masks: Batch, **options: Any) -> list[float]:
    return [harm(*(one.numpy() for one in case), **options).ha for case in zip(*masks, strict=True)]


def test_torchmetrics_gives_the_mean_over_all_batches() -> None:
    from casewise.adapt.torchmetrics_metric import HarmfulArea

    metric = HarmfulArea(min_area=8, foreground=False)
    flat, deep = batch(0, 3, 4, 4), batch(1, 2, 2, 4, 4)
    metric.update(*flat)
    metric.update(*deep)
    wanted = [*areas(flat, min_area=8, foreground=False), *areas(deep, min_area=8, foreground=False)]
    assert 0 < np.mean(wanted) < 1
    assert metric.compute().item() == pytest.approx(np.mean(wanted), abs=1e-12)
    metric.reset()
    metric.update(*(mask[:1] for mask in flat))
    assert metric.compute().item() == 0


def test_torchmetrics_adds_up_over_processes() -> None:
    from casewise.adapt.torchmetrics_metric import HarmfulArea

    one, other, both = HarmfulArea(min_area=4), HarmfulArea(min_area=4), HarmfulArea(min_area=4)
    first, second = batch(2, 1, 4, 4), batch(3, 3, 4, 4)
    one.update(*first)
    other.update(*second)
    both.update(*first)
    both.update(*second)
    one.total, one.cases = one.total + other.total, one.cases + other.cases  # what dist_reduce_fx="sum" does
    one._computed = None
    assert one.compute() == both.compute()


@pytest.mark.slow
def test_monai_buffers_one_value_a_case_from_numbers_or_one_hot() -> None:
    from casewise.adapt.monai_metric import HarmfulArea

    masks = batch(4, 3, 4, 4)
    numbers, hot = HarmfulArea(min_area=4), HarmfulArea(min_area=4, reduction="none")
    source, adapted, label = (mask[:, None] for mask in masks)
    numbers(y_pred=adapted, y=label, source=source)
    source, adapted, label = (torch.nn.functional.one_hot(mask, 3).movedim(-1, 1) for mask in masks)
    hot(y_pred=adapted, y=label, source=source)
    wanted = areas(masks, min_area=4)
    assert numbers.aggregate().item() == pytest.approx(np.mean(wanted), abs=1e-6)
    np.testing.assert_allclose(hot.aggregate().ravel().numpy(), wanted, atol=1e-6)
    numbers.reset()
    with pytest.raises(BadInput, match="before any case"):
        numbers.aggregate()
    with pytest.raises(BadInput, match="compares two masks with a label"):
        numbers(y_pred=adapted, y=label)


def test_logits_are_not_masks() -> None:
    from casewise.adapt.torchmetrics_metric import HarmfulArea

    _, adapted, label = batch(0, 3, 4, 4)
    with pytest.raises(BadInput, match="take the argmax of logits first"):
        HarmfulArea().update(torch.zeros(3, 2, 16, 16), adapted, label)


def updates() -> list[torch.Tensor]:
    """Old, new and label of four cases: hurt, helped, flipped, empty."""
    label = torch.zeros(4, 8, 8, dtype=torch.long)
    label[:3, 2:6, 2:6] = 1
    old, new = label.clone(), label.clone()
    new[0, 2, 2:6] = 0
    old[1, 2, 2:6] = 0
    new[2, 2:5] = 0
    return [old, new, label]


def test_new_against_old_counts_the_same_in_torchmetrics_monai_and_casewise():
    pytest.importorskip("torchmetrics")
    pytest.importorskip("monai")
    import casewise
    from casewise.adapt import monai_metric, torchmetrics_metric

    old, new, label = updates()
    first = torchmetrics_metric.NewAgainstOld(min_area=1)
    first.update(old[:2], new[:2], label[:2])
    first.update(old[2:], new[2:], label[2:])
    second = monai_metric.NewAgainstOld(min_area=1)
    second(y_pred=new[:, None], y=label[:, None], old=old[:, None])
    found, other = first.compute(), second.aggregate()
    summary = casewise.compare([m.numpy() for m in old], list(new.numpy()), list(label.numpy()), min_area=1).summary
    for name in ("helped", "hurt", "flips", "cases"):
        assert int(found[name]) == int(other[name]) == summary[name], name
    assert (int(found["helped"]), int(found["hurt"]), int(found["flips"])) == (1, 2, 1)
    for name in ("metric_old", "metric_new"):
        assert float(found[name]) == pytest.approx(float(other[name])) == pytest.approx(summary[name])
    assert float(found["ha"]) == pytest.approx(float(other["ha"])) == pytest.approx(summary["ha"]["estimate"])


def test_new_against_old_passes_its_options_on_and_refuses_other_shapes():
    pytest.importorskip("torchmetrics")
    pytest.importorskip("monai")
    from casewise.adapt import monai_metric, torchmetrics_metric

    old, new, label = updates()
    strict = torchmetrics_metric.NewAgainstOld(min_area=100, good=0.1, metric="miou")
    strict.update(old, new, label)
    assert (float(strict.compute()["ha"]), int(strict.compute()["flips"])) == (0.0, 0)
    with pytest.raises(BadInput, match="label maps"):
        strict.update(old, new[:2], label)
    with pytest.raises(BadInput, match="new against old needs three masks"):
        monai_metric.NewAgainstOld()(y_pred=new[:, None], y=label[:, None])
    with pytest.raises(BadInput, match="before any case"):
        monai_metric.NewAgainstOld().aggregate()

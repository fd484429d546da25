"""A rate is chosen without labels: enough change at the first step, and rest afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from casewise.adapt.backbones.module import of_network
from casewise.adapt.rates import RateRow, recommended, sweep_rates
from casewise.adapt.snapshot import fingerprint
from casewise.core.errors import BadInput
from casewise.core.records import Case


def row(rate: float, first: float, *, last: float | None = None, moved: float = 1.0, failed: int = 0) -> RateRow:
    fresh = (first, first / 2 if last is None else last)
    return RateRow(rate, 4, moved, (first, sum(fresh)), fresh, failed)


def test_the_rate_nearest_to_the_wanted_change_is_recommended() -> None:
    assert recommended([row(1e-4, 1e-4), row(1e-3, 9e-4), row(1e-2, 5e-3)]).rate == 1e-3


def test_a_rate_that_does_not_come_to_rest_is_not_recommended() -> None:
    choice = recommended([row(1e-4, 1e-4), row(1e-3, 7e-4, last=8e-4)])
    assert choice.rate == 1e-4
    assert "come to rest" in choice.reason


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row(1e-4, 0.0, moved=0.0)], "no rate from 0.0001 to 0.0001 moves the masks of most cases; try larger ones"),
        ([row(1e-3, 7e-4, last=9e-4)], "comes to rest"),
        ([row(1e-3, 1e-1)], "changes 0.1 of the voxels, wanted 0.0007; try smaller rates"),
        ([row(1e-3, 1e-6)], "try larger rates"),
        ([row(1e-3, 0.0, moved=0.0, failed=4)], "ends in NaN; try smaller rates"),
    ],
)
def test_where_no_rate_fits_the_reason_is_said(rows: list[RateRow], sentence: str) -> None:
    choice = recommended(rows)
    assert choice.rate is None
    assert sentence in choice.reason


class TwoClasses(nn.Module):
    """A normalization and a threshold: enough to be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 1)
        self.head = nn.Conv2d(1, 2, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1))
            self.head.bias.copy_(torch.tensor([0.3, -0.3]))

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(image))
        return logits


def test_a_sweep_measures_every_rate_and_gives_the_network_back() -> None:
    from casewise.adapt.objectives import objective_of

    backbone = of_network(TwoClasses())
    rng = np.random.default_rng(0)
    cases = [Case(f"c{number}", rng.normal(size=(1, 32, 32)).astype(np.float32)) for number in range(2)]
    before, told = fingerprint(backbone.network), []
    choice = sweep_rates(backbone, cases, objective_of("tent"), rates=(1e-1, 1e-9), steps=3, seen=told.append)
    assert [one.rate for one in choice.rows] == [1e-9, 1e-1]
    assert told == list(choice.rows)
    small, large = choice.rows
    assert small.moved == 0.0
    assert large.moved == 1.0
    assert len(large.coverage) == 3
    assert large.coverage[0] == pytest.approx(large.fresh[0])
    assert fingerprint(backbone.network) == before


def test_nonsense_is_refused() -> None:
    backbone = of_network(TwoClasses())
    with pytest.raises(BadInput, match="rates are positive numbers"):
        sweep_rates(backbone, [], "tent", rates=(0.0,))
    with pytest.raises(BadInput, match="needs cases"):
        sweep_rates(backbone, [], "tent")


def test_rates_beyond_one_that_changes_far_too_much_are_left_out() -> None:
    from casewise.adapt.objectives import objective_of

    rng, count = np.random.default_rng(0), []
    cases = [Case(f"c{number}", rng.normal(size=(1, 32, 32)).astype(np.float32)) for number in range(2)]
    choice = sweep_rates(
        of_network(TwoClasses()), cases, objective_of("tent"), rates=(1e-5, 5.0, 6.0), steps=1,
        done=lambda: count.append(1),
    )  # fmt: skip
    assert [row.rate for row in choice.rows] == [1e-5, 5.0]  # at 5 every voxel may flip: 6 needs no trial
    assert len(count) == 4

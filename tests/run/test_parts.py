"""SLURM arrays and nnU-Net's two flags."""

from __future__ import annotations

import pytest

from casewise.adapt.contract import parse_size
from casewise.core.errors import BadInput
from casewise.run.gather import part_from


def test_flags_win_over_slurm() -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8"}
    assert part_from(4, 1, slurm) == (4, 1)
    assert part_from(None, None, slurm) == (8, 5)
    assert part_from(None, None, {}) == (1, 0)


def test_an_array_that_does_not_begin_at_zero_is_counted_from_its_first_task() -> None:
    tasks = [{"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "5",
              "SLURM_ARRAY_TASK_COUNT": "3"} for i in (10, 15, 20)]  # fmt: skip
    assert [part_from(None, None, task) for task in tasks] == [(3, 0), (3, 1), (3, 2)]


def test_half_an_array_is_refused() -> None:
    with pytest.raises(BadInput, match="SLURM array variables are incomplete"):
        part_from(None, None, {"SLURM_ARRAY_TASK_COUNT": "3"})


@pytest.mark.parametrize(
    ("text", "size"), [("8G", 8 * 2**30), ("500M", 500 * 2**20), ("1.5gib", 3 * 2**29), ("77", 77)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_without_a_number_is_refused() -> None:
    with pytest.raises(BadInput, match="such as 8G"):
        parse_size("much")

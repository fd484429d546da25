"""mIoU over all voxels at each step (A11)."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.archive.store import create_archive
from casewise.core.records import Binding, Case, Trajectory
from casewise.study.analyses.budget import micro_ladder

MADE_BY = Binding(model="toy", objective="toy", loader="toy", measure="toy")


@pytest.fixture
def archive(tmp_path):
    """A small image that adaptation ruins and a large one that it leaves alone; void is 255."""
    made = create_archive(tmp_path / "toy", binding=MADE_BY, steps=1, configuration={"metric": "miou", "ignore": 255})
    small, large = np.array([[0, 1, 255]], np.uint8), np.array([[0] * 6 + [1] * 2], np.uint8)
    for name, label, adapted in (("small", small, 1 - small % 2), ("large", large, large)):
        path = Trajectory(name, (label % 255, adapted), ({}, {}))
        made.add(Case(name, np.empty((1, 0)), group=name), path, label)
    made.add(Case("unlabelled", np.empty((1, 0)), group="small"), Trajectory("unlabelled", (small, small), ({}, {})))
    return made.seal()


def test_counts_are_added_before_they_are_divided(archive):
    found = micro_ladder(archive)
    assert found.number("micro_miou", step=0) == 1.0
    # class 0: 6 shared of 8, class 1: 2 shared of 4; the mean over images would be (0 + 1) / 2
    assert found.number("micro_miou", step=1) == pytest.approx((6 / 8 + 2 / 4) / 2)


def test_cases_without_a_label_are_left_out(archive):
    found = micro_ladder(archive)
    assert found.n == 2
    assert set(found.table["n"]) == {2}


def test_each_condition_has_its_own_ladder(archive):
    found = micro_ladder(archive, by_group=True)
    assert found.number("micro_miou", group="small", step=1) == 0.0
    assert found.number("micro_miou", group="large", step=1) == 1.0
    assert found.row(group="small", step=1)["n"] == 1


def test_masks_are_read_once(archive, monkeypatch):
    first = micro_ladder(archive)
    monkeypatch.setattr("casewise.study.analyses.budget.micro_miou", lambda *_, **__: pytest.fail("computed again"))
    assert micro_ladder(archive).table.equals(first.table)

"""Panel A of the teaser: micro-mIoU where the metric is mIoU, the case mean where it is Dice (A11)."""

from __future__ import annotations

import warnings

import pytest
from worlds.cohorts import synthetic_archive

from casewise.core.errors import DegenerateTertiles
from casewise.judge.calibration.calibrate import calibrate
from casewise.study.analyses import ANALYSES
from casewise.study.analyses.budget import ladder_of, micro_of
from casewise.study.study import Study


@pytest.fixture(scope="module")
def driving(tmp_path_factory):
    root = tmp_path_factory.mktemp("driving")
    holdout = synthetic_archive(root / "holdout", cases=8, seed=1, prefix="held", metric="miou")
    stream = synthetic_archive(root / "stream", cases=6, seed=2, metric="miou", split="evaluation")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateTertiles)
        return Study.of(stream, holdout, calibrate(holdout, "cardiac"), resamples=100)


def curve(section):
    """(label, values) of panel A's metric."""
    axis = section.pictures[0].figure.axes[2]  # panel A's second scale, drawn after both panels were laid out
    return axis.get_ylabel(), list(axis.lines[0].get_ydata())


def test_mean_iou_is_micro_in_the_teaser_and_says_so(driving):
    section = ANALYSES["budget"](driving)
    found = next(one for one in section.findings if one.name == "budget.micro")
    micro = found.table[found.table["group"] == "all"]["micro_miou"].tolist()
    assert curve(section) == ("micro-mIoU", micro)
    assert "micro over all pixels" in section.pictures[0].caption
    assert found.made["average"] == "micro"


def test_tables_keep_the_mean_over_images(driving):
    ladder = ladder_of(driving).table.query("group == 'all'").set_index("step")["metric"]
    images = driving.outcomes.query("shrink == 0").groupby("step")["metric"].mean()
    assert ladder.tolist() == pytest.approx(images.tolist())
    micro = micro_of(driving).table.query("group == 'all'")["micro_miou"]
    assert ladder.tolist() != pytest.approx(micro.tolist(), abs=1e-6)


def test_dice_stays_a_case_mean(study):
    section = ANALYSES["budget"](study)
    assert micro_of(study) is None
    assert curve(section)[0] == "mean Dice"
    assert "case means" in section.pictures[0].caption

"""Arguments of another range or type are refused at once: --allowed-hurt 10 would allow a design to hurt everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.cohorts import synthetic_archive

import casewise
from casewise.core.errors import BadInput
from casewise.judge.calibration.quality import too_few_for_flags
from casewise.study.quality_control import archive_opinions, controlled, quality_rows

SCANS = [np.random.default_rng(seed).normal(size=(1, 2, 64, 64)) for seed in range(5)]


@pytest.mark.parametrize("options", [{"allowed_hurt": 10}, {"flag_below": 70}, {"margin": 1.5}, {"allowed_hurt": -0.1}])
def test_fit_refuses_a_percentage_before_it_reads_a_case(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(options))} must be from 0 to 1, such as 0.1 for 10 %"):
        casewise.fit("no model", SCANS, [], out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_calibrate_qc_and_compare_refuse_a_percentage(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "a", cases=6)
    for options in ({"allowed_hurt": 10}, {"flag_below": 70}):
        with pytest.raises(BadInput, match="must be from 0 to 1"):
            casewise.calibrate(archive, "default", **options)
    for level in (90, 1):
        with pytest.raises(BadInput, match="the confidence must lie between 0 and 1"):
            too_few_for_flags(archive, level)
    with pytest.raises(BadInput, match="below must be from 0 to 1"):
        controlled(quality_rows(archive_opinions(archive), metric="dice"), below=70)
    with pytest.raises(BadInput, match="good must be from 0 to 1"):
        casewise.compare([np.ones((4, 4), int)], [np.ones((4, 4), int)], good=70)


@pytest.mark.parametrize("policy", [None, 3, {"controller": "m0"}])
def test_what_is_not_a_policy_is_named(policy: Any) -> None:
    with pytest.raises(BadInput, match=r"a policy must be a Policy, its file or its archive, got (NoneType|int|dict)"):
        casewise.Deployment("casewise.adapt.networks:phantom_cardiac", policy)


@pytest.mark.parametrize("image", [None, "heart.nii.gz", [[1, 2], ["a", "b"]]])
def test_what_is_not_an_array_of_numbers_is_no_image(image: Any) -> None:
    with pytest.raises(BadInput, match=r"must be an array of numbers \(channel, \*space\), got (NoneType|str|list)"):
        casewise.Case("a", image)

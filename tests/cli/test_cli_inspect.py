"""``casewise inspect`` prints what a folder is, and writes it out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from casewise.cli import app
from casewise.core.errors import BadInput


@pytest.fixture
def acdc(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0)
    for sequence in ("GOPR1", "GOPR2", "GOPR3", "GOPR4", "GOPR5"):
        for frame in ("000001", "000002"):
            stem = f"fog/val/{sequence}/{sequence}_frame_{frame}"
            for path, values in (
                (f"rgb_anon/{stem}_rgb_anon.png", noise.integers(0, 255, (6, 8, 3), dtype=np.uint8)),
                (f"gt/{stem}_gt_labelTrainIds.png", np.full((6, 8), 13, np.uint8)),
            ):
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(tmp_path / path)
    return tmp_path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_inspect_prints_what_it_finds(acdc: Path) -> None:
    text = run(acdc)
    assert "acdc_driving: layout acdc_driving" in text
    assert "10, 10 labelled, 5 patients (or sequences)" in text
    assert "13 car (10)" in text
    assert "no problem seen" in text


def test_json_holds_the_same(acdc: Path) -> None:
    seen = json.loads(run(acdc, "--json", "--all"))
    assert (seen["cases"], seen["groups"], seen["problems"]) == (10, {"fog": 10}, [])


def test_a_holdout_is_written_with_its_clusters(acdc: Path, tmp_path: Path) -> None:
    out = tmp_path / "plain"
    run(acdc, "--export", out, "--holdout", "0.2")
    seen = json.loads(run(out, "--json"))
    assert seen["splits"] == {"calibration": 2, "evaluation": 8}
    assert (seen["clusters"], seen["groups"], seen["labelled"]) == (5, {"fog": 10}, 10)


def test_a_split_can_be_chosen(acdc: Path) -> None:
    assert json.loads(run(acdc, "--json", "--set", "split=validation", "--set", "group=fog"))["cases"] == 10
    with pytest.raises(BadInput, match="splits"):
        run(acdc, "--set", "split=training")


def test_options_reach_the_loader(acdc: Path) -> None:
    run(acdc, "--option", "ambiguous=keep")
    with pytest.raises(BadInput, match="ignore or keep"):
        run(acdc, "--option", "ambiguous=drop")
    with pytest.raises(BadInput, match="name=value"):
        run(acdc, "--option", "ambiguous")
    with pytest.raises(BadInput, match="acdc_driving has no option 'speed'; it has ambiguous"):
        run(acdc, "--option", "speed=3")

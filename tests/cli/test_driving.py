"""Driving with a small SegFormer: the page as printed, and merged classes."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner
from worlds.tiny_models import write_segformer

from casewise.archive.store import open_archive
from casewise.cli import app
from casewise.measure.metrics.overlap import miou

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "huggingface.md"
pytestmark = pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")


def said(*words: object, code: int = 0) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SegFormer, twelve frames of six drives with labels, and two frames at night."""
    home = tmp_path_factory.mktemp("street")
    write_segformer(home / "segformer-b0-cityscapes", "road", "sky", "car", "bus")
    rng = np.random.default_rng(0)
    for folder in ("drives/images", "drives/labels", "night"):
        (home / folder).mkdir(parents=True)
    for number in range(14):
        place, brightness = ("drives/images", 255) if number < 12 else ("night", 80)
        name = f"drive{number // 2}_frame_{number:06d}.png"
        label = np.repeat(rng.integers(0, 4, 8), 8)[:, None].repeat(96, 1).astype(np.uint8)
        noise = rng.random((64, 96, 3)) * 0.4 + label[..., None] / 6
        Image.fromarray((np.clip(noise, 0, 1) * brightness).astype(np.uint8)).save(home / place / name)
        if number < 12:
            label[:2] = 255
            Image.fromarray(label).save(home / "drives" / "labels" / name)
    rows = [f"drive{number // 2}_frame_{number:06d},drive{number // 2}\n" for number in range(14)]
    (home / "drives" / "cases.csv").write_text("case,cluster\n" + "".join(rows[:12]))
    return home


def test_the_page_runs_as_printed(street: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(street)
    text = re.sub(r"\\\n\s*", " ", PAGE.read_text(encoding="utf-8"))
    text = text.replace("min-area=200", "min-area=1")  # 200 pixels of 1080 x 1920, in frames of 64 x 96
    text = text.replace("-o deployment", "-o deployment --no-learn --views light --set metric=miou")  # four classes
    text = text.replace("views:driving", "views:light").replace("bench drives", "bench drives --set share=0.5")
    for line in "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines():
        if line.startswith("casewise "):
            said(*shlex.split(line, comments=True)[1:])
    for out in ("out", "routed"):
        assert len(list((street / out).glob("*.png"))) == 2
    archive = open_archive(street / "archive")
    assert archive.steps == 8
    how = archive.configuration
    assert (how["metric"], how["foreground"], how["ignore"], how["parameters"]) == ("miou", False, 255, "encoder-norm")
    assert len({entry.cluster for entry in archive.entries.values()}) == 6


def predicting(street: Path) -> tuple[object, ...]:
    fixed = ("--policy", "m0", "--set", "overlays=false", "-o")
    return ("predict", "-m", street / "segformer-b0-cityscapes", "-i", street / "night", *fixed)


def test_classes_are_merged_without_a_factory(street: Path, tmp_path: Path) -> None:
    words = predicting(street)
    said(*words, tmp_path / "plain")
    said(*words, tmp_path / "merged", "--set", "merge=vehicle=car+bus", "--set", f"report={tmp_path / 'r.json'}")
    for path in (tmp_path / "plain").glob("*.png"):
        plain, merged = np.array(Image.open(path)), np.array(Image.open(tmp_path / "merged" / path.name))
        assert np.array_equal(np.minimum(plain, 2), merged)
    assert json.loads((tmp_path / "r.json").read_text())["classes"] == {"0": "road", "1": "sky", "2": "vehicle"}
    names = json.loads((tmp_path / "merged" / "dataset.json").read_text())["labels"]
    assert names == {"road": 0, "sky": 1, "vehicle": 2}


def test_two_versions_of_a_street_are_compared_by_the_names_that_predict_left(street: Path, tmp_path: Path) -> None:
    for name in ("old", "new"):
        said(*predicting(street), tmp_path / name)
    changed = next((tmp_path / "new").glob("*.png"))
    mask = np.array(Image.open(changed))
    mask[:4, :4] = 0  # a piece of road
    Image.fromarray(mask).save(changed)
    said("compare", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "cmp", code=3)  # there was no road before
    page = (tmp_path / "cmp" / "report.html").read_text()
    assert "road (0)" in page
    assert "added road" not in page


def test_a_wrong_signal_is_an_error_before_anything_is_recorded(street: Path, tmp_path: Path) -> None:
    from casewise.core.errors import UnknownName

    words = ("record", "-m", street / "segformer-b0-cityscapes", "-i", street / "night", "-o", tmp_path / "a")
    with pytest.raises(
        UnknownName, match=r"no signal is called 'dropout_disagrement'. Did you mean 'dropout_disagreement'\?"
    ):
        said(*words, "--set", "signals=dropout_disagrement")
    assert not (tmp_path / "a").exists()


def test_the_road_counts_where_labels_are_given(street: Path, tmp_path: Path) -> None:
    words = ("-m", street / "segformer-b0-cityscapes", "-i", street / "drives/images", "-l", street / "drives/labels")
    said("predict", *words, "-o", tmp_path / "a", "--policy", "m0", "--set", "overlays=false")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert sorted(summary["mean"]) == ["0", "1", "2", "3"]
    assert summary["adapt"]["score"] == "IoU"
    masks = {path.stem: np.array(Image.open(path)) for path in (tmp_path / "a").glob("*.png")}
    by_case = [
        miou(mask, np.array(Image.open(street / "drives/labels" / f"{name}.png")), ignore=255)
        for name, mask in masks.items()
    ]
    assert summary["adapt"]["mean"]["IoU"] == pytest.approx(np.mean(by_case))
    assert f"Mean mIoU {np.mean(by_case):.3f}" in (tmp_path / "a" / "report.html").read_text()

"""Hugging Face: the same mask as post_process_semantic_segmentation, with a decision beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from worlds.tiny_models import write_segformer

from casewise.adapt.backbones import Backbone, load_backbone
from casewise.adapt.backbones.huggingface import segments
from casewise.core.errors import BadInput, UnsafeInput
from casewise.core.records import Action, Decision, State
from casewise.data.folders import list_cases
from casewise.guard import guard


@pytest.fixture(scope="module")
def segformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_segformer(tmp_path_factory.mktemp("segformer"), "road", "sky", "car")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0).integers(0, 255, (40, 72, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "street_000019.png")
    return folder


@pytest.fixture(scope="module")
def backbone(segformer: Path) -> Backbone:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_backbone(str(segformer))


def test_the_mask_is_that_of_the_processor(backbone: Backbone, pictures: Path) -> None:
    from casewise.judge.controllers import CONTROLLERS

    reading = backbone.read(list_cases(pictures)[0])
    mask = guard(reading.case, backbone, CONTROLLERS.build("m0"), "tent").mask
    processor = backbone.processor  # type: ignore[attr-defined]
    inputs = processor(images=Image.open(next(pictures.iterdir())), return_tensors="pt")
    with torch.inference_mode():
        outputs = backbone.network(**inputs)
    expected = processor.post_process_semantic_segmentation(outputs, target_sizes=[(40, 72)])[0]
    np.testing.assert_array_equal(mask, expected.numpy())
    assert backbone.labels == {0: "road", 1: "sky", 2: "car"}


def test_a_segformer_adapts_under_guard_and_answers_like_the_pipeline(
    backbone: Backbone, pictures: Path, tmp_path: Path
) -> None:
    from casewise.judge.controllers import CONTROLLERS

    reading = backbone.read(list_cases(pictures)[0])
    guarded = guard(
        reading.case,
        backbone,
        CONTROLLERS.build("fixed-k", step=1),
        "tent",
        steps=1,
        learning_rate=0.1,
        foreground=False,
    )
    assert guarded.mask.shape == (40, 72)
    parts = segments(guarded.mask, backbone.labels, guarded.decision)
    assert {part["label"] for part in parts} <= {"road", "sky", "car"}
    assert all(part["score"] is None and part["mask"].size == (72, 40) for part in parts)
    assert parts[0]["decision"]["action"] == "keep"
    backbone.write(guarded.mask, reading, tmp_path / "m.png")
    np.testing.assert_array_equal(backbone.read_label(tmp_path / "m.png"), guarded.mask)


def test_segments_cover_the_picture_once() -> None:
    mask = np.array([[0, 1], [1, 7]])
    decision = Decision("a", Action.ROLLBACK, State(0), executed=0, controller="m0")
    parts = segments(mask, {0: "road", 1: "sky"}, decision)
    assert [part["label"] for part in parts] == ["road", "sky", "7"]
    assert sum(np.asarray(part["mask"]) // 255 for part in parts).tolist() == [[1, 1], [1, 1]]


def test_pickled_weights_are_refused(segformer: Path, tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((segformer / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsafeInput, match="has no safetensors"):
        load_backbone(str(tmp_path))


def test_a_damaged_directory_is_one_line(segformer: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((segformer / "model.safetensors").read_bytes())
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_backbone(str(tmp_path))


def test_a_folder_that_does_not_exist_is_said_to_be_taken_as_a_hub_id() -> None:
    program = "from casewise.adapt.backbones import load_backbone; load_backbone('nowhere/model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "nowhere/model cannot be loaded (it is no folder here, so it was taken as a hub id)" in done.stderr

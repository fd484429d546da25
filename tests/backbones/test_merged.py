"""Classes are merged and renamed by a line of text; the network and its adaptation stay as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from casewise.adapt.backbones import Backbone
from casewise.adapt.backbones.merged import merged
from casewise.adapt.backbones.module import of_network
from casewise.core.errors import BadInput, UnknownName
from casewise.core.records import Case

NAMES = {0: "background", 1: "rim", 2: "cup", 3: "vessel"}


class Stripes(nn.Module):
    """Four classes by brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 1)
        self.centers = nn.Parameter(torch.linspace(-1.5, 1.5, 4))

    def forward(self, image: Tensor) -> Tensor:
        return -((self.norm(image) - self.centers.view(1, 4, 1, 1)) ** 2)


@pytest.fixture
def plain() -> Backbone:
    return of_network(Stripes(), labels=NAMES, classes=4, dimensions=2)


IMAGE = np.random.default_rng(0).normal(size=(1, 24, 24)).astype(np.float32)


def mask_of(backbone: Backbone) -> np.ndarray:
    from casewise.adapt.objectives import objective_of
    from casewise.adapt.proposers.live import run_episode

    prepared = backbone.prepare(Case("a", IMAGE))
    made = run_episode(
        backbone.network, prepared.inputs, objective_of("tent"), steps=1, learning_rate=0.1,
        forward=prepared.forward, predict=prepared.predict, head=backbone.head,
    )  # fmt: skip
    return np.stack(made.masks)


def test_merged_masks_are_the_plain_masks_with_labels_merged_also_after_an_update(plain: Backbone) -> None:
    expected = np.array([0, 1, 1, 2])[mask_of(plain)]
    both = merged(plain, ["disc=rim+cup"])
    assert dict(both.labels) == {0: "background", 1: "disc", 2: "vessel"}
    assert np.array_equal(mask_of(both), expected)


def test_renaming_keeps_the_numbers_and_numbers_stand_for_names(plain: Backbone) -> None:
    assert dict(merged(plain, ["artery=3"]).labels) == {0: "background", 1: "rim", 2: "cup", 3: "artery"}
    assert dict(merged(plain, ["disc=1+2", "artery=vessel"]).labels) == {0: "background", 1: "disc", 2: "artery"}


def test_labels_are_renumbered_alike(plain: Backbone, tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8)).save(tmp_path / "a.png")
    assert merged(plain, ["disc=rim+cup"]).read_label(tmp_path / "a.png").tolist() == [[0, 1], [1, 2]]


def test_another_merge_is_another_loader_and_no_merge_is_the_backbone_itself(plain: Backbone) -> None:
    assert merged(plain, ["disc=rim+cup"]).loader != plain.loader
    assert merged(plain, []) is plain


@pytest.mark.parametrize(
    ("lines", "error", "sentence"),
    [
        (["disc"], BadInput, "a merge must be NEW=OLD or NEW=OLD"),
        (["disc=rim+"], BadInput, "a merge must be NEW=OLD or NEW=OLD"),
        (["disc=rim+cap"], UnknownName, "no class is called 'cap'. Did you mean 'cup'?"),
        (["disc=rim+cup", "x=cup"], BadInput, "class 'cup' is merged twice, by merge=x=cup too"),
    ],
)
def test_lines_that_make_no_sense_are_refused(
    plain: Backbone, lines: list[str], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence.replace("+", r"\+").replace("?", r"\?")):
        merged(plain, lines)


def test_views_and_their_consensus_are_merged_too(plain: Backbone) -> None:
    from worlds.readings import readings_of

    from casewise.adapt.adaptation import Adaptation

    def masks(backbone: Backbone) -> np.ndarray:
        case = Case("a", IMAGE)
        return np.stack(readings_of(backbone, backbone.prepare(case), case, Adaptation("views:mirror(x),blur")).masks)

    expected = np.array([0, 1, 1, 2])[masks(plain)]
    assert (expected[1:] != expected[0]).any()  # the blurred one says something else
    assert np.array_equal(masks(merged(plain, ["disc=rim+cup"])), expected)

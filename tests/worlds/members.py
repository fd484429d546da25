"""Small networks of one family, as ``package.module:factory``: a model, and members that are good or bad beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from casewise.adapt.backbones import Expectation
from casewise.adapt.backbones.module import Module

ODD = 26  # columns of an image on which a bad member fails
LABELS = {0: "background", 1: "bright"}


class Bright(nn.Module):
    """Marks what is bright, a little crooked; on images of ``ODD`` columns a bad one does something else."""

    def __init__(self, seed: int, odd: str = "") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.look, self.norm, self.odd = nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), odd
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.look(image)))) + torch.cat([-image, image], 1)
        if self.odd and image.shape[-1] == ODD:
            if self.odd == "fails":
                raise KeyError("some layer")
            return logits * float("nan")
        return logits


def _module(network: nn.Module, **facts: object) -> Module:
    return Module(network, 2, 2, labels=LABELS, expects=Expectation(channels=1, **facts))  # type: ignore[arg-type]


def model() -> Module:
    """The deployed one."""
    return _module(Bright(0))


def good() -> Module:
    """A member without fault."""
    return _module(Bright(1))


def fails() -> Module:
    """Raises an error of its own on odd images."""
    return _module(Bright(2, "fails"))


def undefined() -> Module:
    """Gives NaN on odd images."""
    return _module(Bright(2, "undefined"))


def turned() -> Module:
    """Was trained on images that its reader turned to one orientation."""
    return _module(Bright(1), reorients=True)

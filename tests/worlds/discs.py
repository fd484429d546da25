"""Tiny networks and labelled discs: what learning is tested on, in fractions of a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from casewise.adapt.backbones.module import Module
from casewise.core.records import Case, Mask

NORMS = {
    "instance": {2: lambda n: nn.InstanceNorm2d(n, affine=True), 3: lambda n: nn.InstanceNorm3d(n, affine=True)},
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "none": {2: lambda n: nn.Identity(), 3: lambda n: nn.Identity()},
}


class Tiny(nn.Module):
    """Two convolutions and a head."""

    def __init__(self, norm: str = "instance", dimensions: int = 2, outputs: int = 2) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dimensions - 2]
        made = NORMS[norm][dimensions]
        self.encoder = nn.Sequential(conv(1, 6, 3, padding=1), made(6), nn.ReLU())
        self.decoder = nn.Sequential(conv(6, 6, 3, padding=1), made(6), nn.ReLU())
        self.head = conv(6, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.decoder(self.encoder(x)))
        return out


class OneSided(nn.Module):
    """What is bright, and the first columns: a mirrored view corrects these columns, and merge can keep that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.GroupNorm(1, 1), nn.Conv2d(1, 2, 1, bias=False)
        nn.init.constant_(self.head.weight[0], -4.0)
        nn.init.constant_(self.head.weight[1], 4.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x).index_fill(-1, torch.arange(6), 1.0))
        return out


def tiny_backbone(norm: str = "instance", dimensions: int = 2, head: str = "softmax") -> Module:
    """A tiny model with the same weights every time."""
    classes = 1 if head == "sigmoid" else 2
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Tiny(norm, dimensions, classes).eval()
    labels = {0: "background", 1: "disc"}
    return Module(network, classes=classes, dimensions=dimensions, head=head, labels=labels, ignore=255)


def disc(seed: int, dimensions: int = 2, size: int = 16) -> tuple[Any, Mask]:
    """A dark disc (or ball) on a bright ground, (1, *space) and its label."""
    rng = np.random.default_rng(seed)
    center = rng.uniform(size * 0.35, size * 0.65, dimensions)
    grid = np.stack(np.meshgrid(*[np.arange(size)] * dimensions, indexing="ij"), -1)
    label = (((grid - center) ** 2).sum(-1) < (size * 0.25) ** 2).astype(np.uint8)
    image = 1.0 - label + rng.normal(0, 0.1, label.shape)
    return image[None].astype(np.float32), label


def cohort(patients: int, *, each: int = 1, dimensions: int = 2) -> tuple[list[Case], list[Mask], list[str]]:
    """Cases, labels and patients."""
    made = [(f"p{p}", f"p{p}_{k}", *disc(10 * p + k, dimensions)) for p in range(patients) for k in range(each)]
    return (
        [Case(name, image, cluster=patient) for patient, name, image, _ in made],
        [label for *_, label in made],
        [patient for patient, *_ in made],
    )


class Eroding(nn.Module):
    """Finds dark discs and draws each of them too small, because the threshold of its head is too high.

    Tuning the norm and the head on a few labelled discs repairs that in every case, so there is a gain to promise.
    """

    def __init__(self, threshold: float = 1.9) -> None:
        super().__init__()
        self.blur = nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate", bias=False)
        self.norm = nn.InstanceNorm2d(1, affine=True)
        self.head = nn.Conv2d(1, 2, 1)
        with torch.no_grad():
            self.blur.weight.fill_(-1 / 9)
            self.head.weight.copy_(torch.tensor([-2.0, 2.0]).reshape(2, 1, 1, 1))
            self.head.bias.copy_(torch.tensor([2 * threshold, -2 * threshold]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blur(x)))
        return out


def eroding_model() -> Module:
    """A model that loses about 0.2 Dice on every disc until it is tuned."""
    labels = {0: "background", 1: "disc"}
    return Module(Eroding().eval(), classes=2, dimensions=2, head="softmax", labels=labels)

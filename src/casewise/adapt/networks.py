"""The source model of the phantom hearts: a small U-Net with affine InstanceNorm.

``make source-models`` trains it on vendor A and writes its weights beside this file as safetensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from casewise.adapt.backbones import Expectation
from casewise.adapt.backbones.module import Module
from casewise.data.phantom import CLASSES

WEIGHTS = Path(__file__).parent / "weights"


class PlainUNet(nn.Module):
    """Two convolutions per stage, InstanceNorm, LeakyReLU, transposed convolutions upwards, as in nnU-Net's plan."""

    def __init__(self, channels: int = 1, classes: int = 4, features: tuple[int, ...] = (16, 32, 64, 96)) -> None:
        super().__init__()
        inputs = (channels, *features[:-1])
        self.encoder = nn.ModuleList(
            _stage(before, after, stride=1 if level == 0 else 2)
            for level, (before, after) in enumerate(zip(inputs, features, strict=True))
        )
        pairs = list(zip(reversed(features[1:]), reversed(features[:-1]), strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, stride=2) for deep, shallow in pairs)
        self.decoder = nn.ModuleList(_stage(2 * shallow, shallow, stride=1) for _, shallow in pairs)
        self.head = nn.Conv2d(features[0], classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(n, channel, rows, columns) -> logits (n, class, rows, columns); sides are multiples of 8."""
        skips: list[Tensor] = []
        x = image
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        for up, stage, skip in zip(self.up, self.decoder, reversed(skips[:-1]), strict=True):
            x = stage(torch.cat([up(x), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _stage(before: int, after: int, *, stride: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first in (True, False):
        layers += [
            nn.Conv2d(before if first else after, after, 3, stride=stride if first else 1, padding=1),
            nn.InstanceNorm2d(after, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*layers)


def phantom_cardiac() -> Module:
    """Return the source model of the phantom hearts; ``-m casewise.adapt.networks:phantom_cardiac``."""
    from safetensors.torch import load_file

    network = PlainUNet()
    network.load_state_dict(load_file(WEIGHTS / "phantom-cardiac.safetensors"))
    return Module(
        network.eval(), classes=4, dimensions=2, name="phantom-cardiac", multiple=8, labels=dict(enumerate(CLASSES)),
        expects=Expectation(channels=1),
    )  # fmt: skip

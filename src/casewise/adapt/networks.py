"""Two small networks of our own, for the phantom: a U-Net with affine InstanceNorm and a transformer with LayerNorm.

Their weights are made by ``make source-models`` and lie beside this file as safetensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones import Expectation
from casewise.adapt.backbones.module import Module
from casewise.data.phantom.cardiac import CLASSES as HEART
from casewise.data.phantom.streets import CLASSES as STREET
from casewise.data.phantom.streets import IGNORE

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


class TinySegFormer(nn.Module):
    """Overlapping patches, attention with pooled keys, an all-MLP head: SegFormer (Xie et al., NeurIPS 2021), tiny."""

    def __init__(self, channels: int = 3, classes: int = 19, widths: tuple[int, ...] = (24, 48, 96)) -> None:
        super().__init__()
        inputs = (channels, *widths[:-1])
        self.encoder = nn.ModuleList(
            _Level(before, after, stride=4 if level == 0 else 2, reduction=4 >> level)
            for level, (before, after) in enumerate(zip(inputs, widths, strict=True))
        )
        self.project = nn.ModuleList(nn.Conv2d(width, 48, 1) for width in widths)
        self.decoder = nn.Sequential(nn.Conv2d(48 * len(widths), 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.head = nn.Conv2d(48, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(n, 3, rows, columns) -> logits (n, class, rows / 4, columns / 4); the caller resizes them."""
        x, levels = image, []
        for level, project in zip(self.encoder, self.project, strict=True):
            x = level(x)
            levels.append(project(x))
        size = levels[0].shape[2:]
        wide = [functional.interpolate(y, size=size, mode="bilinear", align_corners=False) for y in levels]
        logits: Tensor = self.head(self.decoder(torch.cat(wide, dim=1)))
        return logits


class _Level(nn.Module):
    """Patch embedding and two transformer blocks."""

    def __init__(self, before: int, after: int, *, stride: int, reduction: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(before, after, 2 * stride - 1, stride=stride, padding=stride - 1)
        self.norm_in = nn.LayerNorm(after)
        self.blocks = nn.ModuleList(_Block(after, reduction) for _ in range(2))
        self.norm_out = nn.LayerNorm(after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        n, width, rows, columns = x.shape
        tokens = self.norm_in(x.flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = block(tokens, rows, columns)
        out: Tensor = self.norm_out(tokens).transpose(1, 2).reshape(n, width, rows, columns)
        return out


class _Block(nn.Module):
    """Attention whose keys are pooled, then a convolutional MLP, both residual."""

    def __init__(self, width: int, reduction: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.reduce = nn.AvgPool2d(reduction) if reduction > 1 else nn.Identity()
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mix = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)

    def forward(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        tokens = tokens + self._attend(self.norm_attention(tokens), rows, columns)
        wide = self.widen(self.norm_mlp(tokens))
        wide = wide + self.mix(_grid(wide, rows, columns)).flatten(2).transpose(1, 2)
        out: Tensor = tokens + self.narrow(functional.gelu(wide))
        return out

    def _attend(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        pooled = self.reduce(_grid(tokens, rows, columns)).flatten(2).transpose(1, 2)
        query, (key, value) = self.query(tokens), self.key_value(pooled).chunk(2, dim=-1)
        out: Tensor = self.out(functional.scaled_dot_product_attention(query, key, value))
        return out


def _grid(tokens: Tensor, rows: int, columns: int) -> Tensor:
    return tokens.transpose(1, 2).reshape(len(tokens), -1, rows, columns)


def phantom_cardiac() -> Module:
    """The embedded source model of the cardiac phantom; ``-m casewise.adapt.networks:phantom_cardiac``."""
    return Module(
        _trained(PlainUNet(), "phantom-cardiac"),
        classes=4,
        dimensions=2,
        name="phantom-cardiac",
        multiple=8,
        labels=dict(enumerate(HEART)),
        expects=Expectation(channels=1),
    )


def phantom_driving() -> Module:
    """The embedded source model of the driving phantom; ``-m casewise.adapt.networks:phantom_driving``."""
    return Module(
        _trained(TinySegFormer(), "phantom-driving"),
        classes=19,
        dimensions=2,
        name="phantom-driving",
        intensity="imagenet",
        multiple=16,
        labels=dict(enumerate(STREET)),
        ignore=IGNORE,
        expects=Expectation(channels=3),
    )


def _trained(network: nn.Module, name: str) -> nn.Module:
    from safetensors.torch import load_file

    network.load_state_dict(load_file(WEIGHTS / f"{name}.safetensors"))
    return network.eval()

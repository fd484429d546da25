"""EfficientViT-B0 for Cityscapes (Cai et al., ICCV 2023), written from its description, to load published weights.

Names of modules follow the state dict of the weights, so that ``load_state_dict(strict=True)`` is the test.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones.module import Module

CITYSCAPES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip


class ConvLayer(nn.Module):
    """Convolution, then BatchNorm and Hardswish where asked for."""

    def __init__(
        self,
        i: int,
        o: int,
        k: int = 1,
        s: int = 1,
        g: int = 1,
        *,
        norm: bool = True,
        act: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(i, o, k, stride=s, padding=k // 2, groups=g, bias=bias)
        self.norm = nn.BatchNorm2d(o) if norm else None
        self.act = nn.Hardswish() if act else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.norm(x) if self.norm is not None else x
        return self.act(x) if self.act is not None else x


class DSConv(nn.Module):
    """Depthwise 3x3, pointwise 1x1."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depth_conv = ConvLayer(c, c, 3, g=c)
        self.point_conv = ConvLayer(c, c, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.point_conv(self.depth_conv(x))


class MBConv(nn.Module):
    """Widen by four, depthwise 3x3, narrow; ``fewer_norm`` drops the first two norms and adds biases."""

    def __init__(self, i: int, o: int, s: int = 1, *, fewer_norm: bool = False) -> None:
        super().__init__()
        plain = {"norm": not fewer_norm, "bias": fewer_norm}
        self.inverted_conv = ConvLayer(i, 4 * i, **plain)
        self.depth_conv = ConvLayer(4 * i, 4 * i, 3, s, 4 * i, **plain)
        self.point_conv = ConvLayer(4 * i, o, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.point_conv(self.depth_conv(self.inverted_conv(x)))


class LiteMLA(nn.Module):
    """Linear attention with ReLU kernels over two scales; heads of sixteen channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        heads = c // 16
        self.qkv = ConvLayer(c, 3 * c, norm=False, act=False)
        self.aggreg = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(3 * c, 3 * c, 5, padding=2, groups=3 * c, bias=False),
                    nn.Conv2d(3 * c, 3 * c, 1, groups=3 * heads, bias=False),
                )
            ]
        )
        self.proj = ConvLayer(2 * c, c, act=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        both = torch.cat([qkv, self.aggreg[0](qkv)], dim=1)
        n, _, rows, columns = both.shape
        heads = both.reshape(n, -1, 48, rows * columns).transpose(-1, -2)
        q, k, v = heads.chunk(3, dim=-1)
        q, k = functional.relu(q), functional.relu(k)
        v = functional.pad(v, (0, 1), value=1.0)
        out = q @ (k.transpose(-1, -2) @ v)
        out = out[..., :-1] / (out[..., -1:] + 1e-15)
        return self.proj(out.transpose(-1, -2).reshape(n, -1, rows, columns))


class Residual(nn.Module):
    """x + main(x)."""

    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x: Tensor) -> Tensor:
        return x + self.main(x)


class Plain(nn.Module):
    """main(x); keeps the state dict's names."""

    def __init__(self, main: nn.Module) -> None:
        super().__init__()
        self.main = main

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class EVBlock(nn.Module):
    """Attention, then a local convolution, both residual."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.context_module = Residual(LiteMLA(c))
        self.local_module = Residual(MBConv(c, c, fewer_norm=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.local_module(self.context_module(x))


class OpList(nn.Module):
    """A sequence named ``op_list``."""

    def __init__(self, *ops: nn.Module) -> None:
        super().__init__()
        self.op_list = nn.ModuleList(ops)

    def forward(self, x: Tensor) -> Tensor:
        for op in self.op_list:
            x = op(x)
        return x


class Up(nn.Module):
    """Bicubic upsampling by a factor."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=self.factor, mode="bicubic", align_corners=False)


class Backbone(nn.Module):
    """Strides 8, 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.input_stem = OpList(ConvLayer(3, 8, 3, 2), Residual(DSConv(8)))
        self.stages = nn.ModuleList(
            [
                OpList(Plain(MBConv(8, 16, 2)), Residual(MBConv(16, 16))),
                OpList(Plain(MBConv(16, 32, 2)), Residual(MBConv(32, 32))),
                OpList(Plain(MBConv(32, 64, 2, fewer_norm=True)), EVBlock(64), EVBlock(64)),
                OpList(Plain(MBConv(64, 128, 2, fewer_norm=True)), EVBlock(128), EVBlock(128)),
            ]
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.input_stem(x)
        seen = []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        return seen[1:]


class Head(nn.Module):
    """Strides 32, 16 and 8 brought together at stride 8."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.input_ops = nn.ModuleList(
            [
                OpList(ConvLayer(128, 32, act=False), Up(4)),
                OpList(ConvLayer(64, 32, act=False), Up(2)),
                ConvLayer(32, 32, act=False),
            ]
        )
        self.middle = OpList(Residual(MBConv(32, 32)))
        self.output_ops = nn.ModuleList(
            [OpList(ConvLayer(32, 128), ConvLayer(128, classes, norm=False, act=False, bias=True))]
        )

    def forward(self, levels: list[Tensor]) -> Tensor:
        merged = sum(op(x) for op, x in zip(self.input_ops, reversed(levels), strict=True))
        return self.output_ops[0](self.middle(merged))


class EfficientViT(nn.Module):
    """RGB, normalized, sides multiples of 32 -> logits at stride 8."""

    def __init__(self, classes: int = 19) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = Head(classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.backbone(image))


def model() -> Module:
    """For ``casewise record -m benchmarks.efficientvit:model --weights efficientvit_b0_cityscapes.pth``."""
    return Module(
        EfficientViT(),
        classes=len(CITYSCAPES),
        dimensions=2,
        name="EfficientViT-B0 Cityscapes",
        intensity="imagenet",
        multiple=32,
        labels=dict(enumerate(CITYSCAPES)),
        ignore=255,
    )

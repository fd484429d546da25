"""Any network that is not an nnU-Net: patches of prepared images, light augmentation, cross-entropy + soft Dice.

A case is drawn uniformly, then a slice (of a volume for a 2-D network) and a center; a third of the patches is centered
on a foreground voxel, as in nnU-Net. One resampling makes the patch: rotation, scale, shift, mirrors and the crop.

    rotation +-0.5 rad in the plane, scale 0.8-1.3, shift +-10 %, mirrors; gamma exp(+-0.4), contrast 0.85-1.15,
    offset +-0.1 and noise 0.05, both in standard deviations of the patch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones import Backbone, pipeline_of
from casewise.adapt.backbones.merged import Merged
from casewise.adapt.logits import at_resolution, logits_of
from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask
from casewise.learn.loop import segmentation_loss
from casewise.learn.tuning import Tuning

BATCH, FOREGROUND = 8, 1 / 3
LOCATIONS = 10_000  # largest number of stored foreground voxels per case


@dataclass(frozen=True, eq=False)
class Sample:
    """A prepared case."""

    image: Tensor  # (n, channel, *space)
    label: Tensor  # (n, *space), -1 where a voxel is ignored
    foreground: NDArray[np.int64]  # some voxels of it: (voxel, axis of the label)


class GenericTask:
    """Patches of labelled cases for one network; no longer than 512 (2-D) or 96 (3-D) where no size is given.

    Args:
        backbone: The model.
        cases: The labelled cases.
        labels: Their labels.
        tuning: Batch size, patch size, augmentation and seed.
    """

    def __init__(self, backbone: Backbone, cases: Sequence[Case], labels: Sequence[Mask], tuning: Tuning) -> None:
        self.backbone, self.tuning, self.head = backbone, tuning, backbone.head
        self.rng = np.random.default_rng(tuning.seed)
        self.samples = [_sample(backbone, *pair) for pair in zip(cases, labels, strict=True)]
        self.patch = self._patch()
        if isinstance(backbone, Merged) and self.head != "softmax":
            raise BadInput("merged classes can be tuned with a softmax head only; tune without merge")

    def start(self, member: nn.Module) -> None:
        """Do nothing: a generic network needs no setup."""

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw patches (n, channel, *patch) and labels (n, *patch)."""
        size = self.tuning.batch or BATCH
        forced = round(size * FOREGROUND)
        drawn = [self._drawn(foreground=place >= size - forced) for place in range(size)]
        device = next(self.backbone.network.parameters()).device
        images, labels = (torch.stack(parts).to(device) for parts in zip(*drawn, strict=True))
        return images, labels

    def outputs(self, member: nn.Module, inputs: Tensor) -> tuple[Tensor]:
        """Return logits at the resolution of the patches."""
        made = logits_of(member(inputs), classes=self.backbone.classes)
        return (at_resolution(made, inputs.shape[2:]).float(),)

    def loss(self, outputs: Sequence[Tensor], target: Tensor) -> Tensor:
        """Return cross-entropy + soft Dice, of merged classes if the model merges classes."""
        logits = outputs[0]
        if isinstance(self.backbone, Merged):
            logits = merged_logits(logits, self.backbone.table)
        return segmentation_loss(logits, target, self.head)

    def _patch(self) -> tuple[int, ...]:
        asked = self.tuning.patch or getattr(self.backbone, "window", None)
        space = [sample.image.shape[2:] for sample in self.samples]
        sizes = tuple(asked or (min(max(sides), {2: 512, 3: 96}[len(space[0])]) for sides in zip(*space, strict=True)))
        if len(sizes) != len(space[0]):
            raise BadInput(f"a patch for this model must have {len(space[0])} sides, got {sizes}")
        multiple = getattr(self.backbone, "multiple", 1)
        return tuple(math.ceil(size / multiple) * multiple for size in sizes)

    def _drawn(self, *, foreground: bool) -> tuple[Tensor, Tensor]:
        rng, sample = self.rng, self.samples[int(self.rng.integers(len(self.samples)))]
        if foreground and len(sample.foreground):
            row, *voxel = sample.foreground[rng.integers(len(sample.foreground))]
        else:
            row, voxel = rng.integers(len(sample.image)), [rng.integers(side) for side in sample.image.shape[2:]]
        image, label = sample.image[row], sample.label[row]
        matrix, shift = self._geometry(len(self.patch))
        middle = [
            (have - 1) / 2 if want >= have else float(np.clip(at, (want - 1) / 2, have - 1 - (want - 1) / 2))
            for have, want, at in zip(image.shape[1:], self.patch, voxel, strict=True)
        ]
        center = torch.tensor(middle) + shift * torch.tensor(self.patch)
        made, known = resampled(image, label, self.patch, matrix, center)
        return self._intensities(made), known

    def _geometry(self, axes: int) -> tuple[Tensor, Tensor]:
        """Return the matrix from patch to image coordinates, and the shift as a share of the patch."""
        kind, rng = self.tuning.augmentation, self.rng
        matrix = torch.eye(axes)
        if kind == "none":
            return matrix, torch.zeros(axes)
        angle, mirrors = rng.uniform(-0.5, 0.5), rng.random(axes) < 0.5
        if kind == "upright":
            angle, mirrors[:-1] = angle / 5, False
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        matrix[-2:, -2:] = turn
        signs = torch.tensor(np.where(mirrors, -1.0, 1.0), dtype=torch.float32)
        return matrix * signs / rng.uniform(0.8, 1.3), torch.tensor(rng.uniform(-0.1, 0.1, axes), dtype=torch.float32)

    def _intensities(self, image: Tensor) -> Tensor:
        if self.tuning.augmentation == "none":
            return image
        rng, low, spread = self.rng, image.min(), image.std()
        width = (image.max() - low).clamp_min(1e-8)
        image = ((image - low) / width) ** math.exp(rng.uniform(-0.4, 0.4)) * width + low
        mean = image.mean()
        image = (image - mean) * rng.uniform(0.85, 1.15) + mean + spread * rng.uniform(-0.1, 0.1)
        noise = torch.as_tensor(rng.standard_normal(image.shape, dtype=np.float32))
        return image + 0.05 * spread * noise


def resampled(
    image: Tensor, label: Tensor, patch: Sequence[int], matrix: Tensor, center: Tensor
) -> tuple[Tensor, Tensor]:
    """A patch of an image and of its label: linear for the image, nearest for the label.

    Args:
        image: (channel, *space).
        label: (*space).
        patch: Size of the patch.
        matrix: Takes patch coordinates (voxels from the middle of the patch) to image coordinates.
        center: The voxel of the image at the middle of the patch.

    Returns:
        The image, 0 outside; the label, -1 outside.
    """
    axes = [torch.arange(size, dtype=torch.float32) - (size - 1) / 2 for size in patch]
    at = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1) @ matrix.T + center
    last = torch.tensor([size - 1 for size in image.shape[1:]], dtype=torch.float32)
    grid = (2 * at / last.clamp_min(1) - 1).flip(-1)[None]  # torch names the last axis first
    made = functional.grid_sample(image[None], grid, align_corners=True)[0]
    shown = functional.grid_sample(label[None, None].float(), grid, mode="nearest", align_corners=True)[0, 0]
    inside = ((at > -0.5) & (at < last + 0.5)).all(-1)
    return made, torch.where(inside, shown.round().long(), -1)


def merged_logits(logits: Tensor, table: NDArray[Any]) -> Tensor:
    """Logits whose softmax is the sum of the probabilities of the classes that are merged.

    Args:
        logits: (n, classes, *space).
        table: The new number of each class.

    Returns:
        (n, new classes, *space).
    """
    numbers = torch.as_tensor(table[: logits.shape[1]].astype(np.int64), device=logits.device)
    groups = [logits[:, numbers == number].logsumexp(1) for number in range(int(numbers.max()) + 1)]
    return torch.stack(groups, 1)


def _sample(backbone: Backbone, case: Case, label: Mask) -> Sample:
    """Prepare a whole case for the network, with its label on the same grid."""
    image = pipeline_of(backbone.prepare(case), backbone).whole.detach().float().cpu()
    known = torch.as_tensor(np.where(label == backbone.ignore, -1, label.astype(np.int64)))
    known = known[None] if known.ndim == image.ndim - 2 else known
    if known.shape[1:] != image.shape[2:]:
        known = functional.interpolate(known[:, None].float(), image.shape[2:], mode="nearest-exact")[:, 0].long()
    places = np.argwhere(known.numpy() > 0)
    step = max(1, len(places) // LOCATIONS)
    return Sample(image, known, places[::step])

"""Train the embedded source models on the source vendor and the source weather only: ``make source-models``.

Deterministic: one thread and fixed seeds. Prints what the frozen models reach on held-out source cases and on target
cases, so that the shift is a number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from casewise import dice, miou
from casewise.adapt.backbones.module import INTENSITIES
from casewise.adapt.networks import WEIGHTS, PlainUNet, TinySegFormer
from casewise.data.phantom import cardiac_cohort, driving_cohort
from casewise.data.splits import Cohort


def slices(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Every slice of every case: images (n, channel, rows, columns) and labels (n, rows, columns)."""
    images, labels = [], []
    for case_id in cohort.ids:
        label = cohort.label(case_id)
        images.append(batch(cohort, case_id))
        labels.append(label if label.ndim == 3 else label[None])
    return torch.cat(images), torch.from_numpy(np.concatenate(labels).astype(np.int64))


def batch(cohort: Cohort, case_id: str) -> Tensor:
    """The network's input, scaled as the backbone scales it: slices of a volume, or one picture."""
    image = cohort.case(case_id).image
    scaled = INTENSITIES["zscore" if image.ndim == 4 else "imagenet"](image)
    return torch.from_numpy(np.asarray(np.moveaxis(scaled, 0, 1) if image.ndim == 4 else scaled[None], np.float32))


def resized(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits at the resolution of the labels."""
    return functional.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)


Augment = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


def flipped(image: Tensor, label: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Half of the batches mirrored along columns."""
    if torch.rand((), generator=generator) < 0.5:
        image, label = image.flip(-1), label.flip(-1)
    return image, label


def varied(image: Tensor, label: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mirrored along both axes, gamma .75 to 1.4 and noise: as sources are trained, milder than vendor B."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    for axis in (-1, -2):
        if torch.rand((), generator=generator) < 0.5:
            image, label = image.flip(axis), label.flip(axis)
    low, high = image.amin((1, 2, 3), keepdim=True), image.amax((1, 2, 3), keepdim=True)
    image = ((image - low) / (high - low)).clamp(0, 1) ** between(0.75, 1.4)
    image = image + between(0, 0.03) * torch.randn(image.shape, generator=generator)
    return (image - image.mean((1, 2, 3), keepdim=True)) / image.std((1, 2, 3), keepdim=True), label


def train(
    network: nn.Module, cohort: Cohort, *, rounds: int, rate: float, dice_weight: float, augment: Augment
) -> nn.Module:
    """Cross-entropy and soft Dice, AdamW with a cosine."""
    images, labels = slices(cohort)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=rounds)
    network.train()
    for step in range(rounds):
        rows = torch.randint(len(images), (12,), generator=generator)
        image, label = augment(images[rows], labels[rows], generator)
        logits = resized(network(image), label)
        loss = functional.cross_entropy(logits, label, ignore_index=255)
        if dice_weight:
            loss = loss + dice_weight * soft_dice_loss(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  step {step:5d}  loss {loss.item():.4f}", flush=True)
    return network.eval()


def soft_dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    """1 - mean soft Dice of the foreground classes over the batch."""
    shares = logits.softmax(1)
    truth = functional.one_hot(label.clamp(max=logits.shape[1] - 1), logits.shape[1]).movedim(-1, 1)
    overlap, total = (shares * truth).sum((0, 2, 3)), (shares + truth).sum((0, 2, 3))
    return 1 - (2 * overlap[1:] / (total[1:] + 1e-6)).mean()


@torch.inference_mode()
def mean_metric(network: nn.Module, cohort: Cohort, metric: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """The cohort mean of a metric of M0."""
    values = []
    for case_id in cohort.ids:
        label = cohort.label(case_id)
        size = torch.from_numpy(label if label.ndim == 3 else label[None])
        mask = resized(network(batch(cohort, case_id)), size).argmax(1).numpy().astype(np.uint8)
        values.append(metric(mask.reshape(label.shape), label))
    return float(np.mean(values))


def cardiac() -> None:
    """The U-Net, on vendor A."""
    torch.manual_seed(0)
    print("phantom-cardiac: vendor A")
    hearts = cardiac_cohort("A", 60, split="train")
    network = train(PlainUNet(), hearts, rounds=900, rate=3e-3, dice_weight=1.0, augment=varied)
    save_file(network.state_dict(), WEIGHTS / "phantom-cardiac.safetensors")
    for vendor in ("A", "B"):
        value = mean_metric(network, cardiac_cohort(vendor, 20, split="held-out"), dice)
        print(f"  M0 Dice, vendor {vendor}: {value:.3f}")


def driving() -> None:
    """The transformer, in clear weather."""
    torch.manual_seed(0)
    print("phantom-driving: clear")
    streets = driving_cohort("clear", 240, split="train")
    network = train(TinySegFormer(), streets, rounds=1500, rate=2e-3, dice_weight=0.0, augment=flipped)
    save_file(network.state_dict(), WEIGHTS / "phantom-driving.safetensors")
    for weather in ("clear", "fog", "night", "rain"):
        scenes = driving_cohort(weather, 20, split="held-out")
        value = mean_metric(network, scenes, lambda mask, label: miou(mask, label, classes=range(19), ignore=255))
        print(f"  M0 mIoU, {weather}: {value:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["cardiac", "driving"])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    WEIGHTS.mkdir(exist_ok=True)
    for name, make in (("cardiac", cardiac), ("driving", driving)):
        if only in (None, name):
            make()

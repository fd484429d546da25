"""Train the embedded source model on the phantom hearts of vendor A: ``make source-models``.

Deterministic: one thread and fixed seeds. Prints the Dice of the frozen model on held-out hearts of vendors A and B.
"""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from casewise import dice
from casewise.adapt.backbones.module import zscore
from casewise.adapt.networks import WEIGHTS, PlainUNet
from casewise.data.phantom import cardiac_cohort
from casewise.data.splits import Cohort


def slices(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Every slice of every case: images (n, channel, rows, columns) and labels (n, rows, columns)."""
    images = [batch(cohort, case_id) for case_id in cohort.ids]
    labels = [cohort.label(case_id) for case_id in cohort.ids]
    return torch.cat(images), torch.from_numpy(np.concatenate(labels).astype(np.int64))


def batch(cohort: Cohort, case_id: str) -> Tensor:
    """The slices of a volume as the network takes them, scaled as the backbone scales them."""
    scaled = zscore(cohort.case(case_id).image)
    return torch.from_numpy(np.asarray(np.moveaxis(scaled, 0, 1), np.float32))


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


def train(network: nn.Module, cohort: Cohort, *, rounds: int, rate: float) -> nn.Module:
    """Cross-entropy and soft Dice, AdamW with a cosine."""
    images, labels = slices(cohort)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=rounds)
    network.train()
    for step in range(rounds):
        rows = torch.randint(len(images), (12,), generator=generator)
        image, label = varied(images[rows], labels[rows], generator)
        logits = network(image)
        loss = functional.cross_entropy(logits, label) + soft_dice_loss(logits, label)
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
def mean_dice(network: nn.Module, cohort: Cohort) -> float:
    """The cohort mean of the Dice of M0."""
    masks = {case_id: network(batch(cohort, case_id)).argmax(1).numpy().astype(np.uint8) for case_id in cohort.ids}
    return float(np.mean([dice(mask, cohort.label(case_id)) for case_id, mask in masks.items()]))


def cardiac() -> None:
    """The U-Net, on vendor A."""
    torch.manual_seed(0)
    print("phantom-cardiac: vendor A")
    hearts = cardiac_cohort("A", 60, split="train")
    network = train(PlainUNet(), hearts, rounds=900, rate=3e-3)
    save_file(network.state_dict(), WEIGHTS / "phantom-cardiac.safetensors")
    for vendor in ("A", "B"):
        value = mean_dice(network, cardiac_cohort(vendor, 20, split="held-out"))
        print(f"  M0 Dice, vendor {vendor}: {value:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    WEIGHTS.mkdir(exist_ok=True)
    cardiac()

"""Train the source models of the fundus and polyp benchmarks on their source images only, from scratch.

RIM-ONE v3 (disc rim and cup): a U-Net with InstanceNorm at half resolution. Kvasir-SEG (polyps): a U-Net with BatchNorm
at a quarter of it. Augmented, stopped early on source images that were held out by patient; weights and a JSON of
figures for each seed. Nothing of the target domains is read. A training that was interrupted goes on after its last
epoch and ends as if it had not been. Two stronger source models answer whether the gains are those of a weak one:
polyps-longer is the polyp network at half resolution, trained for longer; hearts-longer continues the training of the
cardiac nnU-Net on its own source images (M&Ms vendor A) for 2,000 updates.

    python -m benchmarks.source_training --data DATA -o OUT fundus-0 polyps-0 polyps-longer-0 hearts-longer
    casewise record -m benchmarks.source_training:fundus --weights OUT/fundus-0.safetensors ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones import pipeline_of
from casewise.adapt.backbones.module import Module
from casewise.adapt.model import Model
from casewise.adapt.networks import PlainUNet
from casewise.adapt.tuned_weights import temporary_weights
from casewise.data.folders import CaseFiles, list_cases, with_labels
from casewise.learn.export import export
from casewise.learn.tuning import Tuning, tune
from casewise.measure.metrics import dice

BATCH = 8
HEARTS = "hearts-longer"


class SmallUNet(PlainUNet):
    """RGB in 0..255, z-scored over all its values and reduced -> logits at the reduced resolution."""

    def __init__(self, classes: int, features: tuple[int, ...], *, reduction: int, norm: type[nn.Module]) -> None:
        super().__init__(channels=3, classes=classes, features=features)
        self.reduction = reduction
        for stage in (*self.encoder, *self.decoder):
            for place, layer in enumerate(stage):
                if isinstance(layer, nn.InstanceNorm2d):
                    stage[place] = norm(layer.num_features, affine=True)

    def forward(self, image: Tensor) -> Tensor:
        """Scale, then segment."""
        every = (1, 2, 3)
        mean, spread = image.mean(every, keepdim=True), image.std(every, correction=0, keepdim=True)
        return super().forward(functional.avg_pool2d((image - mean) / spread, self.reduction))


def fundus() -> Module:
    """For ``casewise record -m benchmarks.source_training:fundus --weights fundus-0.safetensors``."""
    network = SmallUNet(3, (16, 32, 64, 96, 128), reduction=2, norm=nn.InstanceNorm2d)
    return _module(network, "RIM-ONE U-Net", {0: "background", 1: "disc rim", 2: "cup"})


def polyps() -> Module:
    """For ``casewise record -m benchmarks.source_training:polyps --weights polyps-0.safetensors``."""
    network = SmallUNet(2, (24, 48, 96, 160), reduction=4, norm=nn.BatchNorm2d)
    return _module(network, "Kvasir U-Net", {0: "background", 1: "polyp"})


def polyps_longer() -> Module:
    """For ``casewise record -m benchmarks.source_training:polyps_longer --weights polyps-longer-0.safetensors``."""
    network = SmallUNet(2, (24, 48, 96, 160), reduction=2, norm=nn.BatchNorm2d)
    return _module(network, "Kvasir U-Net, trained longer", {0: "background", 1: "polyp"})


def _module(network: SmallUNet, name: str, labels: dict[int, str]) -> Module:
    return Module(network, classes=len(labels), dimensions=2, name=name, intensity="as-is", multiple=32, labels=labels)


@dataclass(frozen=True)
class Recipe:
    """What is trained on which folder, and for how long at most."""

    folder: str
    make: Callable[[], Module]
    patient: Callable[[str], str]  # case name -> whose it is, so that both eyes are on one side of the split
    epochs: int
    patience: int
    rate: float


RECIPES = {
    "fundus": Recipe("fundus_disc_cup/rimone_v3", fundus, lambda name: name.rsplit("-", 1)[0], 44, 12, 2e-3),
    "polyps": Recipe("polyps/kvasir_seg", polyps, str, 40, 12, 2e-3),
    "polyps-longer": Recipe("polyps/kvasir_seg", polyps_longer, str, 80, 25, 2e-3),
    "fundus-reversed": Recipe("fundus_disc_cup/drishti_gs", fundus, str, 30, 12, 2e-3),
    "polyps-reversed": Recipe("polyps/cvc_clinicdb", polyps, lambda name: str(int(name[4:]) // 35), 30, 12, 2e-3),
}


@dataclass(frozen=True)
class Figures:
    """What is written beside the weights."""

    dataset: str
    seed: int
    training_images: int
    validation_images: int
    epochs: int
    best_epoch: int
    validation_dice: float  # mean over images of the mean over foreground classes
    validation_dice_by_class: tuple[float, ...]
    validation_curve: tuple[float, ...]
    seconds: float


def read(folder: Path, most: int | None = None) -> tuple[list[str], Tensor, Tensor]:
    """Names, images (n, 3, rows, columns) in 0..255, labels (n, rows, columns)."""
    files = sorted((folder / "images").iterdir())[:most]
    pictures = [np.array(Image.open(file).convert("RGB"), np.float32) for file in files]
    labels = [np.array(Image.open(folder / "labels" / f"{file.stem}.png")).astype(np.int64) for file in files]
    images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()
    return [file.stem for file in files], images, torch.from_numpy(np.stack(labels))


def held_out(patients: list[str]) -> Tensor:
    """One in five patients by hash, the same for every seed."""
    return torch.tensor([int(hashlib.sha256(name.encode()).hexdigest(), 16) % 5 == 0 for name in patients])


def augmented(images: Tensor, labels: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Flips, rotation, scale, shift; gamma, contrast, brightness, color; sometimes blur or noise."""
    n = len(images)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand((n, *shape), generator=draw)

    angle, scale = between(-math.pi / 6, math.pi / 6), between(0.75, 1.3)
    flip = torch.where(torch.rand((n, 2), generator=draw) < 0.5, -1.0, 1.0)
    turn = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)], 1).view(n, 2, 2)
    matrix = torch.cat([turn * scale[:, None, None] * flip[:, None, :], between(-0.1, 0.1, 2, 1)], dim=2)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    images = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    moved = functional.grid_sample(
        labels[:, None].float(), grid, mode="nearest", padding_mode="reflection", align_corners=False
    )
    shares = (images / 255).clamp(1e-4, 1) ** torch.exp(between(-0.4, 0.4, 1, 1, 1))
    mean = shares.mean((2, 3), keepdim=True)
    shares = (shares - mean) * between(0.7, 1.3, 1, 1, 1) + mean * between(0.85, 1.15, 3, 1, 1)
    if torch.rand((), generator=draw) < 0.2:
        shares = functional.avg_pool2d(shares, 3, stride=1, padding=1, count_include_pad=False)
    if torch.rand((), generator=draw) < 0.2:
        shares = shares + 0.04 * torch.randn(shares.shape, generator=draw)
    return shares.clamp(0, 1) * 255, moved[:, 0].long()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy and one minus the mean soft Dice of the foreground classes."""
    logits = functional.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    shares, truth = logits.softmax(1), functional.one_hot(labels, logits.shape[1]).movedim(-1, 1)
    overlap, total = (shares * truth).sum((0, 2, 3)), (shares + truth).sum((0, 2, 3))
    return functional.cross_entropy(logits, labels) + 1 - (2 * overlap[1:] / (total[1:] + 1)).mean()


@torch.inference_mode()
def dice_by_class(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean over images of each foreground class's Dice; a class in neither mask counts 1."""
    network.eval()
    rows = []
    for image, label in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        logits = functional.interpolate(network(image), size=label.shape[1:], mode="bilinear", align_corners=False)
        mask = logits.argmax(1)
        for k in range(1, logits.shape[1]):
            both, sizes = ((mask == k) & (label == k)).sum((1, 2)), (mask == k).sum((1, 2)) + (label == k).sum((1, 2))
            rows.append(torch.where(sizes > 0, 2 * both / sizes.clamp(min=1), 1.0))
    classes = logits.shape[1] - 1
    return torch.stack([torch.cat(rows[k::classes]).mean() for k in range(classes)])


def train(
    name: str, seed: int, *, data: Path, out: Path, epochs: int | None = None, most: int | None = None
) -> Figures:
    """One network by its recipe; the epoch with the best validation Dice is what is saved."""
    recipe, started = RECIPES[name], time.perf_counter()
    recipe = replace(recipe, epochs=epochs or recipe.epochs)
    names, images, labels = read(data / recipe.folder, most)
    held = held_out([recipe.patient(case) for case in names])
    torch.manual_seed(seed)
    network, draw = recipe.make().network, torch.Generator().manual_seed(seed)
    rows = torch.nonzero(~held).flatten()
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=0.02)
    steps = len(rows) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.rate, total_steps=steps * recipe.epochs, pct_start=0.1
    )
    curve: list[float] = []
    best, kept, before = 0, {}, 0.0
    half = out / f"{name}-{seed}.partial.pt"
    if half.exists():
        there = torch.load(half, weights_only=True)
        for part, state in zip((network, optimizer, schedule), there["parts"], strict=True):
            part.load_state_dict(state)
        draw.set_state(there["draw"])
        curve, best, kept, before = there["curve"], there["best"], there["kept"], there["seconds"]
    for epoch in range(len(curve) + 1, recipe.epochs + 1):
        network.train()
        for chosen in rows[torch.randperm(len(rows), generator=draw)][: steps * BATCH].split(BATCH):
            image, label = augmented(images[chosen], labels[chosen], draw)
            loss = loss_of(network(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        curve.append(float(dice_by_class(network, images[held], labels[held]).mean()))
        print(f"  {name} seed {seed} epoch {epoch:3d}  loss {loss.item():.3f}  Dice {curve[-1]:.4f}", flush=True)
        if curve[-1] >= max(curve):
            best, kept = epoch, {key: value.clone() for key, value in network.state_dict().items()}
        if epoch - best >= recipe.patience:
            break
        state = {
            "parts": [part.state_dict() for part in (network, optimizer, schedule)], "draw": draw.get_state(),
            "curve": curve, "best": best, "kept": kept, "seconds": before + time.perf_counter() - started,
        }  # fmt: skip
        _save(state, half)
    network.load_state_dict(kept)
    by_class = tuple(round(float(value), 4) for value in dice_by_class(network, images[held], labels[held]))
    figures = Figures(
        dataset=recipe.folder,
        seed=seed,
        training_images=int((~held).sum()),
        validation_images=int(held.sum()),
        epochs=len(curve),
        best_epoch=best,
        validation_dice=round(curve[best - 1], 4),
        validation_dice_by_class=by_class,
        validation_curve=tuple(round(value, 4) for value in curve),
        seconds=round(before + time.perf_counter() - started, 1),
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}-{seed}.json").write_text(json.dumps(asdict(figures), indent=1) + "\n")
    save_file(kept, out / f"{name}-{seed}.safetensors")  # the last: where it lies, the training is done
    half.unlink(missing_ok=True)
    return figures


def train_hearts(*, data: Path, out: Path, updates: int = 2000, most: int | None = None) -> dict[str, float]:
    """Continue the training of the cardiac nnU-Net on vendor A in nnU-Net's own way; every seventh subject is left out.

    The model is written as an nnU-Net folder, OUT/hearts-longer. Returns the Dice on held-out volumes before and after.
    """
    folder, model = data / "mnms_cardiac" / "vendorA", Model(data.parent / "weights" / "nnunet_mnms_vendorA").load()
    files = with_labels(list_cases(folder / "images", ending=model.ending), folder / "labels")
    subjects = sorted({one.id.rsplit("_", 1)[0] for one in files})
    held = [one for one in files if one.id.rsplit("_", 1)[0] in subjects[::7]]
    seen = [one for one in files if one not in held][:most]
    pairs = [(model.read(one).case, model.read_label(one.label)) for one in seen if one.label is not None]
    how = Tuning(parameters="all", learning_rate=1e-3, updates=updates)
    tuned = tune(model, *zip(*pairs, strict=True), how, on_progress=_said)
    figures = {"before": _held_out_dice(model, held[:most])}
    with temporary_weights(model.network, tuned, 1.0):
        figures["after"] = _held_out_dice(model, held[:most])
    export(model, tuned, out / HEARTS)
    (out / f"{HEARTS}.json").write_text(json.dumps({"updates": updates, **figures}, indent=1) + "\n")
    return figures


def _said(updates: int, loss: float) -> None:
    if updates % 100 == 0:
        print(f"  hearts update {updates}  loss {loss:.3f}", flush=True)


def _held_out_dice(model: Any, files: Iterable[CaseFiles]) -> float:
    scores = []
    for one in files:
        prepared = model.prepare(model.read(one).case)
        mask, _ = pipeline_of(prepared, model).source()
        scores.append(dice(mask, model.read_label(one.label)))
    return round(float(np.mean(scores)), 4)


def _save(state: dict[str, object], path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    known = [f"{name}-{seed}" for name in RECIPES for seed in (0, 1)] + [HEARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", choices=known, metavar="SOURCE", help=", ".join(known))
    parser.add_argument("--data", type=Path, required=True, help="folder with fundus_disc_cup, polyps, mnms_cardiac")
    parser.add_argument("-o", "--out", type=Path, required=True, help="where NAME-SEED.safetensors and .json go")
    parser.add_argument("--epochs", type=int, help="epochs (updates of hearts-longer) at most; default: the recipe's")
    parser.add_argument("--images", type=int, help="only the first so many images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = {"data": options.data, "out": options.out, "most": options.images}
    for source in options.sources:
        if source == HEARTS:
            print(train_hearts(**where, updates=options.epochs or 2000), flush=True)
        else:
            name, _, seed = source.rpartition("-")
            print(train(name, int(seed), **where, epochs=options.epochs), flush=True)

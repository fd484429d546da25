"""Train the fundus source model on RIM-ONE v3 (disc rim and cup), for the fundus benchmark.

Every fourth image in sorted order is held out. Nothing of Drishti-GS is read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from casewise.adapt.backbones.module import Module
from casewise.adapt.networks import PlainUNet

FEATURES = (16, 32, 64, 96, 128)


class FundusUNet(PlainUNet):
    """RGB crops in 0..255 -> logits of background, rim and cup; an image is z-scored over all its values."""

    def __init__(self) -> None:
        super().__init__(channels=3, classes=3, features=FEATURES)

    def forward(self, image: Tensor) -> Tensor:
        """Scale, then segment."""
        every = (1, 2, 3)
        mean, spread = image.mean(every, keepdim=True), image.std(every, correction=0, keepdim=True)
        return super().forward((image - mean) / spread)


def model() -> Module:
    """For ``casewise record -m benchmarks.fundus_source:model --weights fundus.safetensors``."""
    names = {0: "background", 1: "disc rim", 2: "cup"}
    return Module(FundusUNet(), classes=3, dimensions=2, name="RIM-ONE U-Net", intensity="as-is", labels=names)


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, rows, columns) and labels (n, rows, columns)."""
    names = sorted(path.name for path in (folder / "images").glob("*.png"))
    pictures = [np.array(Image.open(folder / "images" / name).convert("RGB"), np.float32) for name in names]
    labels = [np.array(Image.open(folder / "labels" / name)).astype(np.int64) for name in names]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(np.stack(labels))


def train(images: Tensor, labels: Tensor, *, rounds: int) -> nn.Module:
    """Cross-entropy, AdamW with one cycle, random flips."""
    torch.manual_seed(0)
    model, draw = FundusUNet().train(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=rounds)
    for step in range(rounds):
        rows = torch.randint(len(images), (6,), generator=draw)
        axes = [axis for axis in (-1, -2) if torch.rand((), generator=draw) < 0.5]
        loss = functional.cross_entropy(model(images[rows].flip(axes)), labels[rows].flip(axes))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"  step {step:4d}  loss {loss.item():.4f}", flush=True)
    return model.eval()


@torch.inference_mode()
def disc_and_cup(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean Dice of the disc (label > 0) and of the cup (label 2)."""
    masks = torch.cat([model(image[None]).argmax(1) for image in images])
    return tuple(
        float(np.mean([2 * (m & t).sum() / (m.sum() + t.sum()) for m, t in zip(masks >= k, labels >= k, strict=True)]))
        for k in (1, 2)
    )  # type: ignore[return-value]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder fundus_disc_cup")
    parser.add_argument("-o", "--out", type=Path, required=True, help="where fundus.safetensors goes")
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = read(options.data / "rimone_v3")
    held = torch.arange(len(images)) % 4 == 3
    model = train(images[~held], labels[~held], rounds=options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), options.out / "fundus.safetensors")
    print("Dice disc/cup, RIM-ONE held out:", disc_and_cup(model, images[held], labels[held]))

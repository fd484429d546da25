"""An objective of your own: say what one update is. The loop, the reset and the micro-batches are not its business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from casewise import run_episode


@dataclass(frozen=True)
class Sharpen:
    """Raise the mean largest probability."""

    learning_rate: float = 1e-2

    def begin(self, subject):
        optimizer = torch.optim.SGD(subject.parameters.values(), lr=subject.learning_rate)

        def loss(logits, inputs, rows):
            return -logits.softmax(1).amax(1).sum(), logits[:, 0].numel()

        def update():
            value = subject.backward(loss)
            optimizer.step()
            return {"loss": value}

        return update


def main() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    trajectory = run_episode(network, torch.randn(6, 1, 64, 64), Sharpen(), steps=3, learning_rate=1.0)
    for step, signals in enumerate(trajectory.signals):
        print(f"step {step}: mean largest probability {signals['msp']:.4f}, regions {signals['regions']:.0f}")


if __name__ == "__main__":
    main()

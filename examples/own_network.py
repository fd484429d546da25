"""A network of your own, guarded: any nn.Module that returns logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from casewise import Case, guard
from casewise.judge.controllers import CONTROLLERS


def main() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    image = np.random.default_rng(0).normal(size=(1, 6, 64, 64)).astype("float32")  # channel, slices, rows, columns
    controller = CONTROLLERS.build("frag-stop", cap=4)
    guarded = guard(Case("volume-1", image), network, controller, "tent", steps=4, learning_rate=1e-2)
    print(guarded.decision.action.value, "at step", guarded.decision.deployed, "of", guarded.decision.executed)
    print(guarded.decision.reason)
    print("mask", guarded.mask.shape, "signals", {k: guarded.trajectory.signals[-1][k] for k in ("regions", "delta")})


if __name__ == "__main__":
    main()

"""Small networks and a small case for tests with torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

torch.set_num_threads(1)  # tiny networks: threads only wait for each other


class SmallUNet(nn.Module):
    """One level down and up; any norm layer; 3 classes."""

    def __init__(self, norm=lambda n: nn.InstanceNorm2d(n, affine=True), classes=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.LeakyReLU(inplace=True))
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), norm(8), nn.LeakyReLU(inplace=True))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.decoder = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), norm(8), nn.LeakyReLU(inplace=True))
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        skip = self.encoder(x)
        return self.head(self.decoder(torch.cat([self.up(self.bottom(skip)), skip], 1)))


@pytest.fixture
def make_unet():
    """Builds a seeded U-Net in training mode, with sharp logits so that masks have structure."""

    def make(norm=lambda n: nn.InstanceNorm2d(n, affine=True), classes=3):
        torch.manual_seed(5)
        network = SmallUNet(norm, classes)
        with torch.no_grad():
            network.head.weight.mul_(6)
            for module in network.modules():
                if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                    module.running_mean.normal_(0, 0.2)
                    module.running_var.uniform_(0.5, 2.0)
        return network.train()

    return make


@pytest.fixture
def unet(make_unet):
    return make_unet()


@pytest.fixture
def slices():
    """Five slices of 16 x 16."""
    return torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(7))

"""One thread for torch, and tiny models by their options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from worlds.discs import tiny_backbone

from casewise.adapt.backbones.module import Module


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> Callable[..., Module]:
    return tiny_backbone

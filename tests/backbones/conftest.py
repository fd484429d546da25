"""Miniature models, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from miniature_nnunet import write_model, write_scans

os.environ.setdefault("nnUNet_compile", "f")
os.environ.setdefault("nnUNet_def_n_proc", "1")

Maker = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """``model(dimensions=3)``: a trained miniature folder with those options, made when first asked for."""
    made: dict[tuple[tuple[str, object], ...], Path] = {}

    def make(**options: object) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp("model"), steps=12, **options)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(scope="session")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shifted scans off the training spacing: ``images/`` and ``labels/``."""
    folder = tmp_path_factory.mktemp("scans")
    write_scans(folder, [1, 2], shift=0.3, spacing=(0.8, 1.1, 2.5))
    return folder

"""A prediction folder of phantom hearts, copied for each test, and its server."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds.predictions import Folder, hearts, serving


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hearts and their images, written once."""
    root = tmp_path_factory.mktemp("hearts")
    hearts(root / "out")
    return root


@pytest.fixture
def predictions(written: Path, tmp_path: Path) -> Folder:
    """A copy of the hearts for one test."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return Folder(tmp_path / "out")


Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Serve:
    """``with serve(folder, images=...) as server``."""
    return serving


@pytest.fixture
def new_folder() -> type[Folder]:
    return Folder

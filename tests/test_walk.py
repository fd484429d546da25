"""How many files ``predict`` walks through, counted with a trace: what a reader must follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner
from worlds.discs import disc, eroding_model

import casewise
from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import as_model
from casewise.cli import app
from casewise.core.records import Policy
from casewise.data.datasets.plain import write_cohort
from casewise.data.phantom import cardiac_cohort

SOURCE = Path(casewise.__file__).parent
MOST_FILES = 29
MOST_FILES_OF_A_FOLDER = 53
SHARED = ("core", "measure", "__init__.py")
"""Packages that any other may ask: words and numbers, no step of the walk."""


class Walk:
    """Files that ran, and every order of packages on the call stack."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.stacks: set[tuple[str, ...]] = set()

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Take one call; imports are no part of the walk."""
        if event != "call" or frame.f_code.co_name == "<module>" or (here := _file(frame)) is None:
            return
        self.files.add(here)
        stack: list[str] = []
        above: FrameType | None = frame
        while above is not None:
            part = (_file(above) or "core").split("/")[0]
            if part not in SHARED and (not stack or stack[-1] != part):
                stack.append(part)
            above = above.f_back
        self.stacks.add(tuple(reversed(stack)))

    @property
    def steps(self) -> set[str]:
        """The files without core, which holds records, names and texts that everything uses."""
        return {file for file in self.files if not file.startswith("core/")}

    @property
    def twice(self) -> list[tuple[str, ...]]:
        """Stacks on which the walk comes back to a package that it had left."""
        return sorted(stack for stack in self.stacks if len(set(stack)) < len(stack))


def _file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path[len(str(SOURCE)) + 1 :] if path.startswith(str(SOURCE)) else None


@contextmanager
def walked() -> Iterator[Walk]:
    walk = Walk()
    sys.setprofile(walk.see)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def deployed(objective: str, model: Any = None, **how: Any) -> casewise.Deployment:
    """A deployment of the last candidate of one proposer, as calibration would leave it."""
    adaptation, given = Adaptation(objective, min_area=4, **how), model or eroding_model()
    model = eroding_model() if model is None else as_model(model).load()
    steps = adaptation.horizon(model)
    policy = Policy(
        "fixed-k",
        "fixed-k",
        {"step": steps},
        steps,
        binding=adaptation.binding(model),
        adaptation=adaptation.as_plain(),
    )
    return casewise.Deployment(given, policy, {"": adaptation})


@pytest.mark.parametrize(
    "made",
    [
        lambda: casewise.Deployment(eroding_model()),
        lambda: deployed("tent", steps=1),
        lambda: deployed("views:gamma(1.4),mirror(x)"),
    ],
    ids=["m0", "gradient", "views"],
)
def test_one_image_crosses_few_files_and_no_package_twice(
    made: Callable[[], casewise.Deployment], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, image = made(), disc(1, 2, 24)[0]
    deployment.predict(image)  # what is imported late is imported now
    with walked() as walk:
        deployment.predict(image)
    with capsys.disabled():
        print(f"\n{deployment.policy.name}: {len(walk.steps)} files, and {len(walk.files - walk.steps)} of core")
    assert len(walk.steps) <= MOST_FILES, sorted(walk.steps)
    assert not walk.twice


def test_a_folder_crosses_files_that_architecture_md_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``casewise predict -m DEPLOYMENT -i IN -o OUT`` with masks, records, audit log and page."""
    images = write_cohort(cardiac_cohort("B", 1, split="new"), tmp_path / "data") / "images"
    deployed("views:gamma(1.4)", "casewise.adapt.networks:phantom_cardiac").save(tmp_path / "deployment")
    words = ["predict", "-m", str(tmp_path / "deployment"), "-i", str(images), "-q"]
    assert CliRunner().invoke(app, [*words, "-o", str(tmp_path / "first")], catch_exceptions=False).exit_code == 0
    with walked() as walk:
        CliRunner().invoke(app, [*words, "-o", str(tmp_path / "second")], catch_exceptions=False)
    here = {file for file in walk.steps if file.endswith(".py")}  # Jinja compiles templates under their own names
    with capsys.disabled():
        print(f"\na folder: {len(here)} files, and {len(walk.files - walk.steps)} of core")
    assert len(here) <= MOST_FILES_OF_A_FOLDER, sorted(here)

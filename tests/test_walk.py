"""How many files ``predict`` walks through, counted with a trace: what a reader must follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from worlds.discs import disc, eroding_model

import casewise
from casewise.adapt.adaptation import Adaptation
from casewise.core.records import Policy

SOURCE = Path(casewise.__file__).parent
MOST_FILES = 30
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


def deployed(objective: str, **how: Any) -> casewise.Deployment:
    """A deployment of the last candidate of one proposer, as calibration would leave it."""
    adaptation, model = Adaptation(objective, min_area=4, **how), eroding_model()
    steps = adaptation.horizon(model)
    policy = Policy(
        "fixed-k",
        "fixed-k",
        {"step": steps},
        steps,
        binding=adaptation.binding(model),
        adaptation=adaptation.as_plain(),
    )
    return casewise.Deployment(model, policy, {"": adaptation})


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

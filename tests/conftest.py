"""For every test: one thread for torch (small tensors, two workers on two cores), the same examples in every run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine fails no test, and CI sees the examples that were seen before a commit.
settings.register_profile("casewise", deadline=None, derandomize=True)
settings.load_profile("casewise")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that a test starts find the simulated worlds and the examples too.
_HERE = Path(__file__).parent
_SHARED = [str(_HERE), str(_HERE.parent / "examples")]
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *_SHARED])

# Tests that run commands, browsers, clusters or a whole chain. `make test` leaves them to `make test-whole`.
WHOLE = (
    "attacks", "cli", "report", "run", "serve", "validity", "study/test_every_policy.py", "test_bench.py",
    "test_contributing.py", "test_docs.py", "test_fit.py", "test_front_door.py", "test_tutorial.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of these files and folders."""
    folders = tuple(_HERE / name for name in WHOLE)
    for item in items:
        if any(item.path.is_relative_to(one) for one in folders):
            item.add_marker(pytest.mark.whole)

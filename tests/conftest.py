"""For every test: one thread for torch (small tensors, two workers on two cores), the same examples in every run."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# A busy machine fails no test, and CI sees the examples that were seen before a commit.
settings.register_profile("casewise", deadline=None, derandomize=True)
settings.load_profile("casewise")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that a test starts find the simulated worlds and the examples too.
_HERE = Path(__file__).parent
_SHARED = [str(_HERE), str(_HERE.parent / "examples")]
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *_SHARED])

"""One thread for torch in every test: small tensors, and two workers on two cores."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that a test starts find the simulated worlds and the examples too.
_HERE = Path(__file__).parent
_SHARED = [str(_HERE), str(_HERE.parent / "examples")]
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *_SHARED])

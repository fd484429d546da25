"""One thread for torch in every test: small tensors, and two workers on two cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

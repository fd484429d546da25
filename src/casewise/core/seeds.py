"""One seed for each (run, case, step), so that no result depends on the order of the cases (A7)."""

from __future__ import annotations

import hashlib

RESAMPLING_SEED = 1000  # bootstrap and random controls (A7)


def seed_of(run: int | str, case_id: str, step: int = 0) -> int:
    """A 63-bit seed that depends on the run, the case and the step, and on nothing else.

    >>> seed_of(0, "A0S9V9", 1) == seed_of(0, "A0S9V9", 1)
    True
    >>> seed_of(0, "A0S9V9", 1) == seed_of(0, "A0S9V9", 2)
    False
    """
    words = "\x1f".join((str(run), case_id, str(step))).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "big") >> 1

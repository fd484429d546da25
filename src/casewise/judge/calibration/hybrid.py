"""Hybrid calibration: the pool grows with the stream, so the cut-points become a function of the stream (E10, S12).

Off unless asked for by name. Nothing that was promised for seed-only cut-points holds here; run the exchangeability
alarm beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from casewise.core.errors import BadInput
from casewise.core.records import Policy
from casewise.judge.calibration.cuts import cut_points
from casewise.judge.controllers.router import Router

WARM_UP = 15


@dataclass(frozen=True)
class Stream:
    """A router whose cut-points are refitted on the latest ``window`` values once ``warm_up`` cases came by."""

    seed_only: Router
    pool: tuple[float, ...]
    convention: str = "medical"
    window: int | None = None  # None: everything so far
    warm_up: int = WARM_UP
    came: int = 0

    @property
    def controller(self) -> Router:
        """The router for the next case."""
        if self.came < self.warm_up:
            return self.seed_only
        values = np.array(self.pool if self.window is None else self.pool[-self.window :])
        low, high = cut_points(values, self.convention)
        return replace(self.seed_only, cut_low=low, cut_high=high)

    def after(self, value: float) -> Stream:
        """The stream after a case with this coordinate."""
        return replace(self, pool=(*self.pool, value), came=self.came + 1)


def stream_of(policy: Policy) -> Stream:
    """The beginning of the stream of a hybrid policy."""
    hybrid = policy.options.get("hybrid")
    if hybrid is None:
        raise BadInput(f"policy {policy.name!r} is seed-only; calibrate with hybrid by name for a stream")
    router = Router(**{key: value for key, value in policy.options.items() if key != "hybrid"})
    return Stream(router, **{**hybrid, "pool": tuple(hybrid["pool"])})

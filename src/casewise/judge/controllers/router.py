"""The COQR router: Algorithm 1 of the paper (E6-E9)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from casewise.core.errors import BadInput
from casewise.core.records import Observation, State, Verdict
from casewise.judge.controllers.about import About
from casewise.judge.controllers.bucket import ROLLBACK, Bucket, bucket_of
from casewise.judge.controllers.signal_value import needed, statistics_of, value_at
from casewise.measure.signals.risk import RiskStatistics


@dataclass(frozen=True)
class Router:
    """Probe one step, read one coordinate u of it, and act by bucket.

    u >= cut_high is hard, otherwise u > cut_low is mid, otherwise low; non-strict and strict exactly so (E6).
    """

    coordinate: str
    cut_low: float
    cut_high: float
    low: Bucket
    mid: Bucket
    hard: Bucket = ROLLBACK
    statistics: RiskStatistics | None = None  # for the coordinate "risk" only (C6)

    name: str = field(default="router", init=False, repr=False)
    about = About("COQR router", is_router=True, is_ours=True, fitted_by="cuts")

    def __post_init__(self) -> None:
        for bucket in ("low", "mid", "hard"):
            object.__setattr__(self, bucket, bucket_of(getattr(self, bucket)))
        object.__setattr__(self, "statistics", statistics_of(self.statistics))
        if math.isnan(self.cut_low) or math.isnan(self.cut_high) or self.cut_low > self.cut_high:
            raise BadInput(f"need cut_low <= cut_high, got {self.cut_low} and {self.cut_high}")

    @property
    def needs(self) -> frozenset[str]:
        """The coordinate, and what the stop rules of its buckets read."""
        return needed(self.coordinate).union(*(bucket.needs for bucket in (self.low, self.mid, self.hard)))

    @property
    def states(self) -> frozenset[State]:
        """Shrunk states that a bucket deploys."""
        return frozenset().union(*(bucket.states for bucket in (self.low, self.mid, self.hard)))

    def bucket(self, value: float) -> str:
        """low, mid or hard."""
        if value >= self.cut_high:
            return "hard"
        return "mid" if value > self.cut_low else "low"

    def decide(self, seen: Observation) -> Verdict | None:
        """The bucket's action, once the probe and the steps that the action needs are there."""
        if seen.step < 1:
            return None
        value = value_at(seen, 1, self.coordinate, self.statistics)
        bucket = self.bucket(value)
        chosen = getattr(self, bucket).choose(seen)
        if chosen is None:
            return None
        state, action, reason = chosen
        return Verdict(
            state,
            action,
            bucket=bucket,
            coordinate=self.coordinate,
            value=value,
            cut_low=self.cut_low,
            cut_high=self.cut_high,
            reason=f"{self.coordinate} {value:.4g} {self._place(bucket)}, so {bucket}: {reason}",
            flagged=getattr(self, bucket).action == "ask",
        )

    def _place(self, bucket: str) -> str:
        return {
            "low": f"<= {self.cut_low:.4g}",
            "mid": f"> {self.cut_low:.4g} and < {self.cut_high:.4g}",
            "hard": f">= {self.cut_high:.4g}",
        }[bucket]

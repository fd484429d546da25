r"""Proxy alarm: no labels after deployment; a coordinate's exceedances stand in for harm (Schirmer et al., 2025).

With a threshold q on the coordinate u,

.. math:: P(harmed) \ge P(u > q) - P(u > q,\ not\ harmed).

If false positives are not more frequent on the stream than at calibration, then a stream whose exceedance rate lies
above :math:`P_{cal}(u > q\ or\ harmed) + \epsilon` harms more often than calibration did, by more than epsilon.
That assumption cannot be checked without labels, so this is an alarm and never a certificate: where the coordinate does
not rank harm it will be silent, or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from casewise.core.errors import BadInput, TooFewCases
from casewise.judge.certificates.loss_table import check_level
from casewise.judge.certificates.ltt import clopper_pearson_upper
from casewise.judge.monitors.betting import exceeds, lower_bound


def proxy_threshold(values: Sequence[float], harmed: Sequence[bool]) -> float:
    """The calibration value q whose exceedances u > q disagree least often with harm; the largest in case of a tie."""
    u, h = np.asarray(values, dtype=float), np.asarray(harmed, dtype=bool)
    if not len(u) or len(u) != len(h):
        raise BadInput(f"need one value and one harm flag for each case, got {len(u)} and {len(h)}")
    cuts = np.unique(u)[::-1]
    wrong = ((u[:, None] > cuts[None, :]) != h[:, None]).sum(axis=0)
    return float(cuts[np.argmin(wrong)])


@dataclass(frozen=True)
class Proxy:
    """Alarm when a label-free coordinate exceeds its threshold too often; an indication, not a certificate."""

    threshold: float
    limit: float  # exceedance rate that calibration explains, plus tolerance
    delta: float = 0.05
    exceeded: tuple[int, ...] = ()  # 1 where u > threshold
    alarm_at: int | None = None

    def __post_init__(self) -> None:
        check_level("delta", self.delta)

    @classmethod
    def of(
        cls, values: Sequence[float], harmed: Sequence[bool], *, tolerance: float = 0.0, delta: float = 0.05
    ) -> Proxy:
        """A proxy from labelled patients: every other one chooses the threshold, the rest bound it at delta/2."""
        u, h = np.asarray(values, dtype=float), np.asarray(harmed, dtype=bool)
        if len(u) < 4:
            raise TooFewCases(f"a proxy needs at least 4 labelled patients, got {len(u)}")
        threshold = proxy_threshold(list(u[::2]), list(h[::2]))
        explained = (u[1::2] > threshold) | h[1::2]
        upper = clopper_pearson_upper(int(explained.sum()), len(explained), 1.0 - delta / 2)
        return cls(threshold, min(upper + tolerance, 1.0), delta)

    @property
    def lower(self) -> float:
        """Time-uniform lower bound of the stream's exceedance rate at 1 - delta/2."""
        return lower_bound(self.exceeded, self.delta / 2)

    @property
    def alarm(self) -> bool:
        """Whether the alarm was raised; it stays raised."""
        return self.alarm_at is not None

    def seen(self, value: float) -> Proxy:
        """The monitor after one more unlabelled patient."""
        if not np.isfinite(value):
            raise BadInput(f"a coordinate must be finite, got {value}")
        exceeded = (*self.exceeded, int(value > self.threshold))
        rings = not self.alarm and bool(exceeds(exceeded, self.limit, self.delta / 2))
        return replace(self, exceeded=exceeded, alarm_at=len(exceeded) if rings else self.alarm_at)

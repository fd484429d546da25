"""The two-term risk of an edit: how far its regions and its coverage lie above what the calibration cases had (C6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from casewise.core.errors import DegenerateStatistic


@dataclass(frozen=True)
class RiskStatistics:
    """Means and deviations (ddof 0) of the step-1 signals of the calibration cases (C6, F5)."""

    mean_regions: float
    sigma_regions: float
    mean_delta: float
    sigma_delta: float

    def __post_init__(self) -> None:
        if not (self.sigma_regions > 0 and self.sigma_delta > 0):
            raise DegenerateStatistic(
                f"z-scores need a spread, got sigma {self.sigma_regions} for regions and {self.sigma_delta} for delta; "
                f"calibrate on cases that differ, or use a coordinate that varies on them"
            )

    def risk(self, regions: Any, delta: Any) -> Any:
        """r = z(n)/2 + z(delta)/2 (C6), of numbers or of arrays.

        >>> round(RiskStatistics(0.70, 0.781, 0.00028, 0.00020).risk(0, 0), 3)
        -1.148
        """
        return (regions - self.mean_regions) / self.sigma_regions / 2 + (delta - self.mean_delta) / self.sigma_delta / 2

"""The two-term risk of an edit: z-scores of regions and delta against the calibration cases (C6).

Region scores of the step-1 edit, for the region gate: how much surer the network became in each (L1, L2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, DegenerateStatistic
from casewise.measure.regions import regions_of


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
                f"z-scores need a deviation above 0, got sigma {self.sigma_regions} for regions and {self.sigma_delta} "
                "for delta; calibrate on cases that differ, or use a coordinate that varies on them"
            )

    def risk(self, regions: Any, delta: Any) -> Any:
        """r = z(n)/2 + z(delta)/2 (C6), of numbers or of arrays.

        >>> round(RiskStatistics(0.70, 0.781, 0.00028, 0.00020).risk(0, 0), 3)
        -1.148
        """
        return (regions - self.mean_regions) / self.sigma_regions / 2 + (delta - self.mean_delta) / self.sigma_delta / 2


DROP = "drop."
"""Prefix of the region scores among the signals of step 1."""


def region_drops(source: Any, adapted: Any, drop: NDArray[Any], *, min_area: int = 16) -> dict[str, float | None]:
    r"""Mean entropy drop of D (``drop``) and of each kept region of the raw multi-class edit (``drop.0``, ...).

    .. math:: s_j = \frac{1}{|R_j|} \sum_{x \in R_j} H_{M_0}(x) - H_{M_1}(x)

    ``drop`` holds that difference: of every voxel in the masks' shape, or of the voxels of D in C order.
    """
    found = regions_of(source, adapted, min_area=min_area, foreground=False)
    on_d = drop.reshape(-1)[found.voxels] if drop.shape == found.shape else np.asarray(drop)
    if on_d.shape != found.voxels.shape:
        raise BadInput(f"entropy drops need shape {found.shape} or ({found.area},), got {drop.shape}")
    if not found.area:
        return {"drop": 0.0}
    sums = np.bincount(found.number, weights=on_d, minlength=len(found.sizes))
    scores = {f"{DROP}{number}": float(score) for number, score in enumerate((sums / found.sizes)[found.kept])}
    return {"drop": float(on_d.mean(dtype=np.float64)), **scores}

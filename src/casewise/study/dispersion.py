"""How far the deployed depth spreads inside each bucket: none for fixed depths, some for stop rules (M11)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.study.finding import Finding

BUCKETS = ("low", "mid", "hard")


def depth_dispersion(router: pd.DataFrame) -> Finding:
    """Cases, standard deviation (ddof 0) and range of the deployed depth by bucket."""
    records = []
    for name in BUCKETS:
        depth = router.loc[router["bucket"] == name, "deployed"].to_numpy(float)
        low, std, high = (depth.min(), depth.std(), depth.max()) if len(depth) else (np.nan, np.nan, np.nan)
        reason = "" if len(depth) else "the bucket is empty"
        records.append({"bucket": name, "n": len(depth), "std": std, "low": low, "high": high, "reason": reason})
    return Finding("dispersion", pd.DataFrame(records), len(router), "M11")

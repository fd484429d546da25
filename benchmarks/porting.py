"""Do cut-points travel from the heart to the eye? The cardiac upper tertile of each coordinate, applied away (O13).

No label is read. A coordinate that travels would roll back about a third away, as it does at home.

    python benchmarks/porting.py bench-real/cardiac/ladders-hearts:tent bench-real/fundus/tent-5e-3 ...
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from real_folders import open_arm

from casewise.study.analyses.scale import scale_probe

COORDINATES = ("delta", "area", "largest", "regions", "delta_foreground", "effective_regions", "singleton_share")


def main() -> None:
    """Print one row a coordinate: ratio of means, and the share that the ported cut rolls back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("home", help="folder with a calibration archive, FOLDER:LADDER where it holds several ladders")
    parser.add_argument("away", nargs="+", help="folders with development archives, the same way")
    options = parser.parse_args()
    home = open_arm(options.home, "calibration").signals()
    cohorts = {"/".join(Path(arm).parts[-2:]): open_arm(arm, "development").signals() for arm in options.away}
    print("| coordinate | " + " | ".join(f"{name}: times home, rolled back" for name in cohorts) + " |")
    print("|---|" + "---|" * len(cohorts))
    for coordinate in COORDINATES:
        cells = []
        for away in cohorts.values():
            found = scale_probe(home, away, coordinate=coordinate).table.iloc[1]
            times = f"{found['ratio_mean']:.1f}x" if math.isfinite(found["ratio_mean"]) else "0 at home"
            cells.append(f"{times}, {found['rolled_back']:.0%}")
        print(f"| {coordinate} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

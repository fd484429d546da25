"""Choose, merge, flag on a recorded shift: every design by cross-fitting over clusters of calibration + development.

    python benchmarks/real_choices.py OUT/hearts-views mri            one table per ladder of views; labels are read

No cluster ever helps to fit what is scored on it. Printed: the table of designs with the best fixed candidate (chosen
inside the folds) beside them, what each signal is worth, and what flags would find.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from casewise.archive.store import Archive, open_archive
from casewise.core.records import SOURCE, Controller
from casewise.judge.calibration.designs import (
    DESIGNS,
    AgreementRule,
    Known,
    Setting,
    compare_designs,
    cross_fitted,
    gather,
    mean_low,
    setting_of,
)
from casewise.judge.controllers.choose import board, state_of
from casewise.judge.controllers.fixed import FixedK
from casewise.measure.metrics.selective import auroc
from casewise.study.quality_control import archive_opinions, controlled, quality_rows

POOR = 0.7


def best_fixed(known: Sequence[Known], setting: Setting) -> Controller:
    """The candidate with the largest mean gain on the cases that it is fitted on."""
    states = [state for state in board(known[0].seen) if state.step]
    best = max(states, key=lambda state: np.mean([one.metric[state] - one.source for one in known]))
    if best == state_of(setting.consensus):
        return AgreementRule(setting.steps, setting.consensus, rule="consensus")
    return FixedK(best.step)


def tell(archives: Sequence[Archive], name: str) -> None:
    """Everything about one ladder."""
    setting = setting_of(archives[0])
    known = [one for archive in archives for one in gather(archive, setting)]
    clusters = [one.cluster for one in known]
    metric = np.array([one.source for one in known])
    print(f"\n## {name}: {len(known)} cases of {len(set(clusters))} clusters, M0 {metric.mean():.4f}", end=", ")
    print(f"{int((metric < POOR).sum())} below {POOR}")
    designs = {**DESIGNS, "best fixed": best_fixed}
    found = compare_designs(known, setting, designs, level=0.975)
    print(
        "| design | gain [95 %] | helped : hurt | by more than a point | worst | captured |\n|---|---|---|---|---|---|"
    )
    for row in found.rows:
        share = "" if row.captured is None else f"{row.captured:.0%}"
        print(
            f"| {row.design} | {row.gain:+.4f} [{row.low:+.4f}, {row.high:+.4f}] | {row.helped} : {row.hurt} | "
            f"{row.hurt_by_a_point} | {row.worst:+.3f} | {share} |"
        )
    oracle = [max(one.metric.values()) - one.source for one in known]
    print(f"| best candidate of each case (needs the label) | {np.mean(oracle):+.4f} | | | | 100% |")
    for k, state in enumerate(board(known[0].seen)):
        if state != SOURCE:
            mean, low, high = mean_low([one.metric[state] - one.source for one in known], clusters, level=0.975)
            hurt = sum(one.metric[state] - one.source < -0.01 for one in known)
            print(f"  candidate {k} ({rung(archives[0], k)}): {mean:+.4f} [{low:+.4f}, {high:+.4f}], {hurt} by a point")
    rows = quality_rows(opinion for archive in archives for opinion in archive_opinions(archive))
    quality = controlled(rows, below=POOR, level=0.9)
    print("\n".join(quality.sentences()))
    sure = -np.array([float(board(one.seen)[SOURCE].get("entropy") or np.nan) for one in known])
    if np.isfinite(sure).all():
        print(f"entropy of M0: AUROC {auroc(-sure, metric < POOR):.3f} for metric < {POOR}")
    deployed = cross_fitted(known, setting, DESIGNS["consensus"])
    print(f"consensus below {POOR}: {sum(one.metric < POOR for one in deployed)}")


def rung(archive: Archive, step: int) -> str:
    """What a candidate is called."""
    return next(iter(archive.entries.values())).rungs[step - 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the archives calibration and development")
    parser.add_argument("ladders", nargs="+")
    parser.add_argument("--splits", nargs="+", default=["calibration", "development"])
    options = parser.parse_args()
    for ladder in options.ladders:
        opened = [open_archive(options.folder / split, ladder=ladder) for split in options.splits]
        tell(opened, f"{options.folder.name}, {ladder}")

"""What recorded views are worth: every view alone, every kind of consensus, gain against forwards, choice of views.

    python benchmarks/views_tables.py OUT/hearts-views        reads calibration/ and development/ below it

Gains are changes of the archive's metric against M0, with intervals by cluster; views are chosen on calibration only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from casewise.archive.store import Archive, open_archive
from casewise.judge.calibration.view_selection import ReadCase, chosen_views, read_case, settled_after


@dataclass(frozen=True)
class Cohort:
    """The cases of one split with their labels, their metric on M0, and their clusters."""

    cases: tuple[ReadCase, ...]

    @property
    def clusters(self) -> list[str]:
        return [case.cluster for case in self.cases]

    def gains(self, change: Callable[[ReadCase], float]) -> NDArray[np.float64]:
        return np.array([change(case) - case.source for case in self.cases])


def cohort(archive: Archive) -> Cohort:
    return Cohort(tuple(read_case(archive, case_id) for case_id in archive.ids))


def interval(gains: NDArray[np.float64], clusters: Sequence[str], draws: int = 2000) -> tuple[float, float]:
    """A percentile interval of the mean, clusters drawn as wholes."""
    names = sorted(set(clusters))
    groups = [gains[[k for k, one in enumerate(clusters) if one == name]] for name in names]
    rng = np.random.default_rng(1000)
    picks = rng.integers(len(groups), size=(draws, len(groups)))
    sums, sizes = np.array([g.sum() for g in groups]), np.array([len(g) for g in groups])
    means = sums[picks].sum(1) / sizes[picks].sum(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def row(name: str, gains: NDArray[np.float64], clusters: Sequence[str]) -> str:
    low, high = interval(gains, clusters)
    helped, hurt, badly = int((gains > 0).sum()), int((gains < 0).sum()), int((gains < -0.01).sum())
    return f"| {name} | {gains.mean():+.4f} [{low:+.4f}, {high:+.4f}] | {helped} : {hurt} | {badly} |"


def lines(name: str, calibration: Cohort, development: Cohort) -> Iterator[str]:
    """The table of one ladder, on development; what is chosen is chosen on calibration."""
    yield f"\n**{name}**: {len(calibration.cases)} calibration, {len(development.cases)} development cases"
    yield f"M0: {np.mean([case.source for case in development.cases]):.4f}\n"
    yield "| candidate | gain, development | helped : hurt | worse by > .01 |\n|---|---|---|---|"
    names, all_of = development.cases[0].names, development.clusters
    for place, view in enumerate(names, start=1):
        if "+contrast(" not in view:  # random ones differ by case
            yield row(view, development.gains(lambda case, place=place: case.alone(place)), all_of)
    everything = tuple(range(1, len(names) + 1))
    yield row("mean of all", development.gains(lambda case: case.consensus(everything)), all_of)
    yield row("vote of all", development.gains(lambda case: case.vote(everything)), all_of)
    yield row("medoid", development.gains(lambda case: case.alone(case.medoid)), all_of)
    for size in (4, 8, 12):
        if size < len(names):
            yield row(f"mean of the first {size}", development.gains(
                lambda case, size=size: case.consensus(tuple(range(1, size + 1)))), all_of)  # fmt: skip
    if len({case.names for case in calibration.cases}) == 1:
        chosen = chosen_views(calibration.cases)
        yield row(f"chosen on calibration: {', '.join(chosen.names)} (left-out estimate {chosen.left_out:+.4f})",
                  development.gains(lambda case: case.consensus(chosen.places)), all_of)  # fmt: skip
    yield "\n| settled at | forwards saved | gain kept | gain |\n|---|---|---|---|"
    full = development.gains(lambda case: case.consensus(everything)).mean()
    for threshold in (0.97, 0.98, 0.985, 0.99, 0.995):
        stops = [settled_after(case, threshold) for case in development.cases]
        gain = np.mean([c.consensus(tuple(range(1, k + 1))) - c.source
                        for c, k in zip(development.cases, stops, strict=True)])  # fmt: skip
        yield f"| {threshold} | {1 - np.mean(stops) / len(names):.0%} | {gain / full:.0%} | {gain:+.4f} |"


def main() -> None:
    """Print the tables of every ladder of views."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    both = [open_archive(options.archive / split) for split in ("calibration", "development")]
    for ladder in both[0].ladders:
        calibration, development = (cohort(archive.on(ladder)) for archive in both)
        for line in lines(ladder, calibration, development):
            print(line, flush=True)


if __name__ == "__main__":
    main()

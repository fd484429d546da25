"""Search a router design over several recorded cohorts, and say what it is worth where it was not chosen (S8).

A design is a coordinate and what low and mid cases get; the hard third rolls back. Cut-points always come from a
cohort's calibration archive, without labels; the score is read from its development archive, so choosing is an
exposure, and the honest figures are those of cohorts and folds that did not choose.

score = mean over cohorts of z, where z = (chance - deployed) / sd of chance, for the harmful accepted area of a random
assignment with the same quotas (exact moments, J4). Designs that lose more of the metric than TOLERANCE against M0 on
any cohort that chooses are passed over. Like the policy that is looked for, a design is worth M0 where its retained
calibration cases are evidently hurt, and routes on delta where its own tertiles coincide.

    python benchmarks/design_search.py bench-real/cardiac/eata-chosen bench-real/fundus/ladders-fundus-0:tent ...
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from real_folders import open_arm

from casewise.core.records import SOURCE, State
from casewise.judge.calibration.preflight import EVIDENT, hurt_p
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import outcomes
from casewise.measure.signals import SIGNALS
from casewise.study.analyses.search import Design
from casewise.study.assignment import buckets_at
from casewise.study.statistics.chance import chance_moments
from casewise.study.statistics.resample import clusters_of, folds_of
from casewise.study.trajectories import deployed_at, unshrunk

COORDINATES = (
    "delta", "regions", "area", "largest", "delta_foreground", "effective_regions", "largest_share", "singleton_share",
    "entropy", "msp", "entropy_on_d", "gradient_norm",
)  # fmt: skip
LOWS = (State(1), State(2), State(3), State(4))
MIDS = (State(1), State(2), State(2, 0.5))
FALLBACK = "delta"
TOLERANCE = 0.001
ALIKE = 0.1  # scores this near are alike: fewer steps win
FOLDS = 5


@dataclass(frozen=True)
class Worth:
    """What a design did on some cases of a cohort."""

    ha: float
    chance: float
    sd: float  # of chance
    change: float  # of the metric against M0
    change_chance: float
    rolled_back: float
    n: int

    @property
    def z(self) -> float:
        """Standard deviations of HA below chance at the same quota; 0 where every assignment gives the same."""
        return (self.chance - self.ha) / self.sd if self.sd > 0 else 0.0


def pooled(worths: Sequence[Worth]) -> Worth:
    """Folds of one cohort as one: means weighted by cases, chance independent between folds."""
    n = np.array([worth.n for worth in worths], float)
    share = n / n.sum()
    mean = {
        name: float(share @ [getattr(worth, name) for worth in worths])
        for name in ("ha", "chance", "change", "change_chance", "rolled_back")
    }
    sd = float(np.sqrt(sum((part * worth.sd) ** 2 for part, worth in zip(share, worths, strict=True))))
    return Worth(sd=sd, n=int(n.sum()), **mean)


class Cohort:
    """One arm of one shift: coordinates of both archives, what every state would deploy, clusters."""

    def __init__(self, arm: str) -> None:
        self.name = "/".join(Path(arm).parts[-2:])
        self.holdout = outcomes(open_arm(arm, "calibration"))
        self.calibration = unshrunk(self.holdout)[lambda part: part["step"] == 1].reset_index(drop=True)
        frame = outcomes(unlock(open_arm(arm, "development"), purpose="design search for the policy 'default'"))
        self.first = unshrunk(frame)[lambda part: part["step"] == 1].reset_index(drop=True)
        self.units = _units(self.first)
        recorded = {State(int(k), float(a)) for k, a in zip(frame["step"], frame["shrink"], strict=True)}
        self.arms = {state: deployed_at(frame, state) for state in (SOURCE, *LOWS, *MIDS) if state in recorded}

    def worth(self, design: Design, rows: NDArray[np.bool_] | None = None) -> Worth:
        """Score a design on some development cases."""
        kept = np.ones(len(self.first), bool) if rows is None else rows
        buckets = self.buckets(design)[kept]
        arms = [self.arms[state] for state in (SOURCE, design.mid, design.low)]
        harm = np.column_stack([arm["ha"].to_numpy(float) for arm in arms])[kept]
        change = np.column_stack([np.nan_to_num(arm["change"].to_numpy(float)) for arm in arms])[kept]
        mine = np.arange(len(buckets)), buckets
        moments, ha = chance_moments(harm, buckets), float(harm[mine].mean())
        return Worth(
            ha, moments.mean, moments.sd, float(change[mine].mean()), chance_moments(change, buckets).mean,
            float((buckets == 0).mean()), len(buckets),
        )  # fmt: skip

    def buckets(self, design: Design) -> NDArray[np.int64]:
        """Where calibration puts the development cases; all are rolled back where it saw evident harm."""
        coordinate = design.coordinate
        low, high = np.percentile(_risk(self.calibration, coordinate), design.percentiles)
        if low == high:
            coordinate = FALLBACK
            low, high = np.percentile(_risk(self.calibration, coordinate), design.percentiles)
        seen = buckets_at(_risk(self.calibration, coordinate), low, high)[0]
        arms = [
            deployed_at(self.holdout, state)["change"].to_numpy(float) for state in (SOURCE, design.mid, design.low)
        ]
        change, retained = np.column_stack(arms)[np.arange(len(seen)), seen], seen > 0
        names = self.calibration["cluster"].where(self.calibration["cluster"].notna(), self.calibration["case"])
        if hurt_p(change[retained], names[retained].tolist()) <= EVIDENT:
            return np.zeros(len(self.first), np.int64)
        return buckets_at(_risk(self.first, coordinate), low, high)[0]


def _units(first: pd.DataFrame) -> NDArray[np.int64]:
    """What folds keep together: patients; and in driving the frames of one drive, which only their names tell."""
    drives = first["case"].str.partition("_frame_")
    return clusters_of(first.assign(cluster=drives[0]) if (drives[1] != "").all() else first)


def _risk(frame: pd.DataFrame, coordinate: str) -> NDArray[np.float64]:
    """The coordinate, turned so that higher is riskier; an undefined value is the least risky there is."""
    sign = 1.0 if SIGNALS[coordinate].higher_is_riskier else -1.0
    values = sign * frame[coordinate].to_numpy(float)
    return np.where(np.isnan(values), np.nanmin(values), values)


def designs(cohorts: Sequence[Cohort]) -> list[Design]:
    """Every design whose states were recorded in all cohorts."""
    common = set.intersection(*(set(cohort.arms) for cohort in cohorts))
    pairs = [(low, mid) for low, mid in product(LOWS, MIDS) if {low, mid} <= common and mid.step <= low.step]
    usable = [name for name in COORDINATES if all(cohort.first[name].notna().any() for cohort in cohorts)]
    return [Design(name, low, mid) for name, (low, mid) in product(usable, pairs)]


def score(worths: Sequence[Worth]) -> float:
    """Mean z over cohorts; minus infinity where accuracy is lost."""
    if any(worth.change < -TOLERANCE for worth in worths):
        return -np.inf
    return float(np.mean([worth.z for worth in worths]))


def chosen(
    cohorts: Sequence[Cohort], options: Sequence[Design], rows: Sequence[NDArray[np.bool_]] | None = None
) -> Design:
    """The cheapest design within ``ALIKE`` of the best score on these cohorts, or on these rows of them."""
    masks = rows if rows is not None else [None] * len(cohorts)
    scores = [score([c.worth(one, part) for c, part in zip(cohorts, masks, strict=True)]) for one in options]
    best = max(scores)
    near = [place for place, value in enumerate(scores) if value >= best - ALIKE]
    return options[min(near, key=lambda place: (options[place].low.step + options[place].mid.step, -scores[place]))]


def shift_of(cohort: Cohort) -> str:
    """Arms of one shift share cases, so they are held out together."""
    return cohort.name.split("/")[0]


def held_out_shifts(cohorts: Sequence[Cohort], options: Sequence[Design]) -> list[tuple[str, Design, Worth]]:
    """Choose on the other shifts, score on this one."""
    found = []
    for name in dict.fromkeys(map(shift_of, cohorts)):
        best = chosen([cohort for cohort in cohorts if shift_of(cohort) != name], options)
        found += [(cohort.name, best, cohort.worth(best)) for cohort in cohorts if shift_of(cohort) == name]
    return found


def held_out_folds(cohorts: Sequence[Cohort], options: Sequence[Design]) -> list[tuple[str, str, Worth]]:
    """Choose on four fifths of the clusters of every cohort, score on the fifth that is left; folds pooled.

    A cohort of two drives has two folds: one drive chooses, with all other cohorts, and the other is scored.
    """
    numbers = [folds_of(cohort.units, min(FOLDS, len(set(cohort.units))), seed=0) for cohort in cohorts]
    best = [chosen(cohorts, options, [number != fold for number in numbers]) for fold in range(FOLDS)]
    names = ", ".join(f"{times}x {one}" for one, times in Counter(map(str, best)).items())
    return [(c.name, names, pooled([c.worth(best[fold], number == fold) for fold in sorted(set(number))]))
            for c, number in zip(cohorts, numbers, strict=True)]  # fmt: skip


def report(title: str, found: Sequence[tuple[str, Design | str, Worth]]) -> None:
    """Print rows as Markdown."""
    print(f"\n{title}\n\n| cohort | n | design | HA | chance | z | change of metric | by chance | rolled back |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, design, worth in found:
        print(
            f"| {name} | {worth.n} | {design} | {worth.ha:.4f} | {worth.chance:.4f} | {worth.z:+.2f} | "
            f"{worth.change:+.4f} | {worth.change_chance:+.4f} | {worth.rolled_back:.0%} |"
        )


def main() -> None:
    """Print the best designs, the choice, and its worth where it was not chosen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cohorts",
        nargs="+",
        help="folders with calibration and development archives; FOLDER:LADDER where they hold several",
    )
    parser.add_argument("--top", type=int, default=12)
    options = parser.parse_args()
    cohorts = [Cohort(arm) for arm in options.cohorts]
    candidates = designs(cohorts)
    ranked = sorted(candidates, key=lambda one: -score([cohort.worth(one) for cohort in cohorts]))
    print(
        f"{len(candidates)} designs, {len(cohorts)} cohorts\n\n| design | score | "
        + " | ".join(c.name for c in cohorts)
    )
    for one in ranked[: options.top]:
        worths = [cohort.worth(one) for cohort in cohorts]
        cells = " | ".join(f"z {w.z:+.2f}, change {w.change:+.4f}" for w in worths)
        print(f"| {one} | {score(worths):+.3f} | {cells} |")
    best = chosen(cohorts, candidates)
    report("Chosen on everything (apparent)", [(c.name, best, c.worth(best)) for c in cohorts])
    if len({shift_of(cohort) for cohort in cohorts}) > 1:
        report("Chosen on the other shifts", held_out_shifts(cohorts, candidates))
    report("Chosen on four fifths, scored on the fifth", held_out_folds(cohorts, candidates))


if __name__ == "__main__":
    main()

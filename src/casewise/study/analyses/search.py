"""Choosing a router design honestly: on one split, calibrated on a second, scored once on a third."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.brief import UNIT
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, State
from casewise.core.seeds import RESAMPLING_SEED
from casewise.data.splits import check_disjoint
from casewise.render.tables import Column, rows_of, table
from casewise.study.assignment import MEDICAL, buckets_at
from casewise.study.finding import Finding, Section, rows, sentences
from casewise.study.statistics.chance import chance_moments
from casewise.study.statistics.resample import clusters_of, draws
from casewise.study.study import Study
from casewise.study.trajectories import deployed_at, labelled, unshrunk


def section(study: Study) -> Section:
    """What a searched design would really gain, against the winner's curse."""
    found = design_search(*halves(study.holdout), study.outcomes, seed=study.seed)
    columns = (
        Column("design", "Design", text=True),
        Column("chosen", "chosen"),
        Column("score_design", "score on design cases", 4),
        Column("score_evaluation", "score on evaluation cases", 4),
        Column("metric", study.metric),
        Column("ha", "HA"),
        Column("rolled_back", "rolled back"),
    )
    caption = (
        f"Chosen on half of the holdout's {UNIT[1]}, cut-points fitted on the other half, scored on evaluation cases."
    )
    made = table(
        "design-search", "Design search", columns, rows_of(found.table, columns), caption=caption, collapsed=True
    )
    return Section("search", "Searching for a design", sentences(found), (made,), (), (found,))


Floats = NDArray[np.float64]


Integers = NDArray[np.int64]


def halves(holdout: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The holdout in two halves of whole patients or sequences, every other one."""
    first = holdout.drop_duplicates("case").sort_values("case")
    chosen = holdout["case"].isin(first.loc[clusters_of(first) % 2 == 0, "case"])
    return holdout[chosen], holdout[~chosen]


@dataclass(frozen=True)
class Design:
    """A router without cut-points: what it reads, what low and mid cases get, where the tertiles lie."""

    coordinate: str
    low: State
    mid: State
    percentiles: tuple[float, float] = MEDICAL

    def __str__(self) -> str:
        return (
            f"{self.coordinate}, low {self.low}, mid {self.mid}, cuts {self.percentiles[0]:g}/{self.percentiles[1]:g}"
        )


def default_designs(
    outcomes: pd.DataFrame,
    *,
    coordinates: Sequence[str] = ("delta", "regions"),
    lows: Iterable[State] = (State(1), State(3)),
    mids: Iterable[State] = (State(1), State(2), State(2, 0.5)),
) -> list[Design]:
    """The twelve designs of coordinate x low depth x middle action, as far as their states were recorded (S8)."""
    recorded = {
        State(int(step), float(shrink)) for step, shrink in zip(outcomes["step"], outcomes["shrink"], strict=True)
    }
    chosen = [name for name in coordinates if name in outcomes.columns]
    return [Design(name, low, mid) for name, low, mid in product(chosen, lows, mids) if {low, mid} <= recorded]


def design_search(
    design: pd.DataFrame,
    calibration: pd.DataFrame,
    evaluation: pd.DataFrame,
    *,
    designs: Sequence[Design] | None = None,
    frozen: Design | None = None,
    weight: float = 1.0,
    resamples: int = 2000,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Choose the best of m designs on ``design``, refit its cuts on ``calibration``, score it once on ``evaluation``.

    score = mean HA - weight * mean change of the metric, lower is better. optimism = score on evaluation minus score on
    the split that chose; its interval resamples both splits. The winner's-curse null deals the coordinate to the cases
    at random and takes the best of m again: null_p is how often that is at least as good as the best that was found.
    """
    splits = [_Split(labelled(frame)) for frame in (design, calibration, evaluation)]
    _check_disjoint(splits)
    asked = list(default_designs(design) if designs is None else designs)
    if len(asked) < 2:
        raise BadInput(f"a search needs at least two designs whose states were recorded, got {len(asked)}")
    apparent = [_Scored(one, splits[0], splits[0].cuts(one), weight) for one in asked]
    held_out = [_Scored(one, splits[2], splits[1].cuts(one), weight) for one in asked]
    best = int(np.argmin([scored.score for scored in apparent]))
    records = [
        _row(one, scored, number == best, held_out[number])
        for number, (one, scored) in enumerate(zip(asked, apparent, strict=True))
    ]
    records.append(_chance_row(held_out[best]))
    if frozen is not None:
        records.append(_frozen_row(frozen, splits, weight))
    made = {"weight": weight, "resamples": resamples, "seed": seed, "designs": len(asked), "best": str(asked[best])}
    made |= _optimism(apparent, held_out, best, splits, resamples, seed) | _curse(apparent, resamples, seed)
    columns = ("design", "chosen", "score_design", "score_evaluation", "metric", "ha", "rolled_back", "n", "reason")
    return Finding("search", rows(records, columns), held_out[best].n, "S8, S13, S22", made, _notes(made))


class _Split:
    """One split: what each state deploys and what each coordinate says, looked up once."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        self.first = unshrunk(frame)[lambda part: part["step"] == 1].reset_index(drop=True)
        self.clusters = _clusters(self.first)
        self.units = clusters_of(self.first)
        self._arms: dict[State, pd.DataFrame] = {}

    def arm(self, state: State) -> pd.DataFrame:
        if state not in self._arms:
            self._arms[state] = deployed_at(self.frame, state)
        return self._arms[state]

    def coordinate(self, design: Design) -> Floats:
        return np.asarray(self.first[design.coordinate], dtype=np.float64)

    def cuts(self, design: Design) -> tuple[float, float]:
        """Cut-points of a design on this split; no label is read."""
        low, high = np.percentile(self.coordinate(design), design.percentiles)
        return float(low), float(high)


class _Scored:
    """One design with cut-points on one split: per-case losses, and what the other buckets would have given."""

    def __init__(self, design: Design, split: _Split, cuts: tuple[float, float], weight: float) -> None:
        arms = [split.arm(state) for state in (SOURCE, design.mid, design.low)]
        self.harm = np.column_stack([arm["ha"].to_numpy(float) for arm in arms])
        self.change = np.column_stack([np.nan_to_num(arm["change"].to_numpy(float)) for arm in arms])
        self.metric = np.column_stack([arm["metric"].to_numpy(float) for arm in arms])
        self.values = self.harm - weight * self.change
        self.buckets = buckets_at(split.coordinate(design), *cuts)[0]
        self.n = len(self.buckets)
        self.losses = self.values[np.arange(self.n), self.buckets]
        self.score = float(self.losses.mean())

    def mean(self, values: Floats) -> float:
        return float(np.nanmean(values[np.arange(self.n), self.buckets]))


def _clusters(first: pd.DataFrame) -> dict[str, str]:
    """The cluster of each case; a case without one is its own."""
    own = first["case"]
    names = first["cluster"].where(first["cluster"].notna(), own) if "cluster" in first else own
    return dict(zip(own.astype(str), names.astype(str), strict=True))


def _check_disjoint(splits: Sequence[_Split]) -> None:
    named = zip(("design", "calibration", "evaluation"), splits, strict=True)
    for (first, one), (second, other) in combinations(named, 2):
        check_disjoint(one.clusters, other.clusters, names=(first, second))


def _row(design: Design, scored: _Scored, chosen: bool, held_out: _Scored) -> dict[str, Any]:
    record: dict[str, Any] = {"design": str(design), "chosen": chosen, "score_design": scored.score, "n": scored.n}
    if not chosen:
        return {**record, "reason": "not scored on evaluation: only the chosen design is"}
    return {**record, **_scores(held_out), "reason": ""}


def _scores(held_out: _Scored) -> dict[str, float]:
    return {
        "score_evaluation": held_out.score,
        "metric": held_out.mean(held_out.metric),
        "ha": held_out.mean(held_out.harm),
        "rolled_back": float((held_out.buckets == 0).mean()),
    }


def _chance_row(held_out: _Scored) -> dict[str, Any]:
    means = {
        name: chance_moments(getattr(held_out, name), held_out.buckets).mean for name in ("values", "metric", "harm")
    }
    numbers = {"score_evaluation": means["values"], "metric": means["metric"], "ha": means["harm"]}
    share = float((held_out.buckets == 0).mean())
    return {
        "design": "random at the chosen quota",
        "chosen": False,
        **numbers,
        "rolled_back": share,
        "n": held_out.n,
        "reason": "",
    }


def _frozen_row(frozen: Design, splits: Sequence[_Split], weight: float) -> dict[str, Any]:
    scored = _Scored(frozen, splits[2], splits[1].cuts(frozen), weight)
    return {"design": f"frozen router: {frozen}", "chosen": False, **_scores(scored), "n": scored.n, "reason": ""}


def _optimism(
    apparent: Sequence[_Scored],
    held_out: Sequence[_Scored],
    best: int,
    splits: Sequence[_Split],
    resamples: int,
    seed: int,
) -> dict[str, float]:
    """Evaluation minus design score of whichever design wins the resampled design split; cut-points stay as fitted."""
    drawn = []
    for scored, split, number in ((apparent, splits[0], seed), (held_out, splits[2], seed + 1)):
        counts = draws(int(split.units.max()) + 1, resamples, number).counts
        weights = counts[:, split.units].astype(np.float64)
        losses = np.column_stack([one.losses for one in scored])
        drawn.append(weights @ losses / weights.sum(axis=1, keepdims=True))
    winner, each = drawn[0].argmin(axis=1), np.arange(resamples)
    gaps = drawn[1][each, winner] - drawn[0][each, winner]
    low, high = np.percentile(gaps, [2.5, 97.5])
    point = held_out[best].score - apparent[best].score
    return {
        "optimism": point,
        "optimism_low": float(low),
        "optimism_high": float(high),
        "best_kept": float((winner == best).mean()),
    }


def _curse(apparent: Sequence[_Scored], resamples: int, seed: int) -> dict[str, float]:
    """Best of m when the coordinate says nothing: one permutation of the cases for all designs at a time."""
    rng = np.random.default_rng(seed)
    n = apparent[0].n
    dealt = rng.permuted(np.tile(np.arange(n), (resamples, 1)), axis=1)
    scores = np.column_stack([one.values[np.arange(n), one.buckets[dealt]].mean(axis=1) for one in apparent])
    best, found = scores.min(axis=1), min(one.score for one in apparent)
    return {
        "null_mean": float(best.mean()),
        "null_p": float((1 + (best <= found).sum()) / (1 + resamples)),
        "best_score": found,
    }


def _notes(made: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"chosen: {made['best']} of {made['designs']} designs",
        f"optimism {made['optimism']:+.4f} [{made['optimism_low']:+.4f}, {made['optimism_high']:+.4f}]",
        f"best of {made['designs']} by chance {made['null_mean']:.4f}, found {made['best_score']:.4f}, "
        f"p = {made['null_p']:.3f}",
    )

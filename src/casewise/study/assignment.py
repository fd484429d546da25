"""Assignments of cases to the buckets of a router, and the result of each case in a bucket (J2, D15, E12).

Oracles need labels, so they are reference rows and cannot be deployed. An oracle bounds only what it optimizes: the HA
oracle is no bound on Dice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput
from casewise.judge.monitors.quota import BUCKETS
from casewise.measure.signals import SIGNALS
from casewise.study.statistics.chance import ChanceMoments, chance_moments
from casewise.study.statistics.resample import cluster_numbers
from casewise.study.trajectories import mean_or_nan, signals_in, unshrunk

_NO_LABEL = "an oracle needs labels, and no case has one"


def oracle_steps(frame: pd.DataFrame, *, include_source: bool = True) -> pd.DataFrame:
    """Return the row of each case with the highest metric along its trajectory, ties to the smallest k (E12a)."""
    steps = _labelled(frame)
    steps = steps.loc[(steps["shrink"] == 0) & (steps["step"] >= (0 if include_source else 1))]
    return steps.loc[steps.sort_values(["case", "step"]).groupby("case")["metric"].idxmax()]


def ha_oracle_scores(frame: pd.DataFrame) -> pd.Series:
    """HA of step 1 by case: rank it descending and roll back the top (E12b)."""
    first = frame.loc[(frame["step"] == 1) & (frame["shrink"] == 0) & frame["ha"].notna()]
    if first.empty:
        raise BadInput(_NO_LABEL)
    return first.set_index("case")["ha"].rename("oracle-ha")


def change_oracle_scores(frame: pd.DataFrame) -> pd.Series:
    """Minus the metric change of the last step by case: rank it descending, roll back the top (E12c)."""
    plain = _labelled(frame).loc[frame["shrink"] == 0]
    adapted = plain.loc[plain["step"] == plain["step"].max()].set_index("case")["metric"]
    source = plain.loc[plain["step"] == 0].set_index("case")["metric"]
    return (source - adapted).rename("oracle-change")


def _labelled(frame: pd.DataFrame) -> pd.DataFrame:
    if frame["metric"].isna().all():
        raise BadInput(_NO_LABEL)
    return frame.loc[frame["metric"].notna()]


Arms = Mapping[str, pd.DataFrame]
Floats = NDArray[np.float64]

RANKED = BUCKETS[::-1]  # the order in which ranks are filled, riskiest first (J2)
QUANTITIES = {"metric": "metric", "ha": "ha", "steps": "deployed"}
_EVERYBODY = {"low": (np.inf, np.inf), "mid": (-np.inf, np.inf), "hard": (-np.inf, -np.inf)}


def buckets_at(values: Floats, cut_low: ArrayLike, cut_high: ArrayLike) -> NDArray[np.int64]:
    """0 hard (u >= cut_high), 1 mid (u > cut_low), 2 low; cut-points of many draws give (draw, case) (E6).

    >>> buckets_at(np.array([1.0, 2.0, 3.0]), 1.0, 3.0).tolist()
    [[2, 1, 0]]
    """
    low, high = (np.atleast_1d(np.asarray(cut, dtype=np.float64))[:, None] for cut in (cut_low, cut_high))
    return np.where(values >= high, 0, np.where(values > low, 1, 2))


def arms_of(archive: Any, router: Any, outcomes: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Arms of any router, stop rules included: replay it with cuts that send every case to one bucket (D15, S10)."""
    from casewise.judge.outcomes import deployed
    from casewise.replay import replay

    arms = {bucket: deployed(outcomes, replay(archive, _forced(router, bucket))) for bucket in _EVERYBODY}
    return {bucket: arm.sort_values("case", kind="stable").reset_index(drop=True) for bucket, arm in arms.items()}


def _forced(router: Any, bucket: str) -> Any:
    """The same router, or routers by group, with cut-points that leave one bucket only."""
    if hasattr(router, "controllers"):
        inner = {name: _forced(one, bucket) for name, one in router.controllers.items()}
        more = {"robust": _forced(router.robust, bucket)} if hasattr(router, "robust") else {}
        return replace(router, controllers=inner, **more)
    if not hasattr(router, "cut_high"):
        raise BadInput(f"arms need a router with cut-points, got {getattr(router, 'name', router)!r}")
    low, high = _EVERYBODY[bucket]
    return replace(router, cut_low=low, cut_high=high)


def selector_scores(outcomes: pd.DataFrame, *, coordinate: str = "delta") -> pd.DataFrame:
    """Step-1 scores of every selector by case, high = risky (J3); selectors that are undefined for a case are left out.

    Label-free: every stored signal, turned so that high is risky (-MSP, C12). Oracles, which see labels: HA of step 1,
    and the fall of the metric at the last step.
    """
    frame = unshrunk(outcomes)
    first = frame[frame["step"] == 1].set_index("case").sort_index()
    scores = {f"router ({coordinate})": _oriented(first, coordinate)}
    for name in signals_in(first.reset_index()):
        if name != coordinate and first[name].notna().all():
            scores[name] = _oriented(first, name)
    scores["oracle HA"] = ha_oracle_scores(frame)
    scores["oracle metric"] = change_oracle_scores(frame)
    return pd.DataFrame(scores).dropna(axis="columns")


def _oriented(first: pd.DataFrame, name: str) -> pd.Series:
    values = first[name].astype(float)
    return values if name not in SIGNALS or SIGNALS[name].higher_is_riskier else -values


class Assignment:
    """A router and its arms, with the cases in one order."""

    def __init__(self, arms: Arms, router: pd.DataFrame) -> None:
        self.router = router.sort_values("case", kind="stable").reset_index(drop=True)
        self.cases = self.router["case"].tolist()
        unknown = set(self.router["bucket"]) - set(RANKED)
        if unknown:
            raise BadInput(f"matched controls need a router with buckets {RANKED}, got {sorted(map(str, unknown))}")
        self.arms = {name: arms[name].set_index("case").reindex(self.cases) for name in RANKED}
        self.buckets = self.router["bucket"].map({name: number for number, name in enumerate(RANKED)}).to_numpy(int)
        self.sizes = {name: int((self.buckets == number).sum()) for number, name in enumerate(RANKED)}
        self.n = len(self.cases)
        self.units = cluster_numbers(self.router)

    def scopes(self, by_group: bool) -> Iterator[tuple[str, Assignment]]:
        """All cases, then the cases of each group."""
        yield "all", self
        for name, part in self.router.groupby("group", sort=True) if by_group else ():
            arms = {bucket: arm.loc[part["case"]].reset_index() for bucket, arm in self.arms.items()}
            yield str(name), Assignment(arms, part)

    def arm_values(self, quantity: str) -> Floats:
        """The value of every case in every bucket, (case, bucket)."""
        column = QUANTITIES.get(quantity, quantity)
        return np.column_stack([self.arms[name][column].to_numpy(float) for name in RANKED])

    def assigned(self, score: pd.Series) -> NDArray[np.int64]:
        """Buckets by rank: highest scores roll back, ties in the order of the cases (J2)."""
        values = score.reindex(self.cases).to_numpy(float)
        if np.isnan(values).any():
            raise BadInput(f"selector {score.name!r} has no value for some cases; drop it or record the signal")
        assigned = np.empty(self.n, np.int64)
        assigned[np.argsort(-values, kind="stable")] = np.repeat(np.arange(3), [self.sizes[name] for name in RANKED])
        return assigned

    def chosen(self, quantity: str, assigned: NDArray[np.int64]) -> Floats:
        """The deployed value of each case under an assignment."""
        return np.asarray(self.arm_values(quantity)[np.arange(self.n), assigned])

    def mean(self, quantity: str, assigned: NDArray[np.int64]) -> float:
        """The cohort mean under an assignment."""
        return mean_or_nan(self.chosen(quantity, assigned))

    def means(self, assigned: NDArray[np.int64]) -> dict[str, float]:
        """Metric, HA and deployed steps under an assignment."""
        return {name: self.mean(name, assigned) for name in QUANTITIES}

    def moments(self, quantity: str) -> ChanceMoments:
        """Mean and deviation of random assignments at the same bucket sizes."""
        return chance_moments(self.arm_values(quantity), self.buckets, self.units)

"""Could a learned policy do better than tertiles? A depth-2 tree, nested cross-fitting, a null allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, State
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.tables import Column, rows_of, table
from casewise.study.finding import Finding, Section, rows, sentences
from casewise.study.statistics.chance import ChanceMoments, chance_moments
from casewise.study.statistics.learners import fit_tree
from casewise.study.statistics.resample import RESAMPLES, Interval, clusters_of, folds_of, paired_interval
from casewise.study.study import Study
from casewise.study.trajectories import deployed_at, horizon, labelled, unshrunk


def section(study: Study) -> Section:
    """A small learned policy with nested cross-fitting, beside the router (S5)."""
    found = learned_policy(study.outcomes, seed=study.seed, router=study.router if study.is_router else None)
    columns = (
        Column("policy", "Policy", text=True),
        Column("loss", "loss", 4),
        Column("metric", study.metric),
        Column("ha", "HA"),
        Column("rolled_back", "rolled back"),
        Column("n", "n"),
    )
    caption = "Depth-2 tree on label-free signals, trained and scored on disjoint folds."
    made = table("learned", "A learned policy", columns, rows_of(found.table, columns), caption=caption)
    return Section("learned", "A learned policy", sentences(found), (made,), (), (found,))


Floats = NDArray[np.float64]


Integers = NDArray[np.int64]


FEATURES = ("delta", "regions", "entropy_on_d", "largest_share")


_DEPTHS = (0, 1, 2)


def learned_policy(
    outcomes: pd.DataFrame,
    *,
    router: pd.DataFrame | None = None,
    features: Sequence[str] | None = None,
    weight: float = 1.0,
    folds: int = 5,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    r"""Cross-fitted tree on step-1 signals, beside the tertile router, chance at its quota, M0 and fixed-K.

    .. math:: \ell_i(a) = HA_i(a) + \kappa\,(\max_b Dice_i(b) - Dice_i(a)), \quad a \in \{0, \dots, K, \text{shrunk}\}

    Outer folds score, inner folds choose the depth; clusters stay together. All numbers are out of fold. A rollback
    has HA 0, so with a small weight the best tree is a leaf that rolls everybody back; that is said, not called better.
    """
    table = _Losses(outcomes, features, weight)
    chosen = _cross_fitted(table, folds, seed)
    chance = chance_moments(table.losses, chosen, table.units)
    records = [table.row("learned", chosen), _chance_row(table, chosen, chance)]
    records += [
        table.row("M0", table.always(SOURCE)),
        table.row(f"fixed-{table.steps}", table.always(State(table.steps))),
    ]
    made: dict[str, Any] = {
        "features": table.names,
        "actions": [str(state) for state in table.states],
        "weight": weight,
    }
    made |= {
        "folds": folds,
        "seed": seed,
        "z_chance": chance.z(records[0]["loss"]),
        "p_chance": chance.p_normal(records[0]["loss"]),
    }
    constant = str(table.states[chosen[0]]) if len(np.unique(chosen)) == 1 else None
    made["constant"] = constant
    against = "undefined" if constant else f"p = {made['p_chance']:.3f}"
    notes = [f"learned against chance at its quota: {against} (n={table.n})"]
    if router is not None:
        own = table.deployed_losses(router)
        records.insert(1, own.row)
        options: dict[str, Any] = {"clusters": table.units, "resamples": resamples, "seed": seed}
        gap = paired_interval(table.taken(chosen), own.losses, **options)
        verdict = _verdict(gap, constant)
        made |= {"estimate": gap.estimate, "low": gap.low, "high": gap.high, "verdict": verdict}
        notes.insert(0, f"learned minus router: {gap.estimate:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}], {verdict}")
    columns = ("policy", "n", "loss", "metric", "ha", "rolled_back")
    return Finding("learned", rows(records, columns), table.n, "S5", made, tuple(notes))


def _verdict(gap: Interval, constant: str | None) -> str:
    if constant is not None:
        return f"degenerate: everybody gets state {constant}; no signal was used, raise the weight of the metric"
    if not gap.shown:
        return "not separated from the router"
    return "better than the router" if gap.high < 0 else "worse than the router"


def _cross_fitted(table: _Losses, folds: int, seed: int) -> Integers:
    """The action of every case from a tree that has not seen its cluster."""
    fold = folds_of(table.units, folds, seed)
    chosen = np.empty(table.n, np.int64)
    for number in range(folds):
        inside, outside = fold != number, fold == number
        depth = _inner_depth(table.features[inside], table.losses[inside], table.units[inside], folds, seed + 1)
        tree = fit_tree(table.features[inside], table.losses[inside], depth=depth)
        chosen[outside] = tree.choose(table.features[outside])
    return chosen


def _inner_depth(features: Floats, losses: Floats, units: Integers, folds: int, seed: int) -> int:
    """The depth with the smallest out-of-fold loss; ties go to the simpler tree."""
    fold = folds_of(units, folds, seed)
    total = dict.fromkeys(_DEPTHS, 0.0)
    for number in range(folds):
        inside, outside = fold != number, np.flatnonzero(fold == number)
        for depth in _DEPTHS:
            tree = fit_tree(features[inside], losses[inside], depth=depth)
            total[depth] += float(losses[outside, tree.choose(features[outside])].sum())
    return min(_DEPTHS, key=lambda depth: (round(total[depth], 12), depth))


def _chance_row(table: _Losses, chosen: Integers, chance: ChanceMoments) -> dict[str, Any]:
    means = {
        name: chance_moments(values, chosen).mean for name, values in (("metric", table.metric), ("ha", table.harm))
    }
    share = float((chosen == table.states.index(SOURCE)).mean())
    return {"policy": "random at its quota", "n": table.n, "loss": chance.mean, **means, "rolled_back": share}


class _Deployed:
    """A router's own losses, in the order of the cases."""

    def __init__(self, row: dict[str, Any], losses: Floats) -> None:
        self.row, self.losses = row, losses


class _Losses:
    """Loss, metric and HA of every action for every case: (case, action)."""

    def __init__(self, outcomes: pd.DataFrame, features: Sequence[str] | None, weight: float) -> None:
        frame = labelled(outcomes)
        undefined = frame.loc[frame["metric"].isna(), "case"]
        frame = frame[~frame["case"].isin(undefined)]
        ladder = unshrunk(frame)
        first = ladder[ladder["step"] == 1].sort_values("case", kind="stable").reset_index(drop=True)
        wanted = FEATURES if features is None else features
        self.names = [name for name in wanted if name in first.columns and first[name].notna().all()]
        if not self.names:
            raise BadInput(f"a learned policy needs a step-1 signal that every case has, none of {list(wanted)} is")
        self.cases, self.n, self.steps = first["case"].tolist(), len(first), horizon(frame)
        self.units, self.features = clusters_of(first), first[self.names].to_numpy(float)
        self.states = _states(frame)
        arms = [deployed_at(frame, state) for state in self.states]
        self.metric, self.harm = (
            np.column_stack([arm[name].to_numpy(float) for arm in arms]) for name in ("metric", "ha")
        )
        self.best, self.weight = self.metric.max(axis=1), weight
        self.losses = self.harm + weight * (self.best[:, None] - self.metric)

    def always(self, state: State) -> Integers:
        """The same action for everybody."""
        return np.full(self.n, self.states.index(state))

    def taken(self, chosen: Integers) -> Floats:
        """The loss of each case under its action."""
        return np.asarray(self.losses[np.arange(self.n), chosen])

    def row(self, policy: str, chosen: Integers) -> dict[str, Any]:
        """Means under an action for every case."""
        rows = np.arange(self.n)
        means = {
            name: float(values[rows, chosen].mean()) for name, values in (("metric", self.metric), ("ha", self.harm))
        }
        share = float((chosen == self.states.index(SOURCE)).mean())
        return {"policy": policy, "n": self.n, "loss": float(self.taken(chosen).mean()), **means, "rolled_back": share}

    def deployed_losses(self, router: pd.DataFrame) -> _Deployed:
        """The same loss for what a router really deployed."""
        frame = router.set_index("case").loc[self.cases]
        losses = (frame["ha"] + self.weight * (self.best - frame["metric"])).to_numpy(float)
        means = {"metric": float(frame["metric"].mean()), "ha": float(frame["ha"].mean())}
        share = float(frame["rolled_back"].astype(bool).mean())
        row = {"policy": "router", "n": self.n, "loss": float(losses.mean()), **means, "rolled_back": share}
        return _Deployed(row, losses)


def _states(frame: pd.DataFrame) -> list[State]:
    """Every state that all cases have, in order."""
    counts = frame.groupby(["step", "shrink"])["case"].nunique()
    whole = frame["case"].nunique()
    return sorted(State(int(step), float(shrink)) for (step, shrink), count in counts.items() if count == whole)

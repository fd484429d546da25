"""The budget axis: what each number of steps does, which one a holdout would choose, and what that choice costs (G)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.core.seeds import RESAMPLING_SEED
from casewise.study.finding import Finding, rows
from casewise.study.statistics.resample import RESAMPLES, draws
from casewise.study.trajectories import by_step, horizon, labelled, mean_or_nan, unshrunk

Floats = NDArray[np.float64]

RULES: Mapping[str, Callable[[Floats, Floats], Floats]] = {
    "lowest HA": lambda ha, metric: ha,
    "highest metric": lambda ha, metric: -metric,
    "HA - 0.5 metric": lambda ha, metric: ha - 0.5 * metric,
    "HA - metric": lambda ha, metric: ha - metric,
}
"""The four selection rules as costs over steps; the smallest cost wins, ties go to the smallest step (G2)."""


def ladder(outcomes: pd.DataFrame, *, by_group: bool = False) -> Finding:
    """Cohort metric, HA and BA at every step of one trajectory, M0 included (G1)."""
    records = [
        {"group": name, "step": int(step), **_step_means(part)}
        for name, frame in _scopes(outcomes, by_group)
        for step, part in frame.groupby("step")
    ]
    columns = ("group", "step", "n", "metric", "ha", "ba", "delta", "regions", "scored", "is_best")
    table = rows(records, columns)
    adapted = table["step"] > 0
    best = table[adapted].groupby("group")["ha"].transform("min")
    table["is_best"] = (table["ha"] == best.reindex(table.index)) & adapted
    return Finding("budget.ladder", table, outcomes["case"].nunique(), "G1", {"by_group": by_group})


def _step_means(part: pd.DataFrame) -> dict[str, Any]:
    means = {name: mean_or_nan(part[name]) for name in ("metric", "ha", "ba", "delta", "regions")}
    return {"n": len(part), **means, "scored": int((part["regions"] >= 1).sum())}


def _scopes(outcomes: pd.DataFrame, by_group: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    frame = unshrunk(outcomes)
    yield "all", frame
    if by_group and "group" in frame.columns:
        yield from ((str(name), part) for name, part in frame.groupby("group", sort=True))


def selection(holdout: pd.DataFrame, evaluation: pd.DataFrame) -> Finding:
    """The step that a labelled holdout chooses under four rules, and its regret on the evaluation cases (G2, G3).

    regret = HA_eval(k_holdout) - min_k HA_eval(k).
    """
    held, scored = _matrices(holdout), _matrices(evaluation)
    held_ha, scored_ha = held[0].mean(axis=0), scored[0].mean(axis=0)
    scored_metric = np.nanmean(scored[1], axis=0)
    best = int(np.argmin(scored_ha))
    records = []
    for rule, cost in RULES.items():
        chosen = int(np.argmin(cost(held_ha, np.nanmean(held[1], axis=0))))
        records.append(
            {
                "rule": rule,
                "k_holdout": chosen + 1,
                "k_best": best + 1,
                "ha_holdout": held_ha[chosen],
                "ha_eval": scored_ha[chosen],
                "ha_best": scored_ha[best],
                "metric_eval": scored_metric[chosen],
                "regret": scored_ha[chosen] - scored_ha[best],
                "n_holdout": len(held[0]),
                "n_eval": len(scored[0]),
            }
        )
    return Finding("budget.selection", pd.DataFrame(records), len(scored[0]), "G2, G3")


def _matrices(outcomes: pd.DataFrame) -> tuple[Floats, Floats]:
    """HA and metric as (case, step 1..K)."""
    if horizon(outcomes) < 1:
        raise BadInput("a budget needs at least one update; the archive has step 0 only")
    outcomes = labelled(outcomes)
    ha, metric = (by_step(outcomes, name).drop(columns=0).to_numpy(float) for name in ("ha", "metric"))
    return ha, metric


def _choices(outcomes: pd.DataFrame, resamples: int, seed: int) -> tuple[dict[str, NDArray[np.int64]], Any]:
    """The step that each rule chooses in every resample of the cases: {rule: (draw,)}."""
    ha, metric = _matrices(outcomes)
    drawn = draws(len(ha), resamples, seed)
    weights = drawn.counts.astype(np.float64)
    defined = np.isfinite(metric)
    mean_ha = weights @ ha / len(ha)
    with np.errstate(invalid="ignore"):
        mean_metric = (weights @ np.where(defined, metric, 0.0)) / (weights @ defined)
    chosen = {rule: np.argmin(cost(mean_ha, mean_metric), axis=1) + 1 for rule, cost in RULES.items()}
    return chosen, drawn.proof


def selection_stability(
    holdout: pd.DataFrame, evaluation: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED
) -> Finding:
    """How often each step is chosen when holdout and evaluation cases are resampled, each by itself (G4)."""
    held, proof = _choices(holdout, resamples, seed)
    scored, other = _choices(evaluation, resamples, seed + 1)
    steps = range(1, horizon(evaluation) + 1)
    records: list[dict[str, Any]] = []
    for rule in RULES:
        pairs = pd.Series(list(zip(held[rule].tolist(), scored[rule].tolist(), strict=True))).value_counts(
            normalize=True
        )
        for step in steps:
            records.append(_chance(rule, "holdout", step, None, np.mean(held[rule] == step)))
            records.append(_chance(rule, "evaluation", None, step, np.mean(scored[rule] == step)))
        records.extend(_chance(rule, "joint", pair[0], pair[1], share) for pair, share in pairs.items())
    columns = ("rule", "kind", "k_holdout", "k_eval", "probability")
    made = {"holdout": proof, "evaluation": other, "resamples": resamples}
    return Finding("budget.selection_stability", rows(records, columns), evaluation["case"].nunique(), "G4", made)


def _chance(rule: str, kind: str, held: int | None, scored: int | None, share: float) -> dict[str, Any]:
    return {"rule": rule, "kind": kind, "k_holdout": held, "k_eval": scored, "probability": float(share)}


def selection_agreement(
    holdout: pd.DataFrame, evaluation: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED
) -> Finding:
    """P(the holdout's step is the evaluation's step) in the joint bootstrap, and the modal pair (G4)."""
    joint = selection_stability(holdout, evaluation, resamples=resamples, seed=seed)
    records = []
    for rule, part in joint.table[joint.table["kind"] == "joint"].groupby("rule", sort=False):
        modal = part.loc[part["probability"].idxmax()]
        records.append(
            {
                "rule": rule,
                "agree": float(part.loc[part["k_holdout"] == part["k_eval"], "probability"].sum()),
                "modal_holdout": int(modal["k_holdout"]),
                "modal_eval": int(modal["k_eval"]),
                "modal_share": float(modal["probability"]),
            }
        )
    return Finding("budget.selection_agreement", pd.DataFrame(records), joint.n, "G4", joint.made)


def group_agreement(holdout: pd.DataFrame, evaluation: pd.DataFrame) -> Finding:
    """Whether a group's own holdout chooses the group's own best step (G5)."""
    records: list[dict[str, Any]] = []
    held, scored = (dict(list(unshrunk(frame).groupby("group"))) for frame in (holdout, evaluation))
    for name in sorted(set(held) & set(scored)):
        first, second = (_matrices(part)[0] for part in (held[name], scored[name]))
        chosen, best = (int(np.argmin(ha.mean(axis=0))) + 1 for ha in (first, second))
        sizes = {"n_holdout": len(first), "n_eval": len(second)}
        records.append({"group": name, **sizes, "k_holdout": chosen, "k_eval": best, "agree": chosen == best})
    table = rows(records, ("group", "n_holdout", "n_eval", "k_holdout", "k_eval", "agree"))
    note = f"{int(table['agree'].sum())} of {len(table)} groups agree" if len(table) else ""
    reason = "" if len(table) else "no group is in both holdout and evaluation"
    return Finding("budget.group_agreement", table, evaluation["case"].nunique(), "G5", notes=(note,), reason=reason)


def ladder_shape(outcomes: pd.DataFrame, *, by_group: bool = False) -> Finding:
    """Whether HA is non-monotone in the budget, dips before it rises, and how little the metric moves (G6, G7)."""
    records = []
    for name, part in _scopes(outcomes, by_group):
        ha, metric = _matrices(part)
        records.append({"group": name, "n": len(ha), **_shape(ha.mean(axis=0), np.nanmean(metric, axis=0))})
    return Finding("budget.ladder_shape", pd.DataFrame(records), outcomes["case"].nunique(), "G6, G7")


def _shape(ha: Floats, metric: Floats) -> dict[str, Any]:
    best = int(np.argmin(ha))
    change = np.diff(ha)
    return {
        "k_best": best + 1,
        "ha_first": ha[0],
        "ha_best": ha[best],
        "ha_last": ha[-1],
        "non_monotone": bool((change > 0).any() and (change < 0).any()),
        "dips": bool(ha[-1] > ha[best] and 0 < best < len(ha) - 1),
        "metric_spread": float(metric.max() - metric.min()),
    }


def learning_rate_sweep(stopped: Mapping[float, pd.DataFrame], fixed: Mapping[float, pd.DataFrame]) -> Finding:
    """A stop rule refitted at every learning rate, against the full budget at the same rate (G8)."""
    if set(stopped) != set(fixed):
        raise BadInput(f"both arms need the same learning rates, got {sorted(stopped)} and {sorted(fixed)}")
    records = []
    for rate in sorted(stopped):
        stop, full = stopped[rate], fixed[rate]
        records.append(
            {
                "learning_rate": rate,
                "n": len(stop),
                "stop_metric": mean_or_nan(stop["metric"]),
                "stop_ha": mean_or_nan(stop["ha"]),
                "fixed_metric": mean_or_nan(full["metric"]),
                "fixed_ha": mean_or_nan(full["ha"]),
                "ha_cut": mean_or_nan(full["ha"]) - mean_or_nan(stop["ha"]),
                "steps": mean_or_nan(stop["deployed"]),
            }
        )
    n = max((record["n"] for record in records), default=0)
    return Finding("budget.learning_rate_sweep", pd.DataFrame(records), int(n), "G8")


def oracle_plateau(outcomes: pd.DataFrame, *, epsilon: float = 0.002) -> Finding:
    """The steps within ``epsilon`` of each case's best metric, and the smallest of them (S23)."""
    metric = by_step(outcomes, "metric").dropna()
    values = metric.to_numpy()
    near = values >= values.max(axis=1, keepdims=True) - epsilon if len(values) else np.zeros((0, 1), bool)
    table = pd.DataFrame(
        {
            "case": metric.index,
            "k_best": values.argmax(axis=1) if len(values) else [],
            "k_first": near.argmax(axis=1),
            "width": near.sum(axis=1),
            "metric": values.max(axis=1) if len(values) else [],
        }
    )
    return Finding("budget.oracle_plateau", table, len(table), "S23", {"epsilon": epsilon})

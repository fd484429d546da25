"""How many cases of an unlabelled stream were hurt? Two estimators from a labelled holdout, and a guard.

Each may say "not identifiable from these signals", and with weak signals that is the honest answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from casewise.core.errors import TooFewCases
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.tables import Column, number, rows_of, table
from casewise.study.finding import Finding, Section, rows
from casewise.study.statistics.learners import fit_logistic
from casewise.study.statistics.resample import RESAMPLES, clusters_of, draws, folds_of
from casewise.study.study import Study
from casewise.study.trajectories import horizon, unshrunk


def section(study: Study) -> Section:
    """How many are made worse, without labels on the stream (S3)."""
    found = label_free_balance(study.holdout, study.outcomes, **study.bootstrap)
    columns = (
        Column("quantity", "Estimate", text=True),
        Column("estimate", "share of cases made worse [95 %]", interval=("low", "high")),
        Column("n_holdout", "n holdout"),
        Column("n_stream", "n stream"),
        Column("reason", "Remark", text=True),
    )
    rows = rows_of(found.table, columns)
    true = float((study.uncontrolled["change"] < 0).mean())
    caption = f"Estimated without the labels of the {found.n} evaluation cases; with them the share is {number(true)}."
    made = table("balance", "Made worse, estimated without labels", columns, rows, caption=caption)
    lead = "How many cases does adaptation make worse, when the stream has no labels and only the holdout has?"
    return Section("balance", "Balance without labels", lead, (made,), (), (found,), found.notes)


Floats = NDArray[np.float64]


FEATURES = ("delta", "regions", "entropy_on_d", "largest_share", "delta_foreground")


_BOTH_SIDES = 4  # cases that each side of the holdout needs at least


def label_free_balance(
    holdout: pd.DataFrame,
    stream: pd.DataFrame,
    *,
    features: Sequence[str] | None = None,
    step: int | None = None,
    folds: int = 5,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """The stream's hurt share, P(metric falls at ``step``), from step-1 signals; the stream's labels are not read.

    A logistic model is cross-fitted on the holdout. "prediction-powered": mean prediction on the stream plus the mean
    residual on the holdout. "quantified": p = (q - FPR) / (TPR - FPR). The guard: when the lower confidence limit of
    TPR - FPR is not above zero, the signals do not identify the share, and no number is given.
    """
    depth = horizon(holdout) if step is None else step
    names = _usable(holdout, stream, features)
    x, hurt, units = _holdout(holdout, names, depth)
    seen = _step_one(stream, names).to_numpy(float)
    if min(hurt.sum(), (1 - hurt).sum()) < _BOTH_SIDES:
        raise TooFewCases(
            f"the holdout needs {_BOTH_SIDES} hurt and {_BOTH_SIDES} other cases, got {int(hurt.sum())} of {len(hurt)}"
        )
    held, streamed = _cross_fitted(x, hurt, units, seen, folds, seed)
    sizes = {"n_holdout": len(hurt), "n_stream": len(seen)}
    quantified, guard = _quantified(hurt, held, streamed, units, resamples, seed)
    records = [
        {"quantity": "holdout", **_share_interval(int(hurt.sum()), len(hurt)), **sizes, "reason": ""},
        {"quantity": "prediction-powered", **_powered(hurt, held, streamed), **sizes, "reason": ""},
        {"quantity": "quantified", **quantified, **sizes},
    ]
    table = rows(records, ("quantity", "estimate", "low", "high", "n_holdout", "n_stream", "reason"))
    made = {"features": names, "step": depth, "folds": folds, "seed": seed, **guard}
    notes = tuple(record["reason"] for record in records if record["reason"])
    return Finding("balance", table, len(seen), "S3", made, notes)


def _usable(holdout: pd.DataFrame, stream: pd.DataFrame, features: Sequence[str] | None) -> list[str]:
    """Features that both cohorts have for every case at step 1."""
    wanted = FEATURES if features is None else features
    frames = [unshrunk(frame)[lambda part: part["step"] == 1] for frame in (holdout, stream)]
    names = [name for name in wanted if all(name in frame.columns and frame[name].notna().all() for frame in frames)]
    if not names:
        raise TooFewCases(f"none of the signals {list(wanted)} is defined for every case of holdout and stream")
    return names


def _step_one(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    ladder = unshrunk(frame)
    return ladder[ladder["step"] == 1].set_index("case")[list(names)].astype(float)


def _holdout(frame: pd.DataFrame, names: Sequence[str], depth: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
    ladder = unshrunk(frame)
    metric = ladder.pivot(index="case", columns="step", values="metric")
    change = (metric[depth] - metric[0]).dropna()
    first = ladder[(ladder["step"] == 1) & ladder["case"].isin(change.index)].set_index("case").loc[change.index]
    units = clusters_of(first.reset_index())
    return first[list(names)].to_numpy(float), (change < 0).to_numpy(float), units


def _cross_fitted(
    x: Floats, y: Floats, units: NDArray[np.int64], stream: Floats, folds: int, seed: int
) -> tuple[Floats, Floats]:
    """Out-of-fold probabilities on the holdout, and the mean of the fold models on the stream."""
    fold = folds_of(units, min(folds, len(np.unique(units))), seed)
    held, streamed = np.empty(len(y)), []
    for one in np.unique(fold):
        model = fit_logistic(x[fold != one], y[fold != one])
        held[fold == one] = model.predict(x[fold == one])
        streamed.append(model.predict(stream))
    return held, np.mean(streamed, axis=0)


def _powered(y: Floats, held: Floats, streamed: Floats) -> dict[str, float]:
    r""":math:`\bar f_{stream} + \overline{(y - f)}_{holdout} \pm 1.96 \sqrt{s_f^2/N + s_{y-f}^2/n}`."""
    residual = y - held
    estimate = float(streamed.mean() + residual.mean())
    spread = stats.norm.ppf(0.975) * np.sqrt(streamed.var() / len(streamed) + residual.var() / len(residual))
    return {"estimate": estimate, "low": float(max(0, estimate - spread)), "high": float(min(1, estimate + spread))}


def _share_interval(count: int, n: int) -> dict[str, float]:
    """Wilson's interval of the holdout's own share."""
    found = stats.binomtest(count, n).proportion_ci(method="wilson")
    return {"estimate": count / n, "low": float(found.low), "high": float(found.high)}


def _quantified(
    y: Floats, held: Floats, streamed: Floats, units: NDArray[np.int64], resamples: int, seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Adjusted count with bootstrap limits; called hurt when the probability reaches the holdout's base rate."""
    called, q_calls = (held >= y.mean()).astype(float), (streamed >= y.mean()).astype(float)
    weights = draws(int(units.max()) + 1, resamples, seed).counts[:, units].astype(np.float64)
    positives, negatives = weights @ y, weights @ (1 - y)
    with np.errstate(invalid="ignore", divide="ignore"):
        true_rate, false_rate = (weights @ (y * called)) / positives, (weights @ ((1 - y) * called)) / negatives
    gaps = true_rate - false_rate
    low = float(np.nanpercentile(gaps, 2.5))
    tpr, fpr = float(called[y == 1].mean()), float(called[y == 0].mean())
    guard = {"tpr": tpr, "fpr": fpr, "gap": tpr - fpr, "gap_low": low, "identifiable": bool(low > 0)}
    if low <= 0:
        reason = f"not identifiable from these signals: TPR - FPR is {tpr - fpr:+.3f} with a lower limit of {low:+.3f}"
        return {"estimate": np.nan, "low": np.nan, "high": np.nan, "reason": reason}, guard
    rng = np.random.default_rng(seed + 1)
    q = rng.binomial(len(q_calls), q_calls.mean(), size=resamples) / len(q_calls)
    drawn = np.clip((q - false_rate) / np.where(gaps > 0, gaps, np.nan), 0, 1)
    estimate = float(np.clip((q_calls.mean() - fpr) / (tpr - fpr), 0, 1))
    limits = np.nanpercentile(drawn, [2.5, 97.5])
    return {"estimate": estimate, "low": float(limits[0]), "high": float(limits[1]), "reason": ""}, guard

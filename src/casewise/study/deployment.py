"""What each method deployed, and every controller-against-budget interval, made once and cited by id (H)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import BadInput, UnknownName
from casewise.core.seeds import RESAMPLING_SEED
from casewise.study.finding import Finding, rows
from casewise.study.statistics.pairs import holm, wilcoxon, wins
from casewise.study.statistics.resample import (
    RESAMPLES,
    Interval,
    clusters_of,
    draws,
    paired_interval,
    undefined_interval,
)
from casewise.study.trajectories import mean_or_nan, same_cases

Methods = Mapping[str, pd.DataFrame]

REPRODUCIBILITY_SCALE = 0.002  # of a cohort HA mean between two runs (H9)
BUCKETS = ("low", "mid", "hard")
_MEANS = ("metric", "ha", "ba", "neutral_scored", "unscored")
_FIELDS = ("estimate", "low", "high", "p_below", "n", "clusters", "separated", "p_flip", "shown")
INTERVAL_COLUMNS = (
    *("id", "tier", "method", "reference", "quantity", "estimate", "low", "high", "p_below", "n", "clusters"),
    *("separated", "p_flip", "shown", "matched", "below_scale", "wins", "ties", "losses", "wilcoxon", "wilcoxon_p"),
    *("family", "holm_p", "interval", "corrected", "reason"),
)


@dataclass(frozen=True)
class Comparison:
    """One method against one reference; ``tier`` is A, A', B or C, joined by + where references coincide (H2)."""

    method: str
    reference: str
    tier: str = "C"
    family: str | None = None  # a declared family of tests, corrected by Holm; None is uncorrected (H5, H6)
    family_size: int | None = None  # its declared size, when not every member is compared here


def method_table(methods: Methods) -> Finding:
    """Cohort metric, HA, BA, steps deployed and executed, one row per method; HA over all cases (B9, A12)."""
    records = []
    for name, frame in methods.items():
        means = {column: mean_or_nan(frame[column]) for column in _MEANS}
        steps = {"steps": mean_or_nan(frame["deployed"]), "executed": mean_or_nan(frame["executed"])}
        rolled_back = int(frame["rolled_back"].astype(bool).sum())
        undefined = int(frame["metric"].isna().sum())
        records.append(
            {"method": name, "n": len(frame), "undefined": undefined, **means, **steps, "rolled_back": rolled_back}
        )
    columns = ("method", "n", "undefined", *_MEANS, "steps", "executed", "rolled_back")
    table = rows(records, columns)
    adapted = table["steps"] > 0
    table["best_metric"] = adapted & (table["metric"] == table.loc[adapted, "metric"].max())
    table["best_ha"] = adapted & (table["ha"] == table.loc[adapted, "ha"].min())
    return Finding("deployment.methods", table, int(table["n"].max()) if len(table) else 0, "H, A12, B9")


def tiers(
    methods: Methods,
    *,
    ours: Sequence[str],
    deployable: str | None = None,
    default: str | None = None,
    retrospective: str | None = None,
    source: str | None = "m0",
) -> list[Comparison]:
    """Each of our methods against the deployable budget (A), the default (A'), the best in hindsight (B), M0 (C)."""
    named = {"A": deployable, "A'": default, "B": retrospective, "C": source if source in methods else None}
    by_reference: dict[str, list[str]] = {}
    for tier, reference in named.items():
        if reference is not None:
            by_reference.setdefault(reference, []).append(tier)
    for name in (*ours, *by_reference):
        if name not in methods:
            raise UnknownName(f"no method is called {name!r}. Known: {', '.join(methods)}")
    return [
        Comparison(method, reference, "+".join(joined))
        for method in ours
        for reference, joined in by_reference.items()
        if method != reference
    ]


def intervals(
    methods: Methods,
    comparisons: Iterable[Comparison],
    *,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
    method: str = "percentile",
    cluster: str = "auto",
) -> Finding:
    """Paired bootstrap of HA and metric for every comparison: the single source of every interval (H1, H7-H9).

    ``cluster`` "auto" draws whole clusters when any cluster holds several cases, "never" draws cases.
    """
    if cluster not in ("auto", "never"):
        raise BadInput(f"cluster is 'auto' or 'never', got {cluster!r}")
    asked = list(comparisons)
    options = {"resamples": resamples, "seed": seed, "method": method}
    records = [
        _interval_row(one, quantity, methods, cluster, options) for one in asked for quantity in ("ha", "metric")
    ]
    table = rows(records, INTERVAL_COLUMNS)
    _correct(table, asked)
    units = int(table["clusters"].max()) if len(table) else 0
    made = {**options, "cluster": cluster, "stream": draws(units, resamples, seed).proof if units else None}
    notes = tuple(_coinciding(asked)) + _uncorrected(table)
    n = int(table["n"].max()) if len(table) else 0
    return Finding(
        "deployment.intervals", table, n, "H1-H9, H12", made, notes, "" if asked else "no comparison was asked for"
    )


def _interval_row(
    one: Comparison, quantity: str, methods: Methods, cluster: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    left, right = same_cases(methods[one.method], methods[one.reference])
    defined = (left[quantity].notna() & right[quantity].notna()).to_numpy()
    left, right = left[defined], right[defined]
    found = _paired(left, right, quantity, cluster, options)
    won, tied, lost = wins(left[quantity], right[quantity], lower_is_better=quantity == "ha")
    signed = wilcoxon(left[quantity], right[quantity])
    below = quantity == "ha" and abs(found.estimate) < 10 * REPRODUCIBILITY_SCALE
    return {
        "id": f"{one.method}~{one.reference}:{quantity}",
        "tier": one.tier,
        "method": one.method,
        "reference": one.reference,
        "quantity": quantity,
        **{name: getattr(found, name) for name in _FIELDS},
        "matched": found.holds_zero,
        "below_scale": below,
        "wins": won,
        "ties": tied,
        "losses": lost,
        "wilcoxon": signed.method,
        "wilcoxon_p": signed.p,
        "family": one.family,
        "holm_p": float("nan"),
        "interval": found.method,
        "corrected": False,
        "reason": found.reason or signed.reason,
    }


def _paired(
    left: pd.DataFrame, right: pd.DataFrame, quantity: str, cluster: str, options: Mapping[str, Any]
) -> Interval:
    if left.empty:
        return undefined_interval(0, f"no case has a defined {quantity}")
    units = clusters_of(left) if cluster == "auto" else np.arange(len(left))
    return paired_interval(left[quantity].to_numpy(), right[quantity].to_numpy(), clusters=units, **options)


def _correct(table: pd.DataFrame, asked: Sequence[Comparison]) -> None:
    """Holm within each declared family, on the signed-rank p of HA (H5)."""
    for family in {one.family for one in asked if one.family is not None}:
        members = table.index[(table["family"] == family) & (table["quantity"] == "ha") & table["wilcoxon_p"].notna()]
        size = max((one.family_size or 0 for one in asked if one.family == family), default=0)
        table.loc[members, "holm_p"] = holm(table.loc[members, "wilcoxon_p"].tolist(), family=max(size, len(members)))
        table.loc[members, "corrected"] = True


def _coinciding(asked: Sequence[Comparison]) -> list[str]:
    """Say where one budget serves several tiers (H2)."""
    joined = sorted({(one.reference, one.tier) for one in asked if "+" in one.tier})
    return [f"tiers {tier.replace('+', ' and ')} coincide: both are {reference}" for reference, tier in joined]


def _uncorrected(table: pd.DataFrame) -> tuple[str, ...]:
    """Say how many intervals stand without a correction for multiplicity (H6)."""
    plain = int((~table["corrected"].astype(bool)).sum()) if len(table) else 0
    return (f"{plain} of {len(table)} intervals are not corrected for multiplicity",) if plain else ()


def bucket_decomposition(router: pd.DataFrame) -> Finding:
    """Each bucket's part of the mean change against M0, n_b * mean_b / n; the parts add up to the whole (H10).

    A bucket without a case has no mean, and then no bucket mean is given at all (F4).
    """
    defined = router[router["change"].notna()]
    sizes = {name: int((defined["bucket"] == name).sum()) for name in BUCKETS}
    empty = [name for name, size in sizes.items() if size == 0]
    reason = f"bucket {', '.join(empty)} is empty, so bucket means are not reported" if empty else ""
    records = []
    for name, size in sizes.items():
        part = defined.loc[defined["bucket"] == name, "change"]
        mean = float("nan") if empty else float(part.mean())
        share = float(part.sum()) / len(defined) if len(defined) else float("nan")
        records.append({"bucket": name, "n": size, "mean_change": mean, "contribution": share, "reason": reason})
    whole = mean_or_nan(defined["change"])
    records.append({"bucket": "all", "n": len(defined), "mean_change": whole, "contribution": whole, "reason": ""})
    return Finding("deployment.buckets", pd.DataFrame(records), len(defined), "H10, F4", reason=reason)

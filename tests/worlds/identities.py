"""Sums and identities that every report must satisfy, whatever the data are (Q5-Q11, Q14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from casewise.study.analyses.deployed_methods import bucket_decomposition, method_table_of
from casewise.study.analyses.edited_area import accounting_of
from casewise.study.analyses.helphurt import help_hurt
from casewise.study.finding import Finding
from casewise.study.study import Study

TOLERANCE = 1e-9
BUCKETS = ("low", "mid", "hard")


@dataclass(frozen=True)
class Disagreement:
    """Two ways to compute one number that did not give the same."""

    identity: str
    where: str
    expected: float
    got: float

    def __str__(self) -> str:
        return f"{self.identity} ({self.where}): {self.expected!r} expected, {self.got!r} reported"


def audit(
    methods: Mapping[str, pd.DataFrame],
    *,
    deployment: Finding | None = None,
    accounting: Finding | None = None,
    helphurt: Finding | None = None,
    decomposition: Finding | None = None,
    intervals: Finding | None = None,
    tolerance: float = TOLERANCE,
) -> list[Disagreement]:
    """Recompute every identity from the per-case frames; an empty list means that the report agrees with itself."""
    checks = [*_cases(methods)]
    if deployment is not None:
        checks += _deployment(methods, deployment)
    if accounting is not None:
        checks += _accounting(methods, accounting)
    if helphurt is not None:
        checks += _helphurt(helphurt)
    if decomposition is not None:
        checks += _decomposition(decomposition)
    if intervals is not None:
        checks += _intervals(methods, intervals)
    return [one for one in checks if not np.isclose(one.got, one.expected, rtol=0, atol=tolerance, equal_nan=True)]


def audit_study(study: Study) -> list[Disagreement]:
    """Recompute the sums and identities of a study."""
    return audit(
        study.methods,
        deployment=method_table_of(study),
        accounting=accounting_of(study),
        helphurt=help_hurt(study.methods),
        decomposition=bucket_decomposition(study.policy_rows) if study.is_router else None,
    )


def _cases(methods: Mapping[str, pd.DataFrame]) -> Iterator[Disagreement]:
    """Per case: four shares add up to 1 unless D is empty, and a rollback has none; buckets cover the cases (Q5)."""
    for name, frame in methods.items():
        shares = frame[["ha", "ba", "neutral_scored", "unscored"]].sum(axis=1, min_count=4)
        wanted = (frame["area"] > 0).astype(float).where(shares.notna())
        gap = float((shares - wanted).abs().max()) if shares.notna().any() else 0.0
        yield Disagreement("HA + BA + neutral + unscored = 1 where D is not empty", name, 0.0, gap)
        rolled_back = frame["rolled_back"].astype(bool)
        yield Disagreement("a rollback has HA 0", name, 0.0, float(frame.loc[rolled_back, "ha"].fillna(0).sum()))
        if frame["bucket"].notna().any():
            sizes = sum(int((frame["bucket"] == bucket).sum()) for bucket in BUCKETS)
            yield Disagreement("low + mid + hard = n", name, float(len(frame)), float(sizes))


def _deployment(methods: Mapping[str, pd.DataFrame], found: Finding) -> Iterator[Disagreement]:
    """Means are sums over cases, steps are depth by depth (Q1-Q4)."""
    for row in found.table.itertuples():
        frame = methods[row.method]
        depth = frame["deployed"].value_counts()
        steps = sum(step * count for step, count in depth.items()) / len(frame)
        yield Disagreement("steps = sum over depths of depth x cases / n", row.method, float(steps), row.steps)
        harm = frame["ha"].dropna()
        yield Disagreement(
            "HA x n = sum of HA", row.method, float(harm.sum()), row.ha * len(harm) if len(harm) else 0.0
        )


def _accounting(methods: Mapping[str, pd.DataFrame], found: Finding) -> Iterator[Disagreement]:
    """HA over all = HA within x cases with regions / n (Q8); coverage is the mean delta (Q10); buckets add up (Q5)."""
    table = found.table
    for row in table[table["scored"] > 0].dropna(subset=["ha"]).itertuples():
        where = f"{row.method}, {row.bucket}"
        yield Disagreement("HA = HA within x scored / n", where, row.ha, row.ha_within * row.scored / row.n)
    for name, part in table.groupby("method", sort=False):
        whole, inner = part[part["bucket"] == "all"].iloc[0], part[part["bucket"] != "all"]
        coverage = float(methods[name]["delta"].mean())
        yield Disagreement("coverage = mean delta", str(name), coverage, float(whole["coverage"]))
        if len(inner):
            yield Disagreement("buckets add up to n", str(name), float(whole["n"]), float(inner["n"].sum()))
            yield Disagreement(
                "buckets add up to scored", str(name), float(whole["scored"]), float(inner["scored"].sum())
            )
        if len(inner) and inner["ha"].notna().all():
            total = float((inner["ha"] * inner["n"]).sum() / whole["n"])
            yield Disagreement("bucket HA add up to HA", str(name), float(whole["ha"]), total)


def _helphurt(found: Finding) -> Iterator[Disagreement]:
    """Classes add up to n, and the overall mean is that of its parts (Q6, Q7)."""
    for row in found.table.itertuples():
        parts = row.helped + row.hurt + row.rolled_back + row.unchanged
        yield Disagreement("helped + hurt + rolled back + unchanged = n", row.method, float(row.n), float(parts))
        if row.n:
            gain = row.share_helped * row.mean_helped if row.helped else 0.0
            loss = row.share_hurt * row.mean_hurt if row.hurt else 0.0
            yield Disagreement("mean change = helped part + hurt part", row.method, gain + loss, row.mean_change)


def _decomposition(found: Finding) -> Iterator[Disagreement]:
    """Bucket contributions add up to the whole change (Q11)."""
    parts = found.table[found.table["bucket"] != "all"]["contribution"].sum()
    yield Disagreement(
        "bucket contributions add up", "router", found.number("contribution", bucket="all"), float(parts)
    )


def _intervals(methods: Mapping[str, pd.DataFrame], found: Finding) -> Iterator[Disagreement]:
    """Every point estimate is the difference of unrounded means over the cases that both methods have (H1, Q14)."""
    for row in found.table.itertuples():
        pair = [methods[name].set_index("case")[row.quantity] for name in (row.method, row.reference)]
        gap = (pair[0] - pair[1]).dropna()
        expected = float(gap.mean()) if len(gap) else float("nan")
        yield Disagreement("estimate = difference of means", row.id, expected, row.estimate)

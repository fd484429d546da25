"""Was it the signal, or only the number of rollbacks? Every selector at the router's own quota (J, P1, P2).

A router sends n_hard cases to rollback, n_mid to the middle action, the rest to the low one. A matched control gives
the same actions to the same *numbers* of cases, chosen by another score, or by chance. ``arms[bucket]`` holds what
every case would have got in that bucket, so a control is a choice of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.errors import BadInput, Refused
from casewise.core.seeds import RESAMPLING_SEED
from casewise.study.assignment import BUCKETS, QUANTITIES, Arms, Assignment
from casewise.study.finding import Finding, rows
from casewise.study.statistics.chance import Floats, chance_draws
from casewise.study.statistics.resample import RESAMPLES, clusters_of, paired_interval
from casewise.study.trajectories import mean_or_nan


def check_licence(arms: Arms, router: pd.DataFrame, *, digits: int = 4) -> dict[str, float]:
    """Refuse a counterfactual that does not reproduce the deployed router's own row to printed precision (J1)."""
    table = Assignment(arms, router)
    replayed = table.means(table.buckets)
    wanted = {name: mean_or_nan(table.router[column]) for name, column in QUANTITIES.items()}
    wrong = [name for name in QUANTITIES if round(replayed[name], digits) != round(wanted[name], digits)]
    if wrong:
        raise Refused(
            f"the arms do not reproduce the deployed router: expected {wanted}, got {replayed} ({', '.join(wrong)} "
            f"differ); build the arms from the same archive, or pass substitute=True and label it so (J1, J7)"
        )
    return replayed


def matched_controls(
    arms: Arms,
    router: pd.DataFrame,
    scores: pd.DataFrame,
    *,
    by_group: bool = False,
    draws: int = 1000,
    seed: int = RESAMPLING_SEED,
    weighting: str = "plain",
    substitute: bool = False,
) -> Finding:
    """Every selector at the router's quota, beside the deployed row, chance and M0 (J2-J4, J6, J7).

    ``by_group`` matches the quota inside each group and adds a "pooled" scope: the plain mean over groups, or weighted
    by cases. ``substitute`` allows arms that do not reproduce the deployed router, and says so.
    """
    if not substitute:
        check_licence(arms, router)
    whole = Assignment(arms, router)
    records: list[dict[str, Any]] = []
    for scope, table in whole.scopes(by_group):
        records.extend(_scope_rows(scope, table, scores, draws, seed))
    if by_group:
        records.extend(_pooled(records, weighting))
    columns = (
        "scope",
        "selector",
        "n",
        *BUCKETS,
        *QUANTITIES,
        "p_random",
        "p_random_corrected",
        "overlap_hard",
        "faithful",
    )
    notes = (
        ("does not reproduce the deployed router: retained cases get a substitute action (J7)",) if substitute else ()
    )
    made = {"draws": draws, "seed": seed, "by_group": by_group, "weighting": weighting, "substitute": substitute}
    return Finding("controls.matched", rows(records, columns), whole.n, "J1-J4, J6, J7", made, notes)


def _scope_rows(scope: str, table: Assignment, scores: pd.DataFrame, draws: int, seed: int) -> Iterator[dict[str, Any]]:
    chance = chance_draws(table.arm_values("ha"), table.buckets, draws, seed, table.units)
    common: dict[str, Any] = {"scope": scope, "n": table.n, **table.sizes}
    own = table.buckets == 0
    yield {
        **common,
        "selector": "deployed",
        **table.means(table.buckets),
        **_against(chance, table.mean("ha", table.buckets)),
    }
    for selector in scores.columns:
        assigned = table.assigned(scores[selector])
        shared = int((own & (assigned == 0)).sum())
        means = table.means(assigned)
        facts = {"overlap_hard": shared, "faithful": shared == table.sizes["hard"]}
        yield {**common, "selector": selector, **means, **_against(chance, means["ha"]), **facts}
    exact = {name: table.moments(name).mean for name in QUANTITIES}
    yield {**common, "selector": "random", **exact}
    source = {"metric": mean_or_nan(table.router["metric_source"]), "ha": 0.0, "steps": 0.0}
    yield {**common, "selector": "m0", "hard": table.n, "mid": 0, "low": 0, **source}


def _against(chance: Floats, ha: float) -> dict[str, float]:
    """P(random <= selector): the raw share, and (1 + #) / (1 + draws) which is never zero (J4)."""
    hits = int((chance <= ha + 1e-12).sum())
    return {"p_random": hits / len(chance), "p_random_corrected": (1 + hits) / (1 + len(chance))}


def _pooled(records: list[dict[str, Any]], weighting: str) -> Iterator[dict[str, Any]]:
    """Over groups: plain mean (the paper's), or weighted by cases (J7)."""
    if weighting not in ("plain", "cases"):
        raise BadInput(f"weighting is 'plain' or 'cases', got {weighting!r}")
    groups = pd.DataFrame([record for record in records if record["scope"] != "all"])
    for selector, part in groups.groupby("selector", sort=False) if len(groups) else ():
        weights = part["n"] if weighting == "cases" else np.ones(len(part))
        means = {name: float(np.average(part[name], weights=weights)) for name in QUANTITIES}
        yield {
            "scope": "pooled",
            "selector": selector,
            **{name: int(part[name].sum()) for name in ("n", *BUCKETS)},
            **means,
        }


def random_control(
    arms: Arms, router: pd.DataFrame, *, by_group: bool = False, draws: int = 1000, seed: int = RESAMPLING_SEED
) -> Finding:
    """The chance control: exact mean and sd in closed form beside the draws, and where the router lies (J4, P1)."""
    whole = Assignment(arms, router)
    records = []
    for scope, table in whole.scopes(by_group):
        for quantity in ("ha", "metric"):
            moments = table.moments(quantity)
            drawn = chance_draws(table.arm_values(quantity), table.buckets, draws, seed, table.units)
            observed = table.mean(quantity, table.buckets)
            low, high = np.percentile(drawn, [2.5, 97.5])
            against = _against(drawn, observed)
            records.append(
                {
                    "scope": scope,
                    "quantity": quantity,
                    "mean_exact": moments.mean,
                    "sd_chance": moments.sd,
                    "mean_draws": float(drawn.mean()),
                    "low": float(low),
                    "high": float(high),
                    "deployed": observed,
                    "z": moments.z(observed),
                    "p_normal": moments.p_normal(observed),
                    "p_draws": against["p_random"],
                    "p_draws_corrected": against["p_random_corrected"],
                    "n": table.n,
                }
            )
    return Finding("controls.random", pd.DataFrame(records), whole.n, "J4, P1", {"draws": draws, "seed": seed})


def selector_intervals(
    arms: Arms,
    router: pd.DataFrame,
    scores: pd.DataFrame,
    *,
    against: str,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Paired bootstrap of one selector against every other at the same quota: selector minus ``against`` (J5)."""
    table = Assignment(arms, router)
    units, base = clusters_of(table.router), table.assigned(scores[against])
    records = []
    for selector in scores.columns.drop(against):
        other = table.assigned(scores[selector])
        for quantity in ("ha", "metric"):
            pair = np.stack([table.chosen(quantity, other), table.chosen(quantity, base)])
            defined = np.isfinite(pair).all(axis=0)
            found = paired_interval(
                *pair[:, defined], clusters=_renumbered(units[defined]), resamples=resamples, seed=seed
            )
            names = ("estimate", "low", "high", "p_below", "n", "separated", "p_flip", "shown")
            fields = {name: getattr(found, name) for name in names}
            records.append({"selector": selector, "against": against, "quantity": quantity, **fields})
    return Finding("controls.selectors", pd.DataFrame(records), table.n, "J5", {"resamples": resamples, "seed": seed})


def _renumbered(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cluster numbers without gaps, for the cases that are left."""
    return np.asarray(np.unique(units, return_inverse=True)[1], dtype=np.int64)


def overlap(arms: Arms, router: pd.DataFrame, scores: pd.DataFrame) -> Finding:
    """How many rolled-back cases two selectors share (J6)."""
    table = Assignment(arms, router)
    hard = {name: table.assigned(scores[name]) == 0 for name in scores.columns}
    names = list(hard)
    records = [
        {
            "first": first,
            "second": second,
            "shared": int((hard[first] & hard[second]).sum()),
            "hard": table.sizes["hard"],
        }
        for number, first in enumerate(names)
        for second in names[number + 1 :]
    ]
    return Finding("controls.overlap", rows(records, ("first", "second", "shared", "hard")), table.n, "J6")


def attribution(
    arms: Arms, router: pd.DataFrame, reference: pd.DataFrame, scores: pd.DataFrame | None = None
) -> Finding:
    """The share of the HA cut that the quota alone, or another selector, would have made (P2, J11).

    share = (HA_reference - HA_control) / (HA_reference - HA_router); the reference is fixed-K on the same cases.
    """
    table = Assignment(arms, router)
    before, after = mean_or_nan(reference["ha"]), mean_or_nan(table.router["ha"])
    controls = {"random": table.moments("ha").mean}
    if scores is not None:
        controls |= {name: table.mean("ha", table.assigned(scores[name])) for name in scores.columns}
    records = [_share(name, before, ha, after, table.n) for name, ha in controls.items()]
    notes = (records[0]["sentence"],)
    return Finding("controls.attribution", pd.DataFrame(records), table.n, "P2, J11", notes=notes)


def _share(control: str, before: float, ha: float, after: float, n: int) -> dict[str, Any]:
    cut = before - after
    record = {"control": control, "ha_reference": before, "ha_control": ha, "ha_router": after, "n": n}
    if cut <= 0:
        reason = f"the router does not cut HA ({before:.4f} to {after:.4f}), so there is nothing to attribute"
        return {**record, "share": np.nan, "sentence": reason, "reason": reason}
    share = (before - ha) / cut
    what = "is due to the quota alone" if control == "random" else f"would also be made by {control}"
    sentence = f"{share:.0%} of the HA cut ({before:.4f} to {after:.4f}, n={n}) {what} ({ha:.4f})"
    return {**record, "share": share, "sentence": sentence, "reason": ""}


def substitution(arms: Arms, router: pd.DataFrame, values: pd.Series, *, cut_low: float, cut_high: float) -> Finding:
    """Another coordinate in the router's place: at the same quota, and at its own cut-points (J9)."""
    table = Assignment(arms, router)
    u = values.reindex(table.cases).to_numpy(float)
    native = np.where(u >= cut_high, 0, np.where(u > cut_low, 1, 2))
    records = []
    for kind, assigned in (("matched", table.assigned(values)), ("native", native)):
        sizes = {name: int((assigned == number).sum()) for number, name in enumerate(BUCKETS)}
        means = {**table.means(assigned), "ba": table.mean("ba", assigned)}
        records.append({"kind": kind, "n": table.n, **sizes, **means})
    made = {"cut_low": cut_low, "cut_high": cut_high}
    return Finding("controls.substitution", pd.DataFrame(records), table.n, "J9", made)

"""Matched controls: every selector, and chance, at the bucket sizes of the router.

A router sends n_hard cases to rollback, n_mid to the middle action and the rest to the low one. A matched control gives
the same actions to the same numbers of cases, chosen by another score or at random. ``arms[bucket]`` has the result of
every case in that bucket, so a control is a choice of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from casewise.core.errors import Refused
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.tables import DASH, Cell, Estimate, Table, best, number
from casewise.study.assignment import QUANTITIES, RANKED, Arms, Assignment, buckets_at
from casewise.study.finding import Finding, Section, not_run, rows, show
from casewise.study.statistics.chance import Floats, chance_draws
from casewise.study.statistics.resample import cluster_numbers, interval_fields, paired_interval
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, step_one

COORDINATES = ("delta", "regions", "largest")  # coordinates of the paper's routers and of the default
_TITLE = "Signal or quota?"
_P_CAPTION = "p is (k + 1) / (B + 1) if k of B random assignments have an HA at or below that of the row."
_NAMES = {"deployed": "as deployed", "random": "random (exact mean)", "m0": "M0 (no adaptation)"}


def section(study: Study) -> Section:
    """tab:app-matched-mnm, tab:app-matched-acdc, overlap of the hard buckets, attribution."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; matched quotas need a router with buckets"
        return not_run("controls", _TITLE, "matched-quota controls", reason)
    arms, router, scores = study.arms, study.policy_rows, study.scores
    matched, chance, share = matched_of(study), chance_of(study), attribution_of(study)
    own = str(scores.columns[0])
    pairs = selector_intervals(arms, router, scores, against=own, **study.bootstrap)
    shared, swapped = overlap(arms, router, scores), substitutions_of(study)
    caption = "Share of the router's HA reduction that as many rollbacks give, chosen by another score or at random."
    tables = [
        _matched_table(matched),
        show("attribution", "Share of the HA reduction by control", share, caption=caption, collapsed=True),
    ]
    if study.groups:
        tables.append(_group_table(matched, chance, own))
    tables += [
        show("selector-intervals", f"Each selector minus {own}", pairs, collapsed=True),
        show("overlap", "Overlap of the hard buckets", shared, collapsed=True),
    ]
    found = [matched, chance, pairs, shared, share]
    if len(swapped.table):
        caption = "matched: the same bucket sizes; native: cut-points of its own, fitted by the same rule."
        tables.append(show("substitution", f"Another signal instead of {study.coordinate}", swapped, caption=caption))
        found.append(swapped)
    if study.extras.substitute:
        stand_in = substitute_of(study)
        caption = f"{stand_in.notes[0].capitalize()}. Kept cases get what {study.extras.substitute} deployed."
        tables.append(show("substitute", "With substitute arms", stand_in, caption=caption, collapsed=True))
        found.append(stand_in)
    return Section("controls", _TITLE, _lead(chance, share), tuple(tables), (), tuple(found), matched.notes)


@once
def matched_of(study: Study) -> Finding:
    """Every selector at the router's quota."""
    return matched_controls(study.arms, study.policy_rows, study.scores, by_group=bool(study.groups), seed=study.seed)


@once
def chance_of(study: Study) -> Finding:
    """Random assignment at the router's quota."""
    return random_control(study.arms, study.policy_rows, by_group=bool(study.groups), seed=study.seed)


@once
def attribution_of(study: Study) -> Finding:
    """Shares of the HA reduction."""
    return attribution(study.arms, study.policy_rows, study.uncontrolled, study.scores)


def substitutions_of(study: Study) -> Finding:
    """Other coordinates in place of the router's, with cut-points that the same rule fits on the calibration cases."""
    tables = []
    for name in COORDINATES:
        if name == study.coordinate or name not in study.outcomes.columns or name not in study.holdout.columns:
            continue
        pool, values = (step_one(frame, name) for frame in (study.holdout, study.outcomes))
        if pool.notna().all() and values.notna().all():
            low, high = (float(cut) for cut in np.percentile(pool, study.percentiles))
            found = substitution(study.arms, study.policy_rows, values, cut_low=low, cut_high=high).table
            tables.append(found.assign(coordinate=name, cut_low=low, cut_high=high))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    made = {"percentiles": list(study.percentiles)}
    return Finding("controls.substitution", table, len(study.policy_rows), "J9", made)


def substitute_of(study: Study) -> Finding:
    """Matched controls in which every kept case gets the mask of another method, and a rolled-back case M0 (J7)."""
    name = study.extras.substitute
    arms = {"hard": study.methods[study.source], "mid": study.methods[name], "low": study.methods[name]}
    found = matched_controls(
        arms, study.policy_rows, study.scores, by_group=bool(study.groups), seed=study.seed, substitute=True
    )
    return replace(found, name="controls.substitute", made={**found.made, "kept_cases_get": name})


def check_licence(arms: Arms, router: pd.DataFrame) -> dict[str, float]:
    """Refuse arms that do not reproduce the row of the deployed router to four decimals (J1)."""
    table = Assignment(arms, router)
    replayed = table.means(table.buckets)
    wanted = {name: mean_or_nan(table.router[column]) for name, column in QUANTITIES.items()}
    wrong = [name for name in QUANTITIES if round(replayed[name], 4) != round(wanted[name], 4)]
    if wrong:
        raise Refused(
            f"the arms do not reproduce the deployed router: expected {wanted}, got {replayed} ({', '.join(wrong)} "
            f"differ); build the arms from the same archive, or pass substitute=True and label it so"
        )
    return replayed


def matched_controls(
    arms: Arms, router: pd.DataFrame, scores: pd.DataFrame, *, by_group: bool = False, draws: int = 1000,
    seed: int = RESAMPLING_SEED, substitute: bool = False,
) -> Finding:  # fmt: skip
    """Every selector at the router's quota, beside the deployed row, chance and M0 (J2-J4, J6, J7).

    ``by_group`` matches the quota inside each group and adds a scope "pooled": the plain mean over groups.
    ``substitute`` allows arms that do not reproduce the deployed router, and says so.
    """
    if not substitute:
        check_licence(arms, router)
    whole = Assignment(arms, router)
    records: list[dict[str, Any]] = []
    for scope, part in whole.scopes(by_group):
        records.extend(_scope_rows(scope, part, scores, draws, seed))
    if by_group:
        records.extend(_pooled(records))
    columns = ("scope", "selector", "n", *RANKED, *QUANTITIES, *_P, "overlap_hard", "faithful")
    notes = ("does not reproduce the deployed router: retained cases get a substitute action",) if substitute else ()
    made = {"draws": draws, "seed": seed, "by_group": by_group, "substitute": substitute}
    return Finding("controls.matched", rows(records, columns), whole.n, "J1-J4, J6, J7", made, notes)


_P = ("p_random", "p_random_corrected")


def _scope_rows(scope: str, table: Assignment, scores: pd.DataFrame, draws: int, seed: int) -> Iterator[dict[str, Any]]:
    chance = chance_draws(table.arm_values("ha"), table.buckets, draws, seed, table.units)
    common: dict[str, Any] = {"scope": scope, "n": table.n, **table.sizes}
    own = table.buckets == 0
    means = table.means(table.buckets)
    yield {**common, "selector": "deployed", **means, **_against(chance, means["ha"])}
    for selector in scores.columns:
        assigned = table.assigned(scores[selector])
        shared, means = int((own & (assigned == 0)).sum()), table.means(assigned)
        facts = {"overlap_hard": shared, "faithful": shared == table.sizes["hard"]}
        yield {**common, "selector": selector, **means, **_against(chance, means["ha"]), **facts}
    yield {**common, "selector": "random", **{name: table.moments(name).mean for name in QUANTITIES}}
    source = {"metric": mean_or_nan(table.router["metric_source"]), "ha": 0.0, "steps": 0.0}
    yield {**common, "selector": "m0", "hard": table.n, "mid": 0, "low": 0, **source}


def _against(chance: Floats, ha: float) -> dict[str, float]:
    """P(random <= selector): the raw share, and (1 + #) / (1 + draws), which is never zero (J4)."""
    hits = int((chance <= ha + 1e-12).sum())
    return {"p_random": hits / len(chance), "p_random_corrected": (1 + hits) / (1 + len(chance))}


def _pooled(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over groups: plain mean, as in the paper (J7)."""
    groups = pd.DataFrame([record for record in records if record["scope"] != "all"])
    how = {**dict.fromkeys(("n", *RANKED), "sum"), **dict.fromkeys(QUANTITIES, "mean")}
    pooled = groups.groupby("selector", sort=False, as_index=False).agg(how)
    return list(pooled.assign(scope="pooled").to_dict("records"))


def random_control(
    arms: Arms, router: pd.DataFrame, *, by_group: bool = False, draws: int = 1000, seed: int = RESAMPLING_SEED
) -> Finding:
    """The chance control: exact mean and sd in closed form beside the draws, and the position of the router (J4,
    P1)."""
    whole = Assignment(arms, router)
    records = []
    for scope, part in whole.scopes(by_group):
        for quantity in ("ha", "metric"):
            moments = part.moments(quantity)
            drawn = chance_draws(part.arm_values(quantity), part.buckets, draws, seed, part.units)
            observed = part.mean(quantity, part.buckets)
            records.append(
                (scope, quantity, moments.mean, moments.sd, drawn.mean(), *np.percentile(drawn, [2.5, 97.5]), observed,
                 moments.z(observed), moments.p_normal(observed), *_against(drawn, observed).values(), part.n)
            )  # fmt: skip
    columns = "scope quantity mean_exact sd_chance mean_draws low high deployed z p_normal p_draws p_draws_corrected n"
    return Finding("controls.random", rows(records, columns), whole.n, "J4, P1", {"draws": draws, "seed": seed})


def selector_intervals(
    arms: Arms, router: pd.DataFrame, scores: pd.DataFrame, *, against: str, **bootstrap: Any
) -> Finding:
    """Paired intervals of every selector minus ``against`` at the same quota (J5)."""
    table = Assignment(arms, router)
    units, base = cluster_numbers(table.router), table.assigned(scores[against])
    records = []
    for selector in scores.columns.drop(against):
        other = table.assigned(scores[selector])
        for quantity in ("ha", "metric"):
            pair = np.stack([table.chosen(quantity, other), table.chosen(quantity, base)])
            defined = np.isfinite(pair).all(axis=0)
            numbers = np.unique(units[defined], return_inverse=True)[1]
            found = paired_interval(*pair[:, defined], clusters=numbers, **bootstrap)
            names = {"selector": selector, "against": against, "quantity": quantity}
            records.append({**names, **interval_fields(found), "reason": found.reason})
    return Finding("controls.selectors", pd.DataFrame(records), table.n, "J5", {"against": against, **bootstrap})


def overlap(arms: Arms, router: pd.DataFrame, scores: pd.DataFrame) -> Finding:
    """Number of rolled-back cases that two selectors share (J6)."""
    table = Assignment(arms, router)
    hard = {name: table.assigned(scores[name]) == 0 for name in scores.columns}
    records = [
        (first, second, int((hard[first] & hard[second]).sum()), table.sizes["hard"])
        for first, second in combinations(hard, 2)
    ]
    return Finding("controls.overlap", rows(records, "first second shared hard"), table.n, "J6")


def attribution(
    arms: Arms, router: pd.DataFrame, reference: pd.DataFrame, scores: pd.DataFrame | None = None
) -> Finding:
    """The share of the HA reduction that as many random rollbacks, or another selector, give (P2, J11).

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
        reason = f"the router does not reduce HA ({before:.4f} to {after:.4f}), so no share is defined"
        return {**record, "share": np.nan, "sentence": reason, "reason": reason}
    share = (before - ha) / cut
    what = "comes from the number of rollbacks alone" if control == "random" else f"also results with {control}"
    sentence = f"{share:.0%} of the HA reduction ({before:.4f} to {after:.4f}, n={n}) {what} ({ha:.4f})"
    return {**record, "share": share, "sentence": sentence, "reason": ""}


def substitution(arms: Arms, router: pd.DataFrame, values: pd.Series, *, cut_low: float, cut_high: float) -> Finding:
    """Another coordinate in place of the router's: at the same quota, and with its own cut-points (J9)."""
    table = Assignment(arms, router)
    native = buckets_at(values.reindex(table.cases).to_numpy(float), cut_low, cut_high)[0]
    records = []
    for kind, assigned in (("matched", table.assigned(values)), ("native", native)):
        sizes = {name: int((assigned == number).sum()) for number, name in enumerate(RANKED)}
        means = {**table.means(assigned), "ba": table.mean("ba", assigned)}
        records.append({"kind": kind, "n": table.n, **sizes, **means})
    made = {"cut_low": cut_low, "cut_high": cut_high}
    return Finding("controls.substitution", pd.DataFrame(records), table.n, "J9", made)


# ---- what the page shows ----


def _lead(chance: Finding, share: Finding) -> str:
    row, draws = chance.row(scope="all", quantity="ha"), int(chance.made["draws"])
    better = round(float(row["p_draws"]) * draws)
    return (
        f"{share.table['sentence'].iloc[0]}. Random assignment at the same bucket sizes and actions gives HA "
        f"{number(row['mean_exact'])} (exact mean; 95 % of {draws} draws in [{number(row['low'])}, "
        f"{number(row['high'])}]), the router {number(row['deployed'])}; {better} of {draws} draws are at or below it "
        f"(p = {number(row['p_draws_corrected'])}, n = {chance.n})."
    )


def _matched_table(matched: Finding) -> Table:
    frame = matched.table[matched.table["scope"] == "all"].reset_index(drop=True)
    sizes = "/".join(str(int(frame.iloc[0][bucket])) for bucket in RANKED)
    real = [at for at, name in enumerate(frame["selector"]) if not name.startswith("oracle") and name != "m0"]
    caption = (
        f"Buckets hard/mid/low: {sizes}. Every row rolls back the same number of cases and gives the same actions; "
        "only the score that ranks the cases differs. Oracles use labels: each is optimal only for its own target. "
        f"{_P_CAPTION} n = {matched.n}."
    )
    shown = frame.assign(selector=frame["selector"].replace(_NAMES)).astype(object)
    shown.loc[frame["selector"].isin(["random", "m0"]), "p_random_corrected"] = DASH
    shown.loc[frame["selector"].isin(["deployed", "random", "m0"]), "overlap_hard"] = DASH
    cells = shown.to_dict("records")
    heads = {"p_random_corrected": "p (random ≤)", "overlap_hard": "rolled back in common"}
    return show(
        "matched", "Selectors at the router's quota", cells,
        "selector metric ha steps p_random_corrected overlap_hard",
        heads=heads, caption=caption, paper="tab:app-matched-mnm", bold=best(cells, "ha", real, min),
    )  # fmt: skip


def _group_table(matched: Finding, chance: Finding, own: str) -> Table:
    cells: list[dict[str, Cell]] = []
    for scope, part in matched.table.groupby("scope", sort=False):
        ha = part.set_index("selector")["ha"]
        if scope == "all" or own not in ha.index:
            continue
        mine = part[part["selector"] == own].iloc[0]
        drawn = chance.table[(chance.table["scope"] == scope) & (chance.table["quantity"] == "ha")]
        random: Cell = float(ha["random"])
        for mean, low, high in drawn[["mean_exact", "low", "high"]].to_numpy():
            random = Estimate(mean, low, high)
        row: dict[str, Cell] = {"scope": str(scope), "n": int(part["n"].max()), "hard": int(mine["hard"])}
        row |= {"own": float(ha[own]), "random": random, "oracle": float(ha.get("oracle HA", np.nan))}
        cells.append({**row, "p": float(mine["p_random_corrected"]) if len(drawn) else DASH})
    heads = {
        "hard": "rolled back", "own": f"{own} HA", "random": "random HA [95 %]", "oracle": "oracle HA",
        "p": "p (random ≤)",
    }  # fmt: skip
    caption = f"As many rollbacks in each group; pooled is the plain mean over groups. {_P_CAPTION}"
    return show("matched-by-group", "By group", cells, heads=heads, caption=caption, paper="tab:app-matched-acdc")

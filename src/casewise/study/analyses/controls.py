"""Was it the signal, or only the number of rollbacks? Every selector at the router's own quota.

A router sends n_hard cases to rollback, n_mid to the middle action, the rest to the low one. A matched control gives
the same actions to the same *numbers* of cases, chosen by another score, or by chance. ``arms[bucket]`` holds what
every case would have got in that bucket, so a control is a choice of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from casewise.core.errors import BadInput, Refused
from casewise.core.seeds import RESAMPLING_SEED
from casewise.render.ink import FAINT, HARM, MUTED, OURS, SOURCE, Picture, canvas, inked
from casewise.render.tables import DASH, Cell, Column, Estimate, Table, lowest, number, rows_of, table
from casewise.study.assignment import BUCKETS, QUANTITIES, Arms, Assignment
from casewise.study.finding import Finding, Section, rows
from casewise.study.statistics.chance import Floats, chance_draws
from casewise.study.statistics.resample import RESAMPLES, clusters_of, paired_interval
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, step_one

COORDINATES = ("delta", "regions", "largest")  # what routers of the paper and the default read
_P_CAPTION = "p is (k + 1) / (B + 1) when k of B random assignments have an HA at or below the row's."


def section(study: Study) -> Section:
    """tab:app-matched-mnm, tab:app-matched-acdc, hard-bucket overlap, attribution."""
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; matched quotas need a router with buckets"
        return Section("controls", "Signal or quota?", missing={"matched-quota controls": reason})
    arms, router, scores = study.arms, study.router, study.scores
    matched, chance, share = matched_of(study), chance_of(study), attribution_of(study)
    own = str(scores.columns[0])
    pairs = selector_intervals(arms, router, scores, against=own, **study.bootstrap)
    shared = overlap(arms, router, scores)
    tables = [_matched_table(study, matched), _attribution_table(study, share)]
    if study.groups:
        tables.append(_group_table(matched, chance, own))
    tables += [_pair_table(study, pairs, own), _overlap_table(shared)]
    swapped = substitutions_of(study)
    if len(swapped.table):
        tables.append(_substitution_table(study, swapped))
    found = [matched, chance, pairs, shared, share, *((swapped,) if len(swapped.table) else ())]
    if study.extras.substitute:
        stand_in = substitute_of(study)
        tables.append(_substitute_table(study, stand_in))
        found.append(stand_in)
    picture = _picture(study, matched, chance)
    return Section(
        "controls", "Signal or quota?", _lead(chance, share), tuple(tables), (picture,), tuple(found), matched.notes
    )


@once
def matched_of(study: Study) -> Finding:
    """Every selector at the router's quota."""
    options: dict[str, Any] = {"by_group": bool(study.groups), "seed": study.seed}
    return matched_controls(study.arms, study.router, study.scores, **options)


@once
def chance_of(study: Study) -> Finding:
    """Random assignment at the router's quota."""
    return random_control(study.arms, study.router, by_group=bool(study.groups), seed=study.seed)


@once
def attribution_of(study: Study) -> Finding:
    """What the HA cut is due to."""
    return attribution(study.arms, study.router, study.uncontrolled, study.scores)


@once
def substitutions_of(study: Study) -> Finding:
    """Other coordinates in the router's place, with cut-points that the same rule fits on the calibration cases."""
    tables, n = [], len(study.router)
    for name in COORDINATES:
        if name == study.coordinate or name not in study.outcomes.columns or name not in study.holdout.columns:
            continue
        pool, values = (step_one(frame, name) for frame in (study.holdout, study.outcomes))
        if pool.notna().all() and values.notna().all():
            low, high = (float(cut) for cut in np.percentile(pool, study.percentiles))
            found = substitution(study.arms, study.router, values, cut_low=low, cut_high=high).table
            tables.append(found.assign(coordinate=name, cut_low=low, cut_high=high))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    return Finding("controls.substitution", table, n, "J9", {"percentiles": list(study.percentiles)})


@once
def substitute_of(study: Study) -> Finding:
    """Matched controls in which every kept case gets what one other method deployed, as where no ladder was recorded.

    A rolled-back case gets M0. Such arms do not reproduce the deployed router, and the finding says so.
    """
    name = study.extras.substitute
    arms = {"hard": study.methods[study.source], "mid": study.methods[name], "low": study.methods[name]}
    options: dict[str, Any] = {"by_group": bool(study.groups), "seed": study.seed, "substitute": True}
    found = matched_controls(arms, study.router, study.scores, **options)
    return replace(found, name="controls.substitute", made={**found.made, "kept_cases_get": name})


def _substitute_table(study: Study, found: Finding) -> Table:
    columns = (
        Column("scope", "Group", text=True),
        Column("selector", "Selector", text=True),
        Column("hard", "rolled back"),
        Column("metric", study.metric, 4),
        Column("ha", "HA", 4),
        Column("p_random_corrected", "p (random ≤)"),
        Column("faithful", "rolls back the router's cases"),
        Column("n", "n"),
    )
    frame = found.table.assign(selector=[_name(str(name)) for name in found.table["selector"]]).astype(object)
    frame = frame.where(frame.notna(), "")
    caption = (
        f"Does not reproduce the deployed router: a kept case gets what {study.title(study.extras.substitute)} "
        f"deployed, whatever its bucket. “pooled” is the plain mean over groups. {_P_CAPTION}"
    )
    rows = rows_of(frame, columns)
    return table("substitute", "With substitute arms", columns, rows, caption=caption, collapsed=True)


def _substitution_table(study: Study, swapped: Finding) -> Table:
    columns = (
        Column("coordinate", "Coordinate", text=True),
        Column("kind", "Quota", text=True),
        Column("hard", "rolled back"),
        Column("metric", study.metric, 4),
        Column("ha", "HA", 4),
        Column("ba", "BA", 4),
        Column("steps", "Steps"),
        Column("n", "n"),
    )
    caption = (
        f"Another signal in the place of {study.coordinate}: matched, with as many cases in each bucket; native, with "
        "cut-points of its own, fitted on the calibration cases by the same rule."
    )
    rows = rows_of(swapped.table, columns)
    return table("substitution", "Another coordinate in its place", columns, rows, caption=caption, collapsed=True)


def _lead(chance: Finding, share: Finding) -> str:
    """The attribution line, and where the router lies among random assignments."""
    row = chance.row(scope="all", quantity="ha")
    draws = int(chance.made["draws"])
    better = round(float(row["p_draws"]) * draws)
    return (
        f"{share.table['sentence'].iloc[0]}. Random assignment at the same bucket sizes and actions gives HA "
        f"{number(row['mean_exact'])} (exact mean; 95 % of {draws} draws in [{number(row['low'])}, "
        f"{number(row['high'])}]), the router {number(row['deployed'])}; {better} of {draws} draws are at or below it "
        f"(p = {number(row['p_draws_corrected'])}, n = {chance.n})."
    )


def _matched_table(study: Study, matched: Finding) -> Table:
    frame = matched.table[matched.table["scope"] == "all"]
    first = frame.iloc[0]
    sizes = "/".join(str(int(first[bucket])) for bucket in ("hard", "mid", "low"))
    columns = (
        Column("selector", f"Selector (buckets {sizes})", text=True),
        Column("metric", study.metric, 4),
        Column("ha", "HA", 4),
        Column("steps", "Steps"),
        Column("p_random_corrected", "p (random ≤)"),
        Column("overlap_hard", "rolled back in common"),
    )
    rows: list[dict[str, Cell]] = []
    for record in frame.to_dict("records"):
        is_reference = record["selector"] in ("deployed", "random", "m0")
        row: dict[str, Cell] = {"selector": _name(str(record["selector"]))}
        row |= {key: float(record[key]) for key in ("metric", "ha", "steps")}
        is_drawn = record["selector"] not in ("random", "m0")
        row["p_random_corrected"] = float(record["p_random_corrected"]) if is_drawn else DASH
        row["overlap_hard"] = DASH if is_reference else int(record["overlap_hard"])
        rows.append(row)
    real = [at for at, row in enumerate(frame["selector"]) if not str(row).startswith("oracle") and row != "m0"]
    caption = (
        "Every row rolls back the same number of cases and gives the same actions; only the score that ranks the cases "
        f"differs. Oracles see labels: each bounds only what it optimizes. {_P_CAPTION} n = {matched.n}."
    )
    return table(
        "matched", "Selectors at the router's quota", columns, rows, caption=caption, paper="tab:app-matched-mnm",
        bold=lowest(rows, "ha", among=real),
    )  # fmt: skip


def _name(selector: str) -> str:
    return {"deployed": "as deployed", "random": "random (exact mean)", "m0": "M0 (no adaptation)"}.get(
        selector, selector
    )


def _attribution_table(study: Study, share: Finding) -> Table:
    columns = (
        Column("control", "Control", text=True),
        Column("ha_reference", f"HA of {study.reference}", 4),
        Column("ha_control", "HA of the control", 4),
        Column("ha_router", "HA of the router", 4),
        Column("share", "share of the cut (%)", 1, percent=True),
        Column("n", "n"),
    )
    caption = "What part of the router's HA cut the same quota, filled by another score or by chance, would have made."
    rows = rows_of(share.table, columns)
    return table("attribution", "What the cut is due to", columns, rows, caption=caption, collapsed=True)


def _group_table(matched: Finding, chance: Finding, own: str) -> Table:
    columns = (
        Column("scope", "Group", text=True),
        Column("n", "n"),
        Column("hard", "rolled back"),
        Column("own", f"{own} HA"),
        Column("random", "random HA [95 %]"),
        Column("oracle", "oracle HA"),
        Column("p", "p (random ≤)"),
    )
    rows: list[dict[str, Cell]] = []
    for scope, part in matched.table.groupby("scope", sort=False):
        by_selector = part.set_index("selector")
        if scope == "all" or own not in by_selector.index:
            continue
        row: dict[str, Cell] = {
            "scope": str(scope),
            "n": int(part["n"].max()),
            "hard": int(by_selector.loc[own, "hard"]),
        }
        row["own"], row["oracle"] = (_ha_of(by_selector, name) for name in (own, "oracle HA"))
        row |= _chance_cells(chance, str(scope), by_selector, own)
        rows.append(row)
    caption = f"Quota matched inside each group; pooled is the plain mean over groups. {_P_CAPTION}"
    return table("matched-by-group", "By group", columns, rows, caption=caption, paper="tab:app-matched-acdc")


def _ha_of(by_selector: pd.DataFrame, name: str) -> float | None:
    return float(by_selector.loc[name, "ha"]) if name in by_selector.index else None


def _chance_cells(chance: Finding, scope: str, by_selector: pd.DataFrame, own: str) -> dict[str, Cell]:
    found = chance.table[(chance.table["scope"] == scope) & (chance.table["quantity"] == "ha")]
    if found.empty:
        return {"random": float(by_selector.loc["random", "ha"]), "p": DASH}
    row = found.iloc[0]
    estimate = Estimate(float(row["mean_exact"]), float(row["low"]), float(row["high"]))
    return {"random": estimate, "p": float(by_selector.loc[own, "p_random_corrected"])}


def _pair_table(study: Study, pairs: Finding, own: str) -> Table:
    columns = (
        Column("selector", "Selector", text=True),
        Column("quantity", "Quantity", text=True),
        Column("estimate", "difference [95 %]", 4, signed=True, interval=("low", "high")),
        Column("p_below", "P(<0)"),
        Column("separated", "excludes 0"),
        Column("p_flip", "sign-flip p"),
        Column("n", "n"),
    )
    frame = pairs.table.assign(quantity=pairs.table["quantity"].map({"ha": "HA", "metric": study.metric}))
    caption = f"Each selector minus {own} at the same quota; B = {study.resamples}, seed {study.seed}."
    rows = rows_of(frame, columns)
    return table("selector-intervals", "Selector against selector", columns, rows, caption=caption, collapsed=True)


def _overlap_table(shared: Finding) -> Table:
    columns = (
        Column("first", "Selector", text=True),
        Column("second", "Selector ", text=True),
        Column("shared", "rolled back by both"),
        Column("hard", "rolled back by each"),
    )
    rows = rows_of(shared.table, columns)
    caption = "Two selectors with similar HA may still choose different cases."
    return table("overlap", "Overlap of the hard buckets", columns, rows, caption=caption, collapsed=True)


def _picture(study: Study, matched: Finding, chance: Finding) -> Picture:
    frame = matched.table[(matched.table["scope"] == "all") & ~matched.table["selector"].isin(["random", "m0"])]
    row = chance.row(scope="all", quantity="ha")
    reference = float(study.uncontrolled["ha"].mean())
    figure = draw_quota(
        frame, low=float(row["low"]), high=float(row["high"]), mean=float(row["mean_exact"]), reference=reference,
        name=study.reference,
    )  # fmt: skip
    caption = (
        f"The grey band holds 95 % of random assignments at the router's quota, its line their exact mean; dotted: "
        f"{study.reference}. A selector inside the band is no better than chance. n = {matched.n}."
    )
    return Picture("quota", "Selectors against chance", figure, caption)


def check_licence(arms: Arms, router: pd.DataFrame, *, digits: int = 4) -> dict[str, float]:
    """Refuse a counterfactual that does not reproduce the deployed router's own row to printed precision (J1)."""
    table = Assignment(arms, router)
    replayed = table.means(table.buckets)
    wanted = {name: mean_or_nan(table.router[column]) for name, column in QUANTITIES.items()}
    wrong = [name for name in QUANTITIES if round(replayed[name], digits) != round(wanted[name], digits)]
    if wrong:
        raise Refused(
            f"the arms do not reproduce the deployed router: expected {wanted}, got {replayed} ({', '.join(wrong)} "
            f"differ); build the arms from the same archive, or pass substitute=True and label it so"
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
    for scope, part in whole.scopes(by_group):
        records.extend(_scope_rows(scope, part, scores, draws, seed))
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
    notes = ("does not reproduce the deployed router: retained cases get a substitute action",) if substitute else ()
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
    for scope, part in whole.scopes(by_group):
        for quantity in ("ha", "metric"):
            moments = part.moments(quantity)
            drawn = chance_draws(part.arm_values(quantity), part.buckets, draws, seed, part.units)
            observed = part.mean(quantity, part.buckets)
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
                    "n": part.n,
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


def draw_quota(selectors: pd.DataFrame, *, low: float, high: float, mean: float, reference: float, name: str) -> Figure:
    """``selectors``: selector, ha at the deployed quota; the band is 95 % of random assignments, dotted is fixed-K."""
    frame = selectors.sort_values("ha", ascending=False, kind="stable").reset_index(drop=True)
    with inked():
        figure, axes = canvas(6.9, 0.9 + 0.3 * max(len(frame), 4))
        axis = axes[0, 0]
        axis.axvspan(low, high, color=FAINT, linewidth=0)
        axis.axvline(mean, color=MUTED, linewidth=1.2)
        axis.axvline(reference, color=HARM, linewidth=1.2, linestyle=(0, (1, 2)))
        for place, row in frame.iterrows():
            axis.plot(row["ha"], place, "o", color=_color(str(row["selector"])), markersize=6.5)
        axis.set_yticks(range(len(frame)), list(frame["selector"]))
        axis.set_ylim(-0.7, len(frame) - 0.3)
        axis.set_xlabel("HA at the same bucket sizes and actions")
        axis.set_xlim(left=-0.03 * axis.get_xlim()[1])
        axis.annotate("random", (mean, len(frame) - 0.3), ha="center", va="bottom", fontsize=8, annotation_clip=False)
        axis.annotate(name, (reference, len(frame) - 0.3), ha="center", va="bottom", fontsize=8, annotation_clip=False)
        axis.grid(visible=False, axis="y")
    return figure


def _color(selector: str) -> str:
    if selector == "deployed":
        return OURS
    return SOURCE if selector.startswith("oracle") or selector == "m0" else MUTED

"""Was it the signal, or only the number of rollbacks? Matched-quota controls and the attribution line (J, P1, P2)."""

from __future__ import annotations

import pandas as pd

from casewise.render.cells import DASH, Cell, Estimate, number
from casewise.render.tables import Column, Table, lowest, rows_of, table
from casewise.report.figures.quota import draw_quota
from casewise.report.material import Material
from casewise.report.section import Picture, Section
from casewise.study.controls import overlap, selector_intervals
from casewise.study.finding import Finding

_P_CAPTION = "p is (k + 1) / (B + 1) when k of B random assignments have an HA at or below the row's."


def controls(material: Material) -> Section:
    """tab:app-matched-mnm, tab:app-matched-acdc, hard-bucket overlap, attribution (P 13, 14)."""
    if not material.is_router:
        reason = f"the policy is a {material.controller.name}; matched quotas need a router with buckets"
        return Section("controls", "Signal or quota?", missing={"matched-quota controls": reason})
    arms, router, scores = material.arms, material.router, material.scores
    matched, chance, share = material.matched, material.chance, material.attribution
    own = str(scores.columns[0])
    pairs = selector_intervals(arms, router, scores, against=own, resamples=material.resamples, seed=material.seed)
    shared = overlap(arms, router, scores)
    tables = [_matched_table(material, matched), _attribution_table(material, share)]
    if material.groups:
        tables.append(_group_table(matched, chance, own))
    tables += [_pair_table(material, pairs, own), _overlap_table(shared)]
    found = (matched, chance, pairs, shared, share)
    picture = _picture(material, matched, chance)
    return Section("controls", "Signal or quota?", lead(chance, share), tuple(tables), (picture,), found, matched.notes)


def lead(chance: Finding, share: Finding) -> str:
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


def _matched_table(material: Material, matched: Finding) -> Table:
    frame = matched.table[matched.table["scope"] == "all"]
    first = frame.iloc[0]
    sizes = "/".join(str(int(first[bucket])) for bucket in ("hard", "mid", "low"))
    columns = (
        Column("selector", f"Selector (buckets {sizes})", text=True),
        Column("metric", material.metric, 4),
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


def _attribution_table(material: Material, share: Finding) -> Table:
    columns = (
        Column("control", "Control", text=True),
        Column("ha_reference", f"HA of {material.reference}", 4),
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
        row |= _chance_of(chance, str(scope), by_selector, own)
        rows.append(row)
    caption = f"Quota matched inside each group; pooled is the plain mean over groups. {_P_CAPTION}"
    return table("matched-by-group", "By group", columns, rows, caption=caption, paper="tab:app-matched-acdc")


def _ha_of(by_selector: pd.DataFrame, name: str) -> float | None:
    return float(by_selector.loc[name, "ha"]) if name in by_selector.index else None


def _chance_of(chance: Finding, scope: str, by_selector: pd.DataFrame, own: str) -> dict[str, Cell]:
    found = chance.table[(chance.table["scope"] == scope) & (chance.table["quantity"] == "ha")]
    if found.empty:
        return {"random": float(by_selector.loc["random", "ha"]), "p": DASH}
    row = found.iloc[0]
    estimate = Estimate(float(row["mean_exact"]), float(row["low"]), float(row["high"]))
    return {"random": estimate, "p": float(by_selector.loc[own, "p_random_corrected"])}


def _pair_table(material: Material, pairs: Finding, own: str) -> Table:
    columns = (
        Column("selector", "Selector", text=True),
        Column("quantity", "Quantity", text=True),
        Column("estimate", "difference [95 %]", 4, signed=True, interval=("low", "high")),
        Column("p_below", "P(<0)"),
        Column("separated", "excludes 0"),
        Column("p_flip", "sign-flip p"),
        Column("n", "n"),
    )
    frame = pairs.table.assign(quantity=pairs.table["quantity"].map({"ha": "HA", "metric": material.metric}))
    caption = f"Each selector minus {own} at the same quota; B = {material.resamples}, seed {material.seed}."
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


def _picture(material: Material, matched: Finding, chance: Finding) -> Picture:
    frame = matched.table[(matched.table["scope"] == "all") & ~matched.table["selector"].isin(["random", "m0"])]
    row = chance.row(scope="all", quantity="ha")
    reference = float(material.uncontrolled["ha"].mean())
    figure = draw_quota(
        frame, low=float(row["low"]), high=float(row["high"]), mean=float(row["mean_exact"]), reference=reference,
        name=material.reference,
    )  # fmt: skip
    caption = (
        f"The grey band holds 95 % of random assignments at the router's quota, its line their exact mean; dotted: "
        f"{material.reference}. A selector inside the band is no better than chance. n = {matched.n}."
    )
    return Picture("quota", "Selectors against chance", figure, caption)

"""Whom did it help, whom did it hurt? The decomposition that the mean hides (M1-M3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from casewise.judge.outcomes import deployed
from casewise.render.cells import DASH, Cell, Pair, Undefined, number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.replay import replay
from casewise.report.material import Material
from casewise.report.section import Section
from casewise.study.finding import Finding
from casewise.study.helphurt import help_hurt, net_helped, weaker_source


def helphurt(material: Material) -> Section:
    """Helped, hurt, rolled back and unchanged for the uncontrolled budget and for the policy, overall and by group."""
    shown = (material.reference, material.ours)
    whole = help_hurt(material.methods)
    groups = {group: _group(material, group, shown) for group in material.groups}
    found: list[Finding] = [whole, *groups.values()]
    tables = [_table(material, "helphurt", "Helped and hurt", {"all cases": _only(whole, shown)}, "tab:helphurt")]
    if groups:
        parts = {group: _records(one) for group, one in groups.items()}
        tables.append(_table(material, "helphurt-by-group", "Helped and hurt by group", parts, "tab:supp-helphurt"))
    tables.append(_table(material, "helphurt-all", "Every method", {"all cases": _records(whole)}, "", collapsed=True))
    if material.is_router:
        weaker, helped = weaker_source(material.router), net_helped(_on_holdout(material))
        found += [weaker, helped]
        tables.append(_weaker_table(material, weaker))
    return Section(
        "helphurt", "Helped and hurt", _lead(material, whole), tuple(tables), (), tuple(found), _notes(found)
    )


def _on_holdout(material: Material) -> pd.DataFrame:
    """What the policy deploys on the cases that it was fitted on: a go or no-go before any deployment (M3)."""
    holdout = material.calibration
    return deployed(material.holdout, replay(holdout, material.controller), archive=holdout)


def _group(material: Material, group: str, shown: tuple[str, ...]) -> Finding:
    found = help_hurt({name: material.of_group(group)[name] for name in shown})
    return replace(found, name=f"{found.name}[{group}]")


def _notes(found: list[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for one in found for note in one.notes))


def _lead(material: Material, whole: Finding) -> str:
    before, after = whole.row(method=material.reference), whole.row(method=material.ours)
    return (
        f"{material.reference} makes {int(before['hurt'])} of {int(before['n'])} cases worse and "
        f"{int(before['helped'])} better; the mean change is {number(before['mean_change'], signed=True)}. Under the "
        f"{material.title(material.ours)} {int(after['hurt'])} are worse, {int(after['helped'])} better and "
        f"{int(after['rolled_back'])} rolled back."
    )


def _records(finding: Finding) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in finding.table.to_dict("records")]


def _only(finding: Finding, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [row for row in _records(finding) if row["method"] in names]


def _table(
    material: Material,
    id: str,
    title: str,
    parts: dict[str, list[dict[str, Any]]],
    paper: str,
    *,
    collapsed: bool = False,
) -> Table:
    columns = (
        Column("split", "Split", text=True),
        Column("method", "Method", text=True),
        Column("helped", "helped % (mean Δ⁺)"),
        Column("hurt", "hurt % (mean Δ⁻)"),
        Column("rolled_back", "rolled back %", 1, percent=True),
        Column("unchanged", "unchanged %", 1, percent=True),
        Column("mean_change", "overall mean Δ", signed=True),
        Column("n", "n"),
    )
    rows: list[dict[str, Cell]] = []
    bold, rules = set(), set()
    for split, records in parts.items():
        rules.add(len(rows))
        for row in records:
            if row["method"] == material.ours and row["helped"] != row["hurt"]:
                bold.add((len(rows), "helped" if row["helped"] > row["hurt"] else "hurt"))
            rows.append(_row(material, split, row))
    caption = (
        f"Δ is {material.metric} of what is deployed minus that of M0, without tolerance; shares are of all cases. "
        "Bold marks the larger of helped and hurt on the policy's rows."
    )
    return table(id, title, columns, rows, caption=caption, paper=paper, rules=rules, bold=bold, collapsed=collapsed)


def _row(material: Material, split: str, row: dict[str, Any]) -> dict[str, Cell]:
    never = row["method"].startswith("fixed-") or row["method"] in ("m0",)
    return {
        "split": split,
        "method": material.title(row["method"]),
        "helped": _class(row["share_helped"], row["mean_helped"]),
        "hurt": _class(row["share_hurt"], row["mean_hurt"]),
        "rolled_back": DASH if never else row["share_rolled_back"],
        "unchanged": row["share_unchanged"],
        "mean_change": row["mean_change"],
        "n": int(row["n"]),
    }


def _class(share: float, mean: float) -> Cell:
    if share != share:
        return Undefined(0)
    return 0.0 if share == 0 else Pair(100 * share, mean, "{} ({})", first_digits=1, second_signed=True)


def _weaker_table(material: Material, weaker: Finding) -> Table:
    columns = (
        Column("side", "Cases", text=True),
        Column("n", "n"),
        Column("metric_source", f"mean {material.metric} of M0"),
    )
    caption = "Does the router roll back the cases on which the source model itself is weak?"
    return table("weaker-source", "Weaker source?", columns, rows_of(weaker.table, columns), caption=caption)

"""Who was helped and who was hurt: the mean hides it, the counts do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from casewise.judge.outcomes import deployed
from casewise.render.tables import DASH, Cell, Column, Pair, Table, Undefined, number, rows_of, table
from casewise.replay import replay
from casewise.study.finding import Finding, Section, notes_of, rows
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan


def section(study: Study) -> Section:
    """Helped, hurt, rolled back and unchanged for the uncontrolled budget and for the policy, overall and by group."""
    shown = (study.reference, study.ours)
    whole = help_hurt(study.methods)
    groups = {group: _group(study, group, shown) for group in study.groups}
    found: list[Finding] = [whole, *groups.values()]
    tables = [_table(study, "helphurt", "Helped and hurt", {"all cases": _only(whole, shown)}, "tab:helphurt")]
    if groups:
        parts = {group: _records(one) for group, one in groups.items()}
        tables.append(_table(study, "helphurt-by-group", "Helped and hurt by group", parts, "tab:supp-helphurt"))
    tables.append(_table(study, "helphurt-all", "Every method", {"all cases": _records(whole)}, "", collapsed=True))
    if study.is_router:
        weaker, helped = weaker_source(study.router), net_helped(_on_holdout(study))
        found += [weaker, helped]
        tables.append(_weaker_table(study, weaker))
    return Section(
        "helphurt", "Helped and hurt", _lead(study, whole), tuple(tables), (), tuple(found), notes_of(*found)
    )


def _on_holdout(study: Study) -> pd.DataFrame:
    """What the policy deploys on the cases that it was fitted on: a go or no-go before any deployment (M3)."""
    holdout = study.calibration
    return deployed(study.holdout, replay(holdout, study.controller), archive=holdout, controller=study.controller)


def _group(study: Study, group: str, shown: tuple[str, ...]) -> Finding:
    found = help_hurt({name: study.of_group(group)[name] for name in shown})
    return replace(found, name=f"{found.name}[{group}]")


def _lead(study: Study, whole: Finding) -> str:
    before, after = whole.row(method=study.reference), whole.row(method=study.ours)
    return (
        f"{study.reference} makes {int(before['hurt'])} of {int(before['n'])} cases worse and "
        f"{int(before['helped'])} better; the mean change is {number(before['mean_change'], signed=True)}. Under the "
        f"{study.title(study.ours)} {int(after['hurt'])} are worse, {int(after['helped'])} better and "
        f"{int(after['rolled_back'])} rolled back."
    )


def _records(finding: Finding) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in finding.table.to_dict("records")]


def _only(finding: Finding, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [row for row in _records(finding) if row["method"] in names]


def _table(
    study: Study,
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
        Column("helped", "helped % (mean Δ⁺)", percent=True),
        Column("hurt", "hurt % (mean Δ⁻)", percent=True),
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
            if row["method"] == study.ours and row["helped"] != row["hurt"]:
                bold.add((len(rows), "helped" if row["helped"] > row["hurt"] else "hurt"))
            rows.append(_row(study, split, row))
    caption = (
        f"Δ is {study.metric} of what is deployed minus that of M0, without tolerance; shares are of all cases. "
        "Bold marks the larger of helped and hurt on the policy's rows."
    )
    return table(id, title, columns, rows, caption=caption, paper=paper, rules=rules, bold=bold, collapsed=collapsed)


def _row(study: Study, split: str, row: dict[str, Any]) -> dict[str, Cell]:
    never = row["method"] in {study.source, *study.budgets}
    return {
        "split": split,
        "method": study.title(row["method"]),
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
    return 0.0 if share == 0 else Pair(share, mean, "{} ({})", first_digits=1, second_signed=True)


def _weaker_table(study: Study, weaker: Finding) -> Table:
    columns = (
        Column("side", "Cases", text=True),
        Column("n", "n"),
        Column("metric_source", f"mean {study.metric} of M0"),
    )
    caption = "Does the router roll back the cases on which the source model itself is weak?"
    return table("weaker-source", "Weaker source?", columns, rows_of(weaker.table, columns), caption=caption)


CLASSES = ("helped", "hurt", "rolled_back", "unchanged")


def side(frame: pd.DataFrame) -> pd.Series:
    """Each case's class: rolled back by decision; then helped above zero, hurt below, else unchanged; no tolerance."""
    change, rolled_back = frame["change"], frame["rolled_back"].astype(bool)
    named = np.select(
        [change.isna(), rolled_back, change > 0, change < 0],
        ["undefined", "rolled_back", "helped", "hurt"],
        "unchanged",
    )
    return pd.Series(named, index=frame.index)


def help_hurt(methods: Mapping[str, pd.DataFrame]) -> Finding:
    """Counts, shares of all cases and mean change of each class, one row per method (M1).

    change = metric(deployed) - metric(M0); the overall mean is p_helped * mean_helped + p_hurt * mean_hurt (Q7).
    """
    records = [{"method": name, **_counts(frame)} for name, frame in methods.items()]
    shares = [f"share_{name}" for name in CLASSES]
    columns = ("method", "n", "undefined", *CLASSES, *shares, "mean_helped", "mean_hurt", "mean_change")
    n = max((record["n"] for record in records), default=0)
    return Finding("helphurt", rows(records, columns), int(n), "M1")


def _counts(frame: pd.DataFrame) -> dict[str, Any]:
    sides = side(frame)
    defined = frame[sides != "undefined"]
    n, counts = len(defined), {name: int((sides == name).sum()) for name in CLASSES}
    return {
        "n": n,
        "undefined": len(frame) - n,
        **counts,
        **{f"share_{name}": count / n if n else float("nan") for name, count in counts.items()},
        "mean_helped": mean_or_nan(frame.loc[sides == "helped", "change"]),
        "mean_hurt": mean_or_nan(frame.loc[sides == "hurt", "change"]),
        "mean_change": mean_or_nan(defined["change"]),
    }


def weaker_source(router: pd.DataFrame) -> Finding:
    """Are rolled-back cases those on which M0 was weaker to begin with? Mean M0 metric of both sides (M2)."""
    records = []
    for name, flag in (("rolled back", True), ("kept", False)):
        part = router[router["rolled_back"].astype(bool) == flag]
        reason = "" if part["metric_source"].notna().any() else f"no case was {name}"
        records.append(
            {"side": name, "n": len(part), "metric_source": mean_or_nan(part["metric_source"]), "reason": reason}
        )
    return Finding("helphurt.weaker_source", pd.DataFrame(records), len(router), "M2")


def net_helped(router: pd.DataFrame) -> Finding:
    """Go or no-go before deployment: are more kept cases of the labelled holdout helped than hurt (M3)?"""
    kept = router[~router["rolled_back"].astype(bool)]
    sides = side(kept)
    helped, hurt = int((sides == "helped").sum()), int((sides == "hurt").sum())
    reason = "" if len(kept) else "every case was rolled back, so nothing was kept to judge"
    go = helped > hurt
    table = pd.DataFrame([{"n": len(kept), "helped": helped, "hurt": hurt, "go": go, "reason": reason}])
    note = reason or f"{'go' if go else 'no-go'}: {helped} helped and {hurt} hurt of {len(kept)} kept holdout cases"
    return Finding("helphurt.net_helped", table, len(kept), "M3", notes=(note,), reason=reason)

"""Cases helped, hurt, rolled back and unchanged by each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from casewise.judge.outcomes import deployed
from casewise.render.tables import DASH, Cell, Column, PairCell, Table, number, undefined
from casewise.replay import replay
from casewise.study.finding import Finding, Section, notes_of, show
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan

CLASSES = ("helped", "hurt", "rolled_back", "unchanged")


def section(study: Study) -> Section:
    """tab:helphurt, tab:supp-helphurt: the full budget and the policy, overall and by group."""
    shown = [study.reference, study.ours]
    whole = help_hurt(study.methods)
    groups = {}
    for group in study.groups:
        one = help_hurt({name: study.of_group(group)[name] for name in shown})
        groups[group] = replace(one, name=f"{one.name}[{group}]")
    found: list[Finding] = [whole, *groups.values()]
    every = list(study.methods)
    tables = [_table(study, "helphurt", "Helped and hurt", {"all cases": whole}, shown, "tab:helphurt")]
    if groups:
        title = "Helped and hurt by group"
        tables.append(_table(study, "helphurt-by-group", title, groups, shown, "tab:supp-helphurt"))
    tables.append(replace(_table(study, "helphurt-all", "Every method", {"all cases": whole}, every), collapsed=True))
    if study.is_router:
        decided = replay(study.calibration, study.controller)
        known = deployed(study.holdout, decided, archive=study.calibration, controller=study.controller)
        weaker, helped = weaker_source(study.policy_rows), net_helped(known)
        found += [weaker, helped]
        caption = (
            "Metric of M0 in rolled-back and in kept cases: low in rolled-back ones if the router finds "
            "the cases on which the model is weak."
        )
        tables.append(show("weaker-source", "M0 of rolled-back and kept cases", weaker, caption=caption))
    before, after = whole.row(method=study.reference), whole.row(method=study.ours)
    lead = (
        f"{study.reference} makes {int(before['hurt'])} of {int(before['n'])} cases worse and {int(before['helped'])} "
        f"better; the mean change is {number(before['mean_change'], signed=True)}. Under the {study.title(study.ours)} "
        f"{int(after['hurt'])} are worse, {int(after['helped'])} better and {int(after['rolled_back'])} rolled back."
    )
    return Section("helphurt", "Helped and hurt", lead, tuple(tables), (), tuple(found), notes_of(*found))


def side(frame: pd.DataFrame) -> pd.Series:
    """The class of each case: rolled back by decision; then helped above zero, hurt below, else unchanged."""
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
    records: list[dict[str, Any]] = []
    for name, frame in methods.items():
        sides = side(frame)
        defined = frame[sides != "undefined"]
        n, counts = len(defined), {one: int((sides == one).sum()) for one in CLASSES}
        shares = {f"share_{one}": count / n if n else float("nan") for one, count in counts.items()}
        means = {f"mean_{one}": mean_or_nan(frame.loc[sides == one, "change"]) for one in ("helped", "hurt")}
        sizes = {"method": name, "n": n, "undefined": len(frame) - n}
        records.append({**sizes, **counts, **shares, **means, "mean_change": mean_or_nan(defined["change"])})
    n = max((int(record["n"]) for record in records), default=0)
    return Finding("helphurt", pd.DataFrame(records), n, "M1")


def weaker_source(router: pd.DataFrame) -> Finding:
    """Mean metric of M0 of rolled-back and of kept cases (M2)."""
    records = []
    for name, flag in (("rolled back", True), ("kept", False)):
        part = router[router["rolled_back"].astype(bool) == flag]
        reason = "" if part["metric_source"].notna().any() else f"no case was {name}"
        mean = mean_or_nan(part["metric_source"])
        records.append({"side": name, "n": len(part), "metric_source": mean, "reason": reason})
    return Finding("helphurt.weaker_source", pd.DataFrame(records), len(router), "M2")


def net_helped(router: pd.DataFrame) -> Finding:
    """Go or no-go before deployment: are more kept cases of the labelled holdout helped than hurt (M3)?"""
    kept = router[~router["rolled_back"].astype(bool)]
    sides = side(kept)
    helped, hurt = int((sides == "helped").sum()), int((sides == "hurt").sum())
    reason = "" if len(kept) else "every case was rolled back, so no kept case can be judged"
    go = helped > hurt
    table = pd.DataFrame([{"n": len(kept), "helped": helped, "hurt": hurt, "go": go, "reason": reason}])
    note = reason or f"{'go' if go else 'no-go'}: {helped} helped and {hurt} hurt of {len(kept)} kept holdout cases"
    return Finding("helphurt.net_helped", table, len(kept), "M3", notes=(note,), reason=reason)


def _table(
    study: Study, id: str, title: str, parts: Mapping[str, Finding], names: Sequence[str], paper: str = ""
) -> Table:
    cells: list[dict[str, Cell]] = []
    bold, rules = set(), set()
    for split, found in parts.items():
        rules.add(len(cells))
        for row in found.table[found.table["method"].isin(names)].to_dict("records"):
            if row["method"] == study.ours and row["helped"] != row["hurt"]:
                bold.add((len(cells), "helped" if row["helped"] > row["hurt"] else "hurt"))
            never = row["method"] in {study.source, *study.budgets}
            cells.append(
                {
                    "split": split,
                    "method": row["method"],
                    **{one: _class(row[f"share_{one}"], row[f"mean_{one}"]) for one in ("helped", "hurt")},
                    "rolled_back": DASH if never else row["share_rolled_back"],
                    "unchanged": row["share_unchanged"],
                    "mean_change": row["mean_change"],
                    "n": int(row["n"]),
                }
            )
    heads = {
        "helped": Column("helped", "helped % (mean change)", percent=True),
        "hurt": Column("hurt", "hurt % (mean change)", percent=True),
        "rolled_back": Column("rolled_back", "kept M0 %", 1, percent=True),
        "unchanged": Column("unchanged", "unchanged %", 1, percent=True),
    }
    caption = (
        f"Change: {study.metric} of what is deployed minus that of M0, without tolerance; shares are of all cases. "
        "Bold marks the larger of helped and hurt on the rows of the policy."
    )
    return show(id, title, cells, heads=heads, caption=caption, paper=paper, rules=rules, bold=bold)


def _class(share: float, mean: float) -> Cell:
    if share != share:
        return undefined(0)
    return 0.0 if share == 0 else PairCell(share, mean, "{} ({})", first_digits=1, second_signed=True)

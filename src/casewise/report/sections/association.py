"""Do the signals go with the harm, and do they rank the cases? (I)"""

from __future__ import annotations

from typing import Any

import pandas as pd

from casewise.render.cells import Cell, Estimate, Undefined, number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.figures.forest import draw_forest
from casewise.report.material import Material
from casewise.report.section import Picture, Section
from casewise.study.association import per_step, signal_signal, signal_summary
from casewise.study.finding import Finding


def association(material: Material) -> Section:
    """tab:signal-ha, tab:app-clustered-ci, tab:app-perstep, tab:app-auroc (P 2, 17, 18, 19)."""
    pooled, ranked = material.association, material.ranking
    steps = per_step(material.outcomes, resamples=material.resamples, seed=material.seed)
    pairs, summary = signal_signal(material.outcomes), signal_summary(pooled)
    tables = (
        _summary_table(summary),
        _clustered_table(material, pooled),
        _step_table(steps),
        _auroc_table(material, ranked),
        _pair_table(pairs),
    )
    found = (pooled, steps, ranked, pairs, summary)
    notes = tuple(dict.fromkeys(note for one in found for note in one.notes))
    return Section("association", "Signals and harm", _lead(pooled), tables, (_forest(pooled),), found, notes)


def _lead(pooled: Finding) -> str:
    levels = _part(pooled, "all", "level").dropna(subset=["rho"])
    if levels.empty:
        return "No signal has a defined correlation with HA here."
    best = levels.loc[levels["rho"].abs().idxmax()]
    inverted = [str(name) for name in levels.loc[levels["against"].astype(bool), "signal"]]
    warning = f" Against its orientation, which is a limit of validity: {', '.join(inverted)}." if inverted else ""
    return (
        f"The strongest association with HA is {best['signal']}: Spearman ρ = {number(best['rho'])} "
        f"[{number(best['low'])}, {number(best['high'])}] over {int(best['rows'])} rows of {int(best['n'])} cases, "
        f"cases resampled with all their steps.{warning}"
    )


def _part(pooled: Finding, scope: str, kind: str) -> pd.DataFrame:
    frame = pooled.table
    return frame[(frame["scope"] == scope) & (frame["kind"] == kind)]


def _summary_table(summary: Finding) -> Table:
    columns = (
        Column("signal", "Signal", text=True),
        Column("rho", "ρ vs HA"),
        Column("rho_difference", "ρ(Δ signal, Δ HA)"),
        Column("backprop", "backprop", text=True),
    )
    frame = summary.table.assign(
        backprop=[
            f"yes (×{int(back)})" if back else f"no ({int(ahead)}× forward)" if ahead else "no"
            for back, ahead in zip(
                summary.table["backwards"].fillna(0), summary.table["forwards"].fillna(0), strict=True
            )
        ]
    )
    rows = rows_of(frame, columns)
    best = {
        (int(frame[key].astype(float).argmax()), key) for key in ("rho", "rho_difference") if frame[key].notna().any()
    }
    caption = "Pooled over (case, step ≥ 1); Δ is between consecutive steps of one case, from k = 2 on."
    return table(
        "signal-ha", "Which signal goes with HA", columns, rows, caption=caption, paper="tab:signal-ha", bold=best
    )


def _clustered_table(material: Material, pooled: Finding) -> Table:
    columns = (
        Column("scope", "Split", text=True),
        Column("signal", "Signal", text=True),
        Column("level", "ρ vs HA [95 %]"),
        Column("difference", "ρ(Δ, Δ HA) [95 %]"),
        Column("p", "p of ρ vs HA"),
        Column("n", "n"),
        Column("skipped", "draws without a value"),
    )
    rows: list[dict[str, Cell]] = []
    rules = set()
    for scope, part in pooled.table.groupby("scope", sort=False):
        rules.add(len(rows))
        for signal, both in part.groupby("signal", sort=False):
            kinds = {str(row["kind"]): row for row in both.to_dict("records")}
            first = next(iter(kinds.values()))
            rows.append(
                {
                    "scope": "all cases" if scope == "all" else str(scope),
                    "signal": str(signal),
                    **{kind: _rho(kinds[kind]) if kind in kinds else None for kind in ("level", "difference")},
                    "p": _p(first),
                    "n": int(first["n"]),
                    "skipped": int(first["skipped"]),
                }
            )
    caption = (
        f"Case-clustered bootstrap: a case carries all its steps. B = {material.resamples}, seed {material.seed}. p: "
        "999 shuffles of whole cases (or patients), exact at any n."
    )
    return table(
        "clustered-ci",
        "Clustered intervals",
        columns,
        rows,
        caption=caption,
        paper="tab:app-clustered-ci",
        rules=rules,
        collapsed=True,
    )


def _rho(row: dict[str, object]) -> Cell:
    rho, low, high = (float(row[key]) for key in ("rho", "low", "high"))  # type: ignore[arg-type]
    return Undefined(int(row["n"])) if rho != rho else Estimate(rho, low, high)  # type: ignore[call-overload]


def _p(row: dict[str, Any]) -> Cell:
    p = float(row["p_shuffled"])
    return Undefined(int(row["n"])) if p != p else p


def _step_table(steps: Finding) -> Table:
    frame = steps.table[steps.table["scope"] == "all"] if "scope" in steps.table else steps.table
    names = list(dict.fromkeys(str(step) for step in frame["step"]))
    columns = [Column("signal", "Signal", text=True)]
    columns += [Column(f"k{name}", name if name == "pooled" else f"k = {name}") for name in names]
    rows: list[dict[str, Cell]] = []
    for signal, part in frame.groupby("signal", sort=False):
        row: dict[str, Cell] = {"signal": str(signal)}
        for record in part.to_dict("records"):
            rho = float(record["rho"])
            row[f"k{record['step']}"] = Undefined(int(record["n"])) if rho != rho else rho
        rows.append(row)
    caption = (
        "Spearman ρ with HA within each step; the pooled value can come from the steps rather than from the cases."
    )
    return table("per-step", "Step by step", columns, rows, caption=caption, paper="tab:app-perstep", collapsed=True)


def _auroc_table(material: Material, ranked: Finding) -> Table:
    columns = (
        Column("signal", "Signal after one update", text=True),
        Column("worse", f"AUROC, Δ {material.metric} < 0"),
        Column("harm", "AUROC, top-tertile HA"),
        Column("n", "n"),
    )
    rows: list[dict[str, Cell]] = []
    for signal, part in ranked.table.groupby("signal", sort=False):
        row: dict[str, Cell] = {"signal": str(signal), "n": int(part["n"].max())}
        for record in part.to_dict("records"):
            value = float(record["auroc"])
            undefined = value != value
            row[record["target"]] = (
                Undefined(int(record["n"]))
                if undefined
                else Estimate(value, float(record["low"]), float(record["high"]))
            )
        rows.append(row)
    caption = (
        f"Targets at {material.reference}. Higher means riskier for every signal; MSP is taken as it is, so it inverts."
    )
    return table("auroc", "Ranking the cases", columns, rows, caption=caption, paper="tab:app-auroc")


def _pair_table(pairs: Finding) -> Table:
    columns = (
        Column("first", "Signal", text=True),
        Column("second", "Signal ", text=True),
        Column("rho", "ρ"),
        Column("rows", "rows"),
        Column("n", "n"),
    )
    rows = rows_of(pairs.table, columns)
    caption = "Signals that correlate little with each other carry different information."
    return table("signal-signal", "Signals among themselves", columns, rows, caption=caption, collapsed=True)


def _forest(pooled: Finding) -> Picture:
    panels = []
    for kind, title in (("level", "ρ with HA"), ("difference", "ρ of the differences")):
        frame = _part(pooled, "all", kind)
        panels.append((title, frame.assign(name=frame["signal"], estimate=frame["rho"])))
    caption = f"Spearman ρ with 95 % case-clustered intervals, n = {pooled.n}. Filled where the interval excludes 0."
    return Picture("association", "Signals and HA", draw_forest(panels), caption)

"""Expectations against outcomes: the paper's criteria or the declared ones, and three lines of evidence."""

from __future__ import annotations

from typing import Any

from casewise.report.cells import NOT_RUN, Cell, number
from casewise.report.material import Material
from casewise.report.section import Section
from casewise.report.tables import Column, Table, rows_of, table
from casewise.study.finding import Finding
from casewise.study.prereg import PAPER_CRITERIA, Declaration, reconcile
from casewise.study.resample import Interval


def criteria(material: Material) -> Section:
    """tab:app-prereg, tab:newobj, tab:app-three-pillars (P 15, 16, 26)."""
    if not material.is_router:
        reason = f"the policy is a {material.controller.name}; the criteria are about a router"
        return Section("criteria", "Expectations", missing={"criteria": reason})
    declared = material.extras.criteria or Declaration(PAPER_CRITERIA, "1970-01-01T00:00:00+00:00")
    found = reconcile(declared, facts(material))
    tables = (_table(found), objectives_table(material, found), _lines(material))
    missing = (
        {}
        if material.extras.criteria
        else {"declared criteria": "needs a file that was declared before the run (--criteria)"}
    )
    return Section("criteria", "Expectations", _lead(material, found), tables, (), (found,), (), missing)


def facts(material: Material) -> dict[str, Any]:
    """The numbers that criteria are about, by the keys that declarations use."""
    shape = material.shape.row(group="all")
    cost = material.interval(material.reference, material.ours, "metric") or _turned(
        material.interval(material.ours, material.reference, "metric")
    )
    harm = material.interval(material.ours, material.reference, "ha")
    first = material.interval("fixed-1", "m0", "metric")
    ha = material.matched.table[material.matched.table["scope"] == "all"].set_index("selector")["ha"]
    found: dict[str, Any] = {
        "rho.delta": _rho(material, "delta"),
        "rho.regions": _rho(material, "regions"),
        "ladder.non_monotone": bool(shape["non_monotone"]),
        "ladder.last_minus_best": float(shape["ha_last"] - shape["ha_best"]),
        "ha.router_minus_default": _interval(harm, material.resamples),
        "metric.default_minus_router": _interval(cost, material.resamples),
        "metric.first_minus_source": _interval(first, material.resamples) or _first_step(material),
        "share.random": float(material.attribution.row(control="random")["share"]),
        "p.random": float(material.chance.row(scope="all", quantity="ha")["p_draws"]),
        "ha.oracle_minus_router": float(ha["oracle HA"] - ha["deployed"]),
        "ha.entropy_minus_router": float(ha["entropy"] - ha["deployed"]) if "entropy" in ha.index else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _first_step(material: Material) -> float:
    return float(material.methods["fixed-1"]["change"].mean())


def _turned(row: Any) -> Any:
    """The same interval seen from the other side."""
    if row is None:
        return None
    return {
        **row,
        "estimate": -row["estimate"],
        "low": -row["high"],
        "high": -row["low"],
        "p_below": 1 - row["p_below"],
    }


def _interval(row: Any, resamples: int) -> Interval | None:
    if row is None:
        return None
    return Interval(
        **{name: row[name] for name in ("estimate", "low", "high", "p_below", "n", "clusters")},
        resamples=resamples,
        method=row["interval"],
    )


def _rho(material: Material, signal: str) -> float | None:
    frame = material.association.table
    found = frame[(frame["scope"] == "all") & (frame["kind"] == "level") & (frame["signal"] == signal)]
    return None if found.empty else float(found["rho"].iloc[0])


def _lead(material: Material, found: Finding) -> str:
    if material.extras.criteria is None:
        return (
            f"The paper's criteria on this archive: {found.notes[0]}. They were not declared for it and only describe."
        )
    return f"Declared {found.made['declared_at']} (sha256 {str(found.made['sha256'])[:12]}): {found.notes[0]}."


def _table(found: Finding) -> Table:
    columns = (
        Column("id", "Id", text=True),
        Column("expectation", "Expectation", text=True),
        Column("observed", "observed", 4, interval=("low", "high")),
        Column("verdict", "Verdict", text=True),
        Column("reason", "Remark", text=True),
    )
    rows = rows_of(found.table, columns)
    for row in rows:
        if row["verdict"] == "not run":
            row["observed"] = NOT_RUN
    for row, quantity in zip(rows, found.table["quantity"], strict=True):
        if quantity == "ladder.non_monotone" and row["observed"] is not NOT_RUN:
            row["observed"] = row["observed"] == 1
    return table("prereg", "Expectations and outcomes", columns, rows, paper="tab:app-prereg")


def objectives_table(material: Material, found: Finding) -> Table:
    """tab:newobj: one row for this archive's objective; run the study on another archive for another row."""
    verdicts = dict(zip(found.table["id"], found.table["verdict"], strict=True))
    columns = (
        Column("objective", "Objective", text=True),
        Column("dataset", "Benchmark", text=True),
        Column("delta", "ρ(δ)"),
        Column("regions", "ρ(regions)"),
        *(Column(name, name, text=True) for name in ("V1", "V2", "V3")),
        Column("share", "V4 random"),
    )
    made = material.configuration
    row: dict[str, Cell] = {
        "objective": str(made.get("objective", "not said")),
        "dataset": str(made.get("dataset", "this archive")),
        "delta": _rho(material, "delta"),
        "regions": _rho(material, "regions"),
        "share": float(material.attribution.row(control="random")["share"]),
    }
    row |= {name: _joined([verdicts.get(f"{name}{part}", "not run") for part in "ab"]) for name in ("V1", "V2", "V3")}
    caption = "V1: both ρ in [0.4, 0.6]. V2: non-monotone, HA(K) above its minimum. V3: lower HA at a bounded cost."
    return table(
        "objectives", "Criteria by objective", columns, (row,), caption=caption, paper="tab:newobj", collapsed=True
    )


def _joined(parts: list[str]) -> str:
    for word in ("not run", "failed", "unresolved"):
        if word in parts:
            return word
    return "held"


def _lines(material: Material) -> Table:
    """tab:app-three-pillars: replay, ranking and calibration perturbation, said in words that follow from numbers."""
    columns = (Column("analysis", "Analysis", text=True), Column("verdict", "Here", text=True))
    rows: list[dict[str, Cell]] = [
        {"analysis": "Deployment replay at matched quota", "verdict": _replayed(material)},
        {"analysis": "Case-level ranking AUROC (top-tertile HA)", "verdict": _ranked(material)},
        {"analysis": "Calibration perturbation", "verdict": _perturbed(material)},
    ]
    caption = "Three analyses that share no method; agreement between them is evidence, disagreement a warning."
    return table(
        "three-lines", "Three lines of evidence", columns, rows, caption=caption, paper="tab:app-three-pillars"
    )


def _replayed(material: Material) -> str:
    row = material.chance.row(scope="all", quantity="ha")
    draws, p = int(material.chance.made["draws"]), float(row["p_draws"])
    word = "better than random" if p <= 0.05 else "not better than random"
    found = f"HA {number(row['deployed'])} against {number(row['mean_exact'])}"
    return f"{word}: {found}; {round(p * draws)} of {draws} draws at or below"


def _ranked(material: Material) -> str:
    frame = material.ranking.table
    frame = frame[frame["target"] == "harm"].dropna(subset=["auroc"])
    own = frame[frame["signal"] == material.coordinate]
    if own.empty:
        return "undefined: one class only"
    row = own.iloc[0]
    word = "above chance" if float(row["low"]) > 0.5 else "not separated from chance"
    return f"{word}: {material.coordinate} {number(row['auroc'])} [{number(row['low'])}, {number(row['high'])}]"


def _perturbed(material: Material) -> str:
    drawn = material.refit.table[material.refit.table["draws"] > 1]
    if drawn.empty:
        return "not run: too few calibration cases"
    row = drawn.loc[drawn["cases"].idxmin()]
    share = 100 * float(row["beats_reference"])
    return f"below {material.retrospective} in {share:.0f} % of refits on {int(row['cases'])} cases"

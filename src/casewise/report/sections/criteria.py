"""Expectations against outcomes: the paper's criteria or the declared ones, and three lines of evidence."""

from __future__ import annotations

from casewise.render.cells import NOT_RUN, Cell, number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.facts import NEEDS, facts
from casewise.report.material import Material
from casewise.report.objectives import objectives
from casewise.report.provenance import results_at
from casewise.report.section import Section
from casewise.study.finding import Finding
from casewise.study.prereg import PAPER_CRITERIA, Declaration, reconcile
from casewise.study.statistics.resample import LEVEL


def criteria(material: Material) -> Section:
    """tab:app-prereg, tab:newobj, tab:app-three-pillars (P 15, 16, 26)."""
    if not material.is_router:
        reason = f"the policy is a {material.controller.name}; the criteria are about a router"
        return Section("criteria", "Expectations", missing={"criteria": reason})
    found = _reconciled(material)
    by_objective, finding, notes = objectives(material)
    tables = (_table(found), *by_objective, _lines(material))
    missing = {}
    if material.extras.criteria is None:
        missing["declared criteria"] = "needs a file that was declared before the run (--criteria)"
    if not material.extras.others:
        missing["other objectives (tab:newobj)"] = "need --other NAME=EVALUATION[,CALIBRATION] for each"
    return Section("criteria", "Expectations", _lead(material, found), tables, (), (found, finding), notes, missing)


def _reconciled(material: Material) -> Finding:
    """Declared criteria, judged for lateness too; without a declaration the paper's, which only describe."""
    declared = material.extras.criteria
    if declared is None:
        return reconcile(Declaration(PAPER_CRITERIA, "1970-01-01T00:00:00+00:00"), facts(material), needs=NEEDS)
    moment, event = results_at(material.evaluation)
    return reconcile(declared, facts(material), results_at=moment, event=event, needs=NEEDS)


def _lead(material: Material, found: Finding) -> str:
    if material.extras.criteria is None:
        return (
            f"The paper's criteria on this archive: {found.notes[0]}. They were not declared for it and only describe."
        )
    when = f"{found.made['declared_at']} (sha256 {str(found.made['sha256'])[:12]})"
    timing = "in time, before" if found.made["in_time"] else "too late, after"
    known = f"{found.made['event']} ({str(found.made['results_at'])[:19]} UTC)"
    return f"Declared {when}, {timing} {known}: {found.notes[0]}."


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
    caption = f"n = {found.n} cases. Brackets are 95 % intervals; a margin below its resolution is unresolved."
    return table("prereg", "Expectations and outcomes", columns, rows, caption=caption, paper="tab:app-prereg")


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
    draws, p = int(material.chance.made["draws"]), float(row["p_draws_corrected"])
    word = "better than random" if p <= LEVEL else "not better than random"
    found = f"HA {number(row['deployed'])} against {number(row['mean_exact'])}"
    below = round(float(row["p_draws"]) * draws)
    return f"{word}: {found}; {below} of {draws} draws at or below, p = {number(p)}"


def _ranked(material: Material) -> str:
    frame = material.ranking.table
    frame = frame[frame["target"] == "harm"].dropna(subset=["auroc"])
    own = frame[frame["signal"] == material.coordinate]
    if own.empty:
        return "undefined: one class only"
    row = own.iloc[0]
    p = float(row["p_shuffled"])
    word = "above chance" if float(row["low"]) > 0.5 and p <= LEVEL else "not separated from chance"
    interval = f"{number(row['auroc'])} [{number(row['low'])}, {number(row['high'])}]"
    return f"{word}: {material.coordinate} {interval}, p = {number(p)} with cases shuffled, n = {int(row['n'])}"


def _perturbed(material: Material) -> str:
    drawn = material.refit.table[material.refit.table["draws"] > 1]
    if drawn.empty:
        return "not run: too few calibration cases"
    row = drawn.loc[drawn["cases"].idxmin()]
    share = 100 * float(row["beats_reference"])
    return f"below {material.retrospective} in {share:.0f} % of refits on {int(row['cases'])} cases"

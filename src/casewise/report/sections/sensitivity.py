"""How much depends on the calibration cases, on the smallest region that counts, on connectivity (K, N1-N3)."""

from __future__ import annotations

from casewise.render.cells import NOT_RUN, Cell, number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.figures.sensitivity import draw_min_area, draw_sensitivity
from casewise.report.material import Material
from casewise.report.section import Picture, Section
from casewise.study.finding import Finding
from casewise.study.sweep import min_area_sweep, rank_invariance, sweep_outcomes

FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the deployed min_area: 8, 16, 32, 64 for the paper's 16 (N1)


def sensitivity(material: Material) -> Section:
    """tab:app-calibsens, tab:app-tau, rank invariance (P 21, 22)."""
    if not material.is_router:
        reason = f"the policy is a {material.controller.name}; refitting cut-points needs a router"
        return Section("sensitivity", "How much depends on our choices", missing={"sensitivity": reason})
    refit, swept = material.refit, _swept(material)
    ranks = rank_invariance(swept)
    tables = (_refit_table(material, refit), _min_area_table(material, swept), _rank_table(material, ranks))
    pictures = (_refit_picture(material, refit), _min_area_picture(material, swept))
    notes = (*refit.notes, *swept.notes, *ranks.notes)
    title, lead = "How much depends on our choices", _lead(material, refit)
    return Section("sensitivity", title, lead, tables, pictures, (refit, swept, ranks), notes)


def _swept(material: Material) -> Finding:
    least = material.measure["min_area"]
    areas = tuple(sorted({max(1, round(least * factor)) for factor in FACTORS}))
    sweep = sweep_outcomes(material.evaluation, min_areas=areas, connectivities=("face", "full"))
    return min_area_sweep(sweep, material.methods, router=material.ours, reference=material.retrospective)


def _lead(material: Material, refit: Finding) -> str:
    drawn = refit.table[refit.table["draws"] > 1]
    if drawn.empty:
        return "There are too few calibration cases to leave some out."
    worst = drawn.iloc[0]
    return (
        f"With cut-points refitted on {int(worst['cases'])} calibration cases, "
        f"{100 * float(worst['beats_reference']):.0f} % of {int(worst['draws'])} draws stay below "
        f"{material.retrospective} in HA; the worst draw has HA {number(worst['ha_worst'])}."
    )


def _refit_table(material: Material, refit: Finding) -> Table:
    columns = (
        Column("cases", "calibration cases"),
        Column("metric", f"{material.metric} [95 %]", 4, interval=("metric_low", "metric_high")),
        Column("ha", "HA [95 %]", interval=("ha_low", "ha_high")),
        Column("ha_worst", "worst draw"),
        Column("beats_reference", f"below {material.retrospective} (%)", 0, percent=True),
        Column("draws", "draws"),
        Column("n", "n"),
    )
    caption = "Cut-points refitted on subsamples without replacement; brackets hold 95 % of the draws. Last row: all."
    rows = rows_of(refit.table.sort_values("cases"), columns)
    paper = "tab:app-calibsens"
    return table("calibration-sensitivity", "Fewer calibration cases", columns, rows, caption=caption, paper=paper)


def _min_area_table(material: Material, swept: Finding) -> Table:
    methods = [
        name for name in swept.table["method"].unique() if str(name).startswith("fixed-") or name == material.ours
    ]
    columns = [Column("connectivity", "Connectivity", text=True), Column("min_area", "min_area")]
    columns += [Column(str(name), material.title(str(name))) for name in methods]
    columns += [
        Column("difference", f"router − {material.retrospective}", signed=True),
        Column("scored", "cases with regions"),
    ]
    rows: list[dict[str, Cell]] = []
    for (connectivity, least), part in swept.table.groupby(["connectivity", "min_area"], sort=False):
        by_method = part.set_index("method")
        row: dict[str, Cell] = {"connectivity": str(connectivity), "min_area": int(least)}
        row |= {str(name): float(by_method.loc[name, "ha"]) if name in by_method.index else NOT_RUN for name in methods}
        ours = by_method.loc[material.ours]
        rows.append({**row, "difference": float(ours["difference"]), "scored": int(ours["scored"])})
    caption = (
        "HA recomputed from the stored masks. HA can only fall as min_area grows: |D| stays, the numerator shrinks."
    )
    return table("min-area", "The smallest region that counts", columns, rows, caption=caption, paper="tab:app-tau")


def _rank_table(material: Material, ranks: Finding) -> Table:
    columns = (
        Column("connectivity", "Connectivity", text=True),
        Column("method", "Method", text=True),
        Column("ranks", "ranks over the sweep", text=True),
        Column("invariant", "invariant"),
    )
    named = ranks.table.assign(method=[material.title(name) for name in ranks.table["method"]])
    caption = "Does the order of the methods by HA depend on min_area?"
    return table(
        "rank-invariance", "Order of the methods", columns, rows_of(named, columns), caption=caption, collapsed=True
    )


def _refit_picture(material: Material, refit: Finding) -> Picture:
    frame = refit.table.sort_values("cases").fillna({"ha_low": refit.table["ha"], "ha_high": refit.table["ha"]})
    reference = float(material.methods[material.retrospective]["ha"].mean())
    figure = draw_sensitivity(frame, reference=reference, reference_name=material.retrospective)
    caption = f"Deployed HA when the cut-points come from fewer calibration cases; n = {refit.n} evaluation cases."
    return Picture("calibration-sensitivity", "Fewer calibration cases", figure, caption)


def _min_area_picture(material: Material, swept: Finding) -> Picture:
    frame = swept.table[swept.table["connectivity"] == "face"]
    kept = frame["method"].isin([material.ours, material.reference, material.retrospective, "frag-stop"])
    shown = frame[kept].assign(method=[material.title(name) for name in frame.loc[kept, "method"]])
    caption = f"n = {swept.n}; face connectivity."
    return Picture(
        "min-area", "The smallest region that counts", draw_min_area(shown, ours=material.title(material.ours)), caption
    )

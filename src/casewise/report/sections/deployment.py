"""What each method deploys, and every interval between a controller and a budget (H)."""

from __future__ import annotations

import pandas as pd

from casewise.render.cells import DASH, Cell, Estimate, NotRun, Pair
from casewise.render.tables import Column, Table, highest, lowest, rows_of, table
from casewise.report.figures.forest import draw_forest
from casewise.report.figures.pareto import draw_pareto
from casewise.report.material import Material
from casewise.report.section import Picture, Section
from casewise.report.story import verdict
from casewise.study.deployment import bucket_decomposition, method_table


def deployment(material: Material) -> Section:
    """The method table, the tables by group, the interval list with ids, the bucket decomposition (H1-H10)."""
    found = [material.method_table, material.intervals]
    tables = [methods_table(material), *_by_group(material), interval_table(material)]
    missing = {material.title(name): reason for name, reason in material.skipped.items()}
    if material.is_router:
        buckets = bucket_decomposition(material.router)
        found.append(buckets)
        tables.append(_bucket_table(material, buckets.table, buckets.reason))
    else:
        missing["bucket decomposition"] = f"the policy is a {material.controller.name}, which has no buckets"
    return Section(
        "deployment",
        "What each method deploys",
        _lead(material),
        tuple(tables),
        (_forest(material), _pareto(material)),
        tuple(found),
        material.intervals.notes,
        missing,
    )


def _lead(material: Material) -> str:
    harm = material.interval(material.ours, material.deployable, "ha")
    metric = material.interval(material.ours, material.deployable, "metric")
    if harm is None or metric is None:
        return f"The policy deploys what {material.deployable} deploys, so there is nothing to compare it with."
    left, right = (_estimate(row) for row in (harm, metric))
    column = Column("x", "", signed=True)
    text = Table("", "", (column,), ({"x": left}, {"x": right}))
    return (
        f"Against the budget that could have been deployed ({material.deployable}), the "
        f"{material.title(material.ours)} changes HA by {text.text(0, column)}, {verdict(harm)}, and "
        f"{material.metric} by {text.text(1, column)}, {verdict(metric)} (n = {int(harm['n'])}, "
        f"B = {material.resamples}, seed {material.seed})."
    )


def _estimate(row: object) -> Estimate:
    values = dict(row)  # type: ignore[call-overload]
    return Estimate(float(values["estimate"]), float(values["low"]), float(values["high"]))


def role(material: Material, name: str) -> str:
    """deployable, retrospective or default, as the paper tags its budgets."""
    tags = (
        ("deployable", material.deployable),
        ("retrospective", material.retrospective),
        ("default", material.reference),
    )
    words = " = ".join(word for word, budget in tags if budget == name)
    return f" ({words})" if words else ""


def methods_table(material: Material) -> Table:
    """tab:mnm, tab:prostate, tab:supp-oodhard: one row a method (P 3, 4, 10); BA and executed updates beside them."""
    frame = material.method_table.table
    rows: list[dict[str, Cell]] = []
    for row in frame.to_dict("records"):
        is_source = row["method"] == "m0"
        rows.append(
            {
                "method": material.title(row["method"]) + role(material, row["method"]),
                "metric": row["metric"],
                "ha": row["ha"],
                "ba": row["ba"],
                "steps": DASH if is_source else row["steps"],
                "executed": DASH if is_source else row["executed"],
                "rolled_back": DASH if is_source else int(row["rolled_back"]),
                "n": int(row["n"]),
                "undefined": int(row["undefined"]),
            }
        )
    for name, reason in material.skipped.items():
        rows.append({"method": material.title(name), **dict.fromkeys(_METHOD_KEYS, NotRun(reason))})
    adaptive = [at for at, name in enumerate(frame["method"]) if name != "m0" and not name.startswith("fixed-")]
    bold = highest(rows, "metric", among=adaptive) | lowest(rows, "ha", among=adaptive)
    columns = (
        Column("method", "Method", text=True),
        Column("metric", material.metric),
        Column("ha", "HA"),
        Column("ba", "BA"),
        Column("steps", "Steps", 2),
        Column("executed", "Executed", 2),
        Column("rolled_back", "Rolled back"),
        Column("n", "n"),
        Column("undefined", f"{material.metric} undefined"),
    )
    ladder = sum(name == "m0" or name.startswith("fixed-") for name in frame["method"])
    caption = (
        "Cohort means over all cases. Steps is the depth of what is deployed (a rollback counts 0), Executed what was "
        "really run (a rollback counts its probe). Bold is the best of the adaptive methods."
    )
    return table(
        "methods", "Methods", columns, rows, caption=caption, paper="tab:mnm", rules={1, ladder}, bold=bold
    )  # fmt: skip


_METHOD_KEYS = ("metric", "ha", "ba", "steps", "executed", "rolled_back", "n", "undefined")


def _by_group(material: Material) -> list[Table]:
    """tab:supp-acdc-fogsnow: metric / HA of the main methods, one row a group (P 12)."""
    if not material.groups:
        return []
    shown = [name for name in material.methods if name != "m0" and not _middle(material, name)]
    columns = [Column("group", "Group", text=True), Column("n", "n"), Column("m0", "M0")]
    columns += [Column(name, material.title(name)) for name in shown]
    rows: list[dict[str, Cell]] = []
    for group in material.groups:
        means = method_table(material.of_group(group)).table.set_index("method")
        row: dict[str, Cell] = {"group": group, "n": int(means["n"].max()), "m0": float(means.loc["m0", "metric"])}
        row |= {name: Pair(float(means.loc[name, "metric"]), float(means.loc[name, "ha"])) for name in shown}
        rows.append(row)
    caption = f"{material.metric} / HA by group. M0 takes no step, so its HA is 0."
    return [
        table("methods-by-group", "Methods by group", columns, rows, caption=caption, paper="tab:supp-acdc-fogsnow")
    ]


def _middle(material: Material, name: str) -> bool:
    return name.startswith("fixed-") and name not in {material.reference, material.deployable, material.retrospective}


def interval_table(material: Material) -> Table:
    """The interval list of sec:supp-pairwise: one machine-readable table with ids (H8)."""
    columns = (
        Column("id", "Id", text=True),
        Column("tier", "Tier", text=True),
        Column("estimate", "difference [95 %]", 4, signed=True, interval=("low", "high")),
        Column("p_below", "P(<0)"),
        Column("separated", "excludes 0"),
        Column("p_flip", "sign-flip p"),
        Column("shown", "shown"),
        Column("wins", "wins"),
        Column("ties", "ties"),
        Column("losses", "losses"),
        Column("wilcoxon_p", "Wilcoxon p"),
        Column("below_scale", "below 10× run-to-run"),
        Column("n", "n"),
    )
    caption = (
        f"Paired percentile bootstrap over cases (whole clusters where cases share one), B = {material.resamples}, "
        f"seed {material.seed}. Tier A: against the deployable budget. A′: against the default. B: against the best "
        "budget in hindsight. C: descriptive. Every interval in this report comes from this list. A difference is "
        "shown when its interval excludes 0 and the sign-flip test rejects at 0.05: with few cases the interval alone "
        "calls chance a difference too often, the test does not."
    )
    rows = rows_of(material.intervals.table, columns)
    return table("intervals", "Every interval, once", columns, rows, caption=caption, collapsed=True)


def _bucket_table(material: Material, frame: pd.DataFrame, reason: str) -> Table:
    columns = (
        Column("bucket", "Bucket", text=True),
        Column("n", "n"),
        Column("mean_change", f"mean change of {material.metric}", 6, signed=True),
        Column("contribution", "part of the cohort's change", 6, signed=True),
    )
    caption = reason or "The parts add up to the cohort's mean change against M0."
    return table("buckets", "Where the change comes from", columns, rows_of(frame, columns), caption=caption)


def _forest(material: Material) -> Picture:
    frame = material.intervals.table
    frame = frame[frame["method"] == material.ours]
    named = frame.assign(name=[f"vs {material.title(name)}" for name in frame["reference"]])
    panels = [
        ("difference of HA", named[named["quantity"] == "ha"]),
        (f"difference of {material.metric}", named[named["quantity"] == "metric"]),
    ]
    caption = (
        "Negative is safer on the left, positive is more accurate on the right. Filled where the interval excludes 0."
    )
    return Picture("intervals", f"{material.title(material.ours)} against each reference", draw_forest(panels), caption)


def _pareto(material: Material) -> Picture:
    panels = {"all cases": _points(material, material.method_table.table)}
    for group in material.groups[:5]:
        panels[group] = _points(material, method_table(material.of_group(group)).table)
    figure = draw_pareto(panels, ours=material.marked, metric=material.metric)
    caption = (
        f"Right is safer, up is more accurate; the scale of {material.metric} differs between panels. Descriptive."
    )
    return Picture("pareto", "Reliability and accuracy", figure, caption, "fig:pareto")


def _points(material: Material, frame: pd.DataFrame) -> pd.DataFrame:
    names = ["M0" if name == "m0" else material.title(name) for name in frame["method"]]
    return pd.DataFrame({"method": names, "metric": frame["metric"], "ha": frame["ha"]})

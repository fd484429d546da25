"""The budget axis: does one number of steps suit the cohort, and could it have been chosen in advance? (G)"""

from __future__ import annotations

import pandas as pd

from casewise.render.cells import NOT_RUN, Cell, number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.figures.teaser import draw_teaser
from casewise.report.material import Material
from casewise.report.section import Picture, Section
from casewise.study.budget import group_agreement, oracle_plateau, selection_agreement, selection_stability
from casewise.study.finding import Finding


def budget(material: Material) -> Section:
    """Ladders, selection on the holdout, its regret and its stability (G1-G7)."""
    ladder, chosen, shape = material.ladder, material.selection, material.shape
    stability = selection_stability(
        material.holdout, material.outcomes, resamples=material.resamples, seed=material.seed
    )
    agreement = selection_agreement(
        material.holdout, material.outcomes, resamples=material.resamples, seed=material.seed
    )
    groups = group_agreement(material.holdout, material.outcomes)
    plateau = oracle_plateau(material.outcomes)
    micro = (material.micro,) if material.micro else ()
    return Section(
        "budget",
        "One budget for all cases",
        _lead(material, agreement),
        (
            _sweep(ladder),
            _selection_table(chosen, material.metric),
            _agreement_table(agreement),
            _shape_table(shape, material.metric),
            _group_table(groups),
        ),
        (_teaser(material),),
        (ladder, *micro, chosen, shape, stability, agreement, groups, plateau),
        (*agreement.notes, *stability.notes, *shape.notes, *plateau.notes),
    )


def _lead(material: Material, agreement: Finding) -> str:
    first = material.selection.table.iloc[0]
    agree = float(agreement.table["agree"].iloc[0])
    same = int(first["k_holdout"]) == int(first["k_best"])
    outcome = (
        "which is also the best budget in hindsight"
        if same
        else f"the best in hindsight is k = {int(first['k_best'])}, a difference of {number(first['regret'])} HA"
    )
    return (
        f"By lowest HA the {int(first['n_holdout'])} holdout cases choose k = {int(first['k_holdout'])}; {outcome}. "
        f"Over {material.resamples} joint resamples holdout and evaluation agree in {100 * agree:.1f} % (n = "
        f"{int(first['n_eval'])}, seed {material.seed})."
    )


def _sweep(ladder: Finding) -> Table:
    frame = ladder.table[ladder.table["step"] > 0]
    steps = sorted(int(step) for step in frame["step"].unique())
    columns = [Column("split", "Split", text=True), Column("n", "n"), *(Column(f"k{k}", f"K = {k}") for k in steps)]
    rows: list[dict[str, Cell]] = []
    bold = set()
    for at, (group, part) in enumerate(frame.groupby("group", sort=False)):
        by_step = part.set_index("step")
        rows.append({"split": _scope(str(group)), "n": int(part["n"].max())})
        rows[-1] |= {f"k{k}": float(by_step.loc[k, "ha"]) if k in by_step.index else NOT_RUN for k in steps}
        bold |= {(at, f"k{int(k)}") for k in part.loc[part["is_best"].astype(bool), "step"]}
    caption = "Cohort HA at each step of one trajectory; bold is the smallest of the row."
    return table(
        "budget-sweep", "HA by fixed budget", columns, rows, caption=caption, paper="tab:budget-sweep", bold=bold
    )


def _scope(group: str) -> str:
    return "all cases" if group == "all" else group


def _selection_table(chosen: Finding, metric: str) -> Table:
    columns = (
        Column("rule", "Selection rule", text=True),
        Column("k_holdout", "k chosen"),
        Column("k_best", "k in hindsight"),
        Column("ha_holdout", "HA on holdout"),
        Column("ha_eval", "HA on evaluation"),
        Column("ha_best", "best HA"),
        Column("regret", "regret"),
        Column("metric_eval", metric),
    )
    caption = f"Budget chosen on n = {int(chosen.table['n_holdout'].iloc[0])} holdout cases; ties go to the smallest k."
    return table(
        "budget-selection", "Choosing the budget on a holdout", columns, rows_of(chosen.table, columns), caption=caption
    )


def _agreement_table(agreement: Finding) -> Table:
    columns = (
        Column("rule", "Selection rule", text=True),
        Column("agree", "agree (%)", 1, percent=True),
        Column("modal_holdout", "most frequent k, holdout"),
        Column("modal_eval", "most frequent k, evaluation"),
        Column("modal_share", "share of that pair (%)", 1, percent=True),
    )
    caption = "Holdout and evaluation cases resampled independently; how often both choose the same budget."
    return table(
        "budget-agreement",
        "Would the holdout have agreed?",
        columns,
        rows_of(agreement.table, columns),
        caption=caption,
    )


def _shape_table(shape: Finding, metric: str) -> Table:
    columns = (
        Column("group", "Split", text=True),
        Column("n", "n"),
        Column("k_best", "k of least HA"),
        Column("ha_first", "HA at k = 1"),
        Column("ha_best", "least HA"),
        Column("ha_last", "HA at K"),
        Column("non_monotone", "non-monotone"),
        Column("dips", "dips before it rises"),
        Column("metric_spread", f"spread of {metric}"),
    )
    caption = f"The spread of {metric} over k says how much of this the mean would have shown."
    return table(
        "budget-shape", "Shape of the ladder", columns, rows_of(shape.table, columns), caption=caption, collapsed=True
    )


def _group_table(groups: Finding) -> Table:
    columns = (
        Column("group", "Group", text=True),
        Column("n_holdout", "n holdout"),
        Column("n_eval", "n evaluation"),
        Column("k_holdout", "k chosen"),
        Column("k_eval", "k in hindsight"),
        Column("agree", "agree"),
    )
    rows = rows_of(groups.table, columns)
    caption = groups.reason or "Does each group's holdout choose the budget that its evaluation cases would?"
    return table("budget-groups", "Group by group", columns, rows, caption=caption, collapsed=True)


def _teaser(material: Material) -> Picture:
    shown = material.method_table.table
    shown = pd.DataFrame({**shown, "method": [material.title(name) for name in shown["method"]]})
    shown["method"] = shown["method"].replace(material.title("m0"), "M0")
    steps, curve, averaged = _curve(material)
    figure = draw_teaser(steps, shown, ours=material.marked, metric=material.metric, curve=curve)
    caption = (
        f"A: cohort HA (red) and {curve} (dashed) by step, {averaged}, n = {material.ladder.n}. "
        f"B: HA that each method deploys, with its mean {material.metric}; our methods in green."
    )
    return Picture("teaser", "From problem to payoff", figure, caption, "fig:teaser")


def _curve(material: Material) -> tuple[pd.DataFrame, str, str]:
    """Panel A: the ladder, the name of its metric, how both are averaged; mIoU is micro here and only here (A11)."""
    steps = material.ladder.table[material.ladder.table["group"] == "all"]
    if material.micro is None:
        return steps, f"mean {material.metric}", "case means"
    everything = material.micro.table[material.micro.table["group"] == "all"].set_index("step")["micro_miou"]
    averaged = "HA as case mean, mIoU micro over all pixels (the tables print the mean over images)"
    return steps.assign(metric=steps["step"].map(everything)), "micro-mIoU", averaged

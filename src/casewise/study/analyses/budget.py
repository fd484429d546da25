"""The budget axis: what each number of steps does, which one a holdout would choose, and what that choice costs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from casewise.archive.layout import cached_table
from casewise.archive.store import Archive
from casewise.core.formats import json_text
from casewise.core.records import Mask, State
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.calibration.fixed_budget import cheapest
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.measure.metrics.overlap import micro_miou
from casewise.render.ink import HARM, INK, MUTED, OURS, Picture, canvas, inked
from casewise.render.tables import DASH, NOT_RUN, Cell, Column, Table, number, rows_of, table
from casewise.study.analyses.deployment import method_table_of
from casewise.study.finding import Finding, Section, rows
from casewise.study.statistics.resample import RESAMPLES, draws
from casewise.study.study import Study, once
from casewise.study.trajectories import by_step, harm_and_metric, horizon, mean_or_nan, unshrunk


def section(study: Study) -> Section:
    """Ladders, selection on the holdout, its regret and its stability (G1-G7)."""
    ladder, chosen, shape = ladder_of(study), selection_of(study), shape_of(study)
    stability = selection_stability(study.holdout, study.outcomes, resamples=study.resamples, seed=study.seed)
    agreement = selection_agreement(study.holdout, study.outcomes, resamples=study.resamples, seed=study.seed)
    groups = group_agreement(study.holdout, study.outcomes)
    plateau = oracle_plateau(study.outcomes)
    micro = (micro_of(study),) if micro_of(study) else ()
    return Section(
        "budget",
        "One budget for all cases",
        _lead(study, agreement),
        (
            _sweep(ladder),
            _judged(ladder),
            _selection_table(chosen, study.metric),
            _agreement_table(agreement),
            _shape_table(shape, study.metric),
            _group_table(groups),
        ),
        (_teaser(study),),
        (ladder, *micro, chosen, shape, stability, agreement, groups, plateau),
        (*agreement.notes, *stability.notes, *shape.notes, *plateau.notes),
    )


@once
def ladder_of(study: Study) -> Finding:
    """Cohort HA and metric by step."""
    return ladder(study.outcomes, by_group=bool(study.groups))


@once
def micro_of(study: Study) -> Finding | None:
    """The metric over all voxels by step, for the teaser only; None where the metric has no such average."""
    return micro_ladder(study.evaluation, by_group=bool(study.groups)) if study.scored_by.micro else None


@once
def selection_of(study: Study) -> Finding:
    """Which budget a labelled holdout chooses."""
    return selection(study.holdout, study.outcomes)


@once
def shape_of(study: Study) -> Finding:
    """Whether the ladder dips before it rises."""
    return ladder_shape(study.outcomes, by_group=bool(study.groups))


def _lead(study: Study, agreement: Finding) -> str:
    first = selection_of(study).table.iloc[0]
    agree = float(agreement.table["agree"].iloc[0])
    same = int(first["k_holdout"]) == int(first["k_best"])
    outcome = (
        "which is also the best budget in hindsight"
        if same
        else f"the best in hindsight is k = {int(first['k_best'])}, a difference of {number(first['regret'])} HA"
    )
    return (
        f"By lowest HA the {int(first['n_holdout'])} holdout cases choose k = {int(first['k_holdout'])}; {outcome}. "
        f"Over {study.resamples} joint resamples holdout and evaluation agree in {100 * agree:.1f} % (n = "
        f"{int(first['n_eval'])}, seed {study.seed})."
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
    everyone = frame[frame["group"] == "all"].set_index("step")["judged"]
    share = everyone.get(max(steps), np.nan)
    said = judged_sentence(None if np.isnan(share) else float(share))
    caption = f"Cohort HA at each step of one trajectory; bold is the smallest of the row. At K = {max(steps)}, {said}."
    return table(
        "budget-sweep", "HA by fixed budget", columns, rows, caption=caption, paper="tab:budget-sweep", bold=bold
    )


def _judged(ladder: Finding) -> Table:
    frame = ladder.table[ladder.table["step"] > 0]
    steps = sorted(int(step) for step in frame["step"].unique())
    shares = [Column(f"k{k}", f"K = {k}", 1, percent=True) for k in steps]
    rows: list[dict[str, Cell]] = []
    for group, part in frame.groupby("group", sort=False):
        known = part.dropna(subset="judged").set_index("step")["judged"]
        rows.append({"split": _scope(str(group)), **{f"k{k}": float(known[k]) if k in known else DASH for k in steps}})
    caption = (
        "What of the changed area lies in components that are large enough for HA (%); a dash: nothing was changed. "
        "Where it is small, HA says little, and worse-voxels, which counts every voxel, is the measure to read."
    )
    columns = [Column("split", "Split", text=True), *shares]
    return table("budget-judged", "Share of the edit that HA judged", columns, rows, caption=caption, collapsed=True)


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
        "budget-selection",
        "Choosing the budget on a holdout",
        columns,
        rows_of(chosen.table, columns),
        caption=caption,
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


def _teaser(study: Study) -> Picture:
    shown = method_table_of(study).table
    shown = pd.DataFrame({**shown, "method": [study.title(name) for name in shown["method"]]})
    shown["method"] = shown["method"].replace(study.title(study.source), "M0")
    steps, curve, averaged = _curve(study)
    figure = draw_teaser(steps, shown, ours=study.marked, metric=study.metric, curve=curve)
    caption = (
        f"A: cohort HA (red) and {curve} (dashed) by step, {averaged}, n = {ladder_of(study).n}. "
        f"B: HA that each method deploys, with its mean {study.metric}; our methods in green."
    )
    return Picture("teaser", "From problem to payoff", figure, caption, "fig:teaser")


def _curve(study: Study) -> tuple[pd.DataFrame, str, str]:
    """Panel A: the ladder, the name of its metric, how both are averaged; mIoU is micro here and only here (A11)."""
    steps = ladder_of(study).table[ladder_of(study).table["group"] == "all"]
    micro = micro_of(study)
    if micro is None:
        return steps, f"mean {study.metric}", "case means"
    everything = micro.table[micro.table["group"] == "all"].set_index("step")["micro_miou"]
    averaged = "HA as case mean, mIoU micro over all pixels (the tables print the mean over images)"
    return steps.assign(metric=steps["step"].map(everything)), "micro-mIoU", averaged


Floats = NDArray[np.float64]


RULES = {
    "lowest HA": "ha",
    "highest metric": "metric",
    "HA - 0.5 metric": "ha-half-metric",
    "HA - metric": "ha-metric",
}
"""How the report calls the selection rules of calibrate; :func:`cheapest` is the one place that applies them (G2)."""


def ladder(outcomes: pd.DataFrame, *, by_group: bool = False) -> Finding:
    """Cohort metric, HA and BA at every step of one trajectory, M0 included (G1)."""
    records = [
        {"group": name, "step": int(step), **_step_means(part)}
        for name, frame in _scopes(outcomes, by_group)
        for step, part in frame.groupby("step")
    ]
    columns = (
        *("group", "step", "n", "metric", "ha", "ba", "delta", "regions", "scored", "judged", "worse_voxels"),
        "is_best",
    )
    table = rows(records, columns)
    adapted = table["step"] > 0
    best = table[adapted].groupby("group")["ha"].transform("min")
    table["is_best"] = (table["ha"] == best.reindex(table.index)) & adapted
    return Finding("budget.ladder", table, outcomes["case"].nunique(), "G1", {"by_group": by_group})


def _step_means(part: pd.DataFrame) -> dict[str, Any]:
    means = {name: mean_or_nan(part[name]) for name in ("metric", "ha", "ba", "delta", "regions", "worse_voxels")}
    share = judged_share(part)
    means["judged"] = np.nan if share is None else share
    return {"n": len(part), **means, "scored": int((part["regions"] >= 1).sum())}


def _scopes(outcomes: pd.DataFrame, by_group: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    frame = unshrunk(outcomes)
    yield "all", frame
    if by_group and "group" in frame.columns:
        yield from ((str(name), part) for name, part in frame.groupby("group", sort=True))


def selection(holdout: pd.DataFrame, evaluation: pd.DataFrame) -> Finding:
    """The step that a labelled holdout chooses under four rules, and its regret on the evaluation cases (G2, G3).

    regret = HA_eval(k_holdout) - min_k HA_eval(k).
    """
    held, scored = harm_and_metric(holdout), harm_and_metric(evaluation)
    held_ha, scored_ha = held[0].mean(axis=0), scored[0].mean(axis=0)
    scored_metric = np.nanmean(scored[1], axis=0)
    best = int(cheapest("ha", scored_ha, scored_metric))
    records = []
    for rule, name in RULES.items():
        chosen = int(cheapest(name, held_ha, np.nanmean(held[1], axis=0)))
        records.append(
            {
                "rule": rule,
                "k_holdout": chosen + 1,
                "k_best": best + 1,
                "ha_holdout": held_ha[chosen],
                "ha_eval": scored_ha[chosen],
                "ha_best": scored_ha[best],
                "metric_eval": scored_metric[chosen],
                "regret": scored_ha[chosen] - scored_ha[best],
                "n_holdout": len(held[0]),
                "n_eval": len(scored[0]),
            }
        )
    return Finding("budget.selection", pd.DataFrame(records), len(scored[0]), "G2, G3")


def _choices(outcomes: pd.DataFrame, resamples: int, seed: int) -> tuple[dict[str, NDArray[np.int64]], Any]:
    """The step that each rule chooses in every resample of the cases: {rule: (draw,)}."""
    ha, metric = harm_and_metric(outcomes)
    drawn = draws(len(ha), resamples, seed)
    weights = drawn.counts.astype(np.float64)
    defined = np.isfinite(metric)
    mean_ha = weights @ ha / len(ha)
    with np.errstate(invalid="ignore"):
        mean_metric = (weights @ np.where(defined, metric, 0.0)) / (weights @ defined)
    chosen = {rule: cheapest(name, mean_ha, mean_metric) + 1 for rule, name in RULES.items()}
    return chosen, drawn.proof


def selection_stability(
    holdout: pd.DataFrame, evaluation: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED
) -> Finding:
    """How often each step is chosen when holdout and evaluation cases are resampled, each by itself (G4)."""
    held, proof = _choices(holdout, resamples, seed)
    scored, other = _choices(evaluation, resamples, seed + 1)
    steps = range(1, horizon(evaluation) + 1)
    records: list[dict[str, Any]] = []
    for rule in RULES:
        pairs = pd.Series(list(zip(held[rule].tolist(), scored[rule].tolist(), strict=True))).value_counts(
            normalize=True
        )
        for step in steps:
            records.append(_chance(rule, "holdout", step, None, np.mean(held[rule] == step)))
            records.append(_chance(rule, "evaluation", None, step, np.mean(scored[rule] == step)))
        records.extend(_chance(rule, "joint", pair[0], pair[1], share) for pair, share in pairs.items())
    columns = ("rule", "kind", "k_holdout", "k_eval", "probability")
    made = {"holdout": proof, "evaluation": other, "resamples": resamples}
    return Finding("budget.selection_stability", rows(records, columns), evaluation["case"].nunique(), "G4", made)


def _chance(rule: str, kind: str, held: int | None, scored: int | None, share: float) -> dict[str, Any]:
    return {"rule": rule, "kind": kind, "k_holdout": held, "k_eval": scored, "probability": float(share)}


def selection_agreement(
    holdout: pd.DataFrame, evaluation: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED
) -> Finding:
    """P(the holdout's step is the evaluation's step) in the joint bootstrap, and the modal pair (G4)."""
    joint = selection_stability(holdout, evaluation, resamples=resamples, seed=seed)
    records = []
    for rule, part in joint.table[joint.table["kind"] == "joint"].groupby("rule", sort=False):
        modal = part.loc[part["probability"].idxmax()]
        records.append(
            {
                "rule": rule,
                "agree": float(part.loc[part["k_holdout"] == part["k_eval"], "probability"].sum()),
                "modal_holdout": int(modal["k_holdout"]),
                "modal_eval": int(modal["k_eval"]),
                "modal_share": float(modal["probability"]),
            }
        )
    return Finding("budget.selection_agreement", pd.DataFrame(records), joint.n, "G4", joint.made)


def group_agreement(holdout: pd.DataFrame, evaluation: pd.DataFrame) -> Finding:
    """Whether a group's own holdout chooses the group's own best step (G5)."""
    records: list[dict[str, Any]] = []
    held, scored = (dict(list(unshrunk(frame).groupby("group"))) for frame in (holdout, evaluation))
    for name in sorted(set(held) & set(scored)):
        first, second = (harm_and_metric(part)[0] for part in (held[name], scored[name]))
        chosen, best = (int(np.argmin(ha.mean(axis=0))) + 1 for ha in (first, second))
        sizes = {"n_holdout": len(first), "n_eval": len(second)}
        records.append({"group": name, **sizes, "k_holdout": chosen, "k_eval": best, "agree": chosen == best})
    table = rows(records, ("group", "n_holdout", "n_eval", "k_holdout", "k_eval", "agree"))
    note = f"{int(table['agree'].sum())} of {len(table)} groups agree" if len(table) else ""
    reason = "" if len(table) else "no group is in both holdout and evaluation"
    return Finding("budget.group_agreement", table, evaluation["case"].nunique(), "G5", notes=(note,), reason=reason)


def ladder_shape(outcomes: pd.DataFrame, *, by_group: bool = False) -> Finding:
    """Whether HA is non-monotone in the budget, dips before it rises, and how little the metric moves (G6, G7)."""
    records = []
    for name, part in _scopes(outcomes, by_group):
        ha, metric = harm_and_metric(part)
        records.append({"group": name, "n": len(ha), **_shape(ha.mean(axis=0), np.nanmean(metric, axis=0))})
    return Finding("budget.ladder_shape", pd.DataFrame(records), outcomes["case"].nunique(), "G6, G7")


def _shape(ha: Floats, metric: Floats) -> dict[str, Any]:
    best = int(np.argmin(ha))
    change = np.diff(ha)
    return {
        "k_best": best + 1,
        "ha_first": ha[0],
        "ha_best": ha[best],
        "ha_last": ha[-1],
        "non_monotone": bool((change > 0).any() and (change < 0).any()),
        "dips": bool(ha[-1] > ha[best] and 0 < best < len(ha) - 1),
        "metric_spread": float(metric.max() - metric.min()),
    }


def oracle_plateau(outcomes: pd.DataFrame, *, epsilon: float = 0.002) -> Finding:
    """The steps within ``epsilon`` of each case's best metric, and the smallest of them (S23)."""
    metric = by_step(outcomes, "metric").dropna()
    values = metric.to_numpy()
    near = values >= values.max(axis=1, keepdims=True) - epsilon if len(values) else np.zeros((0, 1), bool)
    table = pd.DataFrame(
        {
            "case": metric.index,
            "k_best": values.argmax(axis=1) if len(values) else [],
            "k_first": near.argmax(axis=1),
            "width": near.sum(axis=1),
            "metric": values.max(axis=1) if len(values) else [],
        }
    )
    return Finding("budget.oracle_plateau", table, len(table), "S23", {"epsilon": epsilon})


_VERSION = 1  # of the table; raise it when a column changes its meaning


def micro_ladder(archive: Archive, *, by_group: bool = False) -> Finding:
    """Micro-mIoU at every step, M0 included: counts of all voxels are added before they are divided (A11).

    Made from masks and labels once, then kept beside the archive. Cases without a label are left out.
    """
    ignore = archive.configuration.get("ignore")
    key = json_text([_VERSION, archive.digest, ignore, by_group])
    name = f"micro-{hashlib.sha256(key.encode()).hexdigest()}"
    table = cached_table(archive.path, name, lambda: _micro_table(archive, ignore, by_group))
    labelled = sum(entry.labelled for entry in archive.entries.values())
    made = {"by_group": by_group, "average": "micro", "ignore": ignore}
    return Finding("budget.micro", table, labelled, "A11, G1", made)


def _micro_table(archive: Archive, ignore: int | None, by_group: bool) -> pd.DataFrame:
    records: list[dict[str, Any]] = [
        {"group": group, "step": step, "n": len(ids), "micro_miou": _at(archive, ids, step, ignore)}
        for group, ids in _groups(archive, by_group)
        for step in range(archive.steps + 1)
    ]
    return rows(records, ("group", "step", "n", "micro_miou"))


def _at(archive: Archive, ids: list[str], step: int, ignore: int | None) -> float:
    return micro_miou(_pairs(archive, ids, State(step)), ignore=ignore)


def _pairs(archive: Archive, ids: list[str], state: State) -> Iterator[tuple[Mask, Mask]]:
    return ((archive.mask(case_id, state), archive.label(case_id)) for case_id in ids)


def _groups(archive: Archive, by_group: bool) -> Iterator[tuple[str, list[str]]]:
    scored = {name: entry.group for name, entry in archive.entries.items() if entry.labelled}
    yield "all", list(scored)
    if by_group:
        for group in sorted({one for one in scored.values() if one is not None}):
            yield group, [name for name, of in scored.items() if of == group]


def draw_teaser(
    ladder: pd.DataFrame, methods: pd.DataFrame, *, ours: frozenset[str], metric: str, curve: str
) -> Figure:
    """``ladder``: step, metric, ha. ``methods``: method, metric, ha, in table order; M0 is left out of panel B.

    ``curve`` names the metric of panel A, which may be averaged in another way (micro) than that of panel B (A11).
    """
    with inked():
        figure, axes = canvas(9.2, 3.3, columns=2)
        _panel_ladder(axes[0, 0], ladder, curve)
        _panel_methods(axes[0, 1], methods[methods["method"] != "M0"], ours, metric)
    return figure


def _panel_ladder(axis: Any, ladder: pd.DataFrame, curve: str) -> None:
    axis.plot(ladder["step"], ladder["ha"], color=HARM, marker="o", markersize=5)
    axis.set_xlabel("updates k")
    axis.set_ylabel("HA", color=HARM)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title("A  the mean hides the harm")
    other = axis.twinx()
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    other.plot(ladder["step"], ladder["metric"], color=INK, marker="s", markersize=4, linestyle=(0, (4, 2)))
    other.set_ylabel(curve, color=INK)
    middle = float(ladder["metric"].mean())
    spread = max(0.02, 2 * float((ladder["metric"] - middle).abs().max()))
    other.set_ylim(middle - spread, middle + spread)


def _panel_methods(axis: Any, methods: pd.DataFrame, ours: frozenset[str], metric: str) -> None:
    where = range(len(methods))[::-1]
    colors = [OURS if name in ours else MUTED for name in methods["method"]]
    axis.barh(list(where), methods["ha"], color=colors, height=0.62)
    for place, ha, value in zip(where, methods["ha"], methods["metric"], strict=True):
        axis.text(ha, place, f"  {ha:.3f}   {metric} {value:.3f}", va="center", fontsize=8, color=INK)
    axis.set_yticks(list(where), list(methods["method"]))
    axis.set_xlim(0, max(0.02, float(methods["ha"].max()) * 1.6))
    axis.set_xlabel("HA (lower is safer)")
    axis.grid(visible=False, axis="y")
    axis.set_title("B  harm that each method accepts")

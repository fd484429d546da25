"""The budget axis: HA and metric at each number of steps, the budget that a holdout chooses, stops, learning rates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from casewise.archive.layout import cached_table
from casewise.archive.store import Archive
from casewise.core.formats import json_text
from casewise.core.records import State
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.calibration.fixed_budget import cheapest
from casewise.judge.controllers.depth import FRAG_STOP, FixedK, StopRule, TauStop
from casewise.judge.outcomes import deployed, judged_sentence, judged_share, outcomes
from casewise.judge.policy import controller_of
from casewise.measure.metrics.overlap import micro_miou
from casewise.render.ink import HARM, INK, MUTED, OURS, Picture, canvas, inked
from casewise.render.tables import NOT_RUN, Cell, Column, PairCell, Table, interval, number
from casewise.replay import replay
from casewise.study.analyses.deployed_methods import method_table_of
from casewise.study.assignment import oracle_steps
from casewise.study.finding import Finding, Section, not_run, rows, show
from casewise.study.statistics.resample import RESAMPLES, cluster_numbers, draws, paired_interval
from casewise.study.study import Study, once
from casewise.study.trajectories import harm_and_metric, horizon, labelled, mean_or_nan, same_cases, scopes_of, unshrunk

Floats = NDArray[np.float64]
RULES = {"lowest HA": "ha", "highest metric": "metric", "HA - 0.5 metric": "ha-half-metric", "HA - metric": "ha-metric"}
"""Selection rules as the report calls them, and as :func:`cheapest` does (G2)."""
_MEANS = ("metric", "ha", "ba", "delta", "regions", "worse_voxels")
_VERSION = 1  # version of the cached table of micro-mIoU; raise it if a column changes its meaning


def section(study: Study) -> Section:
    """Ladders, selection on the holdout, its regret and its stability (G1-G7)."""
    ladder, chosen = ladder_of(study), selection(study.holdout, study.outcomes)
    shape = ladder_shape(study.outcomes, by_group=bool(study.groups))
    stability = selection_stability(study.holdout, study.outcomes, **study.bootstrap)
    agreement, groups = selection_agreement(stability), group_agreement(study.holdout, study.outcomes)
    micro = (micro_of(study),) if micro_of(study) else ()
    drawn = "Holdout and evaluation cases are resampled independently."
    tables = (
        _sweep(ladder),
        show("budget-selection", "Budget chosen on the holdout", chosen),
        show("budget-agreement", "Agreement of holdout and evaluation", agreement, caption=drawn),
        show("budget-shape", "Shape of the ladder", shape, collapsed=True),
        show("budget-groups", "Budget of each group", groups, caption=groups.reason, collapsed=True),
    )
    found = (ladder, *micro, chosen, shape, stability, agreement, groups)
    lead = _lead(study, chosen, agreement)
    return Section("budget", "One budget for all cases", lead, tables, (_teaser(study),), found, groups.notes)


@once
def ladder_of(study: Study) -> Finding:
    """Cohort HA and metric by step."""
    return ladder(study.outcomes, by_group=bool(study.groups))


@once
def micro_of(study: Study) -> Finding | None:
    """The metric over all voxels by step, for the teaser; None if the metric has no such average."""
    return micro_ladder(study.evaluation, by_group=bool(study.groups)) if study.scored_by.micro else None


def ladder(outcomes: pd.DataFrame, *, by_group: bool = False) -> Finding:
    """Cohort metric, HA and BA at every step of one trajectory, M0 included (G1)."""
    records = []
    for name, frame in scopes_of(unshrunk(outcomes), by_group):
        for step, part in frame.groupby("step"):
            share = judged_share(part)
            means = {column: mean_or_nan(part[column]) for column in _MEANS}
            more = {"scored": int((part["regions"] >= 1).sum()), "judged": np.nan if share is None else share}
            records.append({"group": name, "step": int(step), "n": len(part), **means, **more})
    table = pd.DataFrame(records)
    adapted = table["step"] > 0
    best = table[adapted].groupby("group")["ha"].transform("min")
    table["is_best"] = (table["ha"] == best.reindex(table.index)) & adapted
    return Finding("budget.ladder", table, outcomes["case"].nunique(), "G1", {"by_group": by_group})


def selection(holdout: pd.DataFrame, evaluation: pd.DataFrame) -> Finding:
    """The step that a labelled holdout chooses under four rules, and its regret on the evaluation cases (G2, G3).

    regret = HA_eval(k_holdout) - min_k HA_eval(k).
    """
    (held_ha, held_metric), (ha, metric) = (
        (harm.mean(axis=0), np.nanmean(scores, axis=0)) for harm, scores in map(harm_and_metric, (holdout, evaluation))
    )
    best = int(cheapest("ha", ha, metric))
    sizes = {"n_holdout": len(harm_and_metric(holdout)[0]), "n_eval": len(harm_and_metric(evaluation)[0])}
    records = []
    for rule, name in RULES.items():
        at = int(cheapest(name, held_ha, held_metric))
        values = {"ha_holdout": held_ha[at], "ha_eval": ha[at], "ha_best": ha[best], "metric_eval": metric[at]}
        records.append({"rule": rule, "k_holdout": at + 1, "k_best": best + 1, **values, "regret": ha[at] - ha[best]})
    return Finding("budget.selection", pd.DataFrame(records).assign(**sizes), sizes["n_eval"], "G2, G3")


def _choices(outcomes: pd.DataFrame, resamples: int, seed: int) -> tuple[dict[str, NDArray[np.int64]], Any]:
    """The step that each rule chooses in every resample of the cases: {rule: (draw,)}."""
    ha, metric = harm_and_metric(outcomes)
    drawn = draws(len(ha), resamples, seed)
    weights, defined = drawn.counts.astype(np.float64), np.isfinite(metric)
    with np.errstate(invalid="ignore"):
        mean_metric = (weights @ np.where(defined, metric, 0.0)) / (weights @ defined)
    chosen = {rule: cheapest(name, weights @ ha / len(ha), mean_metric) + 1 for rule, name in RULES.items()}
    return chosen, drawn.proof


def selection_stability(
    holdout: pd.DataFrame, evaluation: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED
) -> Finding:
    """Frequency with which each step is chosen if holdout and evaluation cases are resampled independently (G4)."""
    held, proof = _choices(holdout, resamples, seed)
    scored, other = _choices(evaluation, resamples, seed + 1)
    records: list[tuple[Any, ...]] = []
    for rule in RULES:
        for step in range(1, horizon(evaluation) + 1):
            records.append((rule, "holdout", step, None, np.mean(held[rule] == step)))
            records.append((rule, "evaluation", None, step, np.mean(scored[rule] == step)))
        pairs = pd.Series(list(zip(held[rule].tolist(), scored[rule].tolist(), strict=True)))
        records += [(rule, "joint", *pair, share) for pair, share in pairs.value_counts(normalize=True).items()]
    made = {"holdout": proof, "evaluation": other, "resamples": resamples}
    table = pd.DataFrame(records, columns=["rule", "kind", "k_holdout", "k_eval", "probability"])
    return Finding("budget.selection_stability", table, evaluation["case"].nunique(), "G4", made)


def selection_agreement(joint: Finding) -> Finding:
    """P(holdout and evaluation choose the same step) in the joint bootstrap, and the most frequent pair (G4)."""
    records = []
    for rule, part in joint.table[joint.table["kind"] == "joint"].groupby("rule", sort=False):
        modal = part.loc[part["probability"].idxmax()]
        agree = float(part.loc[part["k_holdout"] == part["k_eval"], "probability"].sum())
        pair = {"modal_holdout": int(modal["k_holdout"]), "modal_eval": int(modal["k_eval"])}
        records.append({"rule": rule, "agree": agree, **pair, "modal_share": float(modal["probability"])})
    return Finding("budget.selection_agreement", pd.DataFrame(records), joint.n, "G4", joint.made)


def group_agreement(holdout: pd.DataFrame, evaluation: pd.DataFrame) -> Finding:
    """Compare the step that the holdout of a group chooses with the best step of that group (G5)."""
    records: list[dict[str, Any]] = []
    held, scored = (dict(list(unshrunk(frame).groupby("group"))) for frame in (holdout, evaluation))
    for name in sorted(set(held) & set(scored)):
        first, second = (harm_and_metric(part)[0] for part in (held[name], scored[name]))
        chosen, best = (int(np.argmin(ha.mean(axis=0))) + 1 for ha in (first, second))
        sizes = {"n_holdout": len(first), "n_eval": len(second)}
        records.append({"group": name, **sizes, "k_holdout": chosen, "k_eval": best, "agree": chosen == best})
    table = rows(records, "group n_holdout n_eval k_holdout k_eval agree")
    reason = "" if len(table) else "no group is in both holdout and evaluation"
    notes = (f"{int(table['agree'].sum())} of {len(table)} groups agree",) if len(table) else ()
    return Finding("budget.group_agreement", table, evaluation["case"].nunique(), "G5", notes=notes, reason=reason)


def ladder_shape(outcomes: pd.DataFrame, *, by_group: bool = False) -> Finding:
    """Test if HA is non-monotone in the budget and dips before it rises, and measure the range of the metric (G6,
    G7)."""
    records = []
    for name, part in scopes_of(unshrunk(outcomes), by_group):
        every, metrics = harm_and_metric(part)
        ha, metric = every.mean(axis=0), np.nanmean(metrics, axis=0)
        best, change = int(np.argmin(ha)), np.diff(ha)
        values = {"k_best": best + 1, "ha_first": ha[0], "ha_best": ha[best], "ha_last": ha[-1]}
        values["non_monotone"] = bool((change > 0).any() and (change < 0).any())
        values["dips"] = bool(ha[-1] > ha[best] and 0 < best < len(ha) - 1)
        records.append({"group": name, "n": len(every), **values, "metric_spread": float(np.ptp(metric))})
    return Finding("budget.ladder_shape", pd.DataFrame(records), outcomes["case"].nunique(), "G6, G7")


def micro_ladder(archive: Archive, *, by_group: bool = False) -> Finding:
    """Micro-mIoU at every step, M0 included: counts of all voxels are added before they are divided (A11).

    The table is cached beside the archive. Cases without a label are left out.
    """
    ignore = archive.configuration.get("ignore")
    known = {name: entry.group for name, entry in archive.entries.items() if entry.labelled}

    def measured() -> pd.DataFrame:
        groups = {"all": list(known)}
        if by_group:
            named = sorted({one for one in known.values() if one is not None})
            groups |= {group: [case for case, of in known.items() if of == group] for group in named}
        records = []
        for group, ids in groups.items():
            for step in range(archive.steps + 1):
                pairs = ((archive.mask(case, State(step)), archive.label(case)) for case in ids)
                value = micro_miou(pairs, ignore=ignore)
                records.append({"group": group, "step": step, "n": len(ids), "micro_miou": value})
        return rows(records, "group step n micro_miou")

    key = json_text([_VERSION, archive.digest, ignore, by_group])
    table = cached_table(archive.path, f"micro-{hashlib.sha256(key.encode()).hexdigest()}", measured)
    made = {"by_group": by_group, "average": "micro", "ignore": ignore}
    return Finding("budget.micro", table, len(known), "A11, G1", made)


# ---- what the page shows ----


def _lead(study: Study, chosen: Finding, agreement: Finding) -> str:
    first = chosen.table.iloc[0]
    agree = float(agreement.table["agree"].iloc[0])
    outcome = (
        "which is also the best budget in hindsight"
        if first["k_holdout"] == first["k_best"]
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
    cells: list[dict[str, Cell]] = []
    bold = set()
    for at, (group, part) in enumerate(frame.groupby("group", sort=False)):
        ha = part.set_index("step")["ha"]
        cells.append({"split": "all cases" if group == "all" else str(group), "n": int(part["n"].max())})
        cells[-1] |= {f"k{k}": float(ha[k]) if k in ha.index else NOT_RUN for k in steps}
        bold |= {(at, f"k{int(k)}") for k in part.loc[part["is_best"].astype(bool), "step"]}
    share = frame[frame["group"] == "all"].set_index("step")["judged"].get(max(steps), np.nan)
    said = judged_sentence(None if np.isnan(share) else float(share))
    return show(
        "budget-sweep", "HA by fixed budget", cells, heads={f"k{k}": f"k = {k}" for k in steps}, bold=bold,
        caption=f"Cohort HA after k steps; bold is the smallest of the row. At k = {max(steps)}, {said}.",
        paper="tab:budget-sweep",
    )  # fmt: skip


def _teaser(study: Study) -> Picture:
    methods = method_table_of(study).table
    methods = methods[methods["method"] != study.source].assign(method=lambda frame: frame["method"].map(study.title))
    steps = ladder_of(study).table[ladder_of(study).table["group"] == "all"]
    curve, averaged = f"mean {study.metric}", "case means"
    if (micro := micro_of(study)) is not None:  # mIoU is micro here and only here (A11)
        everything = micro.table[micro.table["group"] == "all"].set_index("step")["micro_miou"]
        steps, curve = steps.assign(metric=steps["step"].map(everything)), "micro-mIoU"
        averaged = "HA as case mean, mIoU micro over all pixels (the tables print the mean over images)"
    figure = draw_teaser(steps, methods, ours=study.marked, metric=study.metric, curve=curve)
    caption = (
        f"A: cohort HA (red) and {curve} (dashed) by step, {averaged}, n = {ladder_of(study).n}. "
        f"B: HA that each method deploys, with its mean {study.metric}; our methods in green."
    )
    return Picture("teaser", "Harm by step and by method", figure, caption, "fig:teaser")


def draw_teaser(
    ladder: pd.DataFrame, methods: pd.DataFrame, *, ours: frozenset[str], metric: str, curve: str
) -> Figure:
    """Draw HA and a metric by step (A) and HA by method (B).

    Args:
        ladder: step, metric, ha.
        methods: method, metric, ha, in the order of the table.
        ours: Methods in color.
        metric: Name of the metric in panel B.
        curve: Name of the metric in panel A, which may be averaged in another way (A11).
    """
    with inked():
        figure, axes = canvas(9.2, 3.3, columns=2)
        _panel_ladder(axes[0, 0], ladder, curve)
        _panel_methods(axes[0, 1], methods, ours, metric)
    return figure


def _panel_ladder(axis: Any, ladder: pd.DataFrame, curve: str) -> None:
    axis.plot(ladder["step"], ladder["ha"], color=HARM, marker="o", markersize=5)
    axis.set(xlabel="steps k", title="A  harm and mean by step")
    axis.set_ylabel("HA", color=HARM)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
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
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel="HA (lower is safer)", title="B  harm that each method accepts")
    axis.grid(visible=False, axis="y")


# ---- early stopping ----


def early_section(study: Study) -> Section:
    """Is an early segment of the trajectory worth keeping? (O12)"""
    found = early_segment(study.outcomes, study.methods, stop=FRAG_STOP, reference=study.reference, **study.bootstrap)
    made = show("early", "Ladder, stop rule and oracle", found, caption="The oracle stop uses labels.")
    return Section("early", "Early stopping", found.notes[0], (made,), (), (found,))


def early_segment(
    outcomes: pd.DataFrame, methods: Mapping[str, pd.DataFrame], *, stop: str, reference: str, **bootstrap: Any
) -> Finding:
    """The ladder, a stop rule and the oracle stop on the same trajectories (O12, E12).

    Worth keeping: some adapted step has a mean metric above that of M0. The oracle stop takes the best step of each
    case from 1 on, ties to the smallest; it bounds the metric only.
    """
    ladder = unshrunk(labelled(outcomes))
    records = [_early_row(f"fixed-{step}" if step else "M0", part, "step") for step, part in ladder.groupby("step")]
    source = records[0]["metric"]
    better = [record["row"] for record in records[1:] if record["metric"] > source]
    adapted = ladder[ladder["step"] >= 1]
    whole = adapted[~adapted["metric"].isna().groupby(adapted["case"]).transform("any")]
    best = oracle_steps(whole, include_source=False) if len(whole) else whole
    records += [_early_row(stop, methods[stop], "deployed"), _early_row("oracle stop", best, "step")]
    left, right = same_cases(methods[stop], methods[reference])
    cut = paired_interval(left["ha"], right["ha"], clusters=cluster_numbers(left), **bootstrap)
    kept = f"{', '.join(better)} have a higher mean" if better else "no step has a higher mean"
    how = "is shown to differ from zero" if cut.shown else "is not shown to differ from zero"
    spread = interval(cut.estimate, cut.low, cut.high, 4, signed=True)
    note = (
        f"M0 {source:.4f}; {kept}. HA of {stop} against {reference}: {spread}, which {how} "
        f"(sign-flip p {cut.p_flip:.3f}, n={cut.n})."
    )
    made = {"cut": cut.estimate, "low": cut.low, "high": cut.high, "reference": reference}
    return Finding("early", pd.DataFrame(records), len(left), "O12", {"worth_keeping": bool(better), **made}, (note,))


def _early_row(name: str, frame: pd.DataFrame, depth: str) -> dict[str, Any]:
    means = {column: mean_or_nan(frame[column]) for column in ("metric", "ha")}
    return {"row": name, "n": len(frame), **means, "steps": mean_or_nan(frame[depth])}


# ---- learning rates ----


def learning_rates_section(study: Study) -> Section:
    """tab:supp-acdc-lr."""
    paper = "tab:supp-acdc-lr"
    if not study.extras.sweep:
        reason = "needs archives at several learning rates: --sweep RATE=EVALUATION[,CALIBRATION], once for each"
        return not_run("learning-rates", "Learning rates", f"learning-rate sweep ({paper})", reason)
    arms: dict[float, tuple[pd.DataFrame, ...]] = {}
    rules = set()
    for rate, (archive, holdout) in sorted(study.extras.sweep.items()):
        # tau-stop refitted at this rate if there is a holdout, else the parameter-free rule
        rule = StopRule(archive.steps) if holdout is None else controller_of(calibrate(holdout, TauStop.name))
        rules.add(rule.name)
        arms[rate] = tuple(deployed(outcomes(archive), replay(archive, one)) for one in (rule, FixedK(archive.steps)))
    found = learning_rate_sweep(arms)
    cells: list[dict[str, Cell]] = [
        {
            "rate": f"{row['learning_rate']:g}",
            "stop": PairCell(row["stop_metric"], row["stop_ha"]),
            "fixed": PairCell(row["fixed_metric"], row["fixed_ha"]),
            **{name: row[name] for name in ("ha_cut", "steps", "n")},
        }
        for row in found.table.to_dict("records")
    ]
    heads: dict[str, str | Column] = {
        "rate": Column("rate", "learning rate", text=True),
        "stop": f"{' / '.join(sorted(rules))} ({study.metric} / HA)",
        "fixed": f"{study.reference} ({study.metric} / HA)",
        "ha_cut": Column("ha_cut", "HA reduction", signed=True),
        "steps": "steps of the stop rule",
    }
    caption = "τ-stop if a calibration archive was given for the rate (refitted there), else FragStop."
    made = show("learning-rates", "Stop rule over learning rates", cells, heads=heads, caption=caption, paper=paper)
    return Section("learning-rates", "Learning rates", "", (made,), (), (found,))


def learning_rate_sweep(arms: Mapping[float, Sequence[pd.DataFrame]]) -> Finding:
    """A stop rule refitted at every learning rate, against the full budget at the same rate (G8)."""
    records = []
    for rate, (stopped, fixed) in arms.items():
        sides = {"stop": stopped, "fixed": fixed}
        means = {f"{arm}_{name}": mean_or_nan(frame[name]) for arm, frame in sides.items() for name in ("metric", "ha")}
        cut, steps = means["fixed_ha"] - means["stop_ha"], mean_or_nan(stopped["deployed"])
        records.append({"learning_rate": rate, "n": len(stopped), **means, "ha_cut": cut, "steps": steps})
    table = pd.DataFrame(records)
    return Finding("budget.learning_rate_sweep", table, int(table["n"].max()), "G8")

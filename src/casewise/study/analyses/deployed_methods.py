"""The results of each method, and every interval between methods, computed once and cited by its id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.monitors.quota import BUCKETS
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.render.ink import MUTED, OURS, SOURCE, Picture, canvas, draw_forest, inked
from casewise.render.tables import DASH, NOT_RUN, Cell, Column, PairCell, Table, best, interval, number
from casewise.study.finding import Finding, Section, rows, show
from casewise.study.statistics.resample import (
    RESAMPLES,
    cluster_numbers,
    draws,
    interval_fields,
    paired_interval,
    undefined_interval,
    wilcoxon,
    wins,
)
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, same_cases

Methods = Mapping[str, pd.DataFrame]
REPRODUCIBILITY_SCALE = 0.002  # difference of a cohort HA mean between two runs (H9)
INTERVAL_COLUMNS = (
    "id tier method reference quantity estimate low high p_below n clusters separated p_flip shown matched below_scale "
    "wins ties losses wilcoxon wilcoxon_p interval reason"
)
_MEANS = {name: name for name in ("metric", "ha", "ba", "neutral_scored", "unscored", "worse_voxels", "executed")}
_MEANS["steps"] = "deployed"
_KEYS = "metric ha judged worse_voxels ba steps executed rolled_back n undefined"
_SHAPES = "osD^vP*X<>ph8dH"


@dataclass(frozen=True)
class MethodPair:
    """One method against one reference; ``tier`` is A, A', B or C, joined by + if references coincide (H2)."""

    method: str
    reference: str
    tier: str = "C"


def section(study: Study) -> Section:
    """The method table, the tables by group, the interval list with ids, the bucket decomposition."""
    found = [method_table_of(study), intervals_of(study)]
    tables = [methods_table(study), *_by_group(study), interval_table(study)]
    missing = {study.title(name): reason for name, reason in study.skipped.items()}
    if study.is_router:
        buckets = bucket_decomposition(study.policy_rows)
        found.append(buckets)
        caption = buckets.reason or "The parts add up to the mean change of the cohort against M0."
        tables.append(show("buckets", "Change by bucket", buckets, caption=caption))
    else:
        missing["bucket decomposition"] = f"the policy is a {study.controller.name}, which has no buckets"
    pictures = (_forest(study), _pareto(study))
    title, notes = "Results of each method", intervals_of(study).notes
    return Section("deployment", title, _lead(study), tuple(tables), pictures, tuple(found), notes, missing)


@once
def method_table_of(study: Study) -> Finding:
    """Metric, HA, BA and steps of every method."""
    return method_table(study.methods)


@once
def intervals_of(study: Study) -> Finding:
    """Every interval between a controller and a budget: computed here, once, and cited by id."""
    ours = study.paper_methods
    against = {"A": study.deployable, "A'": study.reference, "B": study.retrospective, "C": study.source}
    asked = tiers(ours, against)
    known = {*ours, *against.values()}
    others = [MethodPair(study.ours, name) for name in study.methods if name not in known]
    if study.reference != study.source:
        others.append(MethodPair(study.reference, study.source))
    return intervals(study.methods, [*asked, *others], **study.bootstrap)


def interval_between(study: Study, method: str, reference: str, quantity: str) -> Mapping[str, Any] | None:
    """One interval of the list, or None if that comparison is not in it."""
    table = intervals_of(study).table
    found = table[table["id"] == f"{method}~{reference}:{quantity}"]
    return None if found.empty else dict(found.iloc[0])


def method_table(methods: Methods) -> Finding:
    """Cohort metric, HA, BA, steps deployed and executed, one row per method; HA over all cases (B9, A12).

    ``judged`` is the share of the edit that HA judged; NaN if nothing was changed.
    """
    records = []
    for name, frame in methods.items():
        share = judged_share(frame)
        means = {key: mean_or_nan(frame[column]) for key, column in _MEANS.items()}
        counts = {"n": len(frame), "undefined": int(frame["metric"].isna().sum())}
        counts["rolled_back"] = int(frame["rolled_back"].astype(bool).sum())
        records.append({"method": name, **counts, **means, "judged": np.nan if share is None else share})
    table = pd.DataFrame(records)
    return Finding("deployment.methods", table, int(table["n"].max()), "H, A12, B9")


def tiers(ours: Sequence[str], references: Mapping[str, str]) -> list[MethodPair]:
    """Each of our methods against every reference; a reference of several tiers (A, A', B, C) names them all."""
    by_reference: dict[str, list[str]] = {}
    for tier, reference in references.items():
        by_reference.setdefault(reference, []).append(tier)
    return [
        MethodPair(method, reference, "+".join(joined))
        for method in ours
        for reference, joined in by_reference.items()
        if method != reference
    ]


def intervals(
    methods: Methods, asked: Sequence[MethodPair], *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED
) -> Finding:
    """Compute paired intervals of HA and metric by patient for every comparison (H1, H7-H9)."""
    options = {"resamples": resamples, "seed": seed}
    records = [_interval_row(one, name, methods, options) for one in asked for name in ("ha", "metric")]
    table = rows(records, INTERVAL_COLUMNS)
    units = int(table["clusters"].max()) if len(table) else 0
    made = {**options, "stream": draws(units, resamples, seed).proof if units else None}
    joined = sorted({(one.reference, one.tier) for one in asked if "+" in one.tier})
    notes = [f"tiers {tier.replace('+', ' and ')} are equal: both are {reference}" for reference, tier in joined]
    if len(table):
        notes.append(f"the {len(table)} intervals are not corrected for multiplicity")
    reason = "" if asked else "no comparison was requested"
    n = int(table["n"].max()) if len(table) else 0
    return Finding("deployment.intervals", table, n, "H1-H9, H12", made, tuple(notes), reason)


def _interval_row(one: MethodPair, quantity: str, methods: Methods, options: Mapping[str, Any]) -> dict[str, Any]:
    left, right = same_cases(methods[one.method], methods[one.reference])
    defined = (left[quantity].notna() & right[quantity].notna()).to_numpy()
    left, right = left[defined], right[defined]
    found = undefined_interval(0, f"no case has a defined {quantity}")
    if len(left):
        found = paired_interval(left[quantity], right[quantity], clusters=cluster_numbers(left), **options)
    sides = wins(left[quantity], right[quantity], lower_is_better=quantity == "ha")
    p, how = wilcoxon(left[quantity], right[quantity])
    return {
        "id": f"{one.method}~{one.reference}:{quantity}",
        "tier": one.tier,
        "method": one.method,
        "reference": one.reference,
        "quantity": quantity,
        **interval_fields(found),
        "matched": found.holds_zero or how == "none",
        "below_scale": quantity == "ha" and abs(found.estimate) < 10 * REPRODUCIBILITY_SCALE,
        **dict(zip(("wins", "ties", "losses"), sides, strict=True)),
        "wilcoxon": how,
        "wilcoxon_p": p,
        "interval": found.method,
        "reason": "every difference is zero" if how == "none" and len(left) else found.reason,
    }


def bucket_decomposition(router: pd.DataFrame) -> Finding:
    """The part of each bucket in the mean change against M0, n_b * mean_b / n; the parts add up to the whole (H10).

    If a bucket is empty, no bucket mean is given (F4).
    """
    defined = router[router["change"].notna()]
    empty = [name for name in BUCKETS if not (defined["bucket"] == name).any()]
    reason = f"bucket {', '.join(empty)} is empty, so bucket means are not reported" if empty else ""
    whole, n = mean_or_nan(defined["change"]), len(defined)
    records: list[tuple[Any, ...]] = []
    for name in BUCKETS:
        part = defined.loc[defined["bucket"] == name, "change"]
        mean, share = np.nan if empty else float(part.mean()), float(part.sum()) / n if n else np.nan
        records.append((name, len(part), mean, share, reason))
    table = rows([*records, ("all", n, whole, whole, "")], "bucket n mean_change contribution reason")
    return Finding("deployment.buckets", table, n, "H10, F4", reason=reason)


def verdict(row: Mapping[str, Any]) -> str:
    """Say whether a difference is shown: the interval excludes zero, and the sign-flip test, exact at any n,
    rejects."""
    p = f"sign-flip p = {number(row['p_flip'])}"
    if row["shown"]:
        return f"an interval that excludes zero ({p})"
    if row["separated"]:
        return f"an interval that excludes zero, but {p} does not reject chance at 0.05, so no difference is shown"
    reach = f"an interval that contains zero ({p})" if row["low"] < row["high"] else p
    return f"{reach}, so no difference is shown"


# ---- what the page shows ----


def _lead(study: Study) -> str:
    harm, metric = (interval_between(study, study.ours, study.deployable, name) for name in ("ha", "metric"))
    if harm is None or metric is None:
        return f"The policy deploys the masks of {study.deployable}, so there is no difference to test."
    left, right = (interval(row["estimate"], row["low"], row["high"], signed=True) for row in (harm, metric))
    return (
        f"Against the budget that could have been deployed ({study.deployable}), the {study.title(study.ours)} changes "
        f"HA by {left}, {verdict(harm)}, and {study.metric} by {right}, {verdict(metric)} (n = {int(harm['n'])}). In "
        f"its masks, {judged_sentence(judged_share(study.policy_rows))}."
    )


def role(study: Study, name: str) -> str:
    """deployable, retrospective or default, as the paper tags its budgets."""
    tags = {"deployable": study.deployable, "retrospective": study.retrospective, "default": study.reference}
    words = " = ".join(word for word, budget in tags.items() if budget == name and name != study.source)
    return f" ({words})" if words else ""


def methods_table(study: Study) -> Table:
    """tab:mnm, tab:prostate, tab:supp-oodhard: one row per method; BA and executed updates beside them."""
    frame = method_table_of(study).table
    cells: list[dict[str, Cell]] = []
    for row in frame.to_dict("records"):
        made: dict[str, Cell] = {key: row[key] for key in _KEYS.split()}
        if row["method"] == study.source:
            made |= dict.fromkeys(("steps", "executed", "rolled_back"), DASH)
        judged = DASH if np.isnan(row["judged"]) else row["judged"]
        cells.append({**made, "judged": judged, "method": study.title(row["method"]) + role(study, row["method"])})
    for name in study.skipped:
        cells.append({"method": study.title(name), **dict.fromkeys(_KEYS.split(), NOT_RUN)})
    plain = {study.source, *study.budgets}
    adaptive = [at for at, name in enumerate(frame["method"]) if name not in plain]
    caption = (
        "Means over all cases. Steps deployed: depth of the deployed mask (M0 counts 0); steps executed: updates that "
        f"were made (a rollback counts one). HA judges changes of at least {study.measure['min_area']} connected "
        "voxels; the share of the edit that it judges is in the next column. Worse voxels: share of all edited voxels "
        "that became wrong. Bold is the best of the adaptive methods."
    )
    return show(
        "methods", "Methods", cells, f"method {_KEYS}", caption=caption, paper="tab:mnm",
        rules={1, sum(name in plain for name in frame["method"])},
        bold=best(cells, "metric", adaptive, max) | best(cells, "ha", adaptive, min),
    )  # fmt: skip


def _by_group(study: Study) -> list[Table]:
    """tab:supp-acdc-fogsnow: metric / HA of the main methods, one row per group."""
    middle = study.budgets - {study.reference, study.deployable, study.retrospective}
    shown = [name for name in study.methods if name != study.source and name not in middle]
    cells: list[dict[str, Cell]] = []
    for group in study.groups:
        means = method_table(study.of_group(group)).table.set_index("method")
        row: dict[str, Cell] = {"group": group, "n": int(means["n"].max())}
        row["m0"], judged = float(means.loc[study.source, "metric"]), float(means.loc[study.ours, "judged"])
        row |= {name: PairCell(float(means.loc[name, "metric"]), float(means.loc[name, "ha"])) for name in shown}
        cells.append({**row, "judged": DASH if np.isnan(judged) else judged})
    if not cells:
        return []
    heads: dict[str, str | Column] = {"m0": "M0", **{name: study.title(name) for name in shown}}
    heads["judged"] = Column("judged", f"judged by HA ({study.title(study.ours)}, %)", 1, percent=True)
    caption = f"{study.metric} / HA by group. M0 takes no step, so its HA is 0."
    paper = "tab:supp-acdc-fogsnow"
    return [show("methods-by-group", "Methods by group", cells, heads=heads, caption=caption, paper=paper)]


def interval_table(study: Study) -> Table:
    """The interval list of sec:supp-pairwise: one machine-readable table with ids (H8)."""
    caption = (
        "Paired differences; 95 % intervals with Student's t over patients below 200 patients, else bootstrap (B = "
        f"{study.resamples}, seed {study.seed}). Tier A: against the deployable budget. A′: against the default. B: "
        "against the best budget in hindsight. C: descriptive. Every interval in this report comes from this list. A "
        "difference is shown if its interval excludes 0 and the sign-flip test rejects at 0.05."
    )
    keys = "id tier estimate p_below separated p_flip shown wins ties losses wilcoxon_p below_scale n"
    heads = {"wilcoxon_p": "Wilcoxon p", "below_scale": "below 10× the run-to-run scale"}
    found = intervals_of(study)
    return show("intervals", "All intervals", found, keys, heads=heads, caption=caption, collapsed=True)


def _forest(study: Study) -> Picture:
    frame = intervals_of(study).table
    frame = frame[frame["method"] == study.ours]
    named = frame.assign(name=[f"vs {study.title(name)}" for name in frame["reference"]])
    titles = {"ha": "difference of HA", "metric": f"difference of {study.metric}"}
    panels = [(title, named[named["quantity"] == quantity]) for quantity, title in titles.items()]
    caption = "Left: negative is safer. Right: positive is more accurate. Filled: the interval excludes 0."
    return Picture("intervals", f"{study.title(study.ours)} against each reference", draw_forest(panels), caption)


def _pareto(study: Study) -> Picture:
    frames = {"all cases": method_table_of(study).table}
    frames |= {group: method_table(study.of_group(group)).table for group in study.groups[:5]}
    panels = {
        title: frame.assign(method=["M0" if name == study.source else study.title(name) for name in frame["method"]])
        for title, frame in frames.items()
    }
    figure = draw_pareto(panels, ours=study.marked, metric=study.metric)
    caption = f"Right is safer, up is more accurate; the scale of {study.metric} differs between panels. Descriptive."
    return Picture("pareto", "Reliability and accuracy", figure, caption, "fig:pareto")


def draw_pareto(panels: Mapping[str, pd.DataFrame], *, ours: frozenset[str], metric: str) -> Figure:
    """Draw (method, metric, ha) of each panel; ours colored, baselines grey, the shape names the method, M0 dashed."""
    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    lines = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for frame in panels.values() for name in frame["method"] if name != "M0"))
    shapes = dict(zip(names, _SHAPES * 3, strict=False))
    dashed: dict[str, Any] = {"color": SOURCE, "linestyle": (0, (4, 3)), "linewidth": 1}
    with inked():
        figure, axes = canvas(max(3.1 * columns, 6.2), 2.7 * lines + 0.9, columns=columns, rows=lines)
        for axis, (title, frame) in zip(axes.flat, panels.items(), strict=False):
            for _, row in frame.iterrows():
                name, mine = row["method"], row["method"] in ours
                if name == "M0":
                    axis.axhline(row["metric"], **dashed)
                    continue
                style = {"s": 62, "color": OURS, "zorder": 3} if mine else {"s": 38, "color": MUTED, "zorder": 2}
                axis.scatter(row["ha"], row["metric"], marker=shapes[name], **style)
            axis.invert_xaxis()
            axis.margins(0.16)
            axis.set(title=title, xlabel="HA (right is safer)", ylabel=metric)
        for axis in list(axes.flat)[len(panels) :]:
            axis.remove()
        first = axes.flat[0]
        handles = [
            first.plot([], [], linestyle="", marker=shape, color=OURS if name in ours else MUTED, label=name)[0]
            for name, shape in shapes.items()
        ]
        handles.append(first.plot([], [], label="M0", **dashed)[0])
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return figure

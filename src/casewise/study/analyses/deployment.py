"""What each method deploys, and every interval between a controller and a budget, made once and cited by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.core.errors import BadInput, UnknownName
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.outcomes import judged_sentence, judged_share
from casewise.render.ink import MUTED, OURS, SOURCE, Picture, canvas, draw_forest, inked
from casewise.render.tables import (
    DASH,
    Cell,
    Column,
    Estimate,
    NotRun,
    Pair,
    Table,
    highest,
    lowest,
    number,
    rows_of,
    table,
)
from casewise.study.finding import Finding, Section, rows
from casewise.study.statistics.resample import (
    RESAMPLES,
    Interval,
    clusters_of,
    draws,
    holm,
    paired_interval,
    undefined_interval,
    wilcoxon,
    wins,
)
from casewise.study.study import Study, once
from casewise.study.trajectories import mean_or_nan, same_cases


def section(study: Study) -> Section:
    """The method table, the tables by group, the interval list with ids, the bucket decomposition ."""
    found = [method_table_of(study), intervals_of(study)]
    tables = [methods_table(study), *_by_group(study), interval_table(study)]
    missing = {study.title(name): reason for name, reason in study.skipped.items()}
    if study.is_router:
        buckets = bucket_decomposition(study.router)
        found.append(buckets)
        tables.append(_bucket_table(study, buckets.table, buckets.reason))
    else:
        missing["bucket decomposition"] = f"the policy is a {study.controller.name}, which has no buckets"
    return Section(
        "deployment",
        "What each method deploys",
        _lead(study),
        tuple(tables),
        (_forest(study), _pareto(study)),
        tuple(found),
        intervals_of(study).notes,
        missing,
    )


@once
def method_table_of(study: Study) -> Finding:
    """Metric, HA, BA and steps of every method."""
    return method_table(study.methods)


@once
def intervals_of(study: Study) -> Finding:
    """Every interval between a controller and a budget: produced here, once, and cited by id."""
    ours = study.paper_methods
    against = {"deployable": study.deployable, "default": study.reference, "retrospective": study.retrospective}
    asked = tiers(study.methods, ours=ours, source=study.source, **against)
    known = {*ours, study.source, *against.values()}
    others = [Comparison(study.ours, name) for name in study.methods if name not in known]
    budget = [Comparison(study.reference, study.source)]
    return intervals(study.methods, [*asked, *others, *budget], **study.bootstrap)


def interval_between(study: Study, method: str, reference: str, quantity: str) -> Mapping[str, Any] | None:
    """One interval of the single list, or None when that comparison is not in it."""
    table = intervals_of(study).table
    found = table[table["id"] == f"{method}~{reference}:{quantity}"]
    return None if found.empty else dict(found.iloc[0])


def _lead(study: Study) -> str:
    harm = interval_between(study, study.ours, study.deployable, "ha")
    metric = interval_between(study, study.ours, study.deployable, "metric")
    if harm is None or metric is None:
        return f"The policy deploys what {study.deployable} deploys, so there is nothing to compare it with."
    left, right = (_estimate(row) for row in (harm, metric))
    column = Column("x", "", signed=True)
    text = Table("", "", (column,), ({"x": left}, {"x": right}))
    return (
        f"Against the budget that could have been deployed ({study.deployable}), the "
        f"{study.title(study.ours)} changes HA by {text.text(0, column)}, {verdict(harm)}, and "
        f"{study.metric} by {text.text(1, column)}, {verdict(metric)} (n = {int(harm['n'])}, "
        f"B = {study.resamples}, seed {study.seed}). Of what it deploys, {judged_sentence(judged_share(study.router))}."
    )


def _estimate(row: object) -> Estimate:
    values = dict(row)  # type: ignore[call-overload]
    return Estimate(float(values["estimate"]), float(values["low"]), float(values["high"]))


def role(study: Study, name: str) -> str:
    """deployable, retrospective or default, as the paper tags its budgets."""
    tags = (
        ("deployable", study.deployable),
        ("retrospective", study.retrospective),
        ("default", study.reference),
    )
    words = " = ".join(word for word, budget in tags if budget == name)
    return f" ({words})" if words else ""


def methods_table(study: Study) -> Table:
    """tab:mnm, tab:prostate, tab:supp-oodhard: one row per method; BA and executed updates beside them."""
    frame = method_table_of(study).table
    rows: list[dict[str, Cell]] = []
    for row in frame.to_dict("records"):
        is_source = row["method"] == study.source
        rows.append(
            {
                "method": study.title(row["method"]) + role(study, row["method"]),
                "metric": row["metric"],
                "ha": row["ha"],
                "judged": _or_dash(row["judged"]),
                "worse_voxels": row["worse_voxels"],
                "ba": row["ba"],
                "steps": DASH if is_source else row["steps"],
                "executed": DASH if is_source else row["executed"],
                "rolled_back": DASH if is_source else int(row["rolled_back"]),
                "n": int(row["n"]),
                "undefined": int(row["undefined"]),
            }
        )
    for name, reason in study.skipped.items():
        rows.append({"method": study.title(name), **dict.fromkeys(_METHOD_KEYS, NotRun(reason))})
    plain = {study.source, *study.budgets}
    adaptive = [at for at, name in enumerate(frame["method"]) if name not in plain]
    bold = highest(rows, "metric", among=adaptive) | lowest(rows, "ha", among=adaptive)
    columns = (
        Column("method", "Method", text=True),
        Column("metric", study.metric),
        Column("ha", "HA"),
        Column("judged", "judged by HA (%)", 1, percent=True),
        Column("worse_voxels", "worse voxels"),
        Column("ba", "BA"),
        Column("steps", "Steps", 2),
        Column("executed", "Executed", 2),
        Column("rolled_back", "Rolled back"),
        Column("n", "n"),
        Column("undefined", f"{study.metric} undefined"),
    )
    ladder = sum(name in plain for name in frame["method"])
    caption = (
        "Cohort means over all cases. Steps is the depth of what is deployed (a rollback counts 0), Executed what was "
        "really run (a rollback counts its probe). HA judges changes of at least "
        f"{study.measure['min_area']} connected voxels; what share of the edit that is stands beside it. Worse voxels "
        "is the share of all edited voxels that became wrong. Bold is the best of the adaptive methods."
    )
    return table(
        "methods", "Methods", columns, rows, caption=caption, paper="tab:mnm", rules={1, ladder}, bold=bold
    )  # fmt: skip


def _or_dash(share: float) -> Cell:
    """A dash where nothing was changed, so that there was nothing to judge."""
    return DASH if np.isnan(share) else share


_METHOD_KEYS = ("metric", "ha", "judged", "worse_voxels", "ba", "steps", "executed", "rolled_back", "n", "undefined")


def _by_group(study: Study) -> list[Table]:
    """tab:supp-acdc-fogsnow: metric / HA of the main methods, one row per group."""
    if not study.groups:
        return []
    shown = [name for name in study.methods if name != study.source and not _middle(study, name)]
    columns = [Column("group", "Group", text=True), Column("n", "n"), Column("m0", "M0")]
    columns += [Column(name, study.title(name)) for name in shown]
    columns += [Column("judged", f"judged by HA ({study.title(study.ours)}, %)", 1, percent=True)]
    rows: list[dict[str, Cell]] = []
    for group in study.groups:
        means = method_table(study.of_group(group)).table.set_index("method")
        row: dict[str, Cell] = {
            "group": group,
            "n": int(means["n"].max()),
            "m0": float(means.loc[study.source, "metric"]),
        }
        row |= {name: Pair(float(means.loc[name, "metric"]), float(means.loc[name, "ha"])) for name in shown}
        rows.append({**row, "judged": _or_dash(float(means.loc[study.ours, "judged"]))})
    caption = f"{study.metric} / HA by group. M0 takes no step, so its HA is 0."
    return [
        table("methods-by-group", "Methods by group", columns, rows, caption=caption, paper="tab:supp-acdc-fogsnow")
    ]


def _middle(study: Study, name: str) -> bool:
    return name in study.budgets and name not in {study.reference, study.deployable, study.retrospective}


def interval_table(study: Study) -> Table:
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
        f"Paired percentile bootstrap over cases (whole clusters where cases share one), B = {study.resamples}, "
        f"seed {study.seed}. Tier A: against the deployable budget. A′: against the default. B: against the best "
        "budget in hindsight. C: descriptive. Every interval in this report comes from this list. A difference is "
        "shown when its interval excludes 0 and the sign-flip test rejects at 0.05: with few cases the interval alone "
        "calls chance a difference too often, the test does not."
    )
    rows = rows_of(intervals_of(study).table, columns)
    return table("intervals", "Every interval, once", columns, rows, caption=caption, collapsed=True)


def _bucket_table(study: Study, frame: pd.DataFrame, reason: str) -> Table:
    columns = (
        Column("bucket", "Bucket", text=True),
        Column("n", "n"),
        Column("mean_change", f"mean change of {study.metric}", 6, signed=True),
        Column("contribution", "part of the cohort's change", 6, signed=True),
    )
    caption = reason or "The parts add up to the cohort's mean change against M0."
    return table("buckets", "Where the change comes from", columns, rows_of(frame, columns), caption=caption)


def _forest(study: Study) -> Picture:
    frame = intervals_of(study).table
    frame = frame[frame["method"] == study.ours]
    named = frame.assign(name=[f"vs {study.title(name)}" for name in frame["reference"]])
    panels = [
        ("difference of HA", named[named["quantity"] == "ha"]),
        (f"difference of {study.metric}", named[named["quantity"] == "metric"]),
    ]
    caption = (
        "Negative is safer on the left, positive is more accurate on the right. Filled where the interval excludes 0."
    )
    return Picture("intervals", f"{study.title(study.ours)} against each reference", draw_forest(panels), caption)


def _pareto(study: Study) -> Picture:
    panels = {"all cases": _points(study, method_table_of(study).table)}
    for group in study.groups[:5]:
        panels[group] = _points(study, method_table(study.of_group(group)).table)
    figure = draw_pareto(panels, ours=study.marked, metric=study.metric)
    caption = f"Right is safer, up is more accurate; the scale of {study.metric} differs between panels. Descriptive."
    return Picture("pareto", "Reliability and accuracy", figure, caption, "fig:pareto")


def _points(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    names = ["M0" if name == study.source else study.title(name) for name in frame["method"]]
    return pd.DataFrame({"method": names, "metric": frame["metric"], "ha": frame["ha"]})


Methods = Mapping[str, pd.DataFrame]


REPRODUCIBILITY_SCALE = 0.002  # of a cohort HA mean between two runs (H9)


BUCKETS = ("low", "mid", "hard")


_MEANS = ("metric", "ha", "ba", "neutral_scored", "unscored", "worse_voxels")


_FIELDS = ("estimate", "low", "high", "p_below", "n", "clusters", "separated", "p_flip", "shown")


INTERVAL_COLUMNS = (
    *("id", "tier", "method", "reference", "quantity", "estimate", "low", "high", "p_below", "n", "clusters"),
    *("separated", "p_flip", "shown", "matched", "below_scale", "wins", "ties", "losses", "wilcoxon", "wilcoxon_p"),
    *("family", "holm_p", "interval", "corrected", "reason"),
)


@dataclass(frozen=True)
class Comparison:
    """One method against one reference; ``tier`` is A, A', B or C, joined by + where references coincide (H2)."""

    method: str
    reference: str
    tier: str = "C"
    family: str | None = None  # a declared family of tests, corrected by Holm; None is uncorrected (H5, H6)
    family_size: int | None = None  # its declared size, when not every member is compared here


def method_table(methods: Methods) -> Finding:
    """Cohort metric, HA, BA, steps deployed and executed, one row per method; HA over all cases (B9, A12).

    ``judged`` is the share of the edit that HA judged; NaN where nothing was changed.
    """
    records = []
    for name, frame in methods.items():
        means = {column: mean_or_nan(frame[column]) for column in _MEANS}
        share = judged_share(frame)
        means["judged"] = np.nan if share is None else share
        steps = {"steps": mean_or_nan(frame["deployed"]), "executed": mean_or_nan(frame["executed"])}
        rolled_back = int(frame["rolled_back"].astype(bool).sum())
        undefined = int(frame["metric"].isna().sum())
        records.append(
            {"method": name, "n": len(frame), "undefined": undefined, **means, **steps, "rolled_back": rolled_back}
        )
    columns = ("method", "n", "undefined", *_MEANS, "judged", "steps", "executed", "rolled_back")
    table = rows(records, columns)
    adapted = table["steps"] > 0
    table["best_metric"] = adapted & (table["metric"] == table.loc[adapted, "metric"].max())
    table["best_ha"] = adapted & (table["ha"] == table.loc[adapted, "ha"].min())
    return Finding("deployment.methods", table, int(table["n"].max()) if len(table) else 0, "H, A12, B9")


def tiers(
    methods: Methods,
    *,
    ours: Sequence[str],
    deployable: str | None = None,
    default: str | None = None,
    retrospective: str | None = None,
    source: str | None = "m0",
) -> list[Comparison]:
    """Each of our methods against the deployable budget (A), the default (A'), the best in hindsight (B), M0 (C)."""
    named = {"A": deployable, "A'": default, "B": retrospective, "C": source if source in methods else None}
    by_reference: dict[str, list[str]] = {}
    for tier, reference in named.items():
        if reference is not None:
            by_reference.setdefault(reference, []).append(tier)
    for name in (*ours, *by_reference):
        if name not in methods:
            raise UnknownName(f"no method is called {name!r}. Known: {', '.join(methods)}")
    return [
        Comparison(method, reference, "+".join(joined))
        for method in ours
        for reference, joined in by_reference.items()
        if method != reference
    ]


def intervals(
    methods: Methods,
    comparisons: Iterable[Comparison],
    *,
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
    method: str = "percentile",
    cluster: str = "auto",
) -> Finding:
    """Paired bootstrap of HA and metric for every comparison: the single source of every interval (H1, H7-H9).

    ``cluster`` "auto" draws whole clusters when any cluster holds several cases, "never" draws cases.
    """
    if cluster not in ("auto", "never"):
        raise BadInput(f"cluster is 'auto' or 'never', got {cluster!r}")
    asked = list(comparisons)
    options = {"resamples": resamples, "seed": seed, "method": method}
    records = [
        _interval_row(one, quantity, methods, cluster, options) for one in asked for quantity in ("ha", "metric")
    ]
    table = rows(records, INTERVAL_COLUMNS)
    _correct(table, asked)
    units = int(table["clusters"].max()) if len(table) else 0
    made = {**options, "cluster": cluster, "stream": draws(units, resamples, seed).proof if units else None}
    notes = tuple(_coinciding(asked)) + _uncorrected(table)
    n = int(table["n"].max()) if len(table) else 0
    return Finding(
        "deployment.intervals", table, n, "H1-H9, H12", made, notes, "" if asked else "no comparison was asked for"
    )


def _interval_row(
    one: Comparison, quantity: str, methods: Methods, cluster: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    left, right = same_cases(methods[one.method], methods[one.reference])
    defined = (left[quantity].notna() & right[quantity].notna()).to_numpy()
    left, right = left[defined], right[defined]
    found = _paired(left, right, quantity, cluster, options)
    won, tied, lost = wins(left[quantity], right[quantity], lower_is_better=quantity == "ha")
    signed = wilcoxon(left[quantity], right[quantity])
    below = quantity == "ha" and abs(found.estimate) < 10 * REPRODUCIBILITY_SCALE
    return {
        "id": f"{one.method}~{one.reference}:{quantity}",
        "tier": one.tier,
        "method": one.method,
        "reference": one.reference,
        "quantity": quantity,
        **{name: getattr(found, name) for name in _FIELDS},
        "matched": found.holds_zero,
        "below_scale": below,
        "wins": won,
        "ties": tied,
        "losses": lost,
        "wilcoxon": signed.method,
        "wilcoxon_p": signed.p,
        "family": one.family,
        "holm_p": float("nan"),
        "interval": found.method,
        "corrected": False,
        "reason": found.reason or signed.reason,
    }


def _paired(
    left: pd.DataFrame, right: pd.DataFrame, quantity: str, cluster: str, options: Mapping[str, Any]
) -> Interval:
    if left.empty:
        return undefined_interval(0, f"no case has a defined {quantity}")
    units = clusters_of(left) if cluster == "auto" else np.arange(len(left))
    return paired_interval(left[quantity].to_numpy(), right[quantity].to_numpy(), clusters=units, **options)


def _correct(table: pd.DataFrame, asked: Sequence[Comparison]) -> None:
    """Holm within each declared family, on the signed-rank p of HA (H5)."""
    for family in {one.family for one in asked if one.family is not None}:
        members = table.index[(table["family"] == family) & (table["quantity"] == "ha") & table["wilcoxon_p"].notna()]
        size = max((one.family_size or 0 for one in asked if one.family == family), default=0)
        table.loc[members, "holm_p"] = holm(table.loc[members, "wilcoxon_p"].tolist(), family=max(size, len(members)))
        table.loc[members, "corrected"] = True


def _coinciding(asked: Sequence[Comparison]) -> list[str]:
    """Say where one budget serves several tiers (H2)."""
    joined = sorted({(one.reference, one.tier) for one in asked if "+" in one.tier})
    return [f"tiers {tier.replace('+', ' and ')} coincide: both are {reference}" for reference, tier in joined]


def _uncorrected(table: pd.DataFrame) -> tuple[str, ...]:
    """Say how many intervals stand without a correction for multiplicity (H6)."""
    plain = int((~table["corrected"].astype(bool)).sum()) if len(table) else 0
    return (f"{plain} of {len(table)} intervals are not corrected for multiplicity",) if plain else ()


def bucket_decomposition(router: pd.DataFrame) -> Finding:
    """Each bucket's part of the mean change against M0, n_b * mean_b / n; the parts add up to the whole (H10).

    A bucket without a case has no mean, and then no bucket mean is given at all (F4).
    """
    defined = router[router["change"].notna()]
    sizes = {name: int((defined["bucket"] == name).sum()) for name in BUCKETS}
    empty = [name for name, size in sizes.items() if size == 0]
    reason = f"bucket {', '.join(empty)} is empty, so bucket means are not reported" if empty else ""
    records = []
    for name, size in sizes.items():
        part = defined.loc[defined["bucket"] == name, "change"]
        mean = float("nan") if empty else float(part.mean())
        share = float(part.sum()) / len(defined) if len(defined) else float("nan")
        records.append({"bucket": name, "n": size, "mean_change": mean, "contribution": share, "reason": reason})
    whole = mean_or_nan(defined["change"])
    records.append({"bucket": "all", "n": len(defined), "mean_change": whole, "contribution": whole, "reason": ""})
    return Finding("deployment.buckets", pd.DataFrame(records), len(defined), "H10, F4", reason=reason)


_SHAPES = "osD^vP*X<>ph8dH"


def draw_pareto(panels: Mapping[str, pd.DataFrame], *, ours: frozenset[str], metric: str) -> Figure:
    """``panels``: title to (method, metric, ha); ours colored, baselines grey, shape names the method, M0 dashed."""
    columns = len(panels) if len(panels) < 4 else 2 if len(panels) == 4 else 3
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for frame in panels.values() for name in frame["method"] if name != "M0"))
    shapes = dict(zip(names, _SHAPES * 3, strict=False))
    with inked():
        figure, axes = canvas(max(3.1 * columns, 6.2), 2.7 * rows + 0.9, columns=columns, rows=rows)
        for axis, (title, frame) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, frame, shapes, ours)
            axis.set_title(title)
            axis.set(xlabel="HA (right is safer)", ylabel=metric)
        for axis in list(axes.flat)[len(panels) :]:
            axis.remove()
        handles = _handles(axes.flat[0], shapes, ours)
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return figure


def _panel(axis: Any, frame: pd.DataFrame, shapes: Mapping[str, str], ours: frozenset[str]) -> None:
    for _, row in frame.iterrows():
        if row["method"] == "M0":
            axis.axhline(row["metric"], color=SOURCE, linestyle=(0, (4, 3)), linewidth=1)
            continue
        is_ours = row["method"] in ours
        axis.scatter(
            row["ha"],
            row["metric"],
            marker=shapes[row["method"]],
            s=62 if is_ours else 38,
            color=OURS if is_ours else MUTED,
            zorder=3 if is_ours else 2,
        )
    axis.invert_xaxis()
    axis.margins(0.16)


def _handles(axis: Any, shapes: Mapping[str, str], ours: frozenset[str]) -> list[Any]:
    marks = [
        axis.plot([], [], linestyle="", marker=shape, color=OURS if name in ours else MUTED, label=name)[0]
        for name, shape in shapes.items()
    ]
    return [*marks, axis.plot([], [], color=SOURCE, linestyle=(0, (4, 3)), linewidth=1, label="M0")[0]]


def verdict(row: Mapping[str, Any]) -> str:
    """Whether a difference is shown: the interval excludes zero and the sign-flip test, exact at any n, rejects."""
    p = f"sign-flip p = {number(row['p_flip'])}"
    if row["shown"]:
        return f"an interval that excludes zero ({p})"
    if row["separated"]:
        return f"an interval that excludes zero, but {p} does not tell it from chance at 0.05, so nothing is shown"
    return f"an interval that contains zero ({p}), so no difference is shown"

"""Signals and harm: Spearman correlations with HA, and AUROC for the cases that the full budget makes worse."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT, pluralize
from casewise.measure.metrics.selective import auroc
from casewise.measure.signals import SIGNALS
from casewise.render.ink import Picture, draw_forest
from casewise.render.tables import Cell, Column, Estimate, Table, interval, undefined
from casewise.study.finding import Finding, Section, notes_of, rows, show
from casewise.study.statistics.ranks import (
    auroc_interval,
    column_spearman,
    shuffle_p,
    spearman,
    spearman_draws,
    spearman_p,
)
from casewise.study.statistics.resample import FEWEST, LEVEL, RESAMPLES, cluster_numbers, draws, interval_of
from casewise.study.study import Study, once
from casewise.study.trajectories import adapted_rows, horizon, scopes_of, signals_in, unshrunk

COLUMNS = "scope kind step signal rho low high p p_shuffled rows n clusters skipped against backwards reason"
STATE = ("regions", "regions_change", "delta", "delta_change", "entropy_on_d")


def section(study: Study) -> Section:
    """tab:signal-ha, tab:app-clustered-ci, tab:app-perstep."""
    pooled = association_of(study)
    steps = per_step(study.outcomes, **study.bootstrap)
    pairs, summary = signal_signal(study.outcomes), signal_summary(pooled)
    state = fragmentation_state(study.outcomes)
    tables = (
        _summary_table(summary),
        _clustered_table(study, pooled),
        _step_table(steps),
        show("signal-signal", "Correlations between signals", pairs, heads={"rho": "ρ"}, collapsed=True),
        show("state", "The state s_k (means over cases)", state, collapsed=True),
    )
    found = (pooled, steps, pairs, summary, state)
    pictures, notes = (_forest(pooled),), notes_of(*found)
    return Section("association", "Signals and harm", _lead(pooled), tables, pictures, found, notes)


@once
def association_of(study: Study) -> Finding:
    """Correlation of every signal with HA."""
    return association(
        study.outcomes, by_group=bool(study.groups), include_first=study.extras.first_step, **study.bootstrap
    )


def association(
    outcomes: pd.DataFrame, *, signals: Sequence[str] | None = None, by_group: bool = False, differences: bool = True,
    include_first: bool = False, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED,
) -> Finding:  # fmt: skip
    """Spearman of every signal with HA, of levels and of differences between consecutive steps (I1-I3, I5, I6).

    Rows are (case, step) with step >= 1; differences begin with step 2 unless ``include_first``. Whole clusters are
    resampled, with all steps of their cases.
    """
    names = signals_in(outcomes, signals)
    kinds = {"level": adapted_rows(outcomes)}
    if differences:
        ladder, columns = unshrunk(outcomes), [*names, "ha"]
        changed = ladder.assign(**dict(ladder.groupby("case")[columns].diff().items()))
        kinds["difference"] = changed[changed["step"] >= (1 if include_first else 2)]
    records = [
        record
        for kind, part in kinds.items()
        for scope, rest in scopes_of(part, by_group)
        for record in _correlations(rest, names, resamples, seed, scope=scope, kind=kind, step="pooled")
    ]
    table = rows(records, COLUMNS)
    made = {"resamples": resamples, "seed": seed, "include_first": include_first}
    return Finding("association", table, outcomes["case"].nunique(), "I1-I3, I5, I6, I9", made, _boundary(table))


def per_step(outcomes: pd.DataFrame, *, resamples: int = RESAMPLES, seed: int = RESAMPLING_SEED) -> Finding:
    """Spearman at every step alone, where no case counts twice, and pooled (I4)."""
    names, frame = signals_in(outcomes), adapted_rows(outcomes)
    parts = [(str(step), part) for step, part in frame.groupby("step")] + [("pooled", frame)]
    records = [
        record
        for step, part in parts
        for record in _correlations(part, names, resamples, seed, scope="all", kind="level", step=step)
    ]
    made = {"resamples": resamples, "seed": seed}
    return Finding("association.per_step", rows(records, COLUMNS), outcomes["case"].nunique(), "I4", made)


def signal_signal(outcomes: pd.DataFrame) -> Finding:
    """Spearman between signals over (case, step) rows (I7)."""
    frame, records = adapted_rows(outcomes), []
    for first, second in combinations(signals_in(outcomes), 2):
        both = frame[[first, second, "case"]].dropna()
        rho = column_spearman(both, first, second)
        reason = "a signal is constant or there are fewer than three rows" if np.isnan(rho) else ""
        records.append((first, second, rho, len(both), both["case"].nunique(), reason))
    table = rows(records, "first second rho rows n reason")
    return Finding("association.signal_signal", table, outcomes["case"].nunique(), "I7")


def signal_summary(found: Finding) -> Finding:
    """One row per signal: rho with HA, rho of the differences, and its extra passes (I10)."""
    pooled = found.table[found.table["scope"] == "all"]
    wide = pooled.pivot(index="signal", columns="kind", values="rho")
    names = list(dict.fromkeys(pooled["signal"]))
    wide = wide.reindex(index=names, columns=["level", "difference"])
    passes = {kind: [getattr(SIGNALS.get(name), kind, None) for name in names] for kind in ("backwards", "forwards")}
    table = pd.DataFrame({"signal": names, "rho": wide["level"].to_numpy(float), **passes})
    table.insert(2, "rho_difference", wide["difference"].to_numpy(float))
    return Finding("association.summary", table, found.n, "I10", found.made)


def states(outcomes: pd.DataFrame) -> pd.DataFrame:
    """The fragmentation state s_k = (n_k, Δn_k, δ_k, Δδ_k, H̄_k) of every case and step k >= 1; n_0 = δ_0 = 0."""
    frame = unshrunk(outcomes)
    before = frame.groupby("case")[["regions", "delta"]].shift(fill_value=0.0)
    changes = {f"{name}_change": frame[name] - before[name] for name in ("regions", "delta")}
    made = frame.assign(**changes, entropy_on_d=frame.get("entropy_on_d", np.nan))
    return made.loc[made["step"] >= 1, ["case", "step", *STATE]].reset_index(drop=True)


def fragmentation_state(outcomes: pd.DataFrame) -> Finding:
    """Means of the five parts of the state at every step; the entropy over the cases that recorded it."""
    found = states(outcomes)
    table = found.groupby("step", as_index=False)[list(STATE)].mean()
    table.insert(1, "n", found.groupby("step").size().to_numpy())
    made = {"cases_with_entropy": int(found.loc[found["entropy_on_d"].notna(), "case"].nunique())}
    return Finding("association.state", table, found["case"].nunique(), "C5", made)


def _correlations(
    frame: pd.DataFrame, names: Sequence[str], resamples: int, seed: int, **labels: str
) -> Iterator[dict[str, Any]]:
    """One record per signal; signals that are defined on the same rows share one pass over the draws."""
    by_rows: dict[bytes, list[str]] = {}
    for name in names:
        defined = (frame[name].notna() & frame["ha"].notna()).to_numpy()
        by_rows.setdefault(defined.tobytes(), []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for mask, together in by_rows.items():
        found |= _together(frame[np.frombuffer(mask, dtype=bool)], together, resamples, seed)
    for name in names:
        backwards = SIGNALS[name].backwards if name in SIGNALS else None
        yield {**labels, "signal": name, "backwards": backwards, **found[name]}


def _together(part: pd.DataFrame, names: Sequence[str], resamples: int, seed: int) -> dict[str, dict[str, Any]]:
    sizes = {"rows": len(part), "n": part["case"].nunique()}
    harm, columns = part["ha"].to_numpy(float), part[list(names)].to_numpy(float)
    units = cluster_numbers(part)
    amount = int(units.max()) + 1 if len(part) else 0
    if len(part):
        drawn = spearman_draws(columns, harm, units, draws(amount, resamples, seed).counts)
        shuffled = shuffle_p(columns, harm, units, seed=seed)
    records = {}
    for at, name in enumerate(names):
        rho = spearman(columns[:, at], harm)
        record: dict[str, Any] = {**sizes, "rho": rho, "p": spearman_p(rho, len(part)), "reason": ""}
        if np.isnan(rho):
            nothing = {**dict.fromkeys(("low", "high", "p_shuffled"), np.nan), "clusters": 0, "skipped": 0}
            records[name] = {**record, **nothing, "against": False, "reason": _why_undefined(columns[:, at], harm)}
            continue
        found = interval_of(rho, drawn[:, at], n=sizes["n"], clusters=amount)
        fields = {field: getattr(found, field) for field in ("low", "high", "clusters", "skipped")}
        if amount < FEWEST or found.low == found.high:  # all draws are in order: that is not certainty
            fields |= {"low": np.nan, "high": np.nan}
            why = "the order is perfect in every draw of " if amount >= FEWEST else f"fewer than {FEWEST}: "
            record["reason"] = f"{why}{amount} {UNIT[1]}, so there is no interval"
        against = rho > 0 if name in SIGNALS and not SIGNALS[name].higher_is_riskier else rho < 0  # (C12)
        records[name] = {**record, **fields, "p_shuffled": float(shuffled[at]), "against": against}
    return records


def _why_undefined(signal: NDArray[np.float64], harm: NDArray[np.float64]) -> str:
    if len(harm) < 3:
        return f"{pluralize(len(harm), 'row')}, a correlation needs three"
    return "the signal is constant" if np.ptp(signal) == 0 else "the target is constant"


def _boundary(table: pd.DataFrame) -> tuple[str, ...]:
    """Signals whose sign is opposite to the expected one by interval and test: outside their validity (I9)."""
    excludes_zero = ((table["low"] > 0) | (table["high"] < 0)) & (table["p_shuffled"] <= LEVEL)
    wrong = table[table["against"].astype(bool) & excludes_zero & (table["kind"] == "level")]
    return tuple(
        f"{row.signal} has a negative correlation with HA in {row.scope} (rho {row.rho:.3f} "
        f"[{row.low:.3f}, {row.high:.3f}], n={row.n})"
        for row in wrong.itertuples()
    )


# ---- what the page shows ----


def _part(pooled: Finding, kind: str) -> pd.DataFrame:
    frame = pooled.table
    return frame[(frame["scope"] == "all") & (frame["kind"] == kind)]


def _lead(pooled: Finding) -> str:
    levels = _part(pooled, "level").dropna(subset=["rho"])
    if levels.empty:
        return "No signal has a defined correlation with HA here."
    best = levels.loc[levels["rho"].abs().idxmax()]
    inverted = [str(name) for name in levels.loc[levels["against"].astype(bool), "signal"]]
    warning = f" The sign of these is opposite to the expected one: {', '.join(inverted)}." if inverted else ""
    return (
        f"The strongest association with HA is {best['signal']}: Spearman ρ = "
        f"{interval(*best[['rho', 'low', 'high']])} over {int(best['rows'])} steps of {int(best['n'])} cases.{warning}"
    )


def _summary_table(summary: Finding) -> Table:
    passes = summary.table[["backwards", "forwards"]].fillna(0).astype(int).to_numpy()
    words = [f"{back} backward" if back else f"{ahead} forward" if ahead else "none" for back, ahead in passes]
    frame = summary.table.assign(passes=words)
    best = {
        (int(frame[key].astype(float).argmax()), key) for key in ("rho", "rho_difference") if frame[key].notna().any()
    }
    first = 1 if summary.made["include_first"] else 2
    return show(
        "signal-ha", "Signals and HA", frame, "signal rho rho_difference passes", paper="tab:signal-ha",
        heads={"rho_difference": "ρ of differences", "passes": Column("passes", "extra passes", text=True)}, bold=best,
        caption=f"Over all (case, step ≥ 1); differences are between consecutive steps of a case, from k = {first} on.",
    )  # fmt: skip


def _clustered_table(study: Study, pooled: Finding) -> Table:
    cells: list[dict[str, Cell]] = []
    rules = set()
    for scope, part in pooled.table.groupby("scope", sort=False):
        rules.add(len(cells))
        for signal, both in part.groupby("signal", sort=False):
            first = both.iloc[0]
            row: dict[str, Cell] = {"scope": "all cases" if scope == "all" else str(scope), "signal": str(signal)}
            row |= {str(record["kind"]): estimate_cell(record, "rho") for record in both.to_dict("records")}
            row["p"] = undefined(int(first["n"])) if pd.isna(first["p_shuffled"]) else float(first["p_shuffled"])
            cells.append({**row, "n": int(first["n"]), "skipped": int(first["skipped"])})
    caption = (
        f"Bootstrap over {UNIT[1]} with all steps of their cases, B = {study.resamples}, seed {study.seed}. p: "
        f"permutation test, 999 exchanges of whole {UNIT[1]}."
    )
    heads = {"level": "ρ with HA [95 %]", "difference": "ρ of differences [95 %]", "skipped": "draws without a value"}
    return show(
        "clustered-ci", "Intervals of the correlations", cells, "scope signal level difference p n skipped",
        heads={**heads, "difference": Column("difference", heads["difference"])}, caption=caption, rules=rules,
        paper="tab:app-clustered-ci", collapsed=True,
    )  # fmt: skip


def estimate_cell(row: Mapping[Hashable, Any], key: str) -> Cell:
    """A cell with an estimate and its interval; words where there is none."""
    value, low, high = (float(row[name]) for name in (key, "low", "high"))
    return undefined(int(row["n"])) if value != value else Estimate(value, low, high)


def _step_table(steps: Finding) -> Table:
    wide = steps.table.pivot(index="signal", columns="step", values="rho").reindex(dict.fromkeys(steps.table["signal"]))
    wide = wide[list(dict.fromkeys(steps.table["step"]))]
    heads = {f"k{name}": str(name) if name == "pooled" else f"k = {name}" for name in wide}
    frame = wide.add_prefix("k").reset_index().assign(n=steps.n)
    return show(
        "per-step", "Step by step", frame, " ".join(["signal", *heads]), heads=heads, paper="tab:app-perstep",
        caption="Spearman ρ with HA within each step; the pooled value can come from the steps rather than the cases.",
        collapsed=True,
    )  # fmt: skip


def _forest(pooled: Finding) -> Picture:
    panels = []
    for kind, title in (("level", "ρ with HA"), ("difference", "ρ of the differences")):
        frame = _part(pooled, kind)
        panels.append((title, frame.assign(name=frame["signal"], estimate=frame["rho"])))
    caption = f"Spearman ρ with 95 % intervals over {UNIT[1]}, n = {pooled.n}. Filled: the interval excludes 0."
    return Picture("association", "Signals and HA", draw_forest(panels), caption)


# ---- ranking the cases ----

AUROC_COLUMNS = "signal target auroc low high p_shuffled positives n threshold reason"


def ranking_section(study: Study) -> Section:
    """tab:app-auroc."""
    found = ranking_of(study)
    return Section(
        "ranking", "Ranking the cases", _ranking_lead(study, found), (_auroc_table(study, found),), (), (found,)
    )


@once
def ranking_of(study: Study) -> Finding:
    """AUROC of each signal for ranking the cases."""
    return auroc_table(study.outcomes, seed=study.seed)


def auroc_table(outcomes: pd.DataFrame, *, seed: int = RESAMPLING_SEED) -> Finding:
    """AUROC of each step-1 signal for "worse" (metric falls at the budget) and "harm" (HA in the top tertile).

    Scores are used as they are, higher = positive; MSP therefore appears inverted (C12). The budget is the
    last step.
    """
    depth = horizon(outcomes)
    scores = unshrunk(outcomes)[lambda frame: frame["step"] == 1].set_index("case")
    records = [
        _auroc_row(scores, name, target, positive, threshold, seed)
        for target, positive, threshold in _targets(outcomes, depth)
        for name in signals_in(outcomes)
    ]
    made = {"budget": depth, "seed": seed}
    return Finding("ranking.auroc", rows(records, AUROC_COLUMNS), len(scores), "I8", made)


def top_tertile(harm: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
    """HA above its 66.67th percentile; above zero if that percentile is zero (I8).

    >>> flags, threshold = top_tertile(np.array([0.0, 0.0, 0.0, 0.0, 0.4]))
    >>> flags.tolist(), threshold
    ([False, False, False, False, True], 0.0)
    """
    threshold = float(np.percentile(harm, 66.67))
    return harm > threshold, threshold


def _targets(outcomes: pd.DataFrame, budget: int) -> Iterator[tuple[str, pd.Series, float]]:
    frame = unshrunk(outcomes)
    source, final = (frame[frame["step"] == step].set_index("case") for step in (0, budget))
    yield "worse", (final["metric"] - source["metric"]).dropna() < 0, 0.0
    harm = final["ha"].dropna()
    if len(harm):
        flags, threshold = top_tertile(harm.to_numpy(float))
        yield "harm", pd.Series(flags, index=harm.index), threshold


def _auroc_row(
    scores: pd.DataFrame, name: str, target: str, positive: pd.Series, threshold: float, seed: int
) -> dict[str, Any]:
    part = scores.loc[scores[name].notna() & scores.index.isin(positive.index)].reset_index()
    flags = positive.loc[part["case"]].to_numpy(bool)
    values = part[name].to_numpy(float)
    record = {"signal": name, "target": target, "positives": int(flags.sum()), "n": len(part), "threshold": threshold}
    if flags.all() or not flags.any():
        nothing = dict.fromkeys(("auroc", "low", "high", "p_shuffled"), np.nan)
        return {**record, **nothing, "reason": f"all {len(part)} cases are on one side"}
    point, units = auroc(values, flags), cluster_numbers(part)
    low, high = auroc_interval(point, len(np.unique(units[flags])), len(np.unique(units[~flags])))
    p = float(shuffle_p(values[:, None], flags.astype(np.float64), units, seed=seed)[0])
    return {**record, "auroc": point, "low": low, "high": high, "p_shuffled": p, "reason": ""}


def _ranking_lead(study: Study, found: Finding) -> str:
    defined = found.table[found.table["target"] == "worse"].dropna(subset=["auroc"])
    if defined.empty:
        return f"No case, or every case, is made worse by {study.reference}, so a ranking is undefined."
    best = defined.loc[defined["auroc"].idxmax()]
    ranked = interval(*best[["auroc", "low", "high"]])
    return (
        f"Of {defined['signal'].nunique()} signals after one update, {best['signal']} ranked best which cases "
        f"{study.reference} makes worse: AUROC {ranked}, n = {int(best['n'])}. It "
        f"was selected after looking at the labels, which the interval does not allow for."
    )


def _auroc_table(study: Study, ranked: Finding) -> Table:
    cells: list[dict[str, Cell]] = []
    for signal, part in ranked.table.groupby("signal", sort=False):
        row: dict[str, Cell] = {"signal": str(signal), "n": int(part["n"].max())}
        row |= {str(record["target"]): estimate_cell(record, "auroc") for record in part.to_dict("records")}
        cells.append(row)
    heads = {
        "signal": "Signal after one update",
        "worse": f"AUROC for a lower {study.metric} [95 %]",
        "harm": "AUROC for top-tertile HA [95 %]",
    }
    caption = (
        f"Both targets are those of {study.reference}. A higher signal means more risk, except MSP. Intervals by "
        f"Newcombe's method from the numbers of {UNIT[1]} with and without the target."
    )
    keys = "signal worse harm n"
    return show("auroc", "Ranking the cases", cells, keys, heads=heads, caption=caption, paper="tab:app-auroc")

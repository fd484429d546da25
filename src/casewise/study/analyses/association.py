"""Do the signals go with the harm? Spearman correlations with case-clustered intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.brief import UNIT, counted
from casewise.core.seeds import RESAMPLING_SEED
from casewise.measure.signals import SIGNALS
from casewise.render.ink import Picture, draw_forest
from casewise.render.tables import Cell, Column, Estimate, Table, Undefined, number, rows_of, table
from casewise.study.finding import Finding, Section, notes_of, rows
from casewise.study.statistics.ranks import shuffle_p, spearman, spearman_draws, spearman_p
from casewise.study.statistics.resample import LEVEL, RESAMPLES, clusters_of, draws, interval_of
from casewise.study.study import Study, once
from casewise.study.trajectories import signals_in, unshrunk


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
        _pair_table(pairs),
        _state_table(state),
    )
    found = (pooled, steps, pairs, summary, state)
    notes = notes_of(*found)
    return Section("association", "Signals and harm", _lead(pooled), tables, (_forest(pooled),), found, notes)


@once
def association_of(study: Study) -> Finding:
    """Correlation of every signal with HA."""
    return association(
        study.outcomes, by_group=bool(study.groups), include_first=study.extras.first_step, **study.bootstrap
    )


STATE = ("regions", "regions_change", "delta", "delta_change", "entropy_on_d")


def states(outcomes: pd.DataFrame) -> pd.DataFrame:
    """The fragmentation state s_k = (n_k, Δn_k, δ_k, Δδ_k, H̄_k) of every case and step k >= 1; n_0 = δ_0 = 0."""
    frame = unshrunk(outcomes)
    before = frame.groupby("case")[["regions", "delta"]].shift(fill_value=0.0)
    changes = {f"{name}_change": frame[name] - before[name] for name in ("regions", "delta")}
    entropy = frame.get("entropy_on_d", np.nan)
    made = frame.assign(**changes, entropy_on_d=entropy)
    return made.loc[made["step"] >= 1, ["case", "step", *STATE]].reset_index(drop=True)


def fragmentation_state(outcomes: pd.DataFrame) -> Finding:
    """Means of the state's five parts at every step; the entropy over the cases that recorded it."""
    found = states(outcomes)
    records = [
        {"step": int(step), "n": len(part), **{name: float(part[name].mean()) for name in STATE}}
        for step, part in found.groupby("step")
    ]
    made = {"cases_with_entropy": int(found.loc[found["entropy_on_d"].notna(), "case"].nunique())}
    return Finding("association.state", rows(records, ("step", "n", *STATE)), found["case"].nunique(), "C5", made)


def _state_table(state: Finding) -> Table:
    titles = {
        "regions": "regions n",
        "regions_change": "Δn",
        "delta": "δ",
        "delta_change": "Δδ",
        "entropy_on_d": "entropy on D",
    }
    columns = (
        Column("step", "Step k"),
        *(Column(name, title, 6 if "delta" in name else 3, signed="change" in name) for name, title in titles.items()),
        Column("n", "n"),
    )
    caption = "What a controller may read of an edit, step by step: means over cases. Δ is against the step before."
    return table("state", "The state s_k", columns, rows_of(state.table, columns), caption=caption, collapsed=True)


def _lead(pooled: Finding) -> str:
    levels = _part(pooled, "all", "level").dropna(subset=["rho"])
    if levels.empty:
        return "No signal has a defined correlation with HA here."
    best = levels.loc[levels["rho"].abs().idxmax()]
    inverted = [str(name) for name in levels.loc[levels["against"].astype(bool), "signal"]]
    warning = f" Against its orientation, which is a limit of validity: {', '.join(inverted)}." if inverted else ""
    return (
        f"The strongest association with HA is {best['signal']}: Spearman ρ = {number(best['rho'])} "
        f"[{number(best['low'])}, {number(best['high'])}] over {int(best['rows'])} rows of {int(best['n'])} cases, "
        f"cases resampled with all their steps.{warning}"
    )


def _part(pooled: Finding, scope: str, kind: str) -> pd.DataFrame:
    frame = pooled.table
    return frame[(frame["scope"] == scope) & (frame["kind"] == kind)]


def _summary_table(summary: Finding) -> Table:
    columns = (
        Column("signal", "Signal", text=True),
        Column("rho", "ρ vs HA"),
        Column("rho_difference", "ρ(Δ signal, Δ HA)"),
        Column("backprop", "backprop", text=True),
    )
    frame = summary.table.assign(
        backprop=[
            f"yes (×{int(back)})" if back else f"no ({int(ahead)}× forward)" if ahead else "no"
            for back, ahead in zip(
                summary.table["backwards"].fillna(0), summary.table["forwards"].fillna(0), strict=True
            )
        ]
    )
    rows = rows_of(frame, columns)
    best = {
        (int(frame[key].astype(float).argmax()), key) for key in ("rho", "rho_difference") if frame[key].notna().any()
    }
    first = 1 if summary.made["include_first"] else 2
    caption = f"Pooled over (case, step ≥ 1); Δ is between consecutive steps of one case, from k = {first} on."
    return table(
        "signal-ha", "Which signal goes with HA", columns, rows, caption=caption, paper="tab:signal-ha", bold=best
    )


def _clustered_table(study: Study, pooled: Finding) -> Table:
    columns = (
        Column("scope", "Split", text=True),
        Column("signal", "Signal", text=True),
        Column("level", "ρ vs HA [95 %]"),
        Column("difference", "ρ(Δ, Δ HA) [95 %]"),
        Column("p", "p of ρ vs HA"),
        Column("n", "n"),
        Column("skipped", "draws without a value"),
    )
    rows: list[dict[str, Cell]] = []
    rules = set()
    for scope, part in pooled.table.groupby("scope", sort=False):
        rules.add(len(rows))
        for signal, both in part.groupby("signal", sort=False):
            kinds = {str(row["kind"]): row for row in both.to_dict("records")}
            first = next(iter(kinds.values()))
            rows.append(
                {
                    "scope": "all cases" if scope == "all" else str(scope),
                    "signal": str(signal),
                    **{kind: _rho(kinds[kind]) if kind in kinds else None for kind in ("level", "difference")},
                    "p": _p(first),
                    "n": int(first["n"]),
                    "skipped": int(first["skipped"]),
                }
            )
    caption = (
        f"Case-clustered bootstrap: a case carries all its steps. B = {study.resamples}, seed {study.seed}. p: "
        f"999 shuffles of whole cases ({UNIT[1]} where named), exact at any n."
    )
    return table(
        "clustered-ci",
        "Clustered intervals",
        columns,
        rows,
        caption=caption,
        paper="tab:app-clustered-ci",
        rules=rules,
        collapsed=True,
    )


def _rho(row: dict[str, object]) -> Cell:
    rho, low, high = (float(row[key]) for key in ("rho", "low", "high"))  # type: ignore[arg-type]
    return Undefined(int(row["n"])) if rho != rho else Estimate(rho, low, high)  # type: ignore[call-overload]


def _p(row: dict[str, Any]) -> Cell:
    p = float(row["p_shuffled"])
    return Undefined(int(row["n"])) if p != p else p


def _step_table(steps: Finding) -> Table:
    frame = steps.table[steps.table["scope"] == "all"] if "scope" in steps.table else steps.table
    names = list(dict.fromkeys(str(step) for step in frame["step"]))
    columns = [Column("signal", "Signal", text=True)]
    columns += [Column(f"k{name}", name if name == "pooled" else f"k = {name}") for name in names]
    rows: list[dict[str, Cell]] = []
    for signal, part in frame.groupby("signal", sort=False):
        row: dict[str, Cell] = {"signal": str(signal)}
        for record in part.to_dict("records"):
            rho = float(record["rho"])
            row[f"k{record['step']}"] = Undefined(int(record["n"])) if rho != rho else rho
        rows.append(row)
    caption = (
        "Spearman ρ with HA within each step; the pooled value can come from the steps rather than from the cases."
    )
    return table("per-step", "Step by step", columns, rows, caption=caption, paper="tab:app-perstep", collapsed=True)


def _pair_table(pairs: Finding) -> Table:
    columns = (
        Column("first", "Signal", text=True),
        Column("second", "Signal ", text=True),
        Column("rho", "ρ"),
        Column("rows", "rows"),
        Column("n", "n"),
    )
    rows = rows_of(pairs.table, columns)
    caption = "Signals that correlate little with each other carry different information."
    return table("signal-signal", "Signals among themselves", columns, rows, caption=caption, collapsed=True)


def _forest(pooled: Finding) -> Picture:
    panels = []
    for kind, title in (("level", "ρ with HA"), ("difference", "ρ of the differences")):
        frame = _part(pooled, "all", kind)
        panels.append((title, frame.assign(name=frame["signal"], estimate=frame["rho"])))
    caption = f"Spearman ρ with 95 % case-clustered intervals, n = {pooled.n}. Filled where the interval excludes 0."
    return Picture("association", "Signals and HA", draw_forest(panels), caption)


COLUMNS = (
    *("scope", "kind", "step", "signal", "rho", "low", "high", "p", "p_shuffled", "rows", "n", "clusters", "skipped"),
    *("against", "backwards", "reason"),
)


def association(
    outcomes: pd.DataFrame,
    *,
    signals: Sequence[str] | None = None,
    by_group: bool = False,
    differences: bool = True,
    include_first: bool = False,
    max_step: int | None = None,
    target: str = "ha",
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Pooled and within-case differenced Spearman of every signal with HA, per group where asked (I1-I3, I5, I6).

    Rows are (case, step) with step >= 1; differences are between consecutive steps, from step 2 on unless
    ``include_first``. Cases are resampled and carry all their rows; clusters are resampled as wholes.
    """
    names = signals_in(outcomes, signals)
    levels = _adapted(outcomes, max_step)
    tables = [levels.assign(kind="level")]
    if differences:
        tables.append(_differences(outcomes, [*names, target], max_step, include_first).assign(kind="difference"))
    records: list[dict[str, Any]] = []
    for frame in tables:
        kind = frame["kind"].iloc[0] if len(frame) else "difference"
        for scope, part in _scopes(frame, by_group):
            records.extend(_correlations(part, names, target, resamples, seed, scope=scope, kind=kind, step="pooled"))
    table = rows(records, COLUMNS)
    made = {
        "target": target,
        "resamples": resamples,
        "seed": seed,
        "max_step": max_step,
        "include_first": include_first,
    }
    return Finding("association", table, outcomes["case"].nunique(), "I1-I3, I5, I6, I9", made, _boundary(table))


def per_step(
    outcomes: pd.DataFrame,
    *,
    signals: Sequence[str] | None = None,
    target: str = "ha",
    resamples: int = RESAMPLES,
    seed: int = RESAMPLING_SEED,
) -> Finding:
    """Spearman at every step by itself, where no case counts twice, and pooled (I4)."""
    names, frame = signals_in(outcomes, signals), _adapted(outcomes, None)
    parts = [(str(step), part) for step, part in frame.groupby("step")] + [("pooled", frame)]
    records = [
        record
        for step, part in parts
        for record in _correlations(part, names, target, resamples, seed, scope="all", kind="level", step=step)
    ]
    made = {"target": target, "resamples": resamples, "seed": seed}
    return Finding("association.per_step", rows(records, COLUMNS), outcomes["case"].nunique(), "I4", made)


def signal_signal(outcomes: pd.DataFrame, *, signals: Sequence[str] | None = None) -> Finding:
    """Spearman between signals over (case, step) rows: which ones say the same thing (I7)."""
    names, frame = signals_in(outcomes, signals), _adapted(outcomes, None)
    records = []
    for at, first in enumerate(names):
        for second in names[at + 1 :]:
            both = frame[[first, second, "case"]].dropna()
            rho = spearman(both[first].to_numpy(float), both[second].to_numpy(float))
            reason = "a signal is constant or there are fewer than three rows" if np.isnan(rho) else ""
            size = {"rows": len(both), "n": both["case"].nunique()}
            records.append({"first": first, "second": second, "rho": rho, **size, "reason": reason})
    table = rows(records, ("first", "second", "rho", "rows", "n", "reason"))
    return Finding("association.signal_signal", table, outcomes["case"].nunique(), "I7")


def signal_summary(found: Finding) -> Finding:
    """One row per signal: rho with HA, rho of the differences, and what the signal costs (I10)."""
    pooled = found.table[found.table["scope"] == "all"]
    wide = pooled.pivot(index="signal", columns="kind", values="rho")
    records = [
        {
            "signal": name,
            "rho": float(wide.loc[name].get("level", np.nan)),
            "rho_difference": float(wide.loc[name].get("difference", np.nan)),
            "backwards": SIGNALS[name].backwards if name in SIGNALS else None,
            "forwards": SIGNALS[name].forwards if name in SIGNALS else None,
        }
        for name in dict.fromkeys(pooled["signal"])
    ]
    columns = ("signal", "rho", "rho_difference", "backwards", "forwards")
    return Finding("association.summary", rows(records, columns), found.n, "I10", found.made)


def _adapted(outcomes: pd.DataFrame, max_step: int | None) -> pd.DataFrame:
    frame = unshrunk(outcomes)
    frame = frame[frame["step"] >= 1]
    return frame if max_step is None else frame[frame["step"] <= max_step]


def _differences(
    outcomes: pd.DataFrame, columns: Iterable[str], max_step: int | None, include_first: bool
) -> pd.DataFrame:
    """Within-case differences of consecutive steps, both steps >= 1 unless the first is included (I2)."""
    frame = unshrunk(outcomes)
    if max_step is not None:
        frame = frame[frame["step"] <= max_step]
    names = list(dict.fromkeys(columns))
    changes = frame.groupby("case")[names].diff()
    frame = frame.assign(**{name: changes[name] for name in names})
    return frame[frame["step"] >= (1 if include_first else 2)]


def _scopes(frame: pd.DataFrame, by_group: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    yield "all", frame
    if by_group and "group" in frame.columns:
        yield from ((str(name), part) for name, part in frame.groupby("group", sort=True))


def _correlations(
    frame: pd.DataFrame, names: Sequence[str], target: str, resamples: int, seed: int, **labels: str
) -> Iterator[dict[str, Any]]:
    """One record per signal; signals that are defined on the same rows share one pass over the draws."""
    by_rows: dict[bytes, list[str]] = {}
    for name in names:
        defined = (frame[name].notna() & frame[target].notna()).to_numpy()
        by_rows.setdefault(defined.tobytes(), []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for mask, together in by_rows.items():
        part = frame[np.frombuffer(mask, dtype=bool)]
        found |= _together(part, together, target, resamples, seed)
    for name in names:
        backwards = SIGNALS[name].backwards if name in SIGNALS else None
        yield {**labels, "signal": name, "backwards": backwards, **found[name]}


def _together(
    part: pd.DataFrame, names: Sequence[str], target: str, resamples: int, seed: int
) -> dict[str, dict[str, Any]]:
    sizes = {"rows": len(part), "n": part["case"].nunique()}
    harm, columns = part[target].to_numpy(float), part[list(names)].to_numpy(float)
    rhos = [spearman(column, harm) for column in columns.T]
    units = int(clusters_of(part).max()) + 1 if len(part) else 0
    drawn = _drawn(part, columns, harm, resamples, seed) if len(part) else None
    shuffled = shuffle_p(columns, harm, clusters_of(part), seed=seed) if len(part) else np.full(len(names), np.nan)
    records = {}
    for at, (name, rho) in enumerate(zip(names, rhos, strict=True)):
        record: dict[str, Any] = {**sizes, "rho": rho, "p": spearman_p(rho, len(part))}
        if np.isnan(rho) or drawn is None:
            nothing = {**dict.fromkeys(("low", "high", "p_shuffled"), np.nan), "clusters": 0, "skipped": 0}
            nothing |= {"against": False}
            records[name] = {**record, **nothing, "reason": _why_undefined(columns[:, at], harm)}
            continue
        interval = interval_of(rho, drawn[:, at], n=sizes["n"], clusters=units)
        fields = {field: getattr(interval, field) for field in ("low", "high", "clusters", "skipped")}
        fields |= {"p_shuffled": float(shuffled[at]), "against": _expected_sign(name) * rho < 0}
        records[name] = {**record, **fields, "reason": ""}
    return records


def _drawn(
    part: pd.DataFrame, columns: NDArray[np.float64], harm: NDArray[np.float64], resamples: int, seed: int
) -> NDArray[np.float64]:
    units = clusters_of(part)
    return spearman_draws(columns, harm, units, draws(int(units.max()) + 1, resamples, seed).counts)


def _expected_sign(signal: str) -> int:
    """+1 where higher means riskier, -1 for MSP and its like (C12)."""
    return -1 if signal in SIGNALS and not SIGNALS[signal].higher_is_riskier else 1


def _why_undefined(signal: NDArray[np.float64], harm: NDArray[np.float64]) -> str:
    if len(harm) < 3:
        return f"{counted(len(harm), 'row')}, a correlation needs three"
    return "the signal is constant" if np.ptp(signal) == 0 else "the target is constant"


def _boundary(table: pd.DataFrame) -> tuple[str, ...]:
    """Where a signal points the other way, and interval and test both say so: outside its validity (I9)."""
    excludes_zero = ((table["low"] > 0) | (table["high"] < 0)) & (table["p_shuffled"] <= LEVEL)
    wrong = table[table["against"].astype(bool) & excludes_zero & (table["kind"] == "level")]
    return tuple(
        f"{row.signal} goes against HA in {row.scope} (rho {row.rho:.3f} [{row.low:.3f}, {row.high:.3f}], n={row.n})"
        for row in wrong.itertuples()
    )

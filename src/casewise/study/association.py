"""Do the signals go with the harm? Spearman correlations with case-clustered intervals (I1-I7, I9, I10)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.core.seeds import RESAMPLING_SEED
from casewise.measure.signals import SIGNALS
from casewise.study.finding import Finding, need_columns, rows
from casewise.study.statistics.ranks import shuffle_p, spearman, spearman_draws, spearman_p
from casewise.study.statistics.resample import LEVEL, RESAMPLES, clusters_of, draws, interval_of
from casewise.study.trajectories import unshrunk

COLUMNS = (
    *("scope", "kind", "step", "signal", "rho", "low", "high", "p", "p_shuffled", "rows", "n", "clusters", "skipped"),
    *("against", "backwards", "reason"),
)


def signals_in(outcomes: pd.DataFrame, signals: Sequence[str] | None = None) -> list[str]:
    """The signals to look at: those asked for, or every known signal with a defined value."""
    if signals is not None:
        need_columns(outcomes, signals, "the outcomes frame")
        return list(signals)
    adapted = outcomes[outcomes["step"] > 0]
    return [name for name in SIGNALS if name in outcomes.columns and adapted[name].notna().any()]


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
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
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
    for number, (name, rho) in enumerate(zip(names, rhos, strict=True)):
        record: dict[str, Any] = {**sizes, "rho": rho, "p": spearman_p(rho, len(part))}
        if np.isnan(rho) or drawn is None:
            nothing = {**dict.fromkeys(("low", "high", "p_shuffled"), np.nan), "clusters": 0, "skipped": 0}
            nothing |= {"against": False}
            records[name] = {**record, **nothing, "reason": _why_undefined(columns[:, number], harm)}
            continue
        interval = interval_of(rho, drawn[:, number], n=sizes["n"], clusters=units)
        fields = {field: getattr(interval, field) for field in ("low", "high", "clusters", "skipped")}
        fields |= {"p_shuffled": float(shuffled[number]), "against": _expected_sign(name) * rho < 0}
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
        return f"{len(harm)} rows, a correlation needs three"
    return "the signal is constant" if np.ptp(signal) == 0 else "the target is constant"


def _boundary(table: pd.DataFrame) -> tuple[str, ...]:
    """Where a signal points the other way, and interval and test both say so: outside its validity (I9)."""
    excludes_zero = ((table["low"] > 0) | (table["high"] < 0)) & (table["p_shuffled"] <= LEVEL)
    wrong = table[table["against"].astype(bool) & excludes_zero & (table["kind"] == "level")]
    return tuple(
        f"{row.signal} goes against HA in {row.scope} (rho {row.rho:.3f} [{row.low:.3f}, {row.high:.3f}], n={row.n})"
        for row in wrong.itertuples()
    )

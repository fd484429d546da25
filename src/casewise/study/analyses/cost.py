"""What a method pays: updates deployed and executed, what a signal costs, how long an update took."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from casewise.archive.layout import Entry
from casewise.core.errors import DegenerateStatistic
from casewise.measure.signals import FROM_MASKS, SIGNALS
from casewise.render.tables import DASH, Cell, Column, Table, number, rows_of, table
from casewise.study.finding import Finding, Section, plain_table, rows
from casewise.study.inventory import CLOCK
from casewise.study.study import Study
from casewise.study.trajectories import mean_or_nan, step_one, unshrunk


def section(study: Study) -> Section:
    """tab:app-compute, and the updates that each method pays for."""
    spent, signals = cost(study.methods), signal_costs(measured_costs(study.evaluation.entries.values()))
    clock = step_seconds({case: entry.seconds for case, entry in study.evaluation.entries.items()})
    columns = (
        Column("method", "Method", text=True),
        Column("n", "n"),
        Column("deployed", "deployed updates", 2),
        Column("executed", "executed updates", 2),
        Column("wasted", "discarded", 2),
    )
    paid = spent.table.assign(method=[study.title(name) for name in spent.table["method"]])
    updates = table(
        "cost", "Updates paid for", columns, rows_of(paid, columns), caption="Means over cases.", collapsed=True
    )
    found = [spent, signals, *(() if clock.reason else (clock,))]
    tables, missing = [updates, _compute(signals, clock)], {CLOCK: clock.reason} if clock.reason else {}
    try:
        fired = firing(study.outcomes, **_spread(study))
        found.append(fired)
        caption = "Updates whose risk is above zero, by the mean and spread of the calibration cases after one update."
        tables.append(plain_table("firing", "How often modulation would restrict an update", fired, caption=caption))
    except DegenerateStatistic as error:
        missing["how often modulation would fire"] = str(error)
    return Section(
        "cost",
        "What it costs",
        _lead(study, spent),
        tuple(tables),
        (),
        tuple(found),
        spent.notes,
        missing,
    )


def _spread(study: Study) -> dict[str, float]:
    """Means and deviations of regions and delta after one update, over the calibration cases."""
    first = {name: step_one(study.holdout, name).to_numpy(float) for name in ("regions", "delta")}
    means = {f"mean_{name}": float(values.mean()) for name, values in first.items()}
    return means | {f"sd_{name}": float(values.std()) for name, values in first.items()}


def _lead(study: Study, spent: Finding) -> str:
    ours, full = spent.row(method=study.ours), spent.row(method=study.reference)
    return (
        f"The {study.title(study.ours)} executes {number(ours['executed'], 2)} updates per case and deploys "
        f"{number(ours['deployed'], 2)}; {study.reference} executes {number(full['executed'], 2)}."
    )


def _compute(signals: Finding, clock: Finding) -> Table:
    """Passes of each signal, after the seconds that M0 and one update took where the archive stored them."""
    columns = (
        Column("signal", "Component", text=True),
        Column("forwards", "extra forward passes"),
        Column("backwards", "backward passes"),
        Column("milliseconds", "measured (ms)", 1),
        Column("megabytes", "extra peak memory (MiB)", 1),
    )
    timed = list(_timed(clock))
    measured = f"Not measured here: {clock.reason}."
    if timed:
        updates = int(clock.number("steps", part="update"))
        measured = f"Seconds: median of {updates} updates of {clock.n} cases, on the machine that recorded them."
    caption = (
        "Passes of a signal are over and above the adaptation step; gradient_norm shares the backward of the update. "
        f"Milliseconds: median of {signals.n} cases, each the median of its steps. Memory: how far reading the signal "
        "raised the peak of the process, the most of any case; 0 where the adaptation itself had needed more. "
        f"{measured}"
    )
    return table(
        "compute", "Decision-time cost of each signal", columns, [*timed, *_read(signals, columns)],
        caption=caption, paper="tab:app-compute", collapsed=True, rules={len(timed)},
    )  # fmt: skip


def _read(signals: Finding, columns: Sequence[Column]) -> list[dict[str, Cell]]:
    """One row for all signals that share one look at two masks, then those with passes of their own."""
    frame = signals.table
    shared = frame["shared"].astype(bool)
    names = ", ".join(frame.loc[shared, "signal"])
    first = frame[shared].head(1).assign(signal=f"{names} (one look for all)")
    made = pd.concat([first, frame[~shared]]).astype({"milliseconds": object, "megabytes": object})
    return rows_of(made.where(made.notna(), ""), columns)


def _timed(clock: Finding) -> Iterator[dict[str, Cell]]:
    """Rows of M0, which needs no passes but its own, and of an update, whose passes its objective decides."""
    names: dict[str, tuple[str, Cell]] = {
        "m0": ("M0 and its signals", DASH),
        "update": ("one update, its prediction and its signals", "by objective"),
    }
    for row in clock.table.to_dict("records"):
        name, passes = names[row["part"]]
        took = 1e3 * float(row["median"])
        yield {"signal": name, "forwards": passes, "backwards": passes, "milliseconds": took, "megabytes": DASH}


def cost(methods: Mapping[str, pd.DataFrame]) -> Finding:
    """Mean updates deployed and executed; a rollback deploys none but has executed its probe (A12)."""
    records = []
    for name, frame in methods.items():
        kept, made = mean_or_nan(frame["deployed"]), mean_or_nan(frame["executed"])
        records.append({"method": name, "n": len(frame), "deployed": kept, "executed": made, "wasted": made - kept})
    n = max((len(frame) for frame in methods.values()), default=0)
    return Finding("cost", rows(records, ("method", "n", "deployed", "executed", "wasted")), n, "M12, A12")


def firing(
    outcomes: pd.DataFrame, *, mean_regions: float, sd_regions: float, mean_delta: float, sd_delta: float
) -> Finding:
    r"""How many (case, step) rows have risk r > 0, where FragSubset restricts the update (M12, C6).

    .. math:: r_k = \tfrac12 \frac{n_k - \mu_n}{\sigma_n} + \tfrac12 \frac{\delta_k - \mu_\delta}{\sigma_\delta}
              \ge -\tfrac12\left(\frac{\mu_n}{\sigma_n} + \frac{\mu_\delta}{\sigma_\delta}\right)

    The floor on the right is reported beside the lowest value; a value below it means other statistics (R1).
    """
    if sd_regions <= 0 or sd_delta <= 0:
        raise DegenerateStatistic(
            f"risk needs spreads above zero, got {sd_regions} and {sd_delta}; calibrate on more cases"
        )
    frame = unshrunk(outcomes)
    frame = frame[frame["step"] >= 1]
    risk = ((frame["regions"] - mean_regions) / sd_regions + (frame["delta"] - mean_delta) / sd_delta).to_numpy(
        float
    ) / 2
    fired = int((risk > 0).sum())
    record = {
        "n": frame["case"].nunique(),
        "rows": len(risk),
        "fired": fired,
        "share": fired / len(risk) if len(risk) else np.nan,
        "lowest": float(risk.min()) if len(risk) else np.nan,
        "floor": -(mean_regions / sd_regions + mean_delta / sd_delta) / 2,
    }
    made = {"mean_regions": mean_regions, "sd_regions": sd_regions, "mean_delta": mean_delta, "sd_delta": sd_delta}
    return Finding("cost.firing", pd.DataFrame([record]), int(record["n"]), "M12, C6, R1", made)


def measured_costs(entries: Iterable[Entry]) -> dict[str, tuple[float, float, int]]:
    """Median milliseconds and largest extra mebibytes of each signal over the cases that stored them, and how many."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        for name, pair in entry.spent.items():
            found.setdefault(name, []).append(pair)
    return {
        name: (float(np.median([took for took, _ in each])), max(more for _, more in each), len(each))
        for name, each in found.items()
    }


def signal_costs(measured: Mapping[str, tuple[float, float, int]] | None = None) -> Finding:
    """Passes of every signal, the milliseconds of a reading and its extra memory where the cases stored them (C13).

    Signals without passes of their own share one look at M0, the step's mask and its entropies. NaN is "not measured".
    """
    known, records = measured or {}, []
    for name, info in SIGNALS.items():
        shared = not (info.forwards or info.backwards or info.probe) and name not in known
        took, more, n = known.get(FROM_MASKS if shared else name, (np.nan, np.nan, 0))
        passes = {"forwards": info.forwards, "backwards": info.backwards, "shared": shared}
        reason = "" if n else "not measured"
        records.append({"signal": name, **passes, "milliseconds": took, "megabytes": more, "n": n, "reason": reason})
    cases = max((n for *_, n in known.values()), default=0)
    return Finding("cost.signals", pd.DataFrame(records), cases, "C13")


def step_seconds(seconds: Mapping[str, Sequence[float]]) -> Finding:
    """Wall time of M0 and of one update, by case as the archive stored it; the first of each case is M0 (C13).

    A step's time holds the update, the prediction and the signals. Cases without a clock are left out.
    """
    timed = [np.asarray(times, float) for times in seconds.values() if len(times)]
    parts = {"m0": [times[:1] for times in timed], "update": [times[1:] for times in timed]}
    records = [_clocked(name, np.concatenate(times)) for name, times in parts.items() if timed]
    reason = "" if timed else "no case stored how long its steps took"
    columns = ("part", "n", "steps", "mean", "median", "slowest")
    table = rows([{"n": len(timed), **one} for one in records], columns)
    return Finding("cost.seconds", table, len(timed), "C13", reason=reason)


def _clocked(part: str, times: NDArray[np.float64]) -> dict[str, Any]:
    if not times.size:
        return {"part": part, "steps": 0, "mean": np.nan, "median": np.nan, "slowest": np.nan}
    middle, slowest = float(np.median(times)), float(times.max())
    return {"part": part, "steps": times.size, "mean": float(times.mean()), "median": middle, "slowest": slowest}

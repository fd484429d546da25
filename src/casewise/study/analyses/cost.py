"""Updates deployed and executed, the cost of a signal, and the time of an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.layout import Entry
from casewise.core.errors import CasewiseError
from casewise.judge.calibration.cuts import first_step_statistics
from casewise.measure.signals import FROM_MASKS, SIGNALS
from casewise.measure.signals.risk import RiskStatistics
from casewise.render.tables import DASH, Cell, Table, number
from casewise.study.finding import Finding, Section, rows, show
from casewise.study.study import Study
from casewise.study.trajectories import adapted_rows, mean_or_nan


def section(study: Study) -> Section:
    """tab:app-compute, and the updates of each method."""
    spent, signals = cost(study.methods), signal_costs(measured_costs(study.evaluation.entries.values()))
    clock = step_seconds({case: entry.seconds for case, entry in study.evaluation.entries.items()})
    heads = {"deployed": "updates deployed", "executed": "updates executed", "wasted": "executed, not deployed"}
    tables = [
        show("cost", "Updates of each method", spent, heads=heads, caption="Means over cases.", collapsed=True),
        _compute(signals, clock),
    ]
    found = [spent, signals, *(() if clock.reason else (clock,))]
    missing = {"measured seconds of an update": clock.reason} if clock.reason else {}
    try:
        fired = firing(study.outcomes, first_step_statistics(study.holdout))
        caption = "Updates whose risk is above zero, by the mean and spread of the calibration cases after one update."
        tables.append(show("firing", "How often modulation would restrict an update", fired, caption=caption))
        found.append(fired)
    except CasewiseError as error:
        missing["how often modulation would restrict an update"] = str(error)
    ours, full = spent.row(method=study.ours), spent.row(method=study.reference)
    lead = (
        f"The {study.title(study.ours)} executes {number(ours['executed'], 2)} updates per case and deploys "
        f"{number(ours['deployed'], 2)}; {study.reference} executes {number(full['executed'], 2)}."
    )
    return Section("cost", "Cost", lead, tuple(tables), (), tuple(found), spent.notes, missing)


def _compute(signals: Finding, clock: Finding) -> Table:
    """Seconds of M0 and of one update, then passes of each signal; signals that share one look have one row."""
    names: dict[str, tuple[str, Cell]] = {
        "m0": ("M0 and its signals", DASH),
        "update": ("one update, its prediction and its signals", "by objective"),
    }
    cells: list[dict[str, Cell]] = []
    for row in clock.table.to_dict("records"):
        name, passes = names[row["part"]]
        took = 1e3 * float(row["median"])
        cells.append({"signal": name, "forwards": passes, "backwards": passes, "milliseconds": took, "megabytes": DASH})
    timed, frame = len(cells), signals.table
    shared = frame["shared"].astype(bool)
    together = f"{', '.join(frame.loc[shared, 'signal'])} (computed together)"
    for row in pd.concat([frame[shared].head(1).assign(signal=together), frame[~shared]]).to_dict("records"):
        cells.append({str(key): DASH if value != value else value for key, value in row.items()})
    measured = f"Not measured here: {clock.reason}."
    if timed:
        updates = int(clock.number("steps", part="update"))
        measured = f"Seconds: median of {updates} updates of {clock.n} cases, on the machine that recorded them."
    caption = (
        "Passes of a signal are in addition to those of the update; gradient_norm uses the backward pass of the "
        f"update. Milliseconds: median of {signals.n} cases, each the median of its steps. Memory: how far the signal "
        f"raised the peak of the process, largest of all cases; 0 if the update needed more. {measured}"
    )
    heads = {
        "signal": "Component", "forwards": "extra forward passes", "backwards": "backward passes",
        "milliseconds": "measured (ms)", "megabytes": "extra peak memory (MiB)",
    }  # fmt: skip
    return show(
        "compute", "Cost of each signal", cells, "signal forwards backwards milliseconds megabytes", heads=heads,
        caption=caption, paper="tab:app-compute", collapsed=True, rules={timed},
    )  # fmt: skip


def cost(methods: Mapping[str, pd.DataFrame]) -> Finding:
    """Mean updates deployed and executed; a rollback deploys none but has executed its probe (A12)."""
    records = []
    for name, frame in methods.items():
        kept, made = mean_or_nan(frame["deployed"]), mean_or_nan(frame["executed"])
        records.append({"method": name, "n": len(frame), "deployed": kept, "executed": made, "wasted": made - kept})
    n = max((len(frame) for frame in methods.values()), default=0)
    return Finding("cost", rows(records, "method n deployed executed wasted"), n, "M12, A12")


def firing(outcomes: pd.DataFrame, statistics: RiskStatistics) -> Finding:
    r"""Count the (case, step) rows with risk r > 0, where FragSubset restricts the update (M12, C6).

    .. math:: r_k = \tfrac12 \frac{n_k - \mu_n}{\sigma_n} + \tfrac12 \frac{\delta_k - \mu_\delta}{\sigma_\delta}
              \ge -\tfrac12\left(\frac{\mu_n}{\sigma_n} + \frac{\mu_\delta}{\sigma_\delta}\right)

    The bound on the right is reported as ``floor``; a value below it means other statistics (R1).
    """
    frame = adapted_rows(outcomes)
    risk, n = statistics.risk(frame["regions"], frame["delta"]).astype(float), frame["case"].nunique()
    fired = risk > 0
    record = (n, len(risk), int(fired.sum()), fired.mean(), risk.min(), statistics.risk(0, 0))
    table = rows([record], "n rows fired share lowest floor")
    return Finding("cost.firing", table, n, "M12, C6, R1", vars(statistics))


def measured_costs(entries: Iterable[Entry]) -> dict[str, tuple[float, float, int]]:
    """Median milliseconds, largest extra mebibytes and number of cases of each signal that cases stored."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        for name, pair in entry.spent.items():
            found.setdefault(name, []).append(pair)
    return {
        name: (float(np.median([took for took, _ in each])), max(more for _, more in each), len(each))
        for name, each in found.items()
    }


def signal_costs(measured: Mapping[str, tuple[float, float, int]] | None = None) -> Finding:
    """Passes of every signal, and its milliseconds and extra memory if the cases stored them (C13).

    Signals without own passes are computed together from M0, the mask of the step and its entropies.
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
    """Wall time of M0 and of one update with its prediction and signals; the first time of each case is M0 (C13)."""
    timed = [np.asarray(times, float) for times in seconds.values() if len(times)]
    parts = {"m0": [times[:1] for times in timed], "update": [times[1:] for times in timed]}
    records: list[dict[str, Any]] = []
    for part, times in parts.items() if timed else ():
        every = np.concatenate(times)
        numbers = (every.mean(), np.median(every), every.max()) if every.size else (np.nan,) * 3
        values = dict(zip(("mean", "median", "slowest"), map(float, numbers), strict=True))
        records.append({"part": part, "n": len(timed), "steps": every.size, **values})
    reason = "" if timed else "the time of the steps was not recorded"
    return Finding("cost.seconds", rows(records, "part n steps mean median slowest"), len(timed), "C13", reason=reason)

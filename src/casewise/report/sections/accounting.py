"""Where the harmful and the beneficial area lies: edit accounting by method and bucket, and cost (M4, M11, M12)."""

from __future__ import annotations

from collections.abc import Iterator

from casewise.render.cells import DASH, Cell
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.inventory import CLOCK
from casewise.report.material import Material
from casewise.report.section import Section
from casewise.study.accounting import accounting as accounts
from casewise.study.cost import cost, signal_costs, step_seconds
from casewise.study.finding import Finding


def accounting(material: Material) -> Section:
    """tab:app-accounting and the cost tables (P 20, 24)."""
    buckets = (material.ours,) if material.is_router else ()
    found, spent, signals = accounts(material.methods, buckets_of=buckets), cost(material.methods), signal_costs()
    columns = (
        Column("method", "Method", text=True),
        Column("bucket", "Bucket", text=True),
        Column("n", "n"),
        Column("ha", "HA"),
        Column("ba", "BA"),
        Column("ratio", "BA/HA", 2),
        Column("scored", "n with regions"),
        Column("ha_within", "HA within"),
        Column("coverage", "coverage", 6),
    )
    named = found.table.assign(method=[material.title(name) for name in found.table["method"]])
    caption = (
        "HA over all cases; within: over the cases with a region that counts; coverage: mean share of voxels that the "
        "deployed edit touches. BA/HA is a ratio of cohort means."
    )
    edits = table(
        "accounting", "Edit accounting", columns, rows_of(named, columns), caption=caption, paper="tab:app-accounting"
    )
    spending = (
        Column("method", "Method", text=True),
        Column("n", "n"),
        Column("deployed", "deployed updates", 2),
        Column("executed", "executed updates", 2),
        Column("wasted", "discarded", 2),
    )
    paid = spent.table.assign(method=[material.title(name) for name in spent.table["method"]])
    updates = table(
        "cost", "Updates paid for", spending, rows_of(paid, spending), caption="Means over cases.", collapsed=True
    )
    clock = step_seconds({case: entry.seconds for case, entry in material.evaluation.entries.items()})
    compute, missing = _compute(signals, clock), {CLOCK: clock.reason} if clock.reason else {}
    lead = "Low HA can come from deploying little. Coverage and the cases with regions say how much is deployed at all."
    return Section(
        "accounting", "Edit accounting", lead, (edits, updates, compute), (),
        (found, spent, signals, *(() if clock.reason else (clock,))), (*found.notes, *spent.notes), missing,
    )  # fmt: skip


def _compute(signals: Finding, clock: Finding) -> Table:
    """Passes of each signal, after the seconds that M0 and one update took where the archive stored them (P 24)."""
    columns = (
        Column("signal", "Component", text=True),
        Column("forwards", "extra forward passes"),
        Column("backwards", "backward passes"),
        Column("seconds", "measured (s)"),
    )
    timed = list(_timed(clock))
    measured = f"Not measured here: {clock.reason}."
    if timed:
        updates = int(clock.number("steps", part="update"))
        measured = f"Seconds: median of {updates} updates of {clock.n} cases, on the machine that recorded them."
    caption = (
        "Passes of a signal are over and above the adaptation step. An archive has no clock for signals; make bench "
        f"measures them. {measured}"
    )
    return table(
        "compute", "Decision-time cost of each signal", columns, [*timed, *rows_of(signals.table, columns)],
        caption=caption, paper="tab:app-compute", collapsed=True, rules={len(timed)},
    )  # fmt: skip


def _timed(clock: Finding) -> Iterator[dict[str, Cell]]:
    """Rows of M0, which needs no passes but its own, and of an update, whose passes its objective decides."""
    names: dict[str, tuple[str, Cell]] = {
        "m0": ("M0 and its signals", DASH),
        "update": ("one update, its prediction and its signals", "by objective"),
    }
    for row in clock.table.to_dict("records"):
        name, passes = names[row["part"]]
        yield {"signal": name, "forwards": passes, "backwards": passes, "seconds": float(row["median"])}

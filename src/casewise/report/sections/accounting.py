"""Where the harmful and the beneficial area lies: edit accounting by method and bucket, and cost (M4, M11, M12)."""

from __future__ import annotations

from casewise.report.material import Material
from casewise.report.section import Section
from casewise.report.tables import Column, rows_of, table
from casewise.study.accounting import accounting as accounts
from casewise.study.cost import cost, signal_costs


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
    prices = (
        Column("signal", "Signal", text=True),
        Column("forwards", "extra forward passes"),
        Column("backwards", "backward passes"),
        Column("milliseconds", "measured (ms)", 1),
    )
    shown = (
        signals.table.drop(columns=["milliseconds"]) if signals.table["milliseconds"].isna().all() else signals.table
    )
    compute = table(
        "compute", "Decision-time cost of each signal", prices, rows_of(shown, prices),
        caption="Over and above the adaptation step. An archive has no clock for signals; make bench measures them.",
        paper="tab:app-compute", collapsed=True,
    )  # fmt: skip
    lead = "Low HA can come from deploying little. Coverage and the cases with regions say how much is deployed at all."
    return Section(
        "accounting", "Edit accounting", lead, (edits, updates, compute), (), (found, spent, signals),
        (*found.notes, *spent.notes),
    )  # fmt: skip

"""Analyses beyond the paper's tables, each beside the tertile router and chance, each allowed to come out null."""

from __future__ import annotations

from casewise.render.cells import number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.material import Material
from casewise.report.section import Section
from casewise.study.balance import label_free_balance
from casewise.study.early import early_segment
from casewise.study.finding import Finding
from casewise.study.learned import learned_policy
from casewise.study.search import design_search


def early(material: Material) -> Section:
    """Is any early segment of the trajectory worth keeping? (O12)"""
    found = early_segment(
        material.outcomes,
        material.methods,
        stop="frag-stop",
        reference=material.reference,
        resamples=material.resamples,
        seed=material.seed,
    )
    columns = (
        Column("row", "Deployed", text=True),
        Column("metric", material.metric),
        Column("ha", "HA"),
        Column("steps", "Steps", 2),
        Column("n", "n"),
    )
    made = table(
        "early",
        "Ladder, stop rule and oracle",
        columns,
        rows_of(found.table, columns),
        caption="The oracle stop sees labels.",
    )
    return Section("early", "An early segment worth keeping?", found.notes[0], (made,), (), (found,), found.notes[1:])


def search(material: Material) -> Section:
    """What a searched design would really gain, against the winner's curse (S8)."""
    half = material.holdout["case"].drop_duplicates().sort_values()
    design, rest = set(half.iloc[::2]), set(half.iloc[1::2])
    frame = material.holdout
    found = design_search(
        frame[frame["case"].isin(design)], frame[frame["case"].isin(rest)], material.outcomes, seed=material.seed
    )
    columns = (
        Column("design", "Design", text=True),
        Column("chosen", "chosen"),
        Column("score_design", "score on design cases", 4),
        Column("score_evaluation", "score on evaluation cases", 4),
        Column("metric", material.metric),
        Column("ha", "HA"),
        Column("rolled_back", "rolled back"),
    )
    caption = "Chosen on half of the holdout, cut-points fitted on the other half, scored on the evaluation cases."
    made = table(
        "design-search", "Design search", columns, rows_of(found.table, columns), caption=caption, collapsed=True
    )
    return Section("search", "Searching for a design", _sentence(found), (made,), (), (found,))


def learned(material: Material) -> Section:
    """A small learned policy with nested cross-fitting, beside the router (S5)."""
    found = learned_policy(
        material.outcomes, seed=material.seed, router=material.router if material.is_router else None
    )
    columns = (
        Column("policy", "Policy", text=True),
        Column("loss", "loss", 4),
        Column("metric", material.metric),
        Column("ha", "HA"),
        Column("rolled_back", "rolled back"),
        Column("n", "n"),
    )
    caption = "Depth-2 tree on label-free signals, trained and scored on disjoint folds."
    made = table("learned", "A learned policy", columns, rows_of(found.table, columns), caption=caption)
    return Section("learned", "A learned policy", _sentence(found), (made,), (), (found,))


def balance(material: Material) -> Section:
    """How many are made worse, without labels on the stream (S3)."""
    found = label_free_balance(material.holdout, material.outcomes, resamples=material.resamples, seed=material.seed)
    columns = (
        Column("quantity", "Estimate", text=True),
        Column("estimate", "share of cases made worse [95 %]", interval=("low", "high")),
        Column("n_holdout", "n holdout"),
        Column("n_stream", "n stream"),
        Column("reason", "Remark", text=True),
    )
    rows = rows_of(found.table, columns)
    true = float((material.uncontrolled["change"] < 0).mean())
    caption = f"Estimated without the labels of the {found.n} evaluation cases; with them the share is {number(true)}."
    made = table("balance", "Made worse, estimated without labels", columns, rows, caption=caption)
    lead = "How many cases does adaptation make worse, when the stream has no labels and only the holdout has?"
    return Section("balance", "Balance without labels", lead, (made,), (), (found,), found.notes)


def _sentence(found: Finding) -> str:
    """The analysis's own sentences, as one paragraph."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in found.notes)


def plain_table(id: str, title: str, finding: Finding, *, caption: str = "") -> Table:
    """Every column of a finding as it is, for analyses whose table needs no shape of its own."""
    columns = [
        Column(str(name), str(name).replace("_", " "), text=finding.table[name].dtype == object)
        for name in finding.table
    ]
    return table(id, title, columns, rows_of(finding.table, columns), caption=caption)

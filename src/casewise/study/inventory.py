"""Every table and figure of the paper: which of them this report holds, and what the others would need (spec P)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from casewise.render.tables import Cell, Column, Table, table


@dataclass(frozen=True)
class Item:
    """One table or figure of the paper, and the ids under which this report shows it."""

    paper: str
    what: str
    ids: tuple[str, ...]
    needs: str  # what has to be given when it is not there


_OTHER = "rows of MEMO, CoTTA not run: need --other NAME=ARCHIVE"
INPUT_COLUMN = "input column of the pictures"
CLOCK = "measured seconds of an update"
_PARTS = {
    "fig:acdc-qual-supp": (INPUT_COLUMN, "needs --images DIR with the images that were recorded"),
    "tab:app-compute": (CLOCK, "needs an archive whose recording stored them"),
}  # what an item may lack although it is there: the name in Section.missing, and what it needs

ITEMS = (
    Item("tab:budget-sweep", "HA by fixed budget", ("budget-sweep",), "--only left it out"),
    Item("tab:signal-ha", "signals against HA", ("signal-ha",), "--only left it out"),
    Item("tab:mnm", "methods", ("methods",), "--only left it out"),
    Item("tab:prostate", "methods, second benchmark", ("methods",), "run the study on that archive: same table"),
    Item("tab:helphurt", "helped and hurt", ("helphurt",), "--only left it out"),
    Item("tab:supp-routing-coord", "coordinate and actions", ("routing",), "needs a policy that is a router"),
    Item("tab:supp-depth-var", "depth by bucket", ("depth-variation",), "needs a policy that is a router"),
    Item(
        "tab:supp-edit-geometry",
        "geometry of the regions",
        ("edit-geometry",),
        "needs labels and regions of both kinds",
    ),
    Item("tab:supp-helphurt", "helped and hurt by group", ("helphurt-by-group",), "needs cases of more than one group"),
    Item("tab:supp-oodhard", "methods on a subset", ("methods",), "run the study on that subset: same table"),
    Item(
        "tab:supp-acdc-lr",
        "learning rates",
        ("learning-rates",),
        "needs --sweep RATE=EVALUATION[,CALIBRATION] for each rate",
    ),
    Item("tab:supp-acdc-fogsnow", "methods by group", ("methods-by-group",), "needs cases of more than one group"),
    Item("tab:app-matched-mnm", "matched-quota selectors", ("matched",), "needs a policy that is a router"),
    Item(
        "tab:app-matched-acdc",
        "matched quota by group",
        ("matched-by-group",),
        "needs a router and more than one group",
    ),
    Item(
        "tab:app-prereg",
        "expectations and outcomes",
        ("prereg",),
        "needs a file of declared criteria (--criteria FILE)",
    ),
    Item("tab:app-three-pillars", "three lines of evidence", ("three-lines",), "needs a policy that is a router"),
    Item("tab:app-clustered-ci", "clustered intervals", ("clustered-ci",), "--only left it out"),
    Item("tab:app-perstep", "correlation by step", ("per-step",), "--only left it out"),
    Item("tab:app-auroc", "ranking the cases", ("auroc",), "--only left it out"),
    Item("tab:app-accounting", "edit accounting", ("accounting",), "--only left it out"),
    Item(
        "tab:app-calibsens",
        "fewer calibration cases",
        ("calibration-sensitivity",),
        "needs a router and > 5 calibration cases",
    ),
    Item("tab:app-tau", "smallest region that counts", ("min-area",), "needs a policy that is a router"),
    Item("tab:app-algorithm", "the algorithm", ("algorithm",), "needs a policy that is a router"),
    Item("tab:app-compute", "cost of each signal", ("compute",), "--only left it out"),
    Item(
        "tab:app-frozen-p158",
        "frozen design",
        ("frozen",),
        "needs the policy whose design was frozen (--frozen POLICY)",
    ),
    Item("tab:newobj", "criteria by objective", ("objectives",), "needs a policy that is a router"),
    Item("fig:teaser", "budget and methods", ("teaser",), "--only left it out"),
    Item("fig:med-qual", "masks, main", ("qualitative-1",), "needs labels and a slice with a change that counts"),
    Item("fig:ha-hd95", "HA and HD95", ("ha-hd95",), "needs labels and masks that are not empty"),
    Item("fig:acdc-qual-supp", "masks, driving", ("driving-1",), "needs an archive of many classes (foreground off)"),
    Item("fig:pareto", "reliability and accuracy", ("pareto",), "--only left it out"),
    Item(
        "fig:crc",
        "reliability diagram",
        ("crc",),
        "needs certificate.json of a region gate beside the calibration archive",
    ),
    Item(
        "fig:med-qual-prostate", "masks, M0 good", ("qualitative-2",), "needs a second case with a change that counts"
    ),
    Item(
        "fig:swin-geom",
        "edits of two backbones",
        ("backbone-edits",),
        "needs an archive of another backbone (--backbone NAME=ARCHIVE)",
    ),
)
TABLES, FIGURES = 26, 8


def inventory_table(made: Collection[str], *, others: bool, missing: Collection[str] = ()) -> Table:
    """The 26 tables and 8 figures with their state: here, or "not run: needs ...".

    ``others``: whether other objectives were given; ``missing``: what the sections say was not run.
    """
    columns = (
        Column("number", "#"),
        Column("paper", "In the paper", text=True),
        Column("what", "What", text=True),
        Column("state", "Here", text=True),
    )
    rows: list[dict[str, Cell]] = []
    for at, item in enumerate(ITEMS):
        name = f"table {at + 1}" if at < TABLES else f"figure {at + 1 - TABLES}"
        rows.append(
            {"number": name, "paper": item.paper, "what": item.what, "state": state_of(item, made, others, missing)}
        )
    return table("inventory", "Inventory", columns, rows, rules={TABLES})


def state_of(item: Item, made: Collection[str], others: bool, missing: Collection[str]) -> str:
    """Where an item is, or what it needs."""
    there = [id for id in item.ids if id in made]
    if not there:
        return f"not run: {item.needs}"
    part, needs = _PARTS.get(item.paper, ("", ""))
    if part in missing:
        return f"{there[0]}; {part} not run: {needs}"
    partial = item.paper in ("tab:mnm", "tab:prostate", "tab:supp-oodhard", "tab:supp-acdc-fogsnow") and not others
    return f"{there[0]}; {_OTHER}" if partial else there[0]


def counts(made: Collection[str]) -> Mapping[str, int]:
    """How many of the 26 and of the 8 are here."""
    here = [any(id in made for id in item.ids) for item in ITEMS]
    return {"tables": sum(here[:TABLES]), "figures": sum(here[TABLES:])}

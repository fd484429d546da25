"""The router itself: coordinate and actions, where the cases fall, how stable the cut-points are (E7, F9, M11)."""

from __future__ import annotations

from casewise.render.cells import Cell, number
from casewise.render.tables import Column, Table, rows_of, table
from casewise.report.figures.buckets import draw_buckets
from casewise.report.material import Material, step_one
from casewise.report.section import Picture, Section
from casewise.study.dispersion import depth_dispersion
from casewise.study.finding import Finding
from casewise.study.sensitivity import cut_stability

ALGORITHM = (
    "reset to M0 and predict ŷ₀",
    "take one adaptation step and predict ŷ₁",
    "u ← the coordinate of (ŷ₀, ŷ₁): two masks, no label, no backward pass",
    "if u ≥ cut_high: restore M0 and return the cached ŷ₀ (rollback)",
    "bucket ← mid if u > cut_low, else low",
    "run the bucket's action: a fixed depth (and part of the way back to M0 where it shrinks), or a stop rule in a cap",
    "return the deployed mask and the decision record",
)


def routing(material: Material) -> Section:
    """tab:supp-routing-coord, tab:supp-depth-var, tab:app-algorithm (P 6, 7, 23)."""
    if not material.is_router:
        reason = f"the policy is a {material.controller.name}, not a router"
        return Section("routing", "The router", missing={"routing tables": reason})
    depth = depth_dispersion(material.router)
    stability = cut_stability(
        *(step_one(frame, material.coordinate) for frame in (material.holdout, material.outcomes)),
        percentiles=material.percentiles, resamples=material.resamples, seed=material.seed,
    )  # fmt: skip
    tables = (_coordinates(material), _depths(depth), _cuts(material, stability), _algorithm())
    notes = tuple(dict.fromkeys((*depth.notes, *stability.notes)))
    return Section(
        "routing", "The router", _lead(material, stability), tables, (_picture(material),), (depth, stability), notes
    )  # fmt: skip


def _lead(material: Material, stability: Finding) -> str:
    counts = material.router["bucket"].value_counts()
    low, mid, hard = (int(counts.get(name, 0)) for name in ("low", "mid", "hard"))
    changed = stability.made.get("changed_median")
    moved = (
        ""
        if changed is None
        else f" Redrawing the calibration cases moves {100 * float(changed):.1f} % of cases (median)."
    )
    return (
        f"Of {len(material.router)} cases {low} fall low, {mid} mid and {hard} hard, read off "
        f"{material.coordinate} after one update and cut-points fitted on {material.calibration_size} calibration "
        f"cases.{moved}"
    )


def _coordinates(material: Material) -> Table:
    columns = (
        Column("group", "Domain", text=True),
        Column("coordinate", "Coordinate", text=True),
        Column("low", "Low", text=True),
        Column("mid", "Mid", text=True),
        Column("hard", "Hard", text=True),
        Column("cut_low", "cut_low", 6),
        Column("cut_high", "cut_high", 6),
        Column("n", "calibration cases"),
    )
    rows: list[dict[str, Cell]] = []
    for group, router in material.routers.items():
        row: dict[str, Cell] = {"group": group, "coordinate": material.coordinate, "n": material.calibration_size}
        row |= {
            name: str(getattr(router, name)) if hasattr(router, name) else "stop rule"
            for name in ("low", "mid", "hard")
        }
        rows.append({**row, "cut_low": float(router.cut_low), "cut_high": float(router.cut_high)})
    caption = f"Policy “{material.policy.name}”: value ≥ cut_high rolls back, value > cut_low is mid."
    return table("routing", "Coordinate and actions", columns, rows, caption=caption, paper="tab:supp-routing-coord")


def _depths(depth: Finding) -> Table:
    columns = (
        Column("bucket", "Bucket", text=True),
        Column("n", "n"),
        Column("std", "std of depth", 2),
        Column("low", "least", 0),
        Column("high", "most", 0),
    )
    caption = "How much the deployed depth varies inside a bucket (population standard deviation)."
    rows = rows_of(depth.table, columns)
    return table("depth-variation", "Depth by bucket", columns, rows, caption=caption, paper="tab:supp-depth-var")


def _cuts(material: Material, stability: Finding) -> Table:
    columns = (
        Column("cut", "Cut-point", text=True),
        Column("estimate", "value [95 %]", 6, interval=("low", "high")),
        Column("n", "calibration cases"),
    )
    high = stability.made.get("changed_high")
    tail = "" if high is None else f" In the upper tail {number(100 * float(high), 1)} % of cases change bucket."
    caption = f"Calibration cases drawn with replacement, B = {material.resamples}, seed {material.seed}.{tail}"
    return table(
        "cut-stability", "Stability of the cut-points", columns, rows_of(stability.table, columns), caption=caption
    )


def _algorithm() -> Table:
    columns = (Column("line", "Line"), Column("what", "Algorithm 1: routing one case, without labels", text=True))
    rows: list[dict[str, Cell]] = [{"line": at + 1, "what": line} for at, line in enumerate(ALGORITHM)]
    return table("algorithm", "The algorithm", columns, rows, paper="tab:app-algorithm", collapsed=True)


def _picture(material: Material) -> Picture:
    reference = material.uncontrolled.set_index("case")
    frame = material.router[["case", "value"]].join(reference[["ha", "change"]], on="case").dropna()
    cuts = [(float(router.cut_low), float(router.cut_high)) for router in material.routers.values()]
    figure = draw_buckets(frame, coordinate=material.coordinate, cuts=cuts, reference=material.reference)
    caption = f"One dot a case, n = {len(frame)}; dashed: the cut-points. What lies right of the second is rolled back."
    return Picture("buckets", f"What the router reads, and what {material.reference} would have done", figure, caption)

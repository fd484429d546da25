"""Accounting of the edited area: harmful and beneficial area, regions by shape and smallest size, and surface
distance."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats

from casewise.archive.store import Archive
from casewise.core.records import SOURCE, Mask, State
from casewise.judge.monitors.quota import BUCKETS
from casewise.measure.metrics.harm import Harm, harm
from casewise.measure.metrics.surface import hd95
from casewise.measure.regions import Connectivity
from casewise.render.ink import HARM, INK, MUTED, Picture, canvas, inked
from casewise.render.tables import Cell, Column, Table, number
from casewise.study.finding import Finding, Section, not_run, notes_of, rows, show
from casewise.study.statistics.ranks import spearman, spearman_p
from casewise.study.study import Study, once, region_options
from casewise.study.trajectories import horizon, mean_or_nan, unshrunk

ACCOUNTING_COLUMNS = "method bucket n ha ba ratio scored ha_within retained ha_retained coverage reason"


def accounting_section(study: Study) -> Section:
    """tab:app-accounting."""
    found = accounting_of(study)
    caption = (
        "HA is the mean over all cases. BA / HA is a ratio of cohort means. A low HA can come from changing little: "
        "the share of changed voxels and the cases with regions say how much was deployed."
    )
    keys = "method bucket n ha ba ratio scored ha_within coverage"
    made = show("accounting", "Edit accounting", found, keys, caption=caption, paper="tab:app-accounting")
    ours = found.row(method=study.ours, bucket="all")
    lead = f"The deployed masks of {int(ours['scored'])} of {int(ours['n'])} cases differ from M0 in a region."
    return Section("accounting", "Edit accounting", lead, (made,), (), (found,), found.notes)


@once
def accounting_of(study: Study) -> Finding:
    """Accounting of every method, and of the buckets of the policy."""
    return accounting(study.methods, buckets_of=(study.ours,) if study.is_router else ())


def accounting(methods: Mapping[str, pd.DataFrame], *, buckets_of: Collection[str] = ()) -> Finding:
    """Accounting of every method, and of each bucket of the methods in ``buckets_of``.

    ha_within = sum HA / cases with regions, so ha = ha_within * scored / n (Q8); ratio = mean BA / mean HA (B12);
    coverage = mean delta of the deployed edit (B11). If a bucket is empty, no bucket of that method gets means (F4).
    """
    records = []
    for name, frame in methods.items():
        records.append({"method": name, "bucket": "all", **_accounting_row(frame)})
        if name in buckets_of:
            records.extend({"method": name, **row} for row in _buckets(frame))
    n = max((len(frame) for frame in methods.values()), default=0)
    return Finding("accounting", rows(records, ACCOUNTING_COLUMNS), n, "M4, B10-B12")


def _accounting_row(frame: pd.DataFrame) -> dict[str, Any]:
    harm = frame["ha"].dropna()
    scored, retained = int((frame["regions"] >= 1).sum()), int((~frame["rolled_back"].astype(bool)).sum())
    ha, ba, coverage = (mean_or_nan(frame[name]) for name in ("ha", "ba", "delta"))
    within, kept = (float(harm.sum()) / count if count else np.nan for count in (scored, retained))
    ratio = ba / ha if ha > 0 else np.inf if ba > 0 else np.nan
    reason = "" if scored else "no case has a region"
    values = (len(harm), ha, ba, ratio, scored, within, retained, kept, coverage, reason)
    return dict(zip(ACCOUNTING_COLUMNS.split()[2:], values, strict=True))


def _buckets(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    empty = [name for name in BUCKETS if not (frame["bucket"] == name).any()]
    for name in BUCKETS:
        part = frame[frame["bucket"] == name]
        if empty:
            reason = f"bucket {', '.join(empty)} is empty, so bucket means are not reported"
            yield {"bucket": name, "n": len(part), "scored": int((part["regions"] >= 1).sum()), "reason": reason}
        else:
            yield {"bucket": name, **_accounting_row(part)}


# ---- the smallest region that counts ----

FACTORS = (0.5, 1.0, 2.0, 4.0)  # factors of the deployed min_area: 8, 16, 32, 64 for the paper's 16 (N1)
_KEYS = ["case", "step", "shrink"]


def min_area_section(study: Study) -> Section:
    """tab:app-tau and rank invariance."""
    title = "Smallest region that counts"
    if not study.is_router:
        reason = f"the policy is a {study.controller.name}; the sweep compares a router with a budget"
        return not_run("min-area", title, "sweep of min_area", reason)
    areas = tuple(sorted({max(1, round(study.measure["min_area"] * factor)) for factor in FACTORS}))
    sweep = sweep_outcomes(study.evaluation, min_areas=areas, connectivities=("face", "full"))
    swept = min_area_sweep(sweep, study.methods, router=study.ours, reference=study.retrospective)
    ranks = rank_invariance(swept)
    tables = (
        _min_area_table(study, swept),
        show("rank-invariance", "Rank of each method over the sweep", ranks, collapsed=True),
    )
    frame = swept.table[swept.table["connectivity"] == "face"]
    own = frame[frame["method"] == study.ours]
    lead = (
        f"Under face connectivity the {study.title(study.ours)} has less HA than {study.retrospective} at "
        f"{int((own['difference'] < 0).sum())} of {len(own)} minimum areas."
    )
    return Section("min-area", title, lead, tables, (), (swept, ranks), notes_of(swept, ranks))


def _min_area_table(study: Study, swept: Finding) -> Table:
    methods = [name for name in swept.table["method"].unique() if name in study.budgets or name == study.ours]
    cells: list[dict[str, Cell]] = []
    for (connectivity, least), part in swept.table.groupby(["connectivity", "min_area"], sort=False):
        by_method = part.set_index("method")
        ours = by_method.loc[study.ours]
        row: dict[str, Cell] = {"connectivity": str(connectivity), "min_area": int(least)}
        row |= {str(name): float(by_method.loc[name, "ha"]) for name in methods}
        cells.append({**row, "difference": float(ours["difference"]), "scored": int(ours["scored"])})
    heads: dict[str, str | Column] = {str(name): study.title(str(name)) for name in methods}
    heads |= {
        "connectivity": Column("connectivity", "Connectivity", text=True),
        "min_area": "smallest region (voxels)",
        "difference": Column("difference", f"router − {study.retrospective}", signed=True),
    }
    caption = "HA recomputed from the stored masks. It can only fall as the minimum grows: fewer regions count."
    return show("min-area", "Smallest region that counts", cells, heads=heads, caption=caption, paper="tab:app-tau")


def sweep_outcomes(
    archive: Archive, *, min_areas: Sequence[int], connectivities: Sequence[Connectivity] = ("face",)
) -> pd.DataFrame:
    """HA, BA and region count of every labelled candidate under every setting."""
    options = {**region_options(archive), "min_area": 1}
    records = []
    for case, masks, label in _labelled_masks(archive):
        for (state, mask), kind in product(masks.items(), connectivities):
            found = harm(masks[SOURCE], mask, label, connectivity=kind, **options)
            for area in min_areas:
                records.append((case, state.step, state.shrink, kind, area, *_thresholded(found, area)))
    return rows(records, (*_KEYS, "connectivity", "min_area", "ha", "ba", "regions", "delta", "area"))


def _labelled_masks(archive: Archive) -> Iterator[tuple[str, Mapping[State, Mask], Mask]]:
    """(id, masks by state, label) of every labelled case."""
    for case in archive.ids:
        if archive.entries[case].labelled:
            yield case, archive.masks(case), archive.label(case)


def _thresholded(found: Harm, min_area: int) -> tuple[float, ...]:
    """HA, BA, regions, delta and area of the same components under another minimum; HA cannot rise with it (B14)."""
    sizes = found.found.sizes
    kept = sizes >= min_area
    shares = (sizes[kept & (sign * found.worse > 0)].sum() / max(found.area, 1) for sign in (1, -1))
    return *map(float, shares), int(kept.sum()), found.delta, found.area


def min_area_sweep(sweep: pd.DataFrame, methods: Mapping[str, pd.DataFrame], *, router: str, reference: str) -> Finding:
    """Cohort HA of every method under every setting, its rank among them, and router minus reference (N1, N3).

    The setting changes how an edit is scored, not the decisions. Region gates deploy masks that were not recorded, so
    they are left out and named.
    """
    gated = [name for name, frame in methods.items() if (frame["action"] == "gate").any()]
    methods = {name: frame for name, frame in methods.items() if name not in gated}
    records: list[dict[str, Any]] = []
    for (kind, area), part in sweep.groupby(["connectivity", "min_area"], sort=True):
        scores = {name: _scored(part, frame) for name, frame in methods.items()}
        order = sorted({score["ha"] for score in scores.values()})
        gap = scores[router]["ha"] - scores[reference]["ha"]
        for name, score in scores.items():
            place = {"connectivity": kind, "min_area": area, "method": name, "rank": order.index(score["ha"]) + 1}
            records.append({**place, **score, "difference": gap if name == router else np.nan})
    columns = ("connectivity", "min_area", "method", "ha", "scored", "n", "rank", "difference")
    n = max((len(frame) for frame in methods.values()), default=0)
    made = {"router": router, "reference": reference}
    notes = tuple(f"{name} deploys masks that were not recorded, so it is not in the sweep" for name in gated)
    return Finding("sweep.min_area", rows(records, columns), n, "N1, N3", made, notes)


def _scored(part: pd.DataFrame, frame: pd.DataFrame) -> dict[str, Any]:
    states = frame[["case", "deployed", "shrink"]].rename(columns={"deployed": "step"})
    joined = states.merge(part, on=_KEYS, how="left")
    counts = {"scored": int((joined["regions"] >= 1).sum()), "n": int(joined["ha"].notna().sum())}
    return {"ha": mean_or_nan(joined["ha"]), **counts}


def rank_invariance(found: Finding) -> Finding:
    """Rank of each method by HA across the sweep (N2)."""
    ranks = found.table.groupby(["connectivity", "method"], sort=False)["rank"]
    table = pd.DataFrame({"ranks": ranks.agg(list), "invariant": ranks.nunique() == 1}).reset_index()
    return Finding("sweep.ranks", table, found.n, "N2", found.made)


# ---- shapes of harmful and beneficial regions ----

FEATURES = {"area": "area", "compactness": "compactness", "distance": "distance", "fraction": "share"}
SMALL = (0.02, 0.05, 0.10)


def geometry_section(study: Study) -> Section:
    """tab:supp-edit-geometry."""
    found = region_geometry(region_features(study.evaluation))
    caption = (
        f"Regions of {study.reference} against M0. Mann–Whitney U, two-sided; regions of one case are not independent. "
        "d is harmful minus beneficial, so negative means that harmful regions have lower values."
    )
    heads: dict[str, str | Column] = {
        "mean_harmful": Column("mean_harmful", "mean harmful", 4),
        "mean_beneficial": Column("mean_beneficial", "mean beneficial", 4),
        "p": Column("p", "p", 4),
        "cliff_d": Column("cliff_d", "Cliff's d", 2, signed=True),
        "harmful": "harmful regions",
        "beneficial": "beneficial regions",
    }
    keys, paper = "feature mean_harmful mean_beneficial p cliff_d harmful beneficial", "tab:supp-edit-geometry"
    title = "Harmful and beneficial regions"
    made = show("edit-geometry", title, found, keys, heads=heads, caption=caption, paper=paper)
    frame = found.table.dropna(subset=["cliff_d"])
    lead = "There are too few harmful or too few beneficial regions to compare."
    if len(frame):
        row = frame.loc[frame["cliff_d"].abs().idxmax()]
        lead = (
            f"The largest contrast is {row['feature']} (Cliff's d = {number(row['cliff_d'], 2, signed=True)}) over "
            f"{int(row['harmful'])} harmful and {int(row['beneficial'])} beneficial regions of {found.n} cases."
        )
    return Section("geometry", "Geometry of harmful edits", lead, (made,), (), (found,))


def region_features(archive: Archive) -> pd.DataFrame:
    """One row for each region of the edit at the last step of every labelled case (M5-M7).

    compactness = area / boundary voxels squared; distance = between centroids, to the largest region, in voxels.
    """
    options, records = region_options(archive), []
    for case, masks, label in _labelled_masks(archive):
        for row in harm(masks[SOURCE], masks[State(archive.steps)], label, **options).table:
            numbers = (float(row[source]) for source in FEATURES.values())
            records.append((case, int(row["number"]), str(row["verdict"]), *numbers))
    return rows(records, ("case", "region", "side", *FEATURES))


def region_geometry(features: pd.DataFrame) -> Finding:
    """Means, Mann-Whitney U (two-sided, asymptotic, tie correction) and Cliff's d, harmful minus beneficial.

    Neutral regions are dropped and counted. "small@5%" is whether a region is below 5 % of |D| (M5).
    """
    harmful, beneficial = (features[features["side"] == name] for name in ("harmful", "beneficial"))
    neutral = len(features) - len(harmful) - len(beneficial)
    columns = {name: (harmful[name], beneficial[name]) for name in FEATURES}
    columns |= {f"small@{share:.0%}": (harmful["fraction"] < share, beneficial["fraction"] < share) for share in SMALL}
    records = [
        {"feature": name, **_contrast(first.to_numpy(float), second.to_numpy(float))}
        for name, (first, second) in columns.items()
    ]
    made = {"neutral": neutral, "neutral_share": neutral / len(features) if len(features) else float("nan")}
    return Finding("geometry", pd.DataFrame(records), features["case"].nunique(), "M5-M8", made)


def cliff_d(u: float, first: int, second: int) -> float:
    r"""Cliff's d from U of the first sample, :math:`d = 2U/(n_1 n_2) - 1` (M8).

    >>> cliff_d(0.0, 3, 4)
    -1.0
    """
    return 2 * u / (first * second) - 1


def _contrast(first: NDArray[np.float64], second: NDArray[np.float64]) -> dict[str, Any]:
    record: dict[str, Any] = {"harmful": len(first), "beneficial": len(second)}
    record |= {"mean_harmful": mean_or_nan(first), "mean_beneficial": mean_or_nan(second)}
    if not len(first) or not len(second):
        return {**record, "u": np.nan, "p": np.nan, "cliff_d": np.nan, "reason": "one kind of region is missing"}
    u, p = len(first) * len(second) / 2, 1.0
    if np.ptp(np.concatenate([first, second])) > 0:
        found = stats.mannwhitneyu(first, second, alternative="two-sided", method="asymptotic")
        u, p = float(found.statistic), float(found.pvalue)
    return {**record, "u": u, "p": p, "cliff_d": cliff_d(u, len(first), len(second)), "reason": ""}


# ---- HA and surface distance ----


def distance_section(study: Study) -> Section:
    """fig:ha-hd95 and its correlations."""
    measured = distances(study.evaluation)
    found = harm_and_distance(study.outcomes, measured)
    at = study.uncontrolled[["case", "ha"]].merge(measured, on="case")
    at = at[~at["empty"].astype(bool)].dropna(subset=["ha", "hd95", "hd95_source"])
    unit = "mm" if all(entry.spacing_mm for entry in study.evaluation.entries.values()) else "voxels"
    caption = f"n = {len(at)}; the line in A is a least-squares guide; in B solid is the mean, dashed no change."
    title = "HA against a boundary metric"
    pictures = (Picture("ha-hd95", title, draw_distance(at, unit=unit), caption, "fig:ha-hd95"),) if len(at) else ()
    missing = {} if pictures else {"figure of HA and HD95": "no case has a surface in every mask"}
    made = found.made
    lead = (
        f"HD95 changes by {number(made['mean_change'], 2, signed=True)} {unit} on average (median "
        f"{number(made['median_change'], 2, signed=True)}). {made['zero_ha']} cases have HA 0, {made['both_move']} "
        f"have both HA above 0 and a change of HD95, and {made['excluded']} are excluded because a mask is empty."
    )
    caption = "HD95 pools the distances of both directions and uses the spacing of each case; an empty mask has none."
    tables = (show("ha-hd95", "HA and HD95", found, heads={"rho": "ρ"}, caption=caption),)
    return Section("distance", "HA and surface distance", lead, tables, pictures, (found,), found.notes, missing)


def distances(archive: Archive) -> pd.DataFrame:
    """HD95 of M0 and of the last step against the label, foreground, in mm if the spacing is known.

    An empty mask has no surface: its distance is NaN and ``empty`` is true (M9).
    """
    records = []
    for case, masks, label in _labelled_masks(archive):
        spacing = archive.entries[case].spacing_mm
        pair = [hd95(masks[which], label, spacing_mm=spacing) for which in (SOURCE, State(archive.steps))]
        records.append((case, *pair, bool(np.isnan(pair).any())))
    return rows(records, "case hd95_source hd95 empty")


def harm_and_distance(outcomes: pd.DataFrame, measured: pd.DataFrame) -> Finding:
    """Spearman of HA with HD95(M_k) and with its change, over all cases and over those in which both move (M10)."""
    ladder = unshrunk(outcomes)
    depth = horizon(ladder)
    joined = ladder.loc[ladder["step"] == depth, ["case", "ha"]].merge(measured, on="case")
    kept = joined.dropna(subset=["ha", "hd95", "hd95_source"])
    ha, after = kept["ha"].to_numpy(float), kept["hd95"].to_numpy(float)
    change = after - kept["hd95_source"].to_numpy(float)
    moving = (ha > 0) & (change != 0)
    pairs = {"HA, HD95": (ha, after), "HA, change of HD95": (ha, change), "both move": (ha[moving], change[moving])}
    records = []
    for name, (first, second) in pairs.items():
        rho = spearman(first, second)
        reason = "fewer than three cases, or one side does not vary" if np.isnan(rho) else ""
        records.append((name, rho, spearman_p(rho, len(first)), len(first), reason))
    made = {
        "step": depth,
        "excluded": len(joined) - len(kept),
        "zero_ha": int((ha == 0).sum()),
        "unmoved": int((change == 0).sum()),
        "both_move": int(moving.sum()),
        "mean_change": mean_or_nan(change),
        "median_change": float(pd.Series(change).median()),
    }
    return Finding("distance", rows(records, "pairing rho p n reason"), len(kept), "M9, M10", made)


def draw_distance(frame: pd.DataFrame, *, unit: str = "mm") -> Figure:
    """Draw HA against HD95 (A, with a least-squares guide) and against its change (B)."""
    harm, after = frame["ha"].to_numpy(float), frame["hd95"].to_numpy(float)
    change = after - frame["hd95_source"].to_numpy(float)
    with inked():
        figure, axes = canvas(9.2, 3.4, columns=2)
        first, second = axes[0]
        for axis, value in ((first, after), (second, change)):
            axis.scatter(harm, value, s=20, color=HARM, alpha=0.65, linewidth=0, rasterized=len(harm) > 2000)
        first.set(xlabel="HA", ylabel=f"HD95 of the adapted mask ({unit})", title="A  HA and HD95")
        second.set(xlabel="HA", ylabel=f"change of HD95 against M0 ({unit})", title="B  HA and the change of HD95")
        if len(harm) > 2 and np.ptp(harm) > 0:
            slope, start = np.polyfit(harm, after, 1)
            ends = np.array([harm.min(), harm.max()])
            first.plot(ends, start + slope * ends, color=INK, linewidth=1.1)
        second.axhline(0, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
        second.axhline(float(change.mean()), color=INK, linewidth=1.2)
    return figure

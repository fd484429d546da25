"""Results on other data and models: a frozen design, a second recording, another backbone, another modality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive
from casewise.core.errors import BadInput
from casewise.core.records import SOURCE, Policy, State
from casewise.judge.outcomes import outcomes
from casewise.measure.regions import Regions, regions_of
from casewise.render.ink import Picture
from casewise.render.mask_pictures import WORSE, SliceView, draw_masks, painted
from casewise.render.tables import Column
from casewise.study.finding import INTERVAL, Finding, Section, not_run, rows, show
from casewise.study.statistics.ranks import column_spearman
from casewise.study.statistics.resample import cluster_numbers, paired_interval
from casewise.study.study import Frames, Study
from casewise.study.trajectories import adapted_rows, horizon, mean_or_nan, same_cases, signals_in, step_one, unshrunk

# ---- a frozen design ----

_FROZEN_MEANS = {"metric": "metric", "ha": "ha", "ba": "ba", "steps": "deployed", "coverage": "delta"}


def frozen_section(study: Study) -> Section:
    """tab:app-frozen-p158."""
    if study.extras.frozen is None:
        reason = "needs the policy whose design was frozen, to show that only cut-points changed: --frozen POLICY"
        return not_run("frozen", "Frozen design", "frozen-design test (tab:app-frozen-p158)", reason)
    differing = frozen_differences(study.extras.frozen, study.policy)
    found = frozen_design(study.methods, router=study.ours, reference=study.retrospective, **study.bootstrap)
    heads: dict[str, str | Column] = {
        "cut": Column("cut", f"HA − {study.retrospective} [95 %]", signed=True, interval=INTERVAL),
        "relative": Column("relative", "relative (%)", 0, percent=True),
    }
    keys = "method metric ha ba steps cut relative n"
    made = show("frozen", "Frozen design", found, keys, heads=heads, paper="tab:app-frozen-p158")
    lead = (
        f"This is not a frozen design: other changes are {', '.join(differing)}."
        if differing
        else "Only the cut-points differ from the frozen design."
    )
    return Section("frozen", "Frozen design", lead, (made,), (), (found,))


def frozen_differences(original: Policy, refit: Policy) -> list[str]:
    """Return the differences between two policies apart from cut-points; empty if the design was frozen (E14)."""
    found = [name for name in ("controller", "steps") if getattr(original, name) != getattr(refit, name)]
    before, after = original.options, refit.options
    names = sorted({*before, *after} - {"cut_low", "cut_high"})
    return found + [f"options.{name}" for name in names if before.get(name) != after.get(name)]


def frozen_design(methods: Frames, *, router: str, reference: str, **bootstrap: Any) -> Finding:
    """The row of every method, and the HA reduction of the router, absolute and relative (O1, O2).

    relative = 1 - HA_router / HA_reference.
    """
    left, right = same_cases(methods[router], methods[reference])
    cut = paired_interval(left["ha"], right["ha"], clusters=cluster_numbers(left), **bootstrap)
    before, after = mean_or_nan(right["ha"]), mean_or_nan(left["ha"])
    own = {"cut": cut.estimate, "low": cut.low, "high": cut.high}
    own["relative"] = 1 - after / before if before > 0 else float("nan")
    records = []
    for name, frame in methods.items():
        means = {column: mean_or_nan(frame[source]) for column, source in _FROZEN_MEANS.items()}
        retained = int((~frame["rolled_back"].astype(bool)).sum())
        more = own if name == router else dict.fromkeys(own, float("nan"))
        records.append({"method": name, "n": len(frame), **means, "retained": retained, **more})
    made = {"router": router, "reference": reference, **bootstrap}
    return Finding("frozen", pd.DataFrame(records), len(left), "E14, O1, O2", made)


# ---- a second recording ----

GRADIENT_LIMIT = 1e-6  # step-1 gradient norm, largest absolute difference
METRIC_LIMIT = 5e-4  # cohort metric at every step
HARM_LIMIT = 0.002  # cohort HA at every step; also between shared correlations (N6)
MOVED = 0.05  # a case whose HA moved by more is listed (N5)


def rerun_section(study: Study) -> Section:
    """Does a second recording of the same cases give the same numbers? (N4-N7)"""
    if study.extras.rerun is None:
        return not_run("rerun", "Rerun", "alignment of a rerun", "needs a second archive of the same cases: --rerun")
    second = outcomes(study.extras.rerun)
    aligned, moved = alignment(study.outcomes, second), harm_moves(study.outcomes, second)
    shared = shared_signals(study.outcomes, second)
    tables = (
        show("alignment", "Layer by layer", aligned, caption="Only gated layers must pass."),
        show("harm-moves", "Cases whose HA moved", moved),
        show("shared-signals", "Correlations in both runs", shared),
    )
    lead = f"The rerun {'passes' if aligned.made['aligned'] else 'does not pass'} every gated layer."
    return Section("rerun", "Rerun", lead, tables, (), (aligned, moved, shared), (*aligned.notes, *shared.notes))


def alignment(first: pd.DataFrame, second: pd.DataFrame) -> Finding:
    """Step-1 gradient norm, cohort metric and cohort HA of two runs; the metric of cases is shown, not gated (N4)."""
    joined, cases = _joined(first, second)
    records = []
    known = joined[joined["step"] == 1]
    known = known.dropna(subset=["gradient_norm_1", "gradient_norm_2"]) if "gradient_norm_1" in known else known[:0]
    if len(known):
        records.append(("step-1 gradient norm", 1, *_gap(known, "gradient_norm"), GRADIENT_LIMIT, len(known)))
    for step, part in joined.groupby("step"):
        means = part.mean(numeric_only=True).to_frame().T
        for name, limit in (("metric", METRIC_LIMIT), ("ha", HARM_LIMIT)):
            records.append((f"cohort {name}", int(step), *_gap(means, name), limit, len(part)))
        records.append(("case metric", int(step), *_gap(part, "metric"), np.nan, len(part)))
    table = pd.DataFrame(records, columns=["layer", "step", "difference", "relative", "limit", "n"])
    gates = table["limit"].notna()
    table = table.assign(passed=(table["difference"] <= table["limit"]) | ~gates, gated=gates)
    gated = table[table["gated"]]
    own, other = set(first["case"]), set(second["case"])
    made = {"aligned": bool(gated["passed"].all()), "only_first": len(own - other), "only_second": len(other - own)}
    note = f"{int(gated['passed'].sum())} of {len(gated)} gated layers agree, n = {cases}"
    return Finding("alignment", table, cases, "N4, N7", made, (note,))


def _joined(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    joined = unshrunk(first).merge(unshrunk(second), on=["case", "step"], suffixes=("_1", "_2"))
    if joined.empty:
        raise BadInput("the two archives have no (case, step) in common; give two runs of the same cases")
    return joined, int(joined["case"].nunique())


def _gap(part: pd.DataFrame, name: str) -> tuple[float, float]:
    """Largest difference of a column between the runs, and the same by the largest value of the first run."""
    gap, scale = (part[f"{name}_1"] - part[f"{name}_2"]).abs().max(), part[f"{name}_1"].abs().max()
    return float(gap), float(gap / scale) if scale else float("nan")


def harm_moves(first: pd.DataFrame, second: pd.DataFrame) -> Finding:
    """Cases whose HA differs by more than 0.05 between two runs, why, and the mean difference without them (N5)."""
    joined, cases = _joined(first, second)
    change = joined["ha_2"] - joined["ha_1"]
    large = joined.assign(change=change)[change.abs() > MOVED]
    came = large["regions_1"] != large["regions_2"]
    cause = np.where(came, "region count changed", "region changed side")
    table = large[["case", "step", "change"]].assign(cause=cause)
    rest = change[~joined["case"].isin(large["case"])]
    made = {
        "difference": float(change.mean()),
        "difference_without": float(rest.mean()) if len(rest) else float("nan"),
        "moved_cases": int(large["case"].nunique()),
    }
    return Finding("alignment.moves", table.reset_index(drop=True), cases, "N5", made)


def shared_signals(first: pd.DataFrame, second: pd.DataFrame) -> Finding:
    """Pooled Spearman of every shared signal with HA in both runs; they agree within 0.002 (N6, N7)."""
    records = []
    for name in (one for one in signals_in(first) if one in signals_in(second)):
        left, right = (column_spearman(adapted_rows(frame), name, "ha") for frame in (first, second))
        records.append((name, left, right, abs(left - right), abs(left - right) <= HARM_LIMIT))
    table = rows(records, "signal rho_first rho_second difference agrees")
    apart = table.loc[~table["agrees"].astype(bool), "signal"]
    notes = tuple(f"the correlation of {name} differs between the runs" for name in apart)
    return Finding("alignment.signals", table, len(set(first["case"]) & set(second["case"])), "N6, N7", notes=notes)


# ---- other backbones ----

BAND = (0.60, 0.80)  # edits are compared for cases whose M0 has a metric in this range (O4)
WANTED_RHO = 0.4
SIDE = 320
_CHANGED = (240, 160, 60)


def backbones_section(study: Study) -> Section:
    """Edit coherence of other backbones (O4, O5) and fig:swin-geom."""
    title, what = "Other backbones", "edit coherence and fig:swin-geom"
    if not study.extras.backbones:
        reason = "needs an archive of another backbone on the same cohort: --backbone NAME=ARCHIVE"
        return not_run("backbones", title, what, reason)
    others = {name: outcomes(archive) for name, archive in study.extras.backbones.items()}
    found = coherence({"this": study.outcomes, **others})
    made = show("coherence", "Coherence of the edits", found, caption=f"Means over cases with M0 in {list(BAND)}.")
    name, other = next(iter(study.extras.backbones.items()))
    picture = backbone_picture(study, name, other)
    missing = {} if picture else {"fig:swin-geom": f"no case has M0 in {list(BAND)} under both backbones"}
    pictures = (picture,) if picture else ()
    return Section("backbones", title, found.reason, (made,), pictures, (found,), found.notes, missing)


def coherence(frames: Frames) -> Finding:
    """One row per backbone: edit coherence at the last step, and whether both coordinates follow HA.

    Coherence is measured over cases whose M0 metric is in the band. A backbone meets the criterion if rho with HA is at
    least 0.4 for regions and for delta.
    """
    records = [{"backbone": name, **_backbone_row(frame)} for name, frame in frames.items()]
    sizes = [(record["largest"], record["backbone"]) for record in records if record["largest"] > 0]
    notes = []
    if len(sizes) > 1:
        (small, scattered), (large, solid) = min(sizes), max(sizes)
        notes.append(f"the largest component of {solid} is {large / small:.1f} times that of {scattered}")
    n = max((int(record["n"]) for record in records), default=0)
    return Finding("coherence", pd.DataFrame(records), n, "O4, O5", {"band": list(BAND)}, tuple(notes))


def _backbone_row(frame: pd.DataFrame) -> dict[str, Any]:
    ladder, adapted = unshrunk(frame), adapted_rows(frame)
    source = ladder[ladder["step"] == 0].set_index("case")["metric"]
    inside = source.index[source.between(*BAND)]
    at = ladder[(ladder["step"] == horizon(ladder)) & ladder["case"].isin(inside)]
    rho = {f"rho_{name}": column_spearman(adapted, name, "ha") for name in ("regions", "delta")}
    return {
        "n": len(source),
        "in_band": len(inside),
        "metric_source": mean_or_nan(source),
        **{name: mean_or_nan(at[name]) if name in at else np.nan for name in ("largest", "singleton_share")},
        **rho,
        "meets": all(value >= WANTED_RHO for value in rho.values()),
        "reason": "" if len(inside) else f"no case has M0 in {list(BAND)}",
    }


def backbone_picture(study: Study, name: str, other: Archive) -> Picture | None:
    """M0, the full horizon and their disagreement for both backbones; None if no case is in both bands."""
    case = chosen_case(study.outcomes, outcomes(other))
    if case is None:
        return None
    archives = {"this backbone": study.evaluation, name: other}
    measure = {key: study.measure[key] for key in ("min_area", "foreground")}
    regions = {
        title: regions_of(one.mask(case, SOURCE), one.mask(case, State(one.steps)), **measure)
        for title, one in archives.items()
    }
    index = _slice(regions["this backbone"])
    panels: list[tuple[str, Any]] = []
    for title, archive in archives.items():
        panels += _panels(archive, case, title, index, regions[title])
    where = "" if index is None else f", slice {index + 1}"
    caption = (
        f"Case {case}{where}. Orange: changed voxels; red: components of at least {study.measure['min_area']} "
        f"voxels. Both M0 lie in {list(BAND)}; among such cases this one has the median changed volume under {name}. "
        "The slice holds most changed area in components that count."
    )
    return Picture("backbone-edits", "Edits of two backbones", draw_masks(panels, rows=2), caption, "fig:swin-geom")


def chosen_case(home: pd.DataFrame, other: pd.DataFrame) -> str | None:
    """The case with both M0 in the band that has the median |D| of the other backbone at the full horizon."""
    frames = [unshrunk(frame).set_index("case") for frame in (home, other)]
    inside = [frame[(frame["step"] == 0) & frame["metric"].between(*BAND)].index for frame in frames]
    shared = sorted(set(inside[0]) & set(inside[1]))
    if not shared:
        return None
    last = frames[1][frames[1]["step"] == frames[1]["step"].max()]
    area = last.loc[shared, "area"].sort_values(kind="stable")
    return str(area.index[(len(area) - 1) // 2])


def _slice(found: Regions) -> int | None:
    """The slice with most changed area in components that count."""
    if len(found.shape) == 2:
        return None
    counted = found.voxels[found.kept[found.number]]
    slices = (counted if counted.size else found.voxels) // int(np.prod(found.shape[1:]))
    return int(np.bincount(slices, minlength=found.shape[0]).argmax())


def _panels(archive: Archive, case: str, title: str, index: int | None, found: Regions) -> list[tuple[str, Any]]:
    view = SliceView(index)
    edit: Any = None
    for voxels, color in ((found.voxels, _CHANGED), (found.voxels[found.kept[found.number]], WORSE)):
        plane = np.zeros(int(np.prod(found.shape)), np.uint8)
        plane[voxels] = 1
        marked = painted(plane.reshape(found.shape), view, side=SIDE)[..., 0] > 100
        edit = np.full((*marked.shape, 3), 13, np.uint8) if edit is None else edit
        edit[marked] = color
    return [
        (f"{title}: M0", painted(archive.mask(case, SOURCE), view, side=SIDE)),
        (f"{title}: step {archive.steps}", painted(archive.mask(case, State(archive.steps)), view, side=SIDE)),
        (f"{found.area} voxels changed, {int(found.kept.sum())} components count", edit),
    ]


# ---- another modality ----


def scale_section(study: Study) -> Section:
    """Cut-points on another modality (O13)."""
    if study.extras.other_modality is None:
        reason = "needs an archive of another modality: --other-modality ARCHIVE"
        return not_run("scale", "Another modality", "scale probe", reason)
    cut = min((router.cut_high for router in study.routers.values()), default=None) if study.is_router else None
    found = scale_probe(
        study.outcomes, outcomes(study.extras.other_modality), coordinate=study.coordinate, cut_high=cut
    )
    made = show("scale-probe", "The coordinate in both cohorts", found)
    return Section("scale", "Another modality", "", (made,), (), (found,), found.notes)


def scale_probe(home: pd.DataFrame, away: pd.DataFrame, *, coordinate: str, cut_high: float | None) -> Finding:
    """Mean and median of a step-1 coordinate in both cohorts, their ratios, and the share beyond the ported cut.

    Without ``cut_high`` the upper tertile (66.67th percentile) of the home cohort is ported.
    """
    values = {name: step_one(frame, coordinate).dropna() for name, frame in (("home", home), ("away", away))}
    cut = float(np.percentile(values["home"], 66.67)) if cut_high is None else cut_high
    table = pd.DataFrame({"cohort": list(values), "n": [len(found) for found in values.values()]})
    for name in ("mean", "median"):
        table[name] = [float(getattr(found, name)()) for found in values.values()]
    for name in ("mean", "median"):
        table[f"ratio_{name}"] = table[name] / (table[name].iloc[0] or np.nan)
    table["rolled_back"] = [float((found >= cut).mean()) for found in values.values()]
    share, ratio = table["rolled_back"].iloc[1], table["ratio_mean"].iloc[1]
    said = f"{coordinate} is {ratio:.1f} times as large in the other cohort"
    note = f"{said}; the cut {cut:.4g} rolls back {share:.1%} of its cases"
    made = {"coordinate": coordinate, "cut_high": cut}
    return Finding("scale", table, len(values["away"]), "O13", made, (note,))

"""Sections that need more than two archives: a rerun, a sweep, another backbone or modality, a frozen design."""

from __future__ import annotations

from typing import Any

from casewise.judge.controllers import CONTROLLERS
from casewise.judge.outcomes import deployed, outcomes
from casewise.render.cells import Cell, Pair
from casewise.render.tables import Column, rows_of, table
from casewise.replay import replay
from casewise.report.backbone_edits import BAND, backbone_picture
from casewise.report.material import Material
from casewise.report.section import Section
from casewise.report.sections.extensions import plain_table
from casewise.study.alignment import alignment, harm_moves, shared_signals
from casewise.study.budget import learning_rate_sweep
from casewise.study.coherence import coherence
from casewise.study.frozen import frozen_design, frozen_differences
from casewise.study.scale import scale_probe


def rerun(material: Material) -> Section:
    """Does a second recording of the same cases give the same numbers? (N4-N7)"""
    if material.extras.rerun is None:
        return Section(
            "rerun", "Rerun", missing={"alignment of a rerun": "needs a second archive of the same cases; give --rerun"}
        )
    second = outcomes(material.extras.rerun)
    aligned = alignment(material.outcomes, second, runs=("this", "rerun"))
    moved, shared = harm_moves(material.outcomes, second), shared_signals(material.outcomes, second)
    tables = (
        plain_table("alignment", "Layer by layer", aligned, caption="Only gated layers must pass."),
        plain_table("harm-moves", "Cases whose HA moved", moved),
        plain_table("shared-signals", "Correlations in both runs", shared),
    )
    passed = bool(aligned.table.loc[aligned.table["gated"].astype(bool), "passed"].all())
    lead = "The rerun passes every gated layer." if passed else "The rerun does not pass every gated layer."
    return Section("rerun", "Rerun", lead, tables, (), (aligned, moved, shared), (*aligned.notes, *moved.notes))


def sweep(material: Material) -> Section:
    """tab:supp-acdc-lr: the stop rule over learning rates (P 11)."""
    if not material.extras.sweep:
        reason = "needs archives at several learning rates; give --sweep RATE=EVALUATION[,CALIBRATION] once for each"
        return Section("sweep", "Learning rates", missing={"learning-rate sweep (tab:supp-acdc-lr)": reason})
    stopped: dict[float, Any] = {}
    fixed: dict[float, Any] = {}
    rules = set()
    for rate, (archive, holdout) in sorted(material.extras.sweep.items()):
        frame = outcomes(archive)
        rule = _stop_of(archive, holdout)
        rules.add(rule.name)
        stopped[rate] = deployed(frame, replay(archive, rule))
        fixed[rate] = deployed(frame, replay(archive, CONTROLLERS.build("fixed-k", step=archive.steps)))
    found = learning_rate_sweep(stopped, fixed)
    columns = (
        Column("rate", "lr", text=True),
        Column("stop", f"{' / '.join(sorted(rules))} ({material.metric} / HA)"),
        Column("fixed", f"{material.reference} ({material.metric} / HA)"),
        Column("ha_cut", "HA cut", signed=True),
        Column("steps", "steps of the stop rule", 2),
        Column("n", "n"),
    )
    rows: list[dict[str, Cell]] = [
        {
            "rate": f"{row['learning_rate']:g}",
            "stop": Pair(row["stop_metric"], row["stop_ha"]),
            "fixed": Pair(row["fixed_metric"], row["fixed_ha"]),
            "ha_cut": float(row["ha_cut"]),
            "steps": float(row["steps"]),
            "n": int(row["n"]),
        }
        for row in found.table.to_dict("records")
    ]
    caption = (
        "τ-stop where a calibration archive was given for the rate (refitted there), else FragStop, which needs none."
    )
    made = table(
        "learning-rates", "Stop rule over learning rates", columns, rows, caption=caption, paper="tab:supp-acdc-lr"
    )
    return Section("sweep", "Learning rates", "", (made,), (), (found,), found.notes)


def _stop_of(archive: Any, holdout: Any) -> Any:
    """tau-stop refitted at this rate when there is a holdout, else the parameter-free rule."""
    if holdout is None:
        return CONTROLLERS.build("frag-stop", cap=archive.steps)
    from casewise.judge.calibration.fit import calibrate
    from casewise.judge.policy import controller_of

    return controller_of(calibrate(holdout, "tau-stop"))


def backbones(material: Material) -> Section:
    """Is the edit of another backbone coherent enough to be judged by regions? (O4, O5)"""
    if not material.extras.backbones:
        reason = "needs an archive of another backbone on the same cohort; give --backbone NAME=ARCHIVE"
        return Section("backbones", "Other backbones", missing={"edit coherence and fig:swin-geom": reason})
    frames = {
        "this": material.outcomes,
        **{name: outcomes(archive) for name, archive in material.extras.backbones.items()},
    }
    found = coherence(frames)
    made = plain_table("coherence", "Coherence of the edits", found, caption="Means over cases with M0 in the band.")
    name, other = next(iter(material.extras.backbones.items()))
    picture = backbone_picture(material, name, other)
    missing = {} if picture else {"fig:swin-geom": f"no case has M0 in {BAND} under both backbones"}
    pictures = (picture,) if picture else ()
    return Section("backbones", "Other backbones", found.reason, (made,), pictures, (found,), found.notes, missing)


def scale(material: Material) -> Section:
    """Would the cut-points mean anything on another modality? (O13)"""
    if material.extras.away is None:
        reason = "needs an archive of another modality; give --away ARCHIVE"
        return Section("scale", "Another modality", missing={"scale probe": reason})
    cut = min((router.cut_high for router in material.routers.values()), default=None) if material.is_router else None
    found = scale_probe(material.outcomes, outcomes(material.extras.away), coordinate=material.coordinate, cut_high=cut)
    made = plain_table("scale-probe", "The coordinate at home and away", found)
    return Section("scale", "Another modality", "", (made,), (), (found,), found.notes)


def frozen(material: Material) -> Section:
    """tab:app-frozen-p158: the design was fixed elsewhere, only the cut-points were refitted here (P 25)."""
    columns = (
        Column("method", "Method", text=True),
        Column("metric", material.metric, 4),
        Column("ha", "HA"),
        Column("ba", "BA"),
        Column("steps", "Steps", 2),
        Column("cut", f"HA − {material.retrospective} [95 %]", signed=True, interval=("low", "high")),
        Column("relative", "relative (%)", 0, percent=True),
        Column("n", "n"),
    )
    if material.extras.frozen is None:
        reason = "needs the policy whose design was frozen, to prove that only cut-points changed; give --frozen POLICY"
        return Section("frozen", "Frozen design", missing={"frozen-design test (tab:app-frozen-p158)": reason})
    differing = frozen_differences(material.extras.frozen, material.policy)
    found = frozen_design(material.methods, router=material.ours, reference=material.retrospective)
    named = found.table.assign(method=[material.title(name) for name in found.table["method"]])
    made = table("frozen", "Frozen design", columns, rows_of(named, columns), paper="tab:app-frozen-p158")
    lead = (
        f"This is not a frozen design: also changed are {', '.join(differing)}."
        if differing
        else "Only the cut-points differ from the frozen design."
    )
    return Section("frozen", "Frozen design", lead, (made,), (), (found,), found.notes)

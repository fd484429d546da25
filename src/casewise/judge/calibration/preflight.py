"""The preflight: the results of a policy on the calibration cases. It is printed and stored in policy.json.

The guard of a design closes it only if a one-sided sign test over patients is significant, because a small majority of
a dozen cases may be chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from casewise.archive.store import Archive
from casewise.core.errors import CasewiseError
from casewise.core.records import Controller, Decision, Policy
from casewise.core.text import UNIT, pluralize
from casewise.judge.calibration.cuts import first_step_statistics
from casewise.judge.calibration.design_comparison import choice_sentences
from casewise.judge.calibration.fixed_budget import budgets, shape
from casewise.judge.calibration.quality import flag_sentences
from casewise.judge.certificates.risk_control import PLANNED, conformal_floor, patients_needed
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.controllers.router import bucket_of
from casewise.judge.decide import replay_case
from casewise.judge.monitors.quota import BUCKETS, quota_of
from casewise.judge.outcomes import LITTLE, deployed, judged_sentence, judged_share, patients_of

SWAPPED = 0.1
"""From this share of swaps between foreground classes on, calibrate says that HA does not see them."""
USABLE_LOSS = 0.05
"""M0 counts as usable when its metric is at most this far below the source domain's (O4)."""


def preflight(
    archive: Archive, controller: Controller, frame: pd.DataFrame, *, source_metric: float | None = None
) -> dict[str, Any]:
    """Return the results of a policy on the holdout.

    Args:
        archive: The calibration cases.
        controller: The controller of the policy, with its cut-points.
        frame: Outcomes of the calibration cases.
        source_metric: The model's metric on its own domain.

    Returns:
        Helped and hurt among the kept cases, HA by step, budgets, coherence of the edit, M0, what can be certified,
        z-statistics; for a router also its buckets.
    """
    decisions = [replay_case(archive, controller, case_id) for case_id in archive.ids]
    known = frame.loc[frame["ha"].notna()]
    labelled = int(known["case"].nunique())
    patients = len(set(patients_of(known)))
    found = {
        "cases": len(archive.ids),
        "labelled": labelled,
        "patients": patients,
        "retained": retained(frame, decisions, archive, controller),
        "ladder": _or_reason(lambda: shape(frame)),
        "budgets": _or_reason(lambda: budgets(frame)),
        "coherence": coherence(frame),
        "source": usability(frame, source_metric),
        "conformal": reach_of(patients),
        "edit": edit(frame, archive),
        "statistics": _or_reason(lambda: vars(first_step_statistics(archive.signals()))),
    }
    if metadata_of(controller).is_router:
        counts = {name: sum(one.bucket == name for one in decisions) for name in BUCKETS}
        found["buckets"] = {name: {"cases": count, "share": count / len(decisions)} for name, count in counts.items()}
        found["quota"] = quota_of(decisions)
    return found


def retained(
    frame: pd.DataFrame, decisions: Sequence[Decision], archive: Archive, controller: Controller
) -> dict[str, Any]:
    """Helped and hurt among the cases that keep an adaptation: go iff more are helped than hurt (M3)."""
    rows = deployed(frame, decisions, archive=archive, controller=controller)
    kept = rows.loc[~rows["rolled_back"]]
    change = kept["change"].dropna()
    helped, hurt = int((change > 0).sum()), int((change < 0).sum())
    return {
        "kept": len(kept),
        "rolled_back": len(rows) - len(kept),
        "judged": len(change),
        "helped": helped,
        "hurt": hurt,
        "unchanged": len(change) - helped - hurt,
        "mean_change": float(change.mean()) if len(change) else None,
        "go": bool(helped > hurt) if len(change) else None,
        "hurt_p": hurt_p(change, patients_of(rows.loc[change.index])),
    }


def coherence(frame: pd.DataFrame) -> dict[str, Any]:
    """Return medians of the largest component and the share of single voxels, at the first and last step (O5)."""
    plain = frame.loc[frame["shrink"] == 0]
    steps = {"first": 1, "last": int(plain["step"].max())}
    names = ["largest", "largest_share", "singleton_share", "effective_regions"]
    found = {when: plain.loc[plain["step"] == step].reindex(columns=names).median() for when, step in steps.items()}
    return {when: {name: _or_none(medians[name]) for name in names} for when, medians in found.items()}


def usability(frame: pd.DataFrame, source_metric: float | None = None) -> dict[str, Any]:
    """Return the metric of M0 on the holdout, how often M0 is empty, and whether it is usable (O4)."""
    rows = frame.loc[frame["step"] == 0]
    metric = rows["metric"].dropna()
    found = {
        "metric_mean": float(metric.mean()) if len(metric) else None,
        "metric_lowest": float(metric.min()) if len(metric) else None,
        "empty": int(rows["delta_foreground"].isna().sum()) if "delta_foreground" in rows else None,
    }
    if source_metric is None or not len(metric):
        return {**found, "line": None, "usable": None}
    line = source_metric - USABLE_LOSS
    return {**found, "line": line, "usable": bool(metric.mean() >= line)}


def edit(frame: pd.DataFrame, archive: Archive) -> dict[str, Any]:
    """Return the share of the last step's edit that HA judges, and the share that swaps foreground classes."""
    plain = frame.loc[(frame["shrink"] == 0) & (frame["step"] == frame["step"].max())]
    return {
        "judged": judged_share(plain) if plain["unscored"].notna().any() else None,
        "swapped": float(plain["swapped"].mean()) if "swapped" in plain else None,
        "foreground": bool(archive.configuration.get("foreground", True)),
    }


def reach_of(patients: int) -> dict[str, Any]:
    """The smallest risk that n labelled patients can certify, 1/(n+1), and how many each alpha needs (L6)."""
    return {
        "patients": patients,
        "floor": conformal_floor(patients),
        "needed": {f"{alpha:.2f}": patients_needed(alpha) for alpha in PLANNED},
        "feasible": [alpha for alpha in PLANNED if patients_needed(alpha) <= patients],
    }


def concerns(found: Mapping[str, Any]) -> list[str]:
    """Return warnings before a policy is deployed, as sentences."""
    said = []
    kept = found["retained"]
    counted = f"of the retained cases {kept['helped']} were helped and {kept['hurt']} were hurt"
    if found.get("guard"):
        said.append(
            f"GUARD: {counted} (sign test over clusters, p = {kept['hurt_p']:.3f}), so this policy rolls every case "
            f"back to M0; adapt less, or choose a design without a guard, such as cardiac"
        )
    elif kept["go"] is False:
        said.append(f"NO-GO: {counted}")
    if not found["labelled"]:
        said.append("there are no labels, so it is unknown whether the retained cases were helped or hurt")
    if not kept["kept"]:
        said.append("every calibration case rolls back: this policy deploys M0 only")
    if "instead_of" in found:
        said.append(f"the tertiles of {found['instead_of']} are uneven here; the router uses {found['coordinate']}")
    ladder = found["ladder"]
    if "ha" in ladder and not any(ladder["ha"]):
        said.append(
            "HA is 0 at every step: no changed region reaches min_area, or none is harmful; try a smaller "
            "min_area or stronger updates before you rely on this"
        )
    elif ladder.get("argmin") == 1 and not ladder["dips_before_it_rises"]:
        said.append("HA is lowest at step 1 and only rises: more steps do more harm here")
    if found["source"]["usable"] is False:
        said.append(f"M0 is not usable here: its metric is below {found['source']['line']:.3f}")
    singles = found["coherence"]["first"]["singleton_share"]
    if singles is not None and singles > 0.5:
        said.append(f"the edits are not coherent: in half of the cases {singles:.0%} or more are single voxels")
    if 0.10 not in found["conformal"]["feasible"]:
        said.append(f"alpha 0.10 is out of reach: the floor is {found['conformal']['floor']:.3f}; 9 {UNIT[1]} needed")
    seen = found.get("edit", {})
    if seen.get("judged") is not None and seen["judged"] < LITTLE:
        said.append(judged_sentence(seen["judged"]))
    if seen.get("foreground") and (seen.get("swapped") or 0) >= SWAPPED:
        said.append(
            f"{seen['swapped']:.0%} of the changed voxels move between foreground classes, which HA does not see here "
            f"(foreground against background); record with --set classes=true, or certify worse-voxels"
        )
    return said


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _or_reason(make: Any) -> dict[str, Any]:
    """Return a result, or the reason why there is none; a policy without labels is not refused."""
    try:
        return dict(make())
    except (CasewiseError, KeyError) as error:
        return {"not_computed": str(error)}


EVIDENT = 0.05


def hurt_p(changes: ArrayLike, clusters: Sequence[str]) -> float:
    """P(so many clusters hurt | helped and hurt are equally likely); a cluster counts by the sign of its mean change.

    >>> round(hurt_p([-0.1, -0.2, -0.1, -0.3, -0.1], list("abcde")), 5)
    0.03125
    >>> hurt_p([], [])
    1.0
    """
    values = np.asarray(changes, dtype=np.float64)
    _, units = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    means = np.bincount(units, weights=values) / np.bincount(units)
    hurt, moved = int((means < 0).sum()), int((means != 0).sum())
    return float(sum(comb(moved, more) for more in range(hurt, moved + 1)) / 2**moved)


def in_words(policy: Policy) -> list[str]:
    """Return a policy as lines of text: its numbers, the calibration cases, and the concerns."""
    found = policy.preflight
    if "comparison" in found:
        said = (
            f"policy {policy.name} ({policy.controller}), fitted on {pluralize(found['labelled'], 'labelled case')} of "
        )
        lines = [f"{said}{pluralize(found['clusters'], *UNIT)}", *choice_sentences(found)]
        return [*lines, *(f"! {sentence}" for sentence in found["concerns"])]
    lines = [
        f"policy {policy.name} ({policy.controller}), fitted on {pluralize(found['cases'], 'case')}, "
        f"{found['labelled']} labelled"
    ]
    lines += list(_numbers(policy))
    if "stability" in found:
        lines += list(_router_lines(found))
    lines += [*_common_lines(found), *flag_sentences(found)]
    lines += [f"! {sentence}" for sentence in found["concerns"]]
    return [*lines, *_design_lines(policy)]


def _design_lines(policy: Policy) -> Iterator[str]:
    """Yield the design choices that were made by hand, grouped by the labels that had been seen."""
    chosen: dict[str, list[str]] = {}
    for line in policy.exposures:
        chosen.setdefault(line["seen"], []).append(line["choice"])
    for seen, choices in chosen.items():
        yield f"choices in this design: {'; '.join(choices)} ({seen})"


def _numbers(policy: Policy) -> Iterator[str]:
    options = policy.options
    if "cut_low" in options and not policy.groups:
        yield f"cut-points of {options['coordinate']}: {options['cut_low']:.6g} and {options['cut_high']:.6g}"
    for name, own in policy.groups.items():
        yield f"cut-points of {options['coordinate']} for {name}: {own['cut_low']:.6g} and {own['cut_high']:.6g}"
    if {"low", "mid", "hard"} <= set(options):
        yield "; ".join(f"{name}: {bucket_of(options[name])}" for name in ("low", "mid", "hard"))
    elif "cut_low" not in options and options:
        yield ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in options.items()
        )
    if "hybrid" in options:
        yield (
            "hybrid: cut-points change with new cases; after an exchangeability alarm every case gets M0; no "
            "promise for fixed cut-points holds"
        )


def _router_lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "buckets: " + ", ".join(
        f"{name} {row['cases']} ({row['share']:.0%})" for name, row in found["buckets"].items()
    )
    moved = found["stability"]
    for name, own in moved.get("groups", {"": moved}).items():
        whose = f"of {name} " if name else ""
        cuts = " and ".join("[{:.4g}, {:.4g}]".format(*own[cut]) for cut in ("cut_low", "cut_high"))
        yield (
            f"cut-points {whose}under resampling: {cuts}; {own['changed_median']:.1%} of {own['judged']} cases change "
            f"bucket (median), {own['changed_upper']:.1%} at worst of 97.5%"
        )
    best = found["recommended_coordinate"]
    unfit = found["coordinates"].get(found["coordinate"], {}).get("unfit", [])
    verdict = f"unfit ({'; '.join(unfit)})" if unfit else "fit"
    yield f"coordinate {found['coordinate']} is {verdict}; most stable suitable coordinate: {best or 'none'}"


def _common_lines(found: Mapping[str, Any]) -> Iterator[str]:
    kept = found["retained"]
    if kept["judged"]:
        yield (
            f"retained {kept['kept']}, rolled back {kept['rolled_back']}; of the retained {kept['helped']} helped, "
            f"{kept['hurt']} hurt, {kept['unchanged']} unchanged by labels: {'GO' if kept['go'] else 'NO-GO'}"
        )
    else:
        unknown = "" if found["labelled"] else "; helped and hurt are unknown without labels"
        yield f"retained {kept['kept']}, rolled back {kept['rolled_back']}{unknown}"
    ladder = found["ladder"]
    if "ha" in ladder:
        dips = "dips before it rises" if ladder["dips_before_it_rises"] else "does not dip before it rises"
        judged = judged_sentence(found.get("edit", {}).get("judged"))
        yield "HA by step: " + ", ".join(f"{value:.3f}" for value in ladder["ha"]) + f"; it {dips}; {judged}"
    if "ha" in found["budgets"]:
        yield "budget by rule: " + ", ".join(f"{rule} {step}" for rule, step in found["budgets"].items())
    first = found["coherence"]["first"]
    if first["largest"] is not None:
        singles = first["singleton_share"] or 0
        yield f"edit at step 1: largest component {first['largest']:.4g} voxels, single voxels {singles:.0%} (medians)"
    source = found["source"]
    if source["metric_mean"] is not None:
        lowest, empty = source["metric_lowest"], source["empty"]
        yield f"M0: mean metric {source['metric_mean']:.3f}, lowest {lowest:.3f}, empty in {pluralize(empty, 'case')}"
    floor = found["conformal"]
    yield f"smallest risk that certify can promise with {pluralize(floor['patients'], *UNIT)}: {floor['floor']:.3f}"

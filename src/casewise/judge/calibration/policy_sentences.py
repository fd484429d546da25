"""A calibrated policy and its preflight in plain sentences, for a terminal or a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from casewise.core.records import Policy
from casewise.judge.calibration.designs import choice_sentences
from casewise.judge.controllers.bucket import bucket_of
from casewise.judge.outcomes import judged_sentence


def in_words(policy: Policy) -> list[str]:
    """What was fitted, on what, and what speaks for and against it."""
    found = policy.preflight
    if "comparison" in found:
        said = f"policy {policy.name} ({policy.controller}), fitted on {found['labelled']} labelled cases of "
        lines = [f"{said}{found['clusters']} clusters", *choice_sentences(found)]
        return [*lines, *(f"! {sentence}" for sentence in found["concerns"])]
    lines = [
        f"policy {policy.name} ({policy.controller}), fitted on {found['cases']} cases, {found['labelled']} labelled"
    ]
    lines += list(_numbers(policy))
    if "stability" in found:
        lines += list(_router_lines(found))
    lines += list(_common_lines(found))
    lines += [f"! {sentence}" for sentence in found["concerns"]]
    lines += [f"exposed: {line['choice']} ({line['seen']})" for line in policy.exposures]
    return lines


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
            "hybrid: cut-points become a function of the stream, under its exchangeability alarm (then M0 for every "
            "case); nothing promised for seed-only cut-points holds"
        )


def _router_lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "buckets: " + ", ".join(
        f"{name} {row['cases']} ({row['share']:.0%})" for name, row in found["buckets"].items()
    )
    moved = found["stability"]
    yield (
        f"cut-points under resampling: {_interval(moved['cut_low'])} and {_interval(moved['cut_high'])}; "
        f"{moved['changed_median']:.1%} of cases change bucket (median), {moved['changed_upper']:.1%} at worst of 97.5%"
    )
    best = found["recommended_coordinate"]
    unfit = found["coordinates"].get(found["coordinate"], {}).get("unfit", [])
    verdict = f"unfit ({'; '.join(unfit)})" if unfit else "fit"
    yield f"coordinate {found['coordinate']} is {verdict}; most stable fit coordinate: {best or 'none'}"


def _common_lines(found: Mapping[str, Any]) -> Iterator[str]:
    kept = found["retained"]
    if kept["judged"]:
        yield (
            f"retained {kept['kept']}, rolled back {kept['rolled_back']}; of the retained {kept['helped']} helped, "
            f"{kept['hurt']} hurt, {kept['unchanged']} unchanged by {kept['judged_by']}: "
            f"{'GO' if kept['go'] else 'NO-GO'}"
        )
    else:
        yield f"retained {kept['kept']}, rolled back {kept['rolled_back']}; helped and hurt are unknown without labels"
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
        yield f"M0: mean metric {source['metric_mean']:.3f}, lowest {lowest:.3f}, empty in {empty} cases"
    floor = found["conformal"]
    yield f"conformal floor with {floor['patients']} labelled patients: {floor['floor']:.3f}"


def _interval(pair: list[float]) -> str:
    return f"[{pair[0]:.4g}, {pair[1]:.4g}]" if pair else "unbounded"

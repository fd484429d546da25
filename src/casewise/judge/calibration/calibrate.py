"""Calibrate: from a design and a holdout archive to a policy with all numbers for its decisions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from casewise.archive.store import Archive, as_archive
from casewise.core.durable import text_sha256
from casewise.core.errors import BadInput, CasewiseWarning, DegenerateStatistic, Overlap, TooFewCases
from casewise.core.records import CALIBRATION, EVALUATION, Policy, check_shares
from casewise.core.text import pluralize
from casewise.data.splits import check_disjoint, cluster_of, clusters_of
from casewise.judge.appearance import AGREEMENT, Appearance, known_appearance
from casewise.judge.calibration import cuts
from casewise.judge.calibration.cuts import FEWEST, Floats
from casewise.judge.calibration.design_comparison import OnCompared, fitted_choice
from casewise.judge.calibration.designs import DESIGNS, Progress
from casewise.judge.calibration.fixed_budget import budget, tau
from casewise.judge.calibration.preflight import EVIDENT, concerns, preflight
from casewise.judge.calibration.quality import fitted_flag, too_few_for_flags
from casewise.judge.controllers import takes
from casewise.judge.controllers.metadata import RISK, metadata_of
from casewise.judge.controllers.router import bucket_of
from casewise.judge.decide import has_consensus, unshrunk_hint
from casewise.judge.ledger import OURS, PAPER, compared_as, note_comparison, of_candidate, on_ladders
from casewise.judge.outcomes import outcomes
from casewise.judge.policy import (
    READY,
    among_candidates,
    check_modulated,
    controller_kind,
    controller_of,
    design_of,
    fitted_on,
    with_cuts,
)
from casewise.measure.signals import SIGNALS
from casewise.measure.signals.risk import RiskStatistics

UNEVEN = 0.1
"""Largest difference of a bucket's share from a third; beyond it the fallback coordinate is used."""


def calibrate(
    archive: str | Path | Archive,
    design: str | Policy = "default",
    *,
    mode: str = "union",
    percentiles: str | None = None,
    coordinate: str | None = None,
    budget_rule: str = "ha",
    tau_quantile: float = 0.5,
    hybrid: bool = False,
    window: int | None = None,
    unshrunk: bool = False,
    source_metric: float | None = None,
    consensus: str | None = None,
    allowed_hurt: float = 0.1,
    fixed: Sequence[str] = (),
    flag_below: float | None = None,
    confidence: float = 0.9,
    ladders: Sequence[str] = (),
    progress: Progress | None = None,
    on_compared: OnCompared | None = None,
) -> Policy:
    """Fit the numbers of a design on labelled cases and examine it (F1-F9).

    Cut-points and z-statistics use no label. A design that chooses among candidates needs labels; ``default`` compares
    all such designs if the archive has a consensus.

    Args:
        archive: The holdout, or its folder.
        design: Name of a design (``default``, ``cardiac``, ``choose``, ...) or a policy.
        mode: Cut-points when groups differ: ``union``, ``per-group`` or ``robust``.
        percentiles: Convention of the cut-points; default: the design's (driving 33/66, others 33.33/66.67).
        coordinate: Signal to route on; default: the design's.
        budget_rule: Rule by which ``fixed-k`` chooses its step from labels.
        tau_quantile: Quantile of the risk at the best step, for ``tau-stop``.
        hybrid: Let the calibration pool grow with the stream (E10).
        window: For hybrid policies: refit on this many latest cases.
        unshrunk: Keep the mid bucket at its full depth, for archives without shrunk states.
        source_metric: The model's metric on its own domain.
        consensus: Candidate that is the consensus of the others, if none is called so.
        allowed_hurt: Share of patients that may lose more than a point.
        fixed: Candidates that are compared as designs, such as ``"tuned/average"``.
        flag_below: Flag cases whose metric may be below this value.
        confidence: Chance that the lower bound behind a flag holds.
        ladders: Ladders of the archive; default: the only one.
        progress: Called with the step, the finished parts, and all parts.
        on_compared: Called with the masks that every compared design deploys.

    Returns:
        The policy, with the identity of its data and the results on the holdout.

    Raises:
        BadInput: If an option does not suit the design.
        TooFewCases: If there are fewer than five cases.
        Mismatch: If the archive lacks the steps or states that the design needs.

    Example:
        >>> import numpy as np, tempfile
        >>> from casewise import Case, Trajectory, create_archive
        >>> from casewise.core.records import Binding
        >>> binding = Binding("model", "tent", "npy", "min_area=16, foreground=True, connectivity=face")
        >>> holdout = create_archive(tempfile.mkdtemp(), binding=binding, steps=1)
        >>> masks = np.zeros((4, 4), np.uint8), np.eye(4, dtype=np.uint8)
        >>> for n in range(6):
        ...     signals = {"regions": 0.0, "delta": 0.0}, {"regions": float(n), "delta": n / 100}
        ...     holdout = holdout.add(Case(f"heart_{n}", np.zeros((1, 4, 4))), Trajectory(f"heart_{n}", masks, signals))
        >>> round(calibrate(holdout, "prostate").options["cut_high"], 2)
        3.33
    """
    check_shares(allowed_hurt=allowed_hurt, flag_below=flag_below)
    design = design_of(design) if isinstance(design, str) else design
    holdout = _holdout(as_archive(archive, ladders))
    unfitted = replace(
        design, steps=holdout.steps, binding=holdout.binding, ladder=holdout.ladder_name or "",
        adaptation={} if holdout.joined else holdout.configuration.get("adaptation") or {},
        appearance=_appearance(holdout), calibration_id=calibration_id(holdout), calibration_cases=(),
        calibration_clusters=(), calibration_inputs=(),
    )  # fmt: skip
    design = fitted_on(unfitted, holdout.entries.values())
    unflagged = None if flag_below is None else too_few_for_flags(holdout, confidence)
    flag_below = None if unflagged else flag_below
    if among_candidates(design) or (design.name == "default" and has_consensus(holdout, consensus)):
        unread = {
            "mode": mode != "union", "percentiles": percentiles, "coordinate": coordinate, "hybrid": hybrid,
            "budget-rule": budget_rule != "ha", "window": window, "source-metric": source_metric is not None,
        }  # fmt: skip
        if any(unread.values()):
            raise BadInput(
                f"policy {design.name!r} chooses among candidates by their labels here and reads no "
                f"{', '.join(name for name, given in unread.items() if given)}; leave it out"
            )
        return _among_candidates(
            holdout, design, consensus=consensus, allowed_hurt=allowed_hurt, fixed=fixed, flag_below=flag_below,
            at=confidence, progress=progress, on_compared=on_compared, unflagged=unflagged,
        )  # fmt: skip
    able = ", ".join(name for name, one in READY.items() if among_candidates(one))
    if holdout.joined:
        raise BadInput(
            f"policy {design.name!r} reads one ladder step by step, {len(holdout.joined)} were named "
            f"({', '.join(holdout.joined)}); name one, or choose a policy that reads several: default, where one of "
            f"them ends in a consensus, {able}"
        )
    convention = percentiles or ("driving" if design.name == "driving" else "medical")
    frame = outcomes(holdout)
    options = _design_options(holdout, design, coordinate=coordinate, unshrunk=unshrunk)
    guarded = bool(options.pop("guard", False))
    fitted: dict[str, Any] = {"options": options, "groups": {}}
    examined: dict[str, Any] = {}
    kind = metadata_of(controller_kind(design))
    if flag_below is not None and (kind.gates or hybrid):
        why = (
            "makes masks that are not in the ladder; flag merge on an archive of views or members"
            if kind.gates
            else "cannot be flagged because its cut-points change with new cases; leave out hybrid or --flag-below"
        )
        raise BadInput(f"policy {design.name!r} {why}")
    if kind.fitted_by == "cuts":
        try:
            fitted, examined = _routed(holdout, options, mode, convention)
        except DegenerateStatistic as error:
            if design.name != "default" or coordinate is not None:
                raise
            m0 = replace(READY["m0"], name=design.name)
            kept = calibrate(holdout, m0, source_metric=source_metric, flag_below=flag_below, confidence=confidence)
            said = [f"every case keeps M0: {error}", *([unflagged] if unflagged else []), *kept.preflight["concerns"]]
            return replace(kept, exposures=(), preflight={**kept.preflight, "concerns": said})
    elif kind.fitted_by == "budget":
        fitted["options"] = {"step": budget(frame, budget_rule)}
        examined = {"budget_rule": budget_rule}
    elif kind.fitted_by == "tau":
        fitted["options"] = {**tau(frame, quantile=tau_quantile), "cap": holdout.steps}
    exposures = tuple(line for line in (*PAPER, *OURS) if line["design"] == design.name)
    policy = replace(design, **fitted, exposures=exposures)
    found = {**examined, **preflight(holdout, controller_of(policy), frame, source_metric=source_metric)}
    if kind.is_router:
        found["degenerate"] = found["degenerate"] or not all(row["cases"] for row in found["buckets"].values())
    if guarded and found["retained"]["hurt_p"] <= EVIDENT:
        policy, found["guard"] = with_cuts(policy, cut_low=-np.inf, cut_high=-np.inf), "closed"
        found["quota"] = {"low": 0, "mid": 0, "hard": sum(found["quota"].values())}
    found["concerns"] = concerns(found)
    if flag_below is not None:
        try:
            flag, found["quality"], doubts = fitted_flag(
                holdout, controller_of(policy), below=flag_below, at=confidence, consensus=consensus
            )
            found["concerns"] += doubts
            policy = replace(policy, flag=flag)
        except TooFewCases as error:
            found["concerns"].append(f"no case is flagged: {error}")
    found["concerns"] += [unflagged] if unflagged else []
    if hybrid:
        policy = _hybrid(policy, holdout, convention, window)
    if kind.fitted_by == "cuts" or kind.gates:  # what can be certified
        note_comparison(holdout, [compared_as(policy)])  # before any result is shown
    return replace(policy, preflight=found)


def _among_candidates(holdout: Archive, design: Policy, unflagged: str | None, **options: Any) -> Policy:
    """Fit a policy that chooses among all candidates of a case on the labels of the holdout."""
    read, of = holdout.joined or (design.ladder,), of_candidate(options.get("consensus"))
    if design.name == "default":  # before any label is read
        note_comparison(holdout, [on_ladders(one + of, read) for one in (*DESIGNS, *options.get("fixed", ()))])
    name, fitted, found = fitted_choice(holdout, design.name, ladders=holdout.joined, **options)
    rows = found["comparison"]["rows"]  # settled and cleanups, too
    note_comparison(holdout, [on_ladders(row["design"] + of, read) for row in rows])
    found["consensus"] = options.get("consensus")
    found["concerns"] += [unflagged] if unflagged else []
    ladders = {one: holdout.ladder(one).configuration.get("adaptation") or {} for one in holdout.joined}
    agreements = {one["case"]: one["signals"].get(AGREEMENT) for one in found["out_of_fold"]}
    more = {
        "flag": fitted.pop("flag", {}),
        "cleanup": fitted.pop("cleanup", ""),
        "appearance": _appearance(holdout, agreements),
    }
    return replace(design, controller=name, options=fitted, ladders=ladders, preflight=found, **more)


def _appearance(holdout: Archive, agreements: Mapping[str, float | None] = MappingProxyType({})) -> dict[str, Any]:
    """Return the appearances of the calibration images, if all were measured and there are at least two patients.

    ``agreements`` are those of the deployed masks with the other candidates.
    """
    entries = holdout.entries.values()
    looks = [Appearance(e.id, e.appearance, e.cluster).with_agreement(agreements.get(e.id)) for e in entries]
    known = all(e.appearance for e in entries) and len({one.patient for one in looks}) > 1
    return asdict(known_appearance(looks)) if known else {}


def calibration_id(archive: Archive) -> str:
    """sha256 over the calibration case ids and everything that they hold."""
    return text_sha256("\n".join((archive.digest, *archive.ids)))


def _holdout(archive: Archive) -> Archive:
    """Return the cases marked as calibration, or all if none is marked; never evaluation cases (A3)."""
    holdout = archive.marked(CALIBRATION)
    wrong = [name for name, entry in holdout.entries.items() if entry.split == EVALUATION]
    if wrong:
        raise Overlap(
            f"{len(wrong)} of {len(holdout.ids)} cases are marked as evaluation ({', '.join(wrong[:3])}, ...) "
            f"and none as calibration; calibrate on other cases than those of the evaluation"
        )
    unmarked = [name for name in archive.ids if archive.entries[name].split is None and name not in holdout.entries]
    if unmarked:
        warnings.warn(
            f"{archive.path} holds {pluralize(len(unmarked), 'case')} of no split ({', '.join(unmarked[:3])}"
            f"{', ...' if len(unmarked) > 3 else ''}), while others are marked: left out. Recorded again with a split, "
            "or in an archive without splits, they take part",
            CasewiseWarning,
            stacklevel=2,
        )
    rest = archive.select(split=EVALUATION)
    check_disjoint(clusters_of(holdout.entries.values()), clusters_of(rest.entries.values()))
    if len(holdout.ids) < FEWEST:
        raise TooFewCases(
            f"calibration needs at least {FEWEST} cases, {archive.path} has {len(holdout.ids)}; record {FEWEST} or "
            f"more (alpha 0.10 is certifiable from 9 labelled cases on)"
        )
    return holdout


def _design_options(archive: Archive, design: Policy, *, coordinate: str | None, unshrunk: bool) -> dict[str, Any]:
    """Return the options of the design, checked against the archive."""
    options = dict(design.options)
    check_modulated(design, archive.binding)
    if takes(controller_kind(design), "cap"):
        options["cap"] = archive.steps
    if takes(controller_kind(design), "min_area"):
        options["min_area"] = int(archive.configuration.get("min_area", 16))
    if coordinate is not None:
        if not takes(controller_kind(design), "coordinate"):
            raise BadInput(f"coordinate works only with policies that route, such as cardiac; {design.name!r} has none")
        options["coordinate"] = coordinate
        options.pop("fallback", None)
    if metadata_of(controller_kind(design)).fitted_by == "cuts" and not ("coordinate" in options and design.options):
        routers = ", ".join(name for name, one in READY.items() if "coordinate" in one.options)
        raise BadInput(f"{design.name!r} has no coordinate and buckets; these have: {routers}")
    for name in ("low", "mid", "hard"):
        if name in options:
            options[name] = _bucket(archive, design, dict(options[name]), unshrunk)
    if unshrunk and "mid_shrink" in options:
        options["mid_shrink"] = 0.0
    return options


def _bucket(archive: Archive, design: Policy, plain: dict[str, Any], unshrunk: bool) -> dict[str, Any]:
    if unshrunk:
        plain.pop("shrink", None)
    bucket = bucket_of(plain)
    if bucket.depth > archive.steps:
        raise BadInput(
            f"design {design.name!r} needs {bucket.depth} steps per case, the archive holds {archive.steps}; "
            f"record with steps={bucket.depth} or choose another design"
            f"{' (update is the one for a single candidate)' if archive.steps == 1 else ''}"
        )
    lost = [state for state in bucket.states if state not in archive.states]
    if lost:
        raise BadInput(
            f"design {design.name!r} deploys state {lost[0]}, which this archive does not hold for every case; "
            f"{unshrunk_hint(archive, lost[0])}"
        )
    return plain


def _routed(
    archive: Archive, options: dict[str, Any], mode: str, convention: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cut-points of a router and how stable they are."""
    first = _step(archive, 1)
    asked, options = options["coordinate"], _settled(first, options, convention)
    coordinate = options["coordinate"]
    if coordinate == RISK:
        options = {**options, "statistics": vars(cuts.statistics(_column(first, "regions"), _column(first, "delta")))}
    values = coordinate_values(first, coordinate, options)
    best, table = cuts.recommended(first, convention)
    fitted = cuts.fitted_cuts(first, values, mode=mode, convention=convention)
    low, high = fitted["options"]["cut_low"], fitted["options"]["cut_high"]
    for name, own in fitted["groups"].items() or {"": fitted["options"]}.items():
        mine = values[first["group"].to_numpy() == name] if name else values
        what = f"{coordinate} of group {name}" if name else coordinate
        cuts.warn_if_degenerate(what, mine, own["cut_low"], own["cut_high"], best if best != coordinate else None)
    examined = {
        "coordinate": coordinate,
        "convention": convention,
        "mode": mode,
        "degenerate": low == high,
        "stability": cuts.stability_by_group(first, values, convention)
        if fitted["groups"]
        else cuts.stability(values, convention, clusters=first["cluster"].tolist()),
        "coordinates": table,
        "recommended_coordinate": best,
    }
    if coordinate != asked:
        examined["instead_of"] = asked
    return {"options": {**options, **fitted["options"]}, "groups": fitted["groups"]}, examined


def _settled(first: pd.DataFrame, options: Mapping[str, Any], convention: str) -> dict[str, Any]:
    """Return the design's options with its coordinate, or with its fallback if ties make the buckets uneven (S11)."""
    settled = {name: value for name, value in options.items() if name != "fallback"}
    if "fallback" in options:
        values = coordinate_values(first, settled["coordinate"])
        low, high = cuts.cut_points(values, convention)
        shares = [count / len(values) for count in cuts.bucket_counts(values, low, high).values()]
        uneven = max(abs(share - 1 / 3) for share in shares)
        if low == high or uneven > max(UNEVEN, 1 / len(values)) + 1e-9:
            settled["coordinate"] = options["fallback"]
    return settled


def coordinate_values(first: pd.DataFrame, coordinate: str, options: Mapping[str, Any] | None = None) -> Floats:
    """Return the coordinate of each calibration case; refuse one that falls when risk rises (C12)."""
    if coordinate == RISK:
        known = (options or {})["statistics"]
        return np.asarray(RiskStatistics(**known).risk(_column(first, "regions"), _column(first, "delta")))
    name = coordinate.removeprefix("-")
    if name in SIGNALS and SIGNALS[name].higher_is_riskier == coordinate.startswith("-"):
        turned = name if coordinate.startswith("-") else f"-{name}"
        raise BadInput(
            f"coordinate {coordinate!r} falls when risk rises, so a router on it would roll back the safe "
            f"cases; route on {turned!r}"
        )
    return _column(first, name) * (-1 if coordinate.startswith("-") else 1)


def _column(rows: pd.DataFrame, name: str) -> Floats:
    if name not in rows:
        SIGNALS[name]
        raise BadInput(f"this archive has no signal {name!r}; record with it, or choose another coordinate")
    values = rows[name].to_numpy(dtype=np.float64)
    missing = rows.loc[~np.isfinite(values), "case"].tolist()
    if missing:
        raise BadInput(
            f"signal {name!r} is not computable at step 1 for {len(missing)} of {len(rows)} calibration cases "
            f"({', '.join(missing[:3])}); choose another coordinate or leave those cases out"
        )
    return cuts.checked(values)


def _step(archive: Archive, step: int) -> pd.DataFrame:
    """Return the recorded signals of one step, with group and cluster of each case."""
    signals = archive.signals()
    rows = signals.loc[(signals["step"] == step) & (signals["shrink"] == 0)].copy()
    rows["group"] = [archive.entries[case_id].group for case_id in rows["case"]]
    rows["cluster"] = [cluster_of(archive.entries[case_id]) for case_id in rows["case"]]
    return rows


def _hybrid(policy: Policy, archive: Archive, convention: str, window: int | None) -> Policy:
    if not {"low", "mid", "hard"} <= set(policy.options) or policy.groups:
        raise BadInput("hybrid calibration needs a router with one pair of cut-points; use mode union or robust")
    first = _step(archive, 1).drop_duplicates("cluster")  # the alarm counts a patient once, by its first case
    pool = coordinate_values(first, policy.options["coordinate"], policy.options).tolist()
    hybrid = {"pool": pool, "convention": convention, "window": window, "warm_up": cuts.WARM_UP, "delta": cuts.DELTA}
    return replace(policy, options={**policy.options, "hybrid": hybrid})

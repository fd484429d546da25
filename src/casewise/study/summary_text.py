"""The first screen of a report: gain, cases hurt, flagged cases, promise, key figures and the first figure.

Sentences claim a difference only if its interval and its test show one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from casewise.core.text import UNIT, pluralize
from casewise.judge.monitors.quota import BUCKETS
from casewise.judge.outcomes import POINT, judged_sentence, judged_share
from casewise.judge.policy import no_go
from casewise.render.ink import FAINT, HARM, HELP, INK, MUTED, SOURCE, Picture, canvas, inked
from casewise.render.tables import interval, number
from casewise.study.analyses.controls import attribution_of
from casewise.study.analyses.cut_points import quota_found
from casewise.study.analyses.deployed_methods import interval_between, verdict
from casewise.study.analyses.gain import answers, captured, deployed_row
from casewise.study.statistics.resample import FEWEST, cluster_numbers
from casewise.study.study import Study


@dataclass(frozen=True)
class ReportSummary:
    """The first sentences of a report: gain, hurt cases, flagged cases, promise, and the changes by the policy."""

    headline: str
    answers: Mapping[str, str]  # hurt, flagged, promised, in this order
    second: str  # the same cases without control, and what the policy changed


@dataclass(frozen=True)
class Key:
    """One key figure: a number, its name, and its interval or n."""

    value: str
    what: str
    more: str
    tone: str = ""


def report_summary(study: Study) -> ReportSummary:
    """Return the four answers of :mod:`casewise.study.analyses.gain`, and a comparison with the uncontrolled cases."""
    rest = dict(answers(study))
    gained = rest.pop("gained")
    beside = "".join(f" {_beside(study, name)}" for name in study.extras.others)
    if _nothing_undone(study):
        return ReportSummary(gained, rest, f"Nothing was rolled back: {study.everywhere} was deployed.{beside}")
    return ReportSummary(gained, rest, f"{_uncontrolled(study)} {_second(study)}{_attributed(study)}{beside}")


def _nothing_undone(study: Study) -> bool:
    """True if the policy deployed the full horizon everywhere, and other methods are there for comparison."""
    if not study.extras.others:
        return False
    free, ours = (frame.set_index("case")["change"].sort_index() for frame in (study.uncontrolled, study.policy_rows))
    return bool(np.array_equal(free, ours, equal_nan=True))


def advised(study: Study) -> list[str]:
    """Warnings to print before any number: a NO-GO, other bucket sizes than at calibration, few patients."""
    against, units = no_go(study.policy), len(set(cluster_numbers(study.policy_rows)))
    found = [*([] if against is None else [against]), *(quota_found(study).notes if study.is_router else ())]
    if units < FEWEST:
        found.append(
            f"FEW: only {pluralize(units, *UNIT)} were evaluated; with fewer than {FEWEST} an interval is "
            f"unreliable. Record more"
        )
    return found


def _uncontrolled(study: Study) -> str:
    n, worse = _made_worse(study.uncontrolled)
    moved = interval_between(study, study.reference, study.source, "metric")
    mean = f"the mean {study.metric} {_moved(moved)}" if moved else f"the mean {study.metric} is undefined"
    what = "Without control, adaptation" if not study.rungs else f"Without control, the {study.everywhere}"
    if worse == 0:
        return f"{what} made none of {n} cases worse, and {mean}."
    joint = "while" if moved is None or not moved["shown"] else "and" if moved["estimate"] < 0 else "although"
    return f"{what} made {worse} of {n} cases worse, {joint} {mean}."


def _made_worse(frame: pd.DataFrame) -> tuple[int, int]:
    """Cases with a change, and those below M0."""
    return int(frame["change"].notna().sum()), int((frame["change"] < 0).sum())


def _beside(study: Study, name: str) -> str:
    """Gain and harm of another method for every case, without control."""
    found = captured(study).table
    for one in found.loc[found["method"] == study.title(name)].to_dict("records"):
        gain = interval(one["gain"], one["low"], one["high"], 4, signed=True)
        hurt = f"{int(one['hurt'])} hurt, {int(one['hurt_by_a_point'])} of them by more than a point"
        return f"{name}: {gain}, {int(one['helped'])} helped, {hurt}."
    return ""


def _moved(row: Mapping[str, Any]) -> str:
    """Equality is never claimed: what is not shown to differ "did not measurably move" (H7)."""
    if not row["shown"]:
        return "did not measurably move"
    return f"{'fell' if row['estimate'] < 0 else 'rose'} by {number(abs(float(row['estimate'])))}"


def _second(study: Study) -> str:
    frame, before = study.policy_rows, float(study.uncontrolled["ha"].mean())
    after, back = float(frame["ha"].mean()), int(frame["rolled_back"].sum())
    worse = _made_worse(frame)[1]
    then = "no case is then worse" if worse == 0 else f"{worse} {'case is' if worse == 1 else 'cases are'} then worse"
    did = f"Policy {study.title(study.ours)} kept the original mask (M0) in {back} of {len(frame)} cases; {then}"
    row = interval_between(study, study.ours, study.reference, "ha")
    if row is None:
        return f"{did}, and HA is {number(after)}."
    change = interval(row["estimate"], row["low"], row["high"], signed=True)
    return (
        f"{did}, and harmful accepted area goes from {number(before)} to {number(after)}: {change} against "
        f"{study.everywhere}, {verdict(row)}."
    )


def _attributed(study: Study) -> str:
    share = float(attribution_of(study).table.iloc[0]["share"]) if study.is_router else float("nan")
    if share != share:
        return ""
    ranked = (
        "the choice of cases has no effect"
        if share >= 1
        else f"the other {100 * (1 - share):.0f} % comes from which cases were chosen"
    )
    return f" {100 * share:.0f} % of this reduction comes from the number of cases for each action alone; {ranked}."


def keys(study: Study) -> list[Key]:
    """Key figures of the deployed masks (gain, helped and hurt, flagged) and of control (worse without it, HA, M0)."""
    row, decisions, ours, found = deployed_row(study), study.decisions[study.ours], study.policy_rows, []
    if row is not None:
        tone = ("help" if row["gain"] > 0 else "harm") if row["shown"] else ""
        gain, _, spread = interval(row["gain"], row["low"], row["high"], 4, signed=True).partition(" ")
        source = number(study.methods[study.source]["metric"].mean())
        gained = f"mean change of {study.metric}, deployed against M0 ({source})"
        worst = number(max(0.0, -row["worst"]))
        more = f"{int(row['hurt_by_a_point'])} hurt by more than a point, the worst by {worst}"
        found.append(Key(gain, gained, f"{spread}, n = {int(row['n'])}", tone))
        sides = f"{int(row['helped'])} : {int(row['hurt'])}"
        found.append(Key(sides, "cases helped : hurt by the deployed masks", more))
    flagged = sum(decision.flagged for decision in decisions)
    found.append(Key(f"{flagged}", "cases flagged for a person", f"of {len(decisions)}"))
    others = list(study.extras.others)
    name, frame = (others[0], study.methods[others[0]]) if _nothing_undone(study) else (None, study.uncontrolled)
    n, worse = _made_worse(frame)
    points, mean = int((frame["change"] < -POINT).sum()), number(frame["change"].mean(), 4, signed=True)
    what = f"cases made worse by {name or f'{study.everywhere}, without control'}"
    found.append(Key(f"{worse}", what, f"of {n}; {points} by more than a point; mean change {mean}", "harm"))
    harm = f"{number(study.uncontrolled['ha'].mean())} of {study.everywhere}; {judged_sentence(judged_share(ours))}"
    found.append(Key(number(ours["ha"].mean()), f"HA of the {study.title(study.ours)}", harm, "ours"))
    counts = ours["bucket"].value_counts()
    buckets = [", ".join(f"{int(counts.get(one, 0))} {one}" for one in BUCKETS)] * study.is_router
    made = pluralize(study.evaluation.steps, "candidate" if study.rungs else "update")
    spent = f"{number(ours['executed'].mean(), 2)} of {made} made per case"
    back = "; ".join([f"of {len(ours)}", *buckets, spent])
    found.append(Key(f"{int(ours['rolled_back'].sum())}", "cases that keep M0", back))
    return found


def hero(study: Study) -> Picture:
    """The first figure: every case with other methods, without control, and with the policy."""
    rows = [(name, study.methods[name]) for name in study.extras.others]
    rows += [] if _nothing_undone(study) else [(study.everywhere, study.uncontrolled)]
    rows += [(f"casewise, {study.title(study.ours)}", study.policy_rows)]
    flagged = frozenset(one.case_id for one in study.decisions[study.ours] if one.flagged)
    figure = draw_changes(rows, metric=study.metric, flagged=flagged)
    marks = " Diamonds: flagged for a person." if flagged else ""
    caption = (
        f"One line per case, in the same order in every row: the change of {study.metric} against M0. Grey ticks: "
        f"rolled back to M0.{marks} The axis ends at the 99th percentile; longer lines are cut."
    )
    return Picture("changes", "Change of each case", figure, caption)


def draw_changes(rows: Sequence[tuple[str, pd.DataFrame]], *, metric: str, flagged: Collection[str] = ()) -> Figure:
    """Rows of bars that share one order, worst case of the first row first: change = metric(deployed) - metric(M0).

    Cases that are ``flagged`` are marked in the last row.
    """
    order = rows[0][1].set_index("case")["change"].sort_values(kind="stable").index
    with inked():
        figure, axes = canvas(9.2, 0.7 + 1.5 * len(rows), rows=len(rows))
        limit = _limit(*(frame["change"] for _, frame in rows))
        for axis, (name, frame) in zip(axes[:, 0], rows, strict=True):
            _bars(axis, frame.set_index("case").loc[order], limit)
            axis.set_title(f"{name}: {_counts(frame)}", fontsize=9.5)
            axis.tick_params(labelbottom=axis is axes[-1, 0])
        where = [at for at, case in enumerate(order, start=1) if case in flagged]
        axes[-1, 0].plot(where, [-0.94 * limit] * len(where), "D", color=SOURCE, markersize=4.5, clip_on=False)
        axes[-1, 0].set_xlabel(f"cases, worst first under {rows[0][0]}")
        figure.supylabel(f"change of {metric} against M0", fontsize=9, color=INK)
    return figure


def _bars(axis: Any, frame: pd.DataFrame, limit: float) -> None:
    change = frame["change"].to_numpy(float)
    where = np.arange(1, len(change) + 1)
    shown = np.clip(np.nan_to_num(change), -limit, limit)
    for side, color in ((change < 0, HARM), (change > 0, HELP)):
        axis.vlines(where[side], 0, shown[side], color=color, linewidth=max(0.7, min(4.0, 420 / max(len(change), 1))))
    back = frame["rolled_back"].to_numpy(bool)
    axis.plot(where[back], np.zeros(back.sum()), "|", color=MUTED, markersize=4, markeredgewidth=0.8)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_ylim(-1.06 * limit, 1.06 * limit)
    axis.set_xlim(0.2, len(change) + 0.8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=False, axis="x")
    axis.spines["bottom"].set_color(FAINT)
    axis.yaxis.set_major_locator(MaxNLocator(5, symmetric=True))


def _limit(*changes: pd.Series) -> float:
    """The axis ends at the 99th percentile of |change|, so that one outlier does not flatten the rest."""
    sizes = np.abs(np.concatenate([change.to_numpy(float) for change in changes]))
    sizes = sizes[np.isfinite(sizes)]
    return float(np.percentile(sizes, 99)) * 1.05 if sizes.size and np.percentile(sizes, 99) > 0 else 1e-3


def _counts(frame: pd.DataFrame) -> str:
    worse, better = int((frame["change"] < 0).sum()), int((frame["change"] > 0).sum())
    points, back = int((frame["change"] < -POINT).sum()), int(frame["rolled_back"].sum())
    mean = number(frame["change"].mean(), 4, signed=True)
    more = f" ({points} by more than a point)" if points else ""
    return f"mean {mean}, {better} better, {worse} worse{more}" + (f", {back} rolled back" if back else "")

"""How a report opens: what was gained, who was hurt, who was flagged, what is promised; then key figures and a picture.

Everything is said only as strongly as the intervals allow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from casewise.core.brief import UNIT, counted
from casewise.judge.outcomes import POINT, judged_sentence, judged_share
from casewise.judge.policy import no_go
from casewise.render.ink import FAINT, HARM, HELP, INK, MUTED, SOURCE, Picture, canvas, inked
from casewise.render.tables import Estimate, interval, number, text_of
from casewise.study.analyses.controls import attribution_of
from casewise.study.analyses.deployment import interval_between, verdict
from casewise.study.analyses.quality import answers, captured, deployed_row
from casewise.study.analyses.routing import quota_found
from casewise.study.finding import Finding
from casewise.study.statistics.resample import clusters_of
from casewise.study.study import Study

FEWEST = 5  # patients or sequences that an interval needs


@dataclass(frozen=True)
class Story:
    """What the deployed masks gained; whom they hurt, who was flagged, what is promised; what control did about it."""

    headline: str
    answers: Mapping[str, str]  # hurt, flagged, promised, in this order
    second: str  # the same cases without control, and what the policy changed


@dataclass(frozen=True)
class Key:
    """One key figure: a number, what it is, and its interval or n."""

    value: str
    what: str
    more: str
    tone: str = ""


def story(study: Study) -> Story:
    """The four answers of :mod:`casewise.study.analyses.quality`, then the cases without control."""
    share = attribution_of(study) if study.is_router else None
    said = answers(study)
    rest = {"hurt": said.hurt, "flagged": said.flagged, "promised": said.promised}
    beside = "".join(f" {_beside(study, name)}" for name in study.extras.others)
    if _nothing_undone(study):
        return Story(
            said.gained, rest, f"Nothing was rolled back: the {study.everywhere} is what was deployed.{beside}"
        )
    return Story(said.gained, rest, f"{_uncontrolled(study)} {_second(study)}{_attributed(share)}{beside}")


def _nothing_undone(study: Study) -> bool:
    """Whether the policy deployed what runs without control, and other ways are there to be compared with."""
    if not study.extras.others:
        return False
    free, ours = (frame.set_index("case")["change"].sort_index() for frame in (study.uncontrolled, study.router))
    return bool(np.array_equal(free, ours, equal_nan=True))


def advised(study: Study) -> list[str]:
    """What a reader must know before any number: a NO-GO, cut-points that did not travel, few units."""
    against = no_go(study.policy)
    drift = quota_found(study).notes if study.is_router else ()
    return [*([] if against is None else [against]), *drift, *_too_few(study)]


def _too_few(study: Study) -> list[str]:
    """Resampling two or three patients hardly varies: an interval of them looks sure and is not."""
    units = len(set(clusters_of(study.router)))
    if units >= FEWEST:
        return []
    return [
        f"FEW: {counted(units, *UNIT)} stand behind every interval on this page, which are far too narrow below "
        f"{FEWEST}; read the means, and record more {UNIT[1]}"
    ]


def _uncontrolled(study: Study) -> str:
    frame = study.uncontrolled
    n, worse = int(frame["change"].notna().sum()), int((frame["change"] < 0).sum())
    moved = interval_between(study, study.reference, study.source, "metric")
    mean = f"the mean {study.metric} {_moved(moved)}" if moved else f"the mean {study.metric} is undefined"
    what = "Without control, adaptation" if not study.rungs else f"Without control, the {study.everywhere}"
    if worse == 0:
        return f"{what} made none of {n} cases worse, and {mean}."
    joint = "while" if moved is None or not moved["shown"] else "and" if _fell(moved) else "although"
    return f"{what} made {worse} of {n} cases individually worse, {joint} {mean}."


def _beside(study: Study, name: str) -> str:
    """What another way did on the same cases, for every case and without control."""
    found = captured(study).table
    row = found.loc[found["method"] == study.title(name)]
    if row.empty:
        return ""
    one = row.iloc[0]
    gain = interval(one["gain"], one["low"], one["high"], 4, signed=True)
    hurt = f"{int(one['hurt'])} hurt, {int(one['hurt_by_a_point'])} of them by more than a point"
    return f"{name}: {gain}, {int(one['helped'])} helped, {hurt}."


def _fell(moved: Mapping[str, Any]) -> bool:
    return float(moved["estimate"]) < 0


def _moved(row: Mapping[str, Any]) -> str:
    """Equality is never claimed: what is not shown to differ "did not measurably move" (H7)."""
    if not row["shown"]:
        return "did not measurably move"
    return f"{'fell' if _fell(row) else 'rose'} by {number(abs(float(row['estimate'])))}"


def _second(study: Study) -> str:
    frame, before = study.router, float(study.uncontrolled["ha"].mean())
    after, back = float(frame["ha"].mean()), int(frame["rolled_back"].sum())
    worse = int((frame["change"] < 0).sum())
    name = study.title(study.ours)
    then = "no case is then worse" if worse == 0 else f"{worse} {'case is' if worse == 1 else 'cases are'} then worse"
    named = name if "-" in name else f"The {name}"  # "The router", and "small-edits" of somebody's own
    did = f"{named} rolls {back} of {len(frame)} cases back to the source model; {then}"
    row = interval_between(study, study.ours, study.reference, "ha")
    if row is None:
        return f"{did}, and HA is {number(after)}."
    estimate = Estimate(float(row["estimate"]), float(row["low"]), float(row["high"]))
    return (
        f"{did}, and harmful accepted area goes from {number(before)} to {number(after)}: "
        f"{text_of(estimate, signed=True)} against {study.everywhere}, {verdict(row)}."
    )


def _attributed(attribution: Finding | None) -> str:
    if attribution is None:
        return ""
    row = attribution.table.iloc[0]
    share = float(row["share"])
    if share != share:
        return ""
    ranked = (
        "the ranking adds nothing to it"
        if share >= 1
        else f"the remaining {100 * (1 - share):.0f} % to which cases it chose"
    )
    quota = "its quotas alone (as many cases for each action, drawn at random)"
    return f" Of that cut, {100 * share:.0f} % is due to {quota}, {ranked}."


def keys(study: Study) -> list[Key]:
    """Of the deployed masks: gain, helped and hurt, flagged. Of control: made worse without it, HA, rolled back."""
    return [*_deployed_keys(study), *_control_keys(study)]


def _deployed_keys(study: Study) -> list[Key]:
    row, decisions = deployed_row(study), study.decisions[study.ours]
    flagged = sum(decision.flagged for decision in decisions)
    asked = Key(f"{flagged}", "cases flagged for a person", f"of {len(decisions)}")
    if row is None:
        return [asked]
    n, source = int(row["n"]), number(study.methods[study.source]["metric"].mean())
    tone = ("help" if row["gain"] > 0 else "harm") if row["shown"] else ""
    gain, _, spread = interval(row["gain"], row["low"], row["high"], 4, signed=True).partition(" ")
    gained = f"mean change of {study.metric}, deployed against M0 ({source})"
    worst = f"{int(row['hurt_by_a_point'])} hurt by more than a point, the worst by {number(max(0.0, -row['worst']))}"
    return [
        Key(gain, gained, f"{spread}, n = {n}", tone),
        Key(f"{int(row['helped'])} : {int(row['hurt'])}", "cases helped : hurt by the deployed masks", worst),
        asked,
    ]


def _control_keys(study: Study) -> list[Key]:
    frame, ours = study.uncontrolled, study.router
    n, worse = int(frame["change"].notna().sum()), int((frame["change"] < 0).sum())
    harm = (
        f"{number(frame['ha'].mean())} of {study.everywhere}; {_versus(study)}; {judged_sentence(judged_share(ours))}"
    )
    made = counted(study.evaluation.steps, "candidate" if study.rungs else "update")
    spent = f"{number(ours['executed'].mean(), 2)} of {made} made per case"
    back = "; ".join([f"of {len(ours)}", *([_buckets(study)] if study.is_router else []), spent])
    first = Key(
        f"{worse}", f"cases made worse by {study.everywhere}, without control", f"of {n}{_change(study)}", "harm"
    )
    if _nothing_undone(study):
        first = _other_key(study, next(iter(study.extras.others)))
    return [
        first,
        Key(number(ours["ha"].mean()), f"HA of the {study.title(study.ours)}", harm, "ours"),
        Key(f"{int(ours['rolled_back'].sum())}", "cases rolled back to M0", back),
    ]


def _other_key(study: Study, name: str) -> Key:
    frame = study.methods[name]
    n, worse = int(frame["change"].notna().sum()), int((frame["change"] < 0).sum())
    points, mean = int((frame["change"] < -POINT).sum()), number(frame["change"].mean(), 4, signed=True)
    more = f"of {n}; {points} by more than a point, the worst by {number(-frame['change'].min())}; mean {mean}"
    return Key(f"{worse}", f"cases made worse by {name}", more, "harm")


def _change(study: Study) -> str:
    row = interval_between(study, study.reference, study.source, "metric")
    if row is None:
        return ""
    return f"; mean change {interval(row['estimate'], row['low'], row['high'], 4, signed=True)}"


def _versus(study: Study) -> str:
    row = interval_between(study, study.ours, study.deployable, "ha")
    if row is None:
        return f"as {_budget(study)}"
    cut = interval(row["estimate"], row["low"], row["high"], signed=True)
    return f"{cut} against {_budget(study)} (deployable)"


def _budget(study: Study) -> str:
    """The deployable budget as a page says it: fixed-2, or the reading that it stops at."""
    return study.rungs[int(study.deployable.removeprefix("fixed-")) - 1] if study.rungs else study.deployable


def _buckets(study: Study) -> str:
    counts = study.router["bucket"].value_counts()
    return ", ".join(f"{int(counts.get(name, 0))} {name}" for name in ("low", "mid", "hard"))


def words(study: Study) -> list[tuple[str, str]]:
    """The words that the story and every table use, each in a sentence."""
    steps = study.evaluation.steps
    everywhere = (
        f"every case adapted for all {steps} updates; fixed-k stops everywhere after k."
        if not study.rungs
        else f"the last of {steps} candidates for every case; in tables {study.reference}, and fixed-k is the k-th one."
    )
    known = [
        ("M0", "the mask of the source model, without adaptation."),
        (study.everywhere, everywhere),
        ("HA", "harmful accepted area, the share of the changed voxels in regions that became worse than M0."),
        ("BA", "the share in regions that became better."),
        ("Deployable", "the budget k that the labelled calibration cases choose."),
    ]
    if study.is_router:
        meaning = (
            f"COQR, sorts cases by {study.coordinate} after one update: low adapt, mid less, hard roll back to M0."
        )
        known.append(("Router", meaning))
    known.append(("[a, b]", "95 % bootstrap interval."))
    known.append(("Sign-flip p", "how often chance differs as much when the two methods of a case could be swapped."))
    return known


def hero(study: Study) -> Picture:
    """The figure below the story: every case, under other ways, without control, and under the policy."""
    rows = [(name, study.methods[name]) for name in study.extras.others]
    rows += [] if _nothing_undone(study) else [(study.everywhere, study.uncontrolled)]
    rows += [(f"casewise, {study.title(study.ours)}", study.router)]
    flagged = frozenset(one.case_id for one in study.decisions[study.ours] if one.flagged)
    figure = draw_changes(rows, metric=study.metric, flagged=flagged)
    marks = " Diamonds: flagged for a person." if flagged else ""
    caption = (
        f"One line per case, in the same order in every row: the change of {study.metric} against M0. Grey ticks: "
        f"rolled back to M0.{marks} The axis ends at the 99th percentile; longer lines are cut."
    )
    return Picture("changes", "What was done to each case", figure, caption)


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

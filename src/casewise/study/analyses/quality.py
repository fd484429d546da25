"""What the deployed masks gained, whom they hurt, who was flagged, and what the quality signals are worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from casewise.core.brief import UNIT, counted
from casewise.judge.calibration.view_selection import read_case, settled_after
from casewise.judge.deciding import CONSENSUS_NAMES
from casewise.judge.outcomes import POINT, scoring_options
from casewise.render.ink import FAINT, HELP, MUTED, OURS, SOURCE, Picture, canvas, inked
from casewise.render.tables import number
from casewise.study.analyses.certificate import promised
from casewise.study.finding import Finding, Section, plain_table
from casewise.study.quality_control import archive_opinions, quality_rows, worth
from casewise.study.statistics.resample import clusters_of, mean_interval
from casewise.study.study import Study, once

POOR = 0.7
NAMED = 3  # flagged cases that the sentence names


@dataclass(frozen=True)
class Answers:
    """What the deployed masks did, in the order in which a reader asks; a report opens with these sentences."""

    gained: str
    hurt: str
    flagged: str
    promised: str


def section(study: Study) -> Section:
    """Gain, harm and flags of the policy, its share of the oracle, its price, and AURC of every signal of agreement."""
    found = (captured(study), signal_worth(study), price(study))
    tables = (
        plain_table(
            "quality-captured",
            "Gained, hurt, flagged",
            found[0],
            caption="Against M0; intervals over clusters. Candidates: forwards beyond M0, or updates, of a case, mean; "
            "gain_each: the gain for each of them.",
        ),
        plain_table(
            "quality-signals",
            "What each quality signal is worth",
            found[1],
            caption="Confidence in M0 without a label, from how far the candidates agree; risk is 1 - metric.",
        ),
        plain_table(
            "quality-price",
            f"Gain and harm against {found[2].made['unit']}",
            found[2],
            caption=f"Of one case, beyond M0, mean; hurt by a point: lost more than {POINT:g}. A consensus of the "
            "first views, and one that is read until it has settled, stand here where the views' ballots were kept.",
        ),
    )
    drawn = Picture(
        "quality-price",
        f"What the gain costs, in {found[2].made['unit']}",
        draw_price(found[2].table, metric=study.metric, unit=found[2].made["unit"]),
        f"n = {found[2].n}; up and left is better on the left, down and left on the right.",
    )
    pictures = (drawn,) if len(found[2].table) > 1 else ()
    row = deployed_row(study)
    share = (
        f" That is {row['captured']:.0%} of what the best candidate of each case would gain."
        if row is not None and row["captured"] > 0
        else ""
    )
    return Section("quality", "Gain and quality", f"{' '.join(found[0].notes)}{share}", tables, pictures, found)


@once
def captured(study: Study) -> Finding:
    """Mean gain of every method, helped and hurt, and its share of the best candidate of each case."""
    best = study.outcomes.groupby("case")["metric"].max()
    source = study.outcomes.loc[study.outcomes["step"] == 0].set_index("case")["metric"]
    room = float((best - source).mean())
    records = []
    for name, frame in study.methods.items():
        known = frame.loc[frame["change"].notna()].reset_index(drop=True)
        change = known["change"].to_numpy(float)
        if not len(change):
            continue
        gain = mean_interval(change, clusters=clusters_of(known), resamples=study.resamples, seed=study.seed)
        flagged = [decision.flagged for decision in study.decisions.get(name, ())]
        cost = _made(study, name)
        records.append(
            {
                "method": study.title(name),
                "n": len(known),
                "gain": gain.estimate,
                "low": gain.low,
                "high": gain.high,
                "clusters": gain.clusters,
                "shown": gain.shown,
                "helped": int((change > 0).sum()),
                "hurt": int((change < 0).sum()),
                "hurt_by_a_point": int((change < -POINT).sum()),
                "worst": float(change.min()),
                "worst_case": str(known["case"].iloc[int(change.argmin())]) if change.min() < 0 else "none",
                "captured": gain.estimate / room if room > 0 else np.nan,
                "flagged": sum(flagged),
                "candidates": float(np.mean(cost)) if cost else np.nan,
                "gain_each": gain.estimate / float(np.mean(cost)) if any(cost) else np.nan,
            }
        )
    table = pd.DataFrame(records)
    made = {"oracle": room}
    notes = astuple(_answers(study, table))
    return Finding("quality.captured", table, len(source), "M1", made=made, notes=notes)


def _made(study: Study, name: str) -> list[int]:
    """How many candidates (forwards beyond M0, or updates) a method made of each case."""
    return [decision.executed for decision in study.decisions.get(name, ())]


def deployed_row(study: Study) -> pd.Series | None:
    """The row of the policy's own masks; None where no case has a metric."""
    return _own(study, captured(study).table)


def answers(study: Study) -> Answers:
    """Gained, hurt, flagged, promised: the four sentences that a report opens with."""
    return Answers(*captured(study).notes)


def _own(study: Study, table: pd.DataFrame) -> pd.Series | None:
    own = table.loc[table["method"] == study.title(study.ours)] if len(table) else table
    return None if own.empty else own.iloc[0]


def _answers(study: Study, table: pd.DataFrame) -> Answers:
    row = _own(study, table)
    holds, said = promised(study)
    promise = said if holds else f"Nothing is promised: {said}."
    if row is None:
        unknown = f"What the deployed masks gained is unknown: no case has a {study.metric}."
        return Answers(unknown, "Whom they hurt is unknown too.", _flagged(study), promise)
    return Answers(_gained(study, row), _hurt(study, row), _flagged(study), promise)


def _gained(study: Study, row: pd.Series) -> str:
    """Said only as strongly as the interval and the sign-flip test allow."""
    if row["helped"] == row["hurt"] == 0:
        return f"The deployed masks gained and lost nothing: all {int(row['n'])} score as M0 does."
    metric, mean = study.metric, number(row["gain"], 4, signed=True)
    spread = f"[{number(row['low'], 4, signed=True)}, {number(row['high'], 4, signed=True)}]"
    if not row["shown"]:
        said = f"neither gained nor lost measurably against M0: {mean} {metric} {spread}"
    elif row["gain"] > 0:
        said = f"gained {number(row['gain'], 4)} {metric} over M0 {spread}"
    else:
        said = f"lost {metric} against M0: {mean} {spread}"
    among = f" of {counted(int(row['clusters']), *UNIT)}" if row["clusters"] < row["n"] else ""
    return f"The deployed masks {said}, {counted(int(row['n']), 'case')}{among}."


def _hurt(study: Study, row: pd.Series) -> str:
    undefined = len(study.router) - int(row["n"])
    rest = f" {undefined} more have no {study.metric}." if undefined else ""
    if not row["hurt"]:
        return f"They hurt none of {int(row['n'])} cases and helped {int(row['helped'])}.{rest}"
    by_a_point = f"{int(row['hurt_by_a_point'])} by more than a point ({POINT:g})"
    worst = f"the worst ({row['worst_case']}) by {number(-row['worst'])}"
    hurt = f"They hurt {int(row['hurt'])} of {int(row['n'])} cases, {by_a_point}, {worst}"
    return f"{hurt}; they helped {int(row['helped'])}.{rest}"


def _flagged(study: Study) -> str:
    decisions = study.decisions[study.ours]
    chosen = [decision.case_id for decision in decisions if decision.flagged]
    if not chosen and all(decision.quality is None for decision in decisions):
        return "No case was flagged: this policy asks no person."
    if not chosen:
        return f"None of {len(decisions)} cases was flagged for a person."
    more = f" and {len(chosen) - NAMED} more" if len(chosen) > NAMED else ""
    names = f"{', '.join(chosen[:NAMED])}{more}"
    metric = study.router.set_index("case")["metric"]
    asked, others = metric.loc[chosen].mean(), metric.drop(chosen).mean()
    known = (
        f": mean {study.metric} {number(asked)}, of the others {number(others)}"
        if asked + others == asked + others
        else ""
    )
    were = "was" if len(chosen) == 1 else "were"
    return f"{len(chosen)} of {len(decisions)} cases {were} flagged for a person ({names}){known}."


SETTLED = (0.97, 0.98, 0.985, 0.99, 0.995)  # agreement at which the sequential rule stops reading
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # first views of which a consensus is scored


@once
def price(study: Study) -> Finding:
    """Gain and harm of every candidate, consensus size, sequential rule and method, against what each of them costs."""
    rungs = next(iter(study.evaluation.entries.values())).rungs
    unit = "forwards" if rungs else "updates"  # of the frozen model, or of its weights
    records = [*_candidates(study, rungs), *_readings(study), *_methods(study, rungs)]
    table = pd.DataFrame([_priced(study, unit, *one) for one in records if len(one[2])])
    return Finding("quality.price", table, len(study.router), "M1", made={"unit": unit})


Priced = tuple[str, str, pd.DataFrame]
"""Kind, name, and a frame with one row per case: cluster, change against M0, cost."""


def _priced(study: Study, unit: str, kind: str, name: str, cases: pd.DataFrame) -> dict[str, object]:
    change = cases["change"].to_numpy(float)
    gain = mean_interval(change, clusters=clusters_of(cases), resamples=study.resamples, seed=study.seed)
    return {
        "kind": kind,
        "name": name,
        unit: float(cases["cost"].mean()),
        "gain": gain.estimate,
        "low": gain.low,
        "high": gain.high,
        "helped": int((change > 0).sum()),
        "hurt": int((change < 0).sum()),
        "hurt_by_a_point": int((change < -POINT).sum()),
        "n": len(cases),
    }


def _candidates(study: Study, rungs: tuple[str, ...]) -> Iterator[Priced]:
    """Every unshrunk state, for every case."""
    frame = study.outcomes.loc[(study.outcomes["shrink"] == 0) & study.outcomes["metric"].notna()]
    source = frame.loc[frame["step"] == 0].set_index("case")["metric"]
    running = "settled" in frame and frame["settled"].notna().any()  # each rung is a consensus of all before it
    single = [rung for rung in rungs if rung.split("(")[0] not in CONSENSUS_NAMES]
    for step, cases in frame.loc[frame["step"] > 0].groupby("step"):
        place = int(step)
        name = rungs[place - 1] if rungs else f"update {place}"
        made = name not in single
        cost = place if running or not rungs else len(single) if made else 1
        kind = "consensus" if rungs and (running or made) else "candidate"
        said = f"first {place}" if running else "all" if kind == "consensus" else name
        change = cases["metric"].to_numpy(float) - source.reindex(cases["case"]).to_numpy(float)
        yield kind, said, cases[["case", "cluster"]].assign(change=change, cost=cost).reset_index(drop=True)


def _readings(study: Study) -> Iterator[Priced]:
    """A consensus of the first views, and one that is read until it has settled; from the ballots, where kept."""
    archive = study.evaluation
    labelled = [case_id for case_id, entry in archive.entries.items() if entry.labelled]
    if scoring_options(archive)["metric"] not in ("dice", "miou"):
        return
    if not labelled or any(archive.ballots(case_id) is None for case_id in labelled):
        return
    rows: dict[tuple[str, str], list[dict[str, object]]] = {}
    for case_id in labelled:
        case = read_case(archive, case_id)
        views, source = len(case.ballots) - 1, case.source
        asked = [("consensus", f"first {size}", size) for size in SIZES if size < views]
        asked += [("sequential", f"settled at {at:g}", settled_after(case, at)) for at in SETTLED]
        for kind, name, size in asked:
            change = case.consensus(range(1, size + 1)) - source
            row = {"case": case_id, "cluster": case.cluster, "change": change, "cost": size}
            rows.setdefault((kind, name), []).append(row)
    for (kind, name), found in rows.items():
        yield kind, name, pd.DataFrame(found).dropna(subset="change").reset_index(drop=True)


def _forwards(rungs: tuple[str, ...], executed: int) -> int:
    """What the first candidates cost: a consensus of others costs nothing more."""
    return sum(rung.split("(")[0] not in CONSENSUS_NAMES for rung in rungs[:executed]) if rungs else executed


def _methods(study: Study, rungs: tuple[str, ...]) -> Iterator[Priced]:
    """The policy and what it is compared with, at what each of them executed."""
    for name, frame in study.methods.items():
        cost = {decision.case_id: _forwards(rungs, decision.executed) for decision in study.decisions.get(name, ())}
        known = frame.loc[frame["change"].notna() & frame["case"].isin(list(cost))]
        kind = "policy" if name == study.ours else "method"
        rows = known[["case", "cluster", "change"]].assign(cost=known["case"].map(cost))
        yield kind, study.title(name), rows.reset_index(drop=True)


def draw_price(table: pd.DataFrame, *, metric: str, unit: str) -> Figure:
    """Gain, and share of cases hurt by more than a point, against the cost of a case; consensus sizes are joined."""
    kinds = (
        ("candidate", FAINT, "o", "single candidates"),
        ("method", MUTED, "s", "other methods"),
        ("consensus", HELP, "o", "consensus of the first views"),
        ("sequential", SOURCE, "^", "read until settled"),
        ("policy", OURS, "D", "this policy"),
    )
    with inked():
        figure, axes = canvas(6.9, 3.0, columns=2)
        for kind, color, marker, name in kinds:
            part = table.loc[table["kind"] == kind].sort_values(unit) if len(table) else table
            if not len(part):
                continue
            hurt = 100 * part["hurt_by_a_point"] / part["n"]
            line = "-" if kind in ("consensus", "sequential") else ""
            for axis, values in zip(axes[0], (part["gain"], hurt), strict=True):
                edge = MUTED if kind == "candidate" else color
                axis.plot(
                    part[unit], values, marker=marker, markersize=5, linestyle=line, color=color, label=name,
                    markeredgecolor=edge, linewidth=1.2,
                )  # fmt: skip
        for axis, said in zip(axes[0], (f"gain in {metric}", f"% hurt by more than {POINT:g}"), strict=True):
            axis.axhline(0, color=MUTED, linewidth=0.7)
            axis.set(xlabel=f"{unit} of a case beyond M0", ylabel=said)
        if len(table):
            figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def signal_worth(study: Study) -> Finding:
    """Rank correlation, AUROC below 0.7 and AURC of every signal of agreement for the metric of M0."""
    scored = scoring_options(study.evaluation)
    rows = quality_rows(archive_opinions(study.evaluation), metric=scored["metric"], ignore=scored["ignore"])
    known = rows.loc[rows["metric"].notna() & rows["agreement"].notna()]
    table = worth(known, POOR, resamples=min(study.resamples, 1000))
    reason = "" if len(table) else "the candidates of all cases agree, or fewer than three cases are labelled"
    return Finding("quality.signals", table, len(known), "S3", made={"below": POOR}, reason=reason)

"""Gain and harm of the deployed masks, flagged cases, and the value of the quality signals."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.core.text import UNIT, pluralize
from casewise.judge.outcomes import POINT, scoring_options
from casewise.render.tables import number
from casewise.study.analyses.promise import promised
from casewise.study.finding import Finding, Section, show
from casewise.study.quality_control import POOR, archive_opinions, quality_rows, worth
from casewise.study.statistics.resample import cluster_numbers, gain_fields
from casewise.study.study import Study, once

NAMED = 3  # flagged cases that the sentence names
_COLUMNS = (
    "method n gain low high clusters shown helped hurt hurt_by_a_point hurt_patients hurt_bound worst worst_case "
    "captured flagged candidates gain_each"
)
_SHOWN = _COLUMNS.replace(" low high", "")


def section(study: Study) -> Section:
    """Gain, harm and flags of every method, its share of the oracle, and AURC of every signal of agreement."""
    found, row = (captured(study), signal_worth(study)), deployed_row(study)
    caption = "Gain against M0, intervals over patients. Candidates: forward passes after M0, or updates, per case."
    confidence = "Confidence in M0 without a label, from the agreement of the candidates; risk is 1 − metric."
    tables = (
        show("quality-captured", "Gained, hurt, flagged", found[0], _SHOWN, caption=caption),
        show("quality-signals", "Value of each quality signal", found[1], caption=confidence),
    )
    lead = " ".join(answers(study).values())
    if row is not None and row["captured"] > 0:
        lead += f" The gain is {row['captured']:.0%} of the gain of the best candidate of each case."
    return Section("quality", "Gain and quality", lead, tables, (), found)


@once
def captured(study: Study) -> Finding:
    """Mean gain of every method, cases helped and hurt, and its share of the gain of the best candidates."""
    best = study.outcomes.groupby("case")["metric"].max()
    source = study.outcomes.loc[study.outcomes["step"] == 0].set_index("case")["metric"]
    room = float((best - source).mean())
    records = []
    for name, frame in study.methods.items():
        known = frame.loc[frame["change"].notna()].reset_index(drop=True)
        change = known["change"].to_numpy(float)
        if not len(change):
            continue
        gains = gain_fields(change, cluster_numbers(known), **study.bootstrap)
        flagged = [decision.flagged for decision in study.decisions.get(name, ())]
        cost = [decision.executed for decision in study.decisions.get(name, ())]
        records.append(
            {
                "method": study.title(name),
                "n": len(known),
                **gains,
                "worst_case": str(known["case"].iloc[int(change.argmin())]) if change.min() < 0 else "none",
                "captured": gains["gain"] / room if room > 0 else np.nan,
                "flagged": sum(flagged),
                "candidates": float(np.mean(cost)) if cost else np.nan,
                "gain_each": gains["gain"] / float(np.mean(cost)) if any(cost) else np.nan,
            }
        )
    table = pd.DataFrame(records, columns=[*_COLUMNS.split()])
    return Finding("quality.captured", table, len(source), "M1", {"oracle": room})


def deployed_row(study: Study) -> pd.Series | None:
    """Return the row of the policy; None if no case has a metric."""
    table = captured(study).table
    own = table.loc[table["method"] == study.title(study.ours)]
    return None if own.empty else own.iloc[0]


@once
def answers(study: Study) -> dict[str, str]:
    """Return the first sentences of a report by topic: gained, hurt, flagged, promised."""
    row = deployed_row(study)
    holds, said = promised(study)
    gained = f"The gain of the deployed masks is unknown: no case has a {study.metric}."
    hurt = "The number of hurt cases is unknown, too."
    if row is not None:
        gained, hurt = _gained(study, row), _hurt(study, row)
    promise = said if holds else f"Nothing is promised: {said}."
    return {"gained": gained, "hurt": hurt, "flagged": _flagged(study), "promised": promise}


def _gained(study: Study, row: pd.Series) -> str:
    """Claim a gain or loss only if the interval and the sign-flip test show one."""
    if row["helped"] == row["hurt"] == 0:
        return f"The deployed masks did not change the {study.metric} of any of {int(row['n'])} cases."
    metric, mean = study.metric, number(row["gain"], 4, signed=True)
    spread = f"[{number(row['low'], 4, signed=True)}, {number(row['high'], 4, signed=True)}]"
    if not row["shown"]:
        said = f"neither gained nor lost measurably against M0: {mean} {metric} {spread}"
    elif row["gain"] > 0:
        said = f"gained {number(row['gain'], 4)} {metric} over M0 {spread}"
    else:
        said = f"lost {metric} against M0: {mean} {spread}"
    among = f" of {pluralize(int(row['clusters']), *UNIT)}" if row["clusters"] < row["n"] else ""
    return f"The deployed masks {said}, {pluralize(int(row['n']), 'case')}{among}."


def _hurt(study: Study, row: pd.Series) -> str:
    undefined = len(study.policy_rows) - int(row["n"])
    rest = f" {undefined} more have no {study.metric}." if undefined else ""
    rest += (
        f" {int(row['hurt_patients'])} of {pluralize(int(row['clusters']), *UNIT)} lost more than a point; up to "
        f"{100 * row['hurt_bound']:.0f} % may (exact 95 % bound)."
    )
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
        return "No case was flagged: this policy flags no cases."
    if not chosen:
        return f"None of {len(decisions)} cases was flagged for a person."
    more = f" and {len(chosen) - NAMED} more" if len(chosen) > NAMED else ""
    names = f"{', '.join(chosen[:NAMED])}{more}"
    metric = study.policy_rows.set_index("case")["metric"]
    asked, others = metric.loc[chosen].mean(), metric.drop(chosen).mean()
    known = (
        f": mean {study.metric} {number(asked)}, of the others {number(others)}"
        if asked + others == asked + others
        else ""
    )
    were = "was" if len(chosen) == 1 else "were"
    return f"{len(chosen)} of {len(decisions)} cases {were} flagged for a person ({names}){known}."


def signal_worth(study: Study) -> Finding:
    """Rank correlation, AUROC below 0.7 and AURC of every signal of agreement for the metric of M0."""
    scored = scoring_options(study.evaluation)
    rows = quality_rows(archive_opinions(study.evaluation), metric=scored["metric"], ignore=scored["ignore"])
    known = rows.loc[rows["metric"].notna() & rows["agreement"].notna()]
    table = worth(known, POOR)
    reason = "" if len(table) else "the agreement is equal in all cases, or fewer than three cases are labelled"
    return Finding("quality.signals", table, len(known), "X10", made={"below": POOR}, reason=reason)

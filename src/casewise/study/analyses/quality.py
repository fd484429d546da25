"""What the deployed masks gained, whom they hurt, who was flagged, and what the quality signals are worth."""

from __future__ import annotations

import numpy as np
import pandas as pd

from casewise.render.cells import number
from casewise.study.finding import Finding, Section, plain_table, sentences
from casewise.study.quality_control import archive_opinions, quality_rows, worth
from casewise.study.statistics.resample import clusters_of, mean_interval
from casewise.study.study import Study

POINT, POOR = 0.01, 0.7


def section(study: Study) -> Section:
    """Gain, harm and flags of the policy, its share of the oracle, and AURC of every signal of agreement."""
    found = (captured(study), signal_worth(study))
    tables = (
        plain_table(
            "quality-captured", "Gained, hurt, flagged", found[0], caption="Against M0; intervals over clusters."
        ),
        plain_table(
            "quality-signals",
            "What each quality signal is worth",
            found[1],
            caption="Confidence in M0 without a label, from how far the candidates agree; risk is 1 - metric.",
        ),
    )
    return Section("quality", "Gain and quality", sentences(found[0]), tables, (), found)


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
        records.append(
            {
                "method": study.title(name),
                "n": len(known),
                "gain": gain.estimate,
                "low": gain.low,
                "high": gain.high,
                "helped": int((change > 0).sum()),
                "hurt": int((change < 0).sum()),
                "hurt_by_a_point": int((change < -POINT).sum()),
                "worst": float(change.min()),
                "captured": gain.estimate / room if room > 0 else np.nan,
                "flagged": sum(flagged),
            }
        )
    table = pd.DataFrame(records)
    return Finding(
        "quality.captured", table, len(source), "M1", made={"oracle": room}, notes=_notes(study, table, room)
    )


def _notes(study: Study, table: pd.DataFrame, room: float) -> tuple[str, ...]:
    """In the order in which a reader asks: gained, hurt, flagged, promised."""
    own = table.loc[table["method"] == study.title(study.ours)]
    if own.empty:
        return ()
    row = own.iloc[0]
    share = f", {row['captured']:.0%} of what the best candidate of each case would gain" if room > 0 else ""
    spread = f"[{number(row['low'], signed=True)}, {number(row['high'], signed=True)}]"
    said = [
        f"the deployed masks gained {number(row['gain'], signed=True)} {study.metric} {spread} over M0{share}",
        f"{int(row['hurt'])} of {int(row['n'])} cases were hurt, {int(row['hurt_by_a_point'])} by more than a point, "
        f"the worst by {number(-min(row['worst'], 0.0))}",
        f"{int(row['flagged'])} cases were flagged for a person",
    ]
    promised = study.extras.certificate
    if promised is None:
        return (*said, "nothing is promised: there is no certificate")
    said.append(f"promised: {promised.statement.rstrip('.')}")
    return tuple(said)


def signal_worth(study: Study) -> Finding:
    """Rank correlation, AUROC below 0.7 and AURC of every signal of agreement for the metric of M0."""
    rows = quality_rows(archive_opinions(study.evaluation), metric=str(study.configuration.get("metric", "dice")))
    known = rows.loc[rows["metric"].notna() & rows["agreement"].notna()]
    table = worth(known, POOR, resamples=min(study.resamples, 1000))
    reason = "" if len(table) else "the candidates of all cases agree, or fewer than three cases are labelled"
    return Finding("quality.signals", table, len(known), "S3", made={"below": POOR}, reason=reason)

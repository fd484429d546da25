"""Quality control: several masks of each case (of folds, views, raters or models), and how far they agree.

The first mask is the one in use. Its agreement with the others needs no label. With labels of some cases, a conformal
lower bound of its metric is fitted, and the risk-coverage curve of every signal says how well it predicts the metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from casewise.archive.store import Archive
from casewise.core.errors import BadInput, CasewiseError, TooFewCases
from casewise.core.json_records import from_plain, read_json
from casewise.core.records import Mask, check_shares
from casewise.core.text import pluralize
from casewise.data.pairs import Pair, find_pairs, read_pair
from casewise.judge.calibration.quality import QualityFit, caught_sentence, fit_quality
from casewise.judge.controllers.flag import Quality
from casewise.judge.decide import CONSENSUS_NAMES, candidate_masks
from casewise.measure.metrics import METRICS
from casewise.measure.metrics.selective import auroc, risk_coverage
from casewise.measure.signals.agreement import candidates_of
from casewise.study.statistics.resample import cluster_numbers

SIGNALS_OF_QUALITY = ("agreement", "agreement_all", "weighted_agreement")
"""Signals of quality; higher means a better mask."""

POOR = 0.7
"""Default metric below which a case is poor."""


@dataclass(frozen=True, eq=False)
class Opinions:
    """The masks of one case, the one in use first, or the reason why they cannot be compared."""

    case_id: str
    cluster: str
    masks: tuple[Mask, ...] = ()
    label: Mask | None = None
    problem: str = ""
    spacing_mm: tuple[float, ...] | None = None


def folder_opinions(
    folders: Sequence[Path], *, labels: Path | None, cases: Path | None, refused: Mapping[str, str] | None = None
) -> Iterator[Opinions]:
    """Read masks of the same names from several folders; a missing mask or another grid is a problem of that case.

    ``refused`` says by case why its masks could not be read before.
    """
    yield from (Opinions(case_id, case_id, problem=why) for case_id, why in (refused or {}).items())
    if len(folders) < 2:
        raise BadInput(f"quality control needs at least two folders of masks, got {len(folders)}")
    tables = [
        {pair.id: pair for pair in find_pairs(folders[0], other, labels=labels, cases=cases)} for other in folders[1:]
    ]
    for case_id, pair in tables[0].items():
        if case_id in (refused or {}):
            continue
        cluster = pair.cluster or case_id
        try:
            yield _read(case_id, cluster, [table.get(case_id) for table in tables])
        except CasewiseError as error:
            yield Opinions(case_id, cluster, problem=str(error))


def _read(case_id: str, cluster: str, pairs: Sequence[Pair | None]) -> Opinions:
    masks: list[Mask] = []
    label, spacing_mm = None, None
    for pair in pairs:
        if pair is None:
            raise BadInput(f"case {case_id} is not in every folder; leave it out or predict it")
        first, other, truth = read_pair(pair)
        masks = masks or [first.mask]
        masks.append(other.mask)
        label, spacing_mm = None if truth is None else truth.mask, first.spacing_mm
    return Opinions(case_id, cluster, tuple(masks), label, spacing_mm=spacing_mm)


def consensus_steps(rungs: Sequence[str]) -> frozenset[int]:
    """Return the steps whose candidate is made of the other candidates."""
    return frozenset(step for step, rung in enumerate(rungs, start=1) if rung.split("(")[0] in CONSENSUS_NAMES)


def archive_opinions(archive: Archive) -> Iterator[Opinions]:
    """Read M0 and every candidate of a recorded or imported case that is not made of the others."""
    views = [archive.ladder(name) for name in archive.joined] or [archive]
    for case_id in archive.ids:
        entry, kept = archive.entry(case_id), list[Mask]()
        for view in views:
            made = {*consensus_steps(view.entry(case_id).rungs), *([0] if kept else [])}  # M0 once
            kept += [mask for state, mask in candidate_masks(view, case_id).items() if state.step not in made]
        label = archive.label(case_id) if entry.labelled else None
        yield Opinions(case_id, entry.cluster or case_id, tuple(kept), label, spacing_mm=entry.spacing_mm)


def quality_rows(opinions: Iterator[Opinions], *, metric: str = "dice", ignore: int | None = None) -> pd.DataFrame:
    """One row per case: the signals of the mask in use, and its metric where there is a label."""
    score = METRICS[metric].of
    rows = []
    for one in opinions:
        row: dict[str, Any] = {"case": one.case_id, "cluster": one.cluster, "problem": one.problem}
        if not one.problem:
            try:
                row |= candidates_of(one.masks, background=metric == "miou").signals()[0]
                if one.label is not None:
                    row["metric"] = float(score(one.masks[0], one.label, ignore=ignore, spacing_mm=one.spacing_mm))
            except CasewiseError as error:  # only this case fails
                row["problem"] = str(error)
        rows.append(row)
    if not rows:
        raise BadInput("there is no case to compare; the folders have no masks with the same names")
    return pd.DataFrame(rows).reindex(columns=["case", "cluster", *SIGNALS_OF_QUALITY, "metric", "problem"])


@dataclass(frozen=True, eq=False)
class Controlled:
    """Every case with its quality, worst first; the value of each signal; the model for cases without labels."""

    cases: pd.DataFrame  # case, cluster, signals, metric, quality, quality_low, flagged, problem
    worth: pd.DataFrame  # one row per signal: rho, AUROC below the line, AURC, e-AURC, normalised
    fit: QualityFit | None
    below: float | None
    refused: str = ""  # why there is no lower bound

    def sentences(self) -> list[str]:
        """Sentences for the terminal."""
        bad = int((self.cases["problem"] != "").sum())
        said = [
            f"{pluralize(len(self.cases), 'case')}, {int(self.cases['metric'].notna().sum())} labelled, "
            f"{bad} with a problem"
        ]
        for row in self.worth.to_dict("records"):
            said.append(
                f"{row['signal']}: rank correlation {row['rho']:.2f}, AURC {row['aurc']:.4f} "
                f"[{row['low']:.4f}, {row['high']:.4f}] (best {row['optimum']:.4f}, chance {row['chance']:.4f}), "
                f"normalised {row['normalized']:.2f}"
                + ("" if np.isnan(row["auroc"]) else f", AUROC {row['auroc']:.3f} for metric < {self.below:g}")
            )
        if self.refused:
            said.append(f"! no lower bound: {self.refused}")
        flagged = self.cases["flagged"]
        if self.below is not None and flagged.notna().any():
            poor = self.cases["metric"] < self.below
            yes = flagged.fillna(False).astype(bool)
            caught = caught_sentence({"poor": int(poor.sum()), "poor_flagged": int((yes & poor).sum())})
            among = f"; {caught}" if self.cases["metric"].notna().any() else ""
            said.append(f"flagged: {int(yes.sum())} of {len(self.cases)}{among}")
        return said


def controlled(
    rows: pd.DataFrame, *, below: float | None = POOR, level: float = 0.9, quality: Quality | None = None
) -> Controlled:
    """Quality, lower bound and flag of every case.

    With labels here, each cluster's bound comes from the other clusters. ``quality`` is a model from other cases; then
    labels here only test it.
    """
    check_shares(below=below)
    known = rows.loc[rows["metric"].notna() & rows["agreement"].notna()]
    fit, refused = None, ""
    table = rows.assign(quality=np.nan, quality_low=np.nan, flagged=np.nan)
    if quality is not None:
        table = _with_quality(table, table.index, quality)
    elif len(known):
        try:
            fit = _fit(known, level)
            table = _with_quality(table, table.index.difference(known.index), fit.quality)
            for name in known["cluster"].unique():
                own = known.index[known["cluster"] == name]
                table = _with_quality(table, own, _fit(known.drop(own), level).quality)
        except TooFewCases as error:
            fit, refused = None, str(error)
    else:
        refused = "no case is labelled; give --labels of some cases, or --quality from an earlier labelled run"
    if below is not None:
        low = table["quality_low"]
        unknown = low.isna() & (table["problem"] == "") & (fit is not None or quality is not None)
        table["flagged"] = (low < below).where(low.notna()).mask(unknown, True)  # a person checks unknown quality
    order = table.sort_values(["quality_low", "agreement"], kind="stable").reset_index(drop=True)
    return Controlled(order, worth(known, below), fit, below, refused)


def worth(known: pd.DataFrame, below: float | None) -> pd.DataFrame:
    """Quality of each signal as a predictor of the metric: rank correlation, AUROC, AURC with an interval over
    clusters."""
    columns = ["signal", "n", "rho", "auroc", "aurc", "low", "high", "optimum", "excess", "normalized", "chance"]
    found = []
    for name in SIGNALS_OF_QUALITY:
        rows = known.loc[known[name].notna()] if name in known else known.iloc[:0]
        if len(rows) < 3 or rows[name].nunique() < 2:
            continue
        signal, metric = rows[name].to_numpy(float), rows["metric"].to_numpy(float)
        curve = risk_coverage(signal, 1 - metric)
        rho = float(pd.Series(signal).corr(pd.Series(metric), method="spearman"))
        ranked = float("nan") if below is None else auroc(-signal, metric < below)
        spread = area_interval(rows, signal, 1 - metric)
        summaries = (curve.optimum, curve.excess, curve.normalized, curve.mean_risk)
        found.append((name, len(rows), rho, ranked, curve.aurc, *spread, *summaries))
    return pd.DataFrame(found, columns=columns)


def area_interval(rows: pd.DataFrame, signal: Any, risk: Any) -> tuple[float, float]:
    """95 % interval of AURC by Student's t over the values without one patient each (or sequence)."""
    unit = cluster_numbers(rows)
    kept = [unit != k for k in range(int(unit.max()) + 1)]
    if len(kept) < 3 or min(keep.sum() for keep in kept) < 2:
        return float("nan"), float("nan")
    values = [risk_coverage(signal[keep], risk[keep]).aurc for keep in kept]
    error = stats.t.ppf(0.975, len(kept) - 1) * (len(kept) - 1) / np.sqrt(len(kept)) * np.std(values, ddof=1)
    middle = risk_coverage(signal, risk).aurc
    return max(0.0, float(middle - error)), float(middle + error)


def _fit(known: pd.DataFrame, level: float) -> QualityFit:
    return fit_quality({"agreement": known["agreement"]}, known["metric"], known["cluster"].tolist(), level=level)


def _with_quality(table: pd.DataFrame, rows: pd.Index, quality: Quality) -> pd.DataFrame:
    found = [quality.of(None if pd.isna(value) else float(value)) for value in table.loc[rows, "agreement"]]
    usable = [pair if pair is not None and not bad else (np.nan, np.nan) for pair, bad in zip(
        found, table.loc[rows, "problem"] != "", strict=True)]  # fmt: skip
    table.loc[rows, ["quality", "quality_low"]] = np.array(usable).reshape(-1, 2)
    return table


def read_quality(path: Path) -> Quality:
    """Read the quality.json of an earlier run."""
    again = "run casewise qc on labelled cases again"
    return from_plain(Quality, read_json(path, again).get("quality"), str(path), again)

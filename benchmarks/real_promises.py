"""What signals say about M0's quality, and what calibration cases promise: both against what then happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from real_rows import Bench

from casewise.core.errors import CasewiseError
from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.evidence import deployed_numbers
from casewise.judge.certificates.grid import certify_default
from casewise.judge.outcomes import POINT
from casewise.measure.metrics.selective import auroc, risk_coverage
from casewise.study.benchmark.method_scores import POOR
from casewise.study.quality_control import archive_opinions, controlled, quality_rows

GRADIENTS = ("tent", "eata", "cotta", "consensus")
PROMISES = (Promise(("ha",), (0.2,)), Promise(("harmed",), (0.2,), margin=POINT), Promise(("worse-voxels",), (0.4,)))


def number(value: float) -> str:
    """Nothing where a number is not defined, as an AUROC without cases of both kinds."""
    return f"{value:.3f}" if np.isfinite(value) else ""


def quality_lines(bench: Bench, ladder: str) -> Iterator[str]:
    """What each signal says about M0's metric over both splits, and what flags find; bounds leave the cluster out."""
    both = [one.on(ladder) for one in (bench.calibration, bench.development)]
    made = both[0].configuration
    opinions = (opinion for archive in both for opinion in archive_opinions(archive))
    rows = quality_rows(opinions, metric=made["metric"], ignore=made.get("ignore"))
    found = controlled(rows, below=POOR, level=0.9)
    yield "| signal of M0 | rank correlation | AURC [95 %] (best, chance) | normalised | AUROC(metric < .7) |"
    yield "|---|---|---|---|---|"
    for row in found.worth.to_dict("records"):
        yield (
            f"| {row['signal']} | {row['rho']:.2f} | {row['aurc']:.3f} [{row['low']:.3f}, {row['high']:.3f}] "
            f"({row['optimum']:.3f}, {row['chance']:.3f}) | {row['normalized']:.2f} | {number(row['auroc'])} |"
        )
    signals = pd.concat([archive.signals() for archive in both])
    entropy = signals.loc[signals["step"] == 0].set_index("case")["entropy"].reindex(rows["case"]).to_numpy(float)
    metric = rows["metric"].to_numpy(float)
    curve = risk_coverage(-entropy, 1 - metric)
    rho = pd.Series(-entropy).corr(pd.Series(metric), method="spearman")
    yield (
        f"| confidence (minus entropy) | {rho:.2f} | {curve.aurc:.3f} ({curve.optimum:.3f}, {curve.mean_risk:.3f}) | "
        f"{curve.normalized:.2f} | {number(auroc(entropy, metric < POOR))} |"
    )
    if found.refused:
        yield f"\nNo lower bound: {found.refused}"
        return
    flagged = found.cases["flagged"].fillna(False).astype(bool)
    poor = found.cases["metric"] < POOR
    covered = (found.cases["metric"] >= found.cases["quality_low"]).mean()
    own = found.cases["case"].isin(both[1].ids)
    kept = rows[["case", "cluster", "agreement", "metric"]].to_dict("list")
    bench.kept.setdefault("quality", {})[ladder] = kept
    yield (
        f"\nFlags (`--flag-below 0.7 --at 0.9`, each cluster's bound from the others): {int(flagged.sum())} of "
        f"{len(flagged)} cases, {int((flagged & poor).sum())} of the {int(poor.sum())} below .7 among them; on "
        f"development {int((flagged & own).sum())} of {int(own.sum())}, {int((flagged & poor & own).sum())} of "
        f"{int((poor & own).sum())}. The lower bound held for {covered:.0%} of the cases (promised 90 %)."
    )


def promise_lines(bench: Bench) -> Iterator[str]:
    """What the calibration cases could promise, and what then happened on development."""
    yield "| what | promise | patients | bound | kept | realised on development, kept |"
    yield "|---|---|---|---|---|---|"
    for ladder in bench.views:
        yield from _chosen_promises(bench, ladder)
    asked = [(ladder, "consensus") for ladder in bench.views]
    asked += [(ladder, design) for ladder in bench.begun if ladder in GRADIENTS for design in ("cardiac", "default")]
    for ladder, design in asked:
        holdout, archive = bench.calibration.on(ladder), bench.development.on(ladder)
        try:
            policy = calibrate(holdout, design, unshrunk=ladder == "consensus")
        except CasewiseError as error:
            bench.refused.append(f"{ladder}, {design}: {error}")
            continue
        for promise in PROMISES:
            try:
                certificate, certified = certify_router(holdout, policy, promise, force=True)
                after = deployed_numbers(archive, certified, margin=promise.margin)
            except CasewiseError as error:
                bench.refused.append(f"{ladder}, {design}, {promise.label}: {error}")
                continue
            bound = "refused" if certificate.bound is None else f"{certificate.bound:.3f}"
            realised = after.get(promise.label, after.get("harmed"))
            yield (
                f"| {ladder}, {design} | {_said(promise)} | {certificate.units} | {bound} | {certificate.kept:.0%} | "
                f"{realised:.3f}, {after['kept']:.0%} |"
            )


def _said(promise: Promise) -> str:
    sure = "" if promise.delta is None else f" with chance {1 - promise.delta:g}"
    return f"{promise.label} <= {promise.alphas[0]}{f', by > {promise.margin}' if promise.margin else ''}{sure}"


def _chosen_promises(bench: Bench, ladder: str) -> Iterator[str]:
    """The design chosen with labels, certified with its choice: half of the patients fit, the others test."""
    holdout, archive = bench.calibration.on(ladder), bench.development.on(ladder)
    for promise in (replace(one, delta=0.1) for one in PROMISES):
        try:
            certificate, certified = certify_default(holdout, promise, force=True)
            after = deployed_numbers(archive, certified, margin=promise.margin)
        except CasewiseError as error:
            bench.refused.append(f"{ladder}, default, {promise.label}: {error}")
            continue
        chosen = f"default, chosen with it: {certified.name}" if certificate.feasible else "default, chosen with it"
        bound = "refused" if certificate.bound is None else f"p {certificate.bound:.3f}"
        yield (
            f"| {ladder}, {chosen} | {_said(promise)} | {certificate.units} | {bound} | {certificate.kept:.0%} | "
            f"{after.get(promise.label, after.get('harmed')):.3f}, {after['kept']:.0%} |"
        )

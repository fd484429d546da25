"""The report checks its own arithmetic: sums and identities that must hold whatever the data say (P3, Q5-Q11, Q14).

Where every number comes from: archives, policy, seeds, software, the exposure ledger, the preflight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from casewise import __version__
from casewise.archive.store import Archive
from casewise.core.errors import Refused
from casewise.judge.ledger import read_ledger
from casewise.render.tables import Cell, Column, Table, table
from casewise.study.analyses.accounting import accounting_of
from casewise.study.analyses.deployment import bucket_decomposition, intervals_of, method_table_of
from casewise.study.analyses.helphurt import help_hurt
from casewise.study.finding import Finding
from casewise.study.study import Study

TOLERANCE = 1e-9
BUCKETS = ("low", "mid", "hard")


@dataclass(frozen=True)
class Disagreement:
    """Two ways to compute one number that did not give the same."""

    identity: str
    where: str
    expected: float
    got: float

    def __str__(self) -> str:
        return f"{self.identity} ({self.where}): {self.expected!r} expected, {self.got!r} reported"


def audit(
    methods: Mapping[str, pd.DataFrame],
    *,
    deployment: Finding | None = None,
    accounting: Finding | None = None,
    helphurt: Finding | None = None,
    decomposition: Finding | None = None,
    intervals: Finding | None = None,
    tolerance: float = TOLERANCE,
) -> list[Disagreement]:
    """Recompute every identity from the per-case frames; an empty list means that the report agrees with itself."""
    checks = [*_cases(methods)]
    if deployment is not None:
        checks += _deployment(methods, deployment)
    if accounting is not None:
        checks += _accounting(methods, accounting)
    if helphurt is not None:
        checks += _helphurt(helphurt)
    if decomposition is not None:
        checks += _decomposition(decomposition)
    if intervals is not None:
        checks += _intervals(methods, intervals)
    return [one for one in checks if not np.isclose(one.got, one.expected, rtol=0, atol=tolerance, equal_nan=True)]


def audit_study(study: Study) -> int:
    """Recompute sums and identities of a study; one that contradicts itself is refused, so no report of it is written.

    Gives the number of methods that were checked.
    """
    return check_audit(
        study.methods,
        deployment=method_table_of(study),
        accounting=accounting_of(study),
        helphurt=help_hurt(study.methods),
        decomposition=bucket_decomposition(study.router) if study.is_router else None,
    )


def check_audit(methods: Mapping[str, pd.DataFrame], **findings: Finding | None) -> int:
    """Raise when the report contradicts itself; otherwise the number of methods that were checked."""
    wrong = audit(methods, **findings)  # type: ignore[arg-type]
    if wrong:
        raise Refused(
            f"the report contradicts itself in {len(wrong)} places, first: {wrong[0]}; this is a bug, report it"
        )
    return len(methods)


def _cases(methods: Mapping[str, pd.DataFrame]) -> Iterator[Disagreement]:
    """Per case: four shares add up to 1 unless D is empty, and a rollback has none; buckets cover the cases (Q5)."""
    for name, frame in methods.items():
        shares = frame[["ha", "ba", "neutral_scored", "unscored"]].sum(axis=1, min_count=4)
        wanted = (frame["area"] > 0).astype(float).where(shares.notna())
        gap = float((shares - wanted).abs().max()) if shares.notna().any() else 0.0
        yield Disagreement("HA + BA + neutral + unscored = 1 where D is not empty", name, 0.0, gap)
        rolled_back = frame["rolled_back"].astype(bool)
        yield Disagreement("a rollback has HA 0", name, 0.0, float(frame.loc[rolled_back, "ha"].fillna(0).sum()))
        if frame["bucket"].notna().any():
            sizes = sum(int((frame["bucket"] == bucket).sum()) for bucket in BUCKETS)
            yield Disagreement("low + mid + hard = n", name, float(len(frame)), float(sizes))


def _deployment(methods: Mapping[str, pd.DataFrame], found: Finding) -> Iterator[Disagreement]:
    """Means are sums over cases, steps are depth by depth (Q1-Q4)."""
    for row in found.table.itertuples():
        frame = methods[row.method]
        depth = frame["deployed"].value_counts()
        steps = sum(step * count for step, count in depth.items()) / len(frame)
        yield Disagreement("steps = sum over depths of depth x cases / n", row.method, float(steps), row.steps)
        harm = frame["ha"].dropna()
        yield Disagreement(
            "HA x n = sum of HA", row.method, float(harm.sum()), row.ha * len(harm) if len(harm) else 0.0
        )


def _accounting(methods: Mapping[str, pd.DataFrame], found: Finding) -> Iterator[Disagreement]:
    """HA over all = HA within x cases with regions / n (Q8); coverage is the mean delta (Q10); buckets add up (Q5)."""
    table = found.table
    for row in table[table["scored"] > 0].dropna(subset=["ha"]).itertuples():
        where = f"{row.method}, {row.bucket}"
        yield Disagreement("HA = HA within x scored / n", where, row.ha, row.ha_within * row.scored / row.n)
    for name, part in table.groupby("method", sort=False):
        whole, inner = part[part["bucket"] == "all"].iloc[0], part[part["bucket"] != "all"]
        coverage = float(methods[name]["delta"].mean())
        yield Disagreement("coverage = mean delta", str(name), coverage, float(whole["coverage"]))
        if len(inner):
            yield Disagreement("buckets add up to n", str(name), float(whole["n"]), float(inner["n"].sum()))
            yield Disagreement(
                "buckets add up to scored", str(name), float(whole["scored"]), float(inner["scored"].sum())
            )
        if len(inner) and inner["ha"].notna().all():
            total = float((inner["ha"] * inner["n"]).sum() / whole["n"])
            yield Disagreement("bucket HA add up to HA", str(name), float(whole["ha"]), total)


def _helphurt(found: Finding) -> Iterator[Disagreement]:
    """Classes add up to n, and the overall mean is that of its parts (Q6, Q7)."""
    for row in found.table.itertuples():
        parts = row.helped + row.hurt + row.rolled_back + row.unchanged
        yield Disagreement("helped + hurt + rolled back + unchanged = n", row.method, float(row.n), float(parts))
        if row.n:
            gain = row.share_helped * row.mean_helped if row.helped else 0.0
            loss = row.share_hurt * row.mean_hurt if row.hurt else 0.0
            yield Disagreement("mean change = helped part + hurt part", row.method, gain + loss, row.mean_change)


def _decomposition(found: Finding) -> Iterator[Disagreement]:
    """Bucket contributions add up to the whole change (Q11)."""
    parts = found.table[found.table["bucket"] != "all"]["contribution"].sum()
    yield Disagreement(
        "bucket contributions add up", "router", found.number("contribution", bucket="all"), float(parts)
    )


def _intervals(methods: Mapping[str, pd.DataFrame], found: Finding) -> Iterator[Disagreement]:
    """Every point estimate is the difference of unrounded means over the cases that both methods have (H1, Q14)."""
    for row in found.table.itertuples():
        pair = [methods[name].set_index("case")[row.quantity] for name in (row.method, row.reference)]
        gap = (pair[0] - pair[1]).dropna()
        expected = float(gap.mean()) if len(gap) else float("nan")
        yield Disagreement("estimate = difference of means", row.id, expected, row.estimate)


def provenance(study: Study) -> dict[str, Any]:
    """The provenance block of results.json."""
    return {
        "casewise": __version__,
        "evaluation": _archive(study.evaluation),
        "calibration": _archive(study.calibration),
        "policy": {
            "name": study.policy.name,
            "controller": study.policy.controller,
            "options": study.policy.options,
            "groups": study.policy.groups,
            "calibration_id": study.policy.calibration_id,
            "calibration_cases": len(study.policy.calibration_cases),
        },
        "bootstrap": {
            "resamples": study.resamples,
            "seed": study.seed,
            "stream": intervals_of(study).made.get("stream"),
        },
    }


def _archive(archive: Archive) -> dict[str, Any]:
    return {
        "name": archive.path.name,
        "id": archive.digest,
        "cases": len(archive.ids),
        "labelled": sum(entry.labelled for entry in archive.entries.values()),
        "steps": archive.steps,
        "binding": asdict(archive.binding),
        "configuration": archive.configuration,
        "software": archive.manifest.get("software", {}),
    }


def provenance_tables(study: Study) -> Iterator[Table]:
    """What the page shows of it: a summary, the exposure ledger, then everything and the preflight on request."""
    yield _named("sources", "Sources", _summary(study), "Ids are sha256 digests, shortened.", collapsed=False)
    yield ledger_table(study)
    yield _named("provenance", "Everything about the sources", flat(provenance(study)), "", collapsed=True)
    caption = "What calibrate found before anything was deployed; stored in policy.json."
    yield _named("preflight", "Preflight of the policy", flat(study.policy.preflight), caption, collapsed=True)


def _summary(study: Study) -> dict[str, Cell]:
    binding = study.evaluation.binding
    return {
        "evaluation archive": f"{study.evaluation.path.name} ({study.evaluation.digest[:12]})",
        "evaluation cases": len(study.evaluation.ids),
        "calibration archive": f"{study.calibration.path.name} ({study.calibration.digest[:12]})",
        "calibration cases": study.calibration_size,
        "policy": f"{study.policy.name}, calibration {study.policy.calibration_id[:12] or 'none'}",
        "model": binding.model[:64],
        "objective": binding.objective,
        "measure": binding.measure,
        "bootstrap": f"B = {study.resamples}, seed {study.seed}",
        "casewise": __version__,
    }


def ledger_table(study: Study) -> Table:
    """Choices that were made while evaluation labels could be seen (F12); repeated readings are counted."""
    columns = (
        Column("choice", "Choice", text=True),
        Column("seen", "What could be seen", text=True),
        Column("times", "Times"),
        Column("last", "Last", text=True),
    )
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for choice, seen, when in _exposures(study):
        row = rows.setdefault((choice, seen), {"choice": choice, "seen": seen, "times": 0})
        row |= {"times": int(str(row["times"])) + 1, "last": when}
    caption = "Every reading of the evaluation labels is written down in the archive, this study included."
    return table("exposures", "Exposure ledger", columns, rows.values(), caption=caption)


def _exposures(study: Study) -> Iterator[tuple[str, str, str]]:
    for line in study.policy.exposures:
        yield str(line.get("choice", "")), str(line.get("seen", "not said")), "with the design"
    for line in read_ledger(study.evaluation.path):
        seen = "evaluation labels" if line.get("labels_visible", True) else "no label"
        yield str(line.get("choice", "")), seen, str(line.get("when", "not said"))


def _named(id: str, title: str, rows: Mapping[str, Cell], caption: str, *, collapsed: bool) -> Table:
    columns = (Column("name", "Name", text=True), Column("value", "Value", 6, text=True))
    listed = [{"name": name, "value": value} for name, value in rows.items()]
    return table(id, title, columns, listed, caption=caption, collapsed=collapsed)


def flat(plain: Any, prefix: str = "") -> dict[str, Cell]:
    """Nested records as one list of dotted names."""
    if isinstance(plain, Mapping):
        return {
            key: value
            for name, one in plain.items()
            for key, value in flat(one, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    if isinstance(plain, list | tuple):
        if any(isinstance(one, Mapping) for one in plain):
            return {
                key: value for at, one in enumerate(plain) for key, value in flat(one, f"{prefix}.{at + 1}").items()
            }
        return {prefix: ", ".join(str(one) for one in plain) or "none"}
    return {prefix: "none" if plain is None else plain if isinstance(plain, int | float) else str(plain)}


def without_folders(text: str, archives: Iterable[Archive]) -> str:
    """The text without the machine's folders: of an archive's path only its name stays."""
    parents = {str(form.parent) for archive in archives for form in (archive.path, archive.path.resolve())}
    for parent in sorted({*parents, str(Path.home())}, key=len, reverse=True):
        if len(parent) > 1:
            text = text.replace(parent + "/", "").replace(parent, "")
    return text

"""Sources of a report: archives, policy, seeds, software, exposure ledger, preflight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from casewise import __version__
from casewise.archive.store import Archive
from casewise.judge.ledger import read_ledger
from casewise.render.tables import Cell, Column, Table
from casewise.study.analyses.deployed_methods import intervals_of
from casewise.study.finding import show
from casewise.study.study import Study

_LEDGER = {"choice": "Choice", "seen": "What could be seen", "times": "Times", "last": "Last"}


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
    """Tables of the page: a summary, the exposure ledger, then everything and the preflight on request."""
    yield _named("sources", "Sources", _summary(study), "Ids are sha256 digests, shortened.", collapsed=False)
    yield ledger_table(study)
    yield _named("provenance", "Everything about the sources", flat(provenance(study)), "", collapsed=True)
    caption = "Findings of calibrate before anything was deployed; stored in policy.json."
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
    heads = {key: Column(key, title, text=True) for key, title in _LEDGER.items()}
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for choice, seen, when in _exposures(study):
        row = rows.setdefault((choice, seen), {"choice": choice, "seen": seen, "times": 0})
        row |= {"times": int(str(row["times"])) + 1, "last": when}
    caption = "Every reading of the evaluation labels is written down in the archive, this study included."
    return show("exposures", "Exposure ledger", list(rows.values()), " ".join(heads), heads=heads, caption=caption)


def _exposures(study: Study) -> Iterator[tuple[str, str, str]]:
    for line in study.policy.exposures:
        yield str(line.get("choice", "")), str(line.get("seen", "not said")), "with the design"
    for line in read_ledger(study.evaluation.path):
        seen = "evaluation labels" if line.get("labels_visible", True) else "no label"
        yield str(line.get("choice", "")), seen, str(line.get("time", "not said"))


def _named(id: str, title: str, values: Mapping[str, Cell], caption: str, *, collapsed: bool) -> Table:
    cells = [{"name": name, "value": value} for name, value in values.items()]
    return show(id, title, cells, "name value", caption=caption, collapsed=collapsed)


def flat(plain: Any, prefix: str = "") -> dict[str, Cell]:
    """Nested records as one list of dotted names."""
    parts: Mapping[Any, Any] | None = plain if isinstance(plain, Mapping) else None
    if isinstance(plain, list | tuple) and any(isinstance(one, Mapping) for one in plain):
        parts = {at + 1: one for at, one in enumerate(plain)}
    if parts is not None:
        found: dict[str, Cell] = {}
        for name, one in parts.items():
            found |= flat(one, f"{prefix}.{name}" if prefix else str(name))
        return found
    if isinstance(plain, list | tuple):
        return {prefix: ", ".join(str(one) for one in plain) or "none"}
    return {prefix: "none" if plain is None else plain if isinstance(plain, int | float) else str(plain)}

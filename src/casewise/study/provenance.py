"""Sources of a report: archives, policy, seeds, software and exposure ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from casewise import __version__
from casewise.archive.store import Archive
from casewise.judge.ledger import read_ledger
from casewise.render.tables import Cell, Column, Table
from casewise.study.analyses.deployed_methods import intervals_of
from casewise.study.finding import show
from casewise.study.study import Study

_LEDGER = {"choice": "Choice", "seen": "Readings of labels", "times": "Times", "last": "Last"}


def provenance(study: Study) -> dict[str, Any]:
    """The provenance block of results.json."""
    names = ("name", "controller", "options", "groups", "calibration_id")
    known = {name: getattr(study.policy, name) for name in names}
    return {
        "casewise": __version__,
        "evaluation": _archive(study.evaluation),
        "calibration": _archive(study.calibration),
        "policy": {**known, "calibration_cases": len(study.policy.calibration_cases)},
        "bootstrap": {**study.bootstrap, "stream": intervals_of(study).made.get("stream")},
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
    """Tables of the page: the sources, and the exposure ledger. results.json has everything about the sources."""
    cells = [{"name": name, "value": value} for name, value in _summary(study).items()]
    yield show("sources", "Sources", cells, "name value", caption="Ids are sha256 digests, shortened.")
    yield _ledger_table(study)


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


def _ledger_table(study: Study) -> Table:
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

"""The result file of a benchmark: data, model, policies, decisions, masks and scores, each with its hash."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.archive.store import Archive
from casewise.core.chain import Chain
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, in_one_line
from casewise.core.formats import json_text
from casewise.core.records import CALIBRATION, EVALUATION
from casewise.judge.certificates.certify_router import Promise
from casewise.judge.ledger import LEDGER, read_ledger
from casewise.study.benchmark.case_scores import Scored
from casewise.study.benchmark.decisions import SCHEMA, Sealed, cluster_name
from casewise.study.benchmark.method_scores import oracle_gain, quota_p, realised, summary
from casewise.study.benchmark.sides import Sides
from casewise.study.statistics.resample import clusters_of as units_of

RESULT = "result.json"
NUMBERS = ("metric", "change", "ha", "ba", "unscored", "area", "worse_voxels")
"""What the result keeps of each case and method."""


def result_of(
    found: Scored,
    sealed: Sealed,
    *,
    name: str,
    sides: Sides,
    images: Mapping[str, Mapping[str, str | None]],
    calibration: Archive,
    evaluation: Archive,
    promise: Promise | None = None,
    refused: Sequence[str] = (),
    label_table: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The one file: data, model, policies, decisions, masks and scores, each with its hash, and a hash over all."""
    first = evaluation.on(evaluation.ladders[0])
    oracle = oracle_gain(found.cases)
    cases = [{**row, "image_sha256": images[EVALUATION][row["case"]]} for row in found.cases.to_dict("records")]
    known = calibration.on(calibration.ladders[0]).entries
    fitted_on = [
        {"case": case_id, "cluster": cluster_name(entry), "image_sha256": images[CALIBRATION][case_id],
         "label_sha256": entry.label_sha256}
        for case_id, entry in known.items()
    ]  # fmt: skip
    plain: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": dict(evaluation.manifest.get("software", {})),
        "model": {
            "name": first.configuration.get("model"), "sha256": first.binding.model, "loader": first.binding.loader,
        },
        "metric": first.configuration.get("metric", "dice"),
        "measure": first.binding.measure,
        "label_table": None if label_table is None else [int(value) for value in label_table],
        "split": dict(sides.how),
        "data": {"calibration": fitted_on, "evaluation": cases, "sha256": data_sha256(cases)},
        "archives": {
            ladder: {
                "objective": evaluation.on(ladder).binding.objective,
                "steps": evaluation.on(ladder).steps,
                CALIBRATION: calibration.on(ladder).digest,
                EVALUATION: evaluation.on(ladder).digest,
            }
            for ladder in evaluation.ladders
        },
        "decisions_sha256": sealed.sha256,
        "labels_seen_before_decisions": sealed.labels_seen_before,
        "ledger": _ledger_lines(sealed.ledger),
        "oracle": oracle,
        "promise": None if promise is None else asdict(promise),
        "methods": [
            {**method, "rows": _kept(found.methods[method["name"]]), "dealt": found.dealt[method["name"]],
             **_summarized(method, found, oracle)}
            for method in sealed.methods
        ],
        "refused": list(refused),
    }  # fmt: skip
    plain = json.loads(json_text(plain))
    return {**plain, "sha256": json_sha256(plain)}


def _summarized(method: Mapping[str, Any], found: Scored, oracle: float | None) -> dict[str, Any]:
    rows = kept_frame(_kept(found.methods[method["name"]]), found.cases.to_dict("records"))
    chance = quota_p(found.dealt[method["name"]], units_of(rows))
    return {"scores": {**summary(rows, oracle), **chance}, "realised": realised(method["certificate"], rows)}


def _kept(rows: pd.DataFrame) -> list[dict[str, Any]]:
    names = ["case", *NUMBERS, "agreement", "forwards", "updates", "seconds", "flagged"]
    return list(json.loads(json_text([dict(row) for row in rows[names].to_dict("records")])))


def kept_frame(rows: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows that a result keeps, with the clusters of their cases; null is NaN."""
    frame = pd.DataFrame(rows)
    clusters = {case["case"]: case["cluster"] for case in cases}
    numbers = [name for name in frame.columns if name not in ("case", "flagged")]
    frame[numbers] = frame[numbers].astype(float)
    return frame.assign(cluster=frame["case"].map(clusters))


def data_sha256(cases: Sequence[Mapping[str, Any]]) -> str:
    """What makes two benchmarks comparable: the same evaluation images with the same labels, under any name."""
    return json_sha256(sorted([str(case["image_sha256"]), str(case["label_sha256"])] for case in cases))


def _ledger_lines(folder: Path) -> list[dict[str, Any]]:
    """The ledger as it is on disk, every line with its hash."""
    read_ledger(folder)  # refuses one that was edited
    return Chain(folder / LEDGER).lines()


def read_result(path: Path) -> dict[str, Any]:
    """A result file; anything else is refused in one sentence."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"there is no result file {path}; casewise bench DATA -m MODEL -o OUT writes OUT/result.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a result file of casewise bench ({in_one_line(error)})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        said = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise BadInput(f"{path} is not a result file of casewise bench: its schema is {said!r}, expected {SCHEMA!r}")
    return found

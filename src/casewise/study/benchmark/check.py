"""A result file against itself, against its archives and against the data.

Without the data a file can only be checked against itself: hashes, sums, the order of the ledger. With the archives
beside it, policies are fitted again and decisions taken again; with the data, labels and scores too.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.archive.layout import CACHE, image_sha256
from casewise.archive.store import Archive, open_archive
from casewise.archive.verify import verify
from casewise.core.chain import BEGINNING, line_hash
from casewise.core.durable import json_sha256
from casewise.core.errors import CasewiseError
from casewise.core.records import CALIBRATION, EVALUATION, Action, State
from casewise.data.datasets import load_dataset
from casewise.data.splits import Cohort
from casewise.judge.certificates.certify_router import Promise
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.policy import READY
from casewise.study.benchmark.case_scores import label_source, scored, with_labels
from casewise.study.benchmark.decisions import Method, decide_all, seen_before
from casewise.study.benchmark.method_scores import oracle_gain, quota_p, realised, summary
from casewise.study.benchmark.result import NUMBERS, data_sha256, kept_frame
from casewise.study.benchmark.sides import part_of
from casewise.study.statistics.resample import clusters_of as units_of

SMALL = 1e-9  # what rounding may change between two machines
CHANGED = 1e-6  # of an interval, whose draws are sorted
FEW_DRAWS = 0.005  # of a p-value, where draws tie with what was observed
DECIDED = ("state", "state_hash", "action", "executed")
SEALED_FIELDS = (
    "name", "design", "ladders", "controller", "policy_sha256", "certificate", "notes", "decisions",
)  # fmt: skip


# ---- a file against itself ----


def file_problems(result: Mapping[str, Any]) -> list[str]:
    """What contradicts itself in a result file, as sentences; none where nothing does."""
    try:
        return list(_own_problems(result))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, ArithmeticError) as error:
        return [f"the file was edited: a part is missing or is not what it should be ({type(error).__name__}: {error})"]


def _own_problems(result: Mapping[str, Any]) -> Iterator[str]:
    if json_sha256({name: value for name, value in result.items() if name != "sha256"}) != result["sha256"]:
        yield "the hash over the whole file does not fit: it was edited after it was written"
    sealed = [{name: method[name] for name in SEALED_FIELDS} for method in result["methods"]]
    if json_sha256(sealed) != result["decisions_sha256"]:
        yield "the decisions are not the ones that were sealed before the labels were opened"
    yield from _ledger_problems(result)
    yield from _data_problems(result)
    cases = result["data"]["evaluation"]
    ids = [case["case"] for case in cases]
    for method in result["methods"]:
        if [one["case_id"] for one in method["decisions"]] != ids or [one["case"] for one in method["rows"]] != ids:
            yield f"{method['name']}: decisions and rows are not those of the evaluation cases, each once and in order"
            return
        yield from _row_problems(method, cases)
        rows = kept_frame(method["rows"], cases)
        scores = {**summary(rows, result["oracle"]), **quota_p(method["dealt"], units_of(rows))}
        yield from _differences(f"{method['name']}: scores", method["scores"], scores)
        yield from _deal_problems(method)
        again = {"realised": realised(method["certificate"], rows)}
        yield from _differences(method["name"], {"realised": method["realised"]}, again)
    yield from _mask_problems(result)
    oracle = oracle_gain(pd.DataFrame(cases)[["best", "metric"]].astype(float))
    yield from _differences("the file", {"oracle": result["oracle"]}, {"oracle": oracle})


def _ledger_problems(result: Mapping[str, Any]) -> Iterator[str]:
    previous = BEGINNING
    for number, line in enumerate(result["ledger"], start=1):
        if line["previous"] not in (previous, "") or line["hash"] != line_hash(line):
            yield f"line {number} of the ledger was edited, or lines were taken out before it"
            return
        previous = line["hash"]
    seen = seen_before(result["ledger"], result["decisions_sha256"])
    if seen != result["labels_seen_before_decisions"]:
        yield "the file and its ledger disagree on whether labels were seen before the decisions"
    if not any(str(line.get("choice", "")).endswith(result["decisions_sha256"]) for line in result["ledger"]):
        yield "the ledger never sealed these decisions"


def _data_problems(result: Mapping[str, Any]) -> Iterator[str]:
    known, cases = result["data"][CALIBRATION], result["data"][EVALUATION]
    if data_sha256(cases) != result["data"]["sha256"]:
        yield "the hash of the evaluation data does not fit its images and labels"
    for what in ("cluster", "image_sha256", "case"):
        shared = {one[what] for one in known} & {one[what] for one in cases}
        if shared:
            yield f"calibration and evaluation share {len(shared)} by {what}, such as {sorted(shared)[0]}"


def _row_problems(method: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for decision, row, case in zip(method["decisions"], method["rows"], cases, strict=True):
        name = f"{method['name']}, case {case['case']}"
        change = None if row["metric"] is None or case["metric"] is None else row["metric"] - case["metric"]
        yield from _differences(name, {"change": row["change"]}, {"change": change})
        if decision["deployed"] == 0 and decision["state_hash"] != case["m0_sha256"]:
            yield f"{name}: M0 is deployed, but the mask is not M0"
        if row["flagged"] != bool(decision.get("flagged", False)):
            yield f"{name}: the row and the decision disagree on whether it was flagged"
        chosen = decision["action"] != "gate" and row["metric"] is not None and case["best"] is not None
        if chosen and row["metric"] > case["best"] + SMALL:
            yield f"{name}: the metric {row['metric']:.4f} is above that of the best candidate, {case['best']:.4f}"


def _deal_problems(method: Mapping[str, Any]) -> Iterator[str]:
    """What a random deal is drawn from fits the decisions and the rows."""
    dealt, states = method["dealt"], [str(State(**one["state"])) for one in method["decisions"]]
    ranked = len(set(states)) > 1 and not _composes(method)
    if ranked != (dealt is not None):
        yield f"{method['name']}: states were {'' if ranked else 'not '}dealt, and the file says otherwise"
        return
    if dealt is None:
        return
    if [dealt["states"][place] for place in dealt["given"]] != states or sorted(set(states)) != dealt["states"]:
        yield f"{method['name']}: the states that a random deal draws from are not those of the decisions"
        return
    for row, place, change, ha in zip(method["rows"], dealt["given"], dealt["change"], dealt["ha"], strict=True):
        said = {"change": change[place], "ha": ha[place]}
        yield from _differences(f"{method['name']}, case {row['case']}: dealt", said, {k: row[k] for k in said})


def _mask_problems(result: Mapping[str, Any]) -> Iterator[str]:
    """The same mask of a case has the same metric, whichever method deployed it."""
    metric: dict[tuple[str, str], float | None] = {
        (case["case"], case["m0_sha256"]): case["metric"] for case in result["data"][EVALUATION]
    }
    for method in result["methods"]:
        for decision, row in zip(method["decisions"], method["rows"], strict=True):
            known = metric.setdefault((row["case"], decision["state_hash"]), row["metric"])
            if not _alike(known, row["metric"]):
                yield f"{method['name']}, case {row['case']}: the same mask has another metric elsewhere in the file"


def _differences(where: str, said: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Numbers that the file states and a recomputation does not give."""
    for name, value in found.items():
        allowed = {"low": CHANGED, "high": CHANGED, "p_gain": FEW_DRAWS, "p_ha": FEW_DRAWS}.get(name, SMALL)
        if name not in said or not _alike(said[name], value, allowed):
            yield f"{where}: {name} is {said.get(name)}, recomputed {value}"


def _alike(said: Any, found: Any, allowed: float = SMALL) -> bool:
    numbers = [None if isinstance(one, float) and math.isnan(one) else one for one in (said, found)]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        return bool(numbers[0] == numbers[1])
    return math.isclose(*map(float, numbers), rel_tol=allowed, abs_tol=allowed)  # type: ignore[arg-type]


# ---- a file against its archives and the data ----


def check(result: Mapping[str, Any], archives: Path | None, data: Sequence[Path] = ()) -> tuple[list[str], list[str]]:
    """(what is wrong, what could not be repeated), as sentences.

    ``archives`` is the folder of the benchmark, where it is at hand; ``data`` are the folders of its images and labels.
    """
    problems = file_problems(result)
    open_ends: list[str] = []
    if problems:
        return problems, open_ends
    fresh: dict[str, Method] = {}
    try:
        if archives is None:
            open_ends.append("no archives lie beside the file, so no decision was taken again")
        else:
            _forget_derived(archives)
            problems += _damages(archives)
            fresh = {} if problems else _repeated(result, archives)
            problems += _archive_differences(result, archives, fresh) if fresh else []
            lost = [method["name"] for method in result["methods"] if method["name"] not in fresh]
            open_ends += [f"{name}: its decisions were not taken again (code of its own)" for name in lost]
        if not data:
            open_ends.append("no data were given, so neither images nor labels nor scores were compared")
        elif not problems:
            problems += list(_data_differences(result, data, archives, fresh))
    except (CasewiseError, KeyError, TypeError, ValueError, OSError) as error:
        problems.append(f"the benchmark cannot be repeated: {error}")
    return problems, open_ends


def _forget_derived(archives: Path) -> None:
    """Derived tables could have been edited, so a check makes its own; they may always be deleted."""
    for split in (CALIBRATION, EVALUATION):
        shutil.rmtree(archives / split / CACHE, ignore_errors=True)


def _damages(archives: Path) -> list[str]:
    """Every file and mask of both archives by hash."""
    return [f"{split} archive: {one}" for split in (CALIBRATION, EVALUATION) for one in verify(archives / split)]


def _archives(result: Mapping[str, Any], folder: Path) -> tuple[Archive, Archive]:
    """(calibration, evaluation) below a folder, with the cases and ladders that the file is about."""
    ladders = tuple(result["archives"])
    found = [
        part_of(open_archive(folder / split), [case["case"] for case in result["data"][split]], ladders)
        for split in (CALIBRATION, EVALUATION)
    ]
    return found[0], found[1]


def _repeated(result: Mapping[str, Any], folder: Path) -> dict[str, Method]:
    """Policies fitted and decisions taken again, of registered designs: nothing that a file names is imported."""
    calibration, evaluation = _archives(result, folder)
    asked = dict.fromkeys(method["design"] for method in result["methods"] if method["design"])
    designs = [name for name in asked if name in READY or name in CONTROLLERS]
    plain = result["promise"]
    promise = (
        None if plain is None else Promise(**{**plain, **{name: tuple(plain[name]) for name in ("losses", "alphas")}})
    )
    made, _ = decide_all(calibration, evaluation, designs, promise=promise)
    return {method.name: method for method in made}


def _archive_differences(result: Mapping[str, Any], folder: Path, fresh: Mapping[str, Method]) -> list[str]:
    """Masks, calibration labels, policies and decisions that are not those of the file."""
    calibration, evaluation = _archives(result, folder)
    found = []
    for ladder, said in result["archives"].items():
        for split, archive in ((CALIBRATION, calibration), (EVALUATION, evaluation)):
            if archive.on(ladder).digest != said[split]:
                found.append(f"the {split} archive holds other masks or cases on ladder {ladder!r} than the file says")
    for case in result["data"][CALIBRATION]:
        if calibration.entry(case["case"]).label_sha256 != case["label_sha256"]:
            found.append(f"calibration case {case['case']}: the archive holds another label")
    for method in result["methods"]:
        if method["name"] not in fresh:
            continue
        again = fresh[method["name"]].plain()
        if method["policy_sha256"] != again["policy_sha256"]:
            found.append(f"{method['name']}: fitted again on the calibration cases, the policy is another one")
        pairs = zip(method["decisions"], again["decisions"], strict=True)
        changed = [one["case_id"] for one, other in pairs if any(one[name] != other[name] for name in DECIDED)]
        if changed:
            found.append(f"{method['name']}: decided again, {len(changed)} cases differ, such as {changed[0]}")
    return found


def _data_differences(
    result: Mapping[str, Any], folders: Sequence[Path], archives: Path | None, fresh: Mapping[str, Method]
) -> Iterator[str]:
    """Every image by hash; with archives, every label by hash and every score again."""
    cohorts = [load_dataset(folder) for folder in folders]
    home = {case_id: cohort for cohort in reversed(cohorts) for case_id in cohort.ids}
    wrong = [
        f"{split} case {case['case']}: {said}"
        for split in (CALIBRATION, EVALUATION)
        for case in result["data"][split]
        if (said := _other_image(home, case))
    ]
    yield from wrong
    if wrong or archives is None:
        return
    _, evaluation = _archives(result, archives)
    labels = {name: label_source(cohort, evaluation, result["label_table"]) for name, cohort in home.items()}
    labelled = with_labels(evaluation, lambda case_id: labels[case_id](case_id), unlocked_by="check of a result file")
    methods = [one for one in result["methods"] if one["name"] in fresh or not _composes(one)]
    policies = {one["name"]: fresh[one["name"]].policy if one["name"] in fresh else READY["m0"] for one in methods}
    found = scored(labelled, methods, policies)
    for said, again in zip(result["data"][EVALUATION], found.cases.to_dict("records"), strict=True):
        if said["label_sha256"] != again["label_sha256"]:
            yield f"evaluation case {said['case']}: the label is another one"
        yield from _differences(f"case {said['case']}", said, {name: again[name] for name in ("metric", "best")})
    for method in methods:
        for said, again in zip(method["rows"], found.methods[method["name"]].to_dict("records"), strict=True):
            numbers = {name: again[name] for name in (*NUMBERS, "agreement")}
            yield from _differences(f"{method['name']}, case {said['case']}", said, numbers)
        yield from _other_deals(method, found.dealt[method["name"]])


def _other_deals(method: Mapping[str, Any], again: Mapping[str, Any] | None) -> Iterator[str]:
    """Numbers of states that were dealt but not deployed, measured again."""
    if again is None:
        return
    for name in ("change", "ha"):
        for row, said, found in zip(method["rows"], method["dealt"][name], again[name], strict=True):
            if not all(map(_alike, said, found)):
                yield f"{method['name']}, case {row['case']}: {name} of the states that could be dealt is another one"


def _other_image(home: Mapping[str, Cohort], case: Mapping[str, Any]) -> str:
    if case["case"] not in home:
        return "it is not in the data"
    same = image_sha256(home[case["case"]].case(case["case"]).image) == case["image_sha256"]
    return "" if same else "the image is another one"


def _composes(method: Mapping[str, Any]) -> bool:
    return any(one["action"] == Action.GATE.value for one in method["decisions"])

"""Result files of ``casewise bench``: read, checked against themselves, their archives and the data, and compared.

Without the data a file can only be checked against itself: hashes, sums, the order of the ledger. With the archives
beside it, policies are fitted again and decisions taken again; with the data, labels and scores too.
"""

from __future__ import annotations

import html
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.archive.layout import CACHE, image_sha256
from casewise.archive.store import Archive, open_archive
from casewise.archive.verify import verify
from casewise.core.brief import counted
from casewise.core.chain import BEGINNING, line_hash
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Refused
from casewise.core.formats import json_text
from casewise.core.records import CALIBRATION, EVALUATION, Action, State
from casewise.data.datasets import load_dataset
from casewise.data.splits import Cohort
from casewise.judge.certificates.certify_router import Promise
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.policy import READY
from casewise.render.tables import Column, Table, table
from casewise.study.benchmark import (
    NUMBERS,
    SCHEMA,
    Method,
    data_sha256,
    decide_all,
    kept_frame,
    label_source,
    oracle_gain,
    part_of,
    quota_p,
    realised,
    scored,
    seen_before,
    summary,
    with_labels,
)
from casewise.study.statistics.resample import clusters_of as units_of

SMALL = 1e-9  # what rounding may change between two machines
CHANGED = 1e-6  # of an interval, whose draws are sorted
FEW_DRAWS = 0.005  # of a p-value, where draws tie with what was observed
DECIDED = ("state", "state_hash", "action", "executed")
SEALED_FIELDS = (
    "name", "design", "ladders", "controller", "policy_sha256", "certificate", "notes", "decisions",
)  # fmt: skip


def read_result(path: Path) -> dict[str, Any]:
    """A result file; anything else is refused in one sentence."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"there is no result file {path}; casewise bench DATA -m MODEL -o OUT writes OUT/result.json"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a result file of casewise bench ({error})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        said = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise BadInput(f"{path} is not a result file of casewise bench: its schema is {said!r}, expected {SCHEMA!r}")
    return found


# ---- a file against itself ----


def file_problems(result: Mapping[str, Any]) -> list[str]:
    """What contradicts itself in a result file, as sentences; none where nothing does."""
    try:
        return list(_own_problems(result))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
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


# ---- several files ----

COLUMNS = (
    Column("method", "Method", text=True),
    Column("model", "Model", text=True),
    Column("metric", "Metric"),
    Column("gain", "Gain [95 %]", text=True),
    Column("captured", "Captured", text=True),
    Column("helped", "Helped : hurt", text=True),
    Column("points", "Hurt by > .01", text=True),
    Column("ha", "HA (judged)", text=True),
    Column("worse", "Worse-voxels", text=True),
    Column("flagged", "Flagged", text=True),
    Column("cost", "Forwards", text=True),
    Column("seconds", "Seconds", text=True),
    Column("aurc", "AURC (best)", text=True),
    Column("auroc", "AUROC < .7", text=True),
    Column("p", "p at its quota: gain, HA", text=True),
    Column("promise", "Promised, realised", text=True),
)


def leaderboard(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """One table over result files of the same evaluation data, best gain first; others are refused."""
    check_comparable(results)
    pairs = [(result, method) for result in results.values() for method in result["methods"]]
    pairs.sort(key=lambda pair: _by_gain(pair[1]["scores"]))
    rows = [{**cells(method), "model": f"{one['name']} ({str(one['model']['sha256'])[:8]})"} for one, method in pairs]
    first = next(iter(results.values()))
    scores = first["methods"][0]["scores"]
    caption = (
        f"{counted(scores['cases'], 'evaluation case')} of {counted(scores['clusters'], 'cluster')}, "
        f"{first['metric']}, data {first['data']['sha256'][:12]}; gains against M0 of the same model."
    )
    return table("leaderboard", "Leaderboard", COLUMNS, rows, caption=caption)


def _by_gain(scores: Mapping[str, Any]) -> float:
    """What rows are sorted by: the largest gain first, none last."""
    return math.inf if scores["gain"] is None else -float(scores["gain"])


def check_comparable(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse other data, another metric, files that contradict themselves, and decisions that came after the labels."""
    if not results:
        raise BadInput("a leaderboard needs at least one result file: casewise bench --leaderboard FILE...")
    for path, result in results.items():
        found = file_problems(result)
        if found:
            raise Refused(f"{path} contradicts itself: {found[0]}; casewise bench --check {path} says more")
        if result["labels_seen_before_decisions"]:
            raise Refused(
                f"{path}: evaluation labels were seen before its decisions were sealed, so it cannot be ranked; decide "
                f"again in a new folder, with everything chosen before"
            )
    (first_path, first), *rest = results.items()
    for path, result in rest:
        if result["data"]["sha256"] != first["data"]["sha256"]:
            raise Mismatch(
                f"{path} was measured on other evaluation data ({result['data']['sha256'][:12]}) than {first_path} "
                f"({first['data']['sha256'][:12]}); compare results of the same images and labels"
            )
        if (result["metric"], result["measure"]) != (first["metric"], first["measure"]):
            raise Mismatch(f"{path} was scored with another metric or region measure than {first_path}")


def result_table(result: Mapping[str, Any]) -> Table:
    """The table of one result, methods in the order in which they were decided."""
    columns = tuple(column for column in COLUMNS if column.key != "model")
    return table("bench", result["name"], columns, [cells(method) for method in result["methods"]])


def cells(method: Mapping[str, Any]) -> dict[str, Any]:
    """One method as a row of words and numbers."""
    said, promise = method["scores"], method["certificate"]

    def shown(name: str, pattern: str = "{:.3f}") -> str:
        return "–" if said[name] is None else pattern.format(said[name])

    interval = "" if said["low"] is None else f" [{said['low']:+.4f}, {said['high']:+.4f}]"
    forwards = shown("forwards", "{:.1f}")
    cost = f"{said['updates']:.1f} updates" if said["forwards"] is None and said["updates"] is not None else forwards
    return {
        "method": method["name"],
        "metric": said["metric"],
        "gain": f"{shown('gain', '{:+.4f}')}{interval}",
        "captured": shown("captured", "{:.0%}"),
        "helped": f"{said['helped']} : {said['hurt']}",
        "points": f"{said['hurt_by_a_point']} of {said['cases']}",
        "ha": "–" if said["ha"] is None else f"{said['ha']:.3f} ({said['judged']:.0%})",
        "worse": shown("worse_voxels"),
        "flagged": shown("flagged", "{:d}"),
        "cost": cost,
        "seconds": shown("seconds", "{:.1f}"),
        "aurc": "–" if said["aurc"] is None else f"{said['aurc']:.3f} ({said['aurc_best']:.3f})",
        "auroc": shown("auroc"),
        "p": "–" if said["p_gain"] is None else f"{said['p_gain']:.3f}, {said['p_ha']:.3f}",
        "promise": "" if promise is None else f"{promise['loss']} ≤ {promise['alpha']:g}, {method['realised']:.3f}",
    }


def markdown(made: Table) -> str:
    """A table as Markdown."""
    lines = [[column.title for column in made.columns], ["---"] * len(made.columns)]
    lines += [_escaped(made, row, _without_bars) for row in range(len(made.rows))]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{made.caption}" if made.caption else text


def _without_bars(text: str) -> str:
    return html.escape(text.replace("|", "/").replace("\n", " "), quote=False).replace("&gt;", ">")


def html_page(made: Table) -> str:
    """A table as a page of its own; whatever a file says stays text."""
    head = "".join(f"<th>{html.escape(column.title)}</th>" for column in made.columns)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{text}</td>' for text in _escaped(made, row, html.escape))}</tr>"
        for row in range(len(made.rows))
    )
    title = html.escape(made.title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(made.caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div></html>\n"
    )


_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem 1rem;overflow-wrap:anywhere}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}"
    "td,th{padding:.3em .6em .3em 0;border-bottom:1px solid #8886;text-align:left;vertical-align:top;"
    "overflow-wrap:normal}"
    "td:nth-child(-n+2){min-width:10rem;overflow-wrap:anywhere}@page{size:landscape;margin:12mm}"
    "@media print{.scroll{overflow:visible}table{font-size:6.5pt}td,th{padding:.2em .3em .2em 0}"
    "td,td:nth-child(-n+2){min-width:0;overflow-wrap:anywhere}thead{display:table-header-group}tr{break-inside:avoid}}"
)  # the first two columns are names of any length


def _escaped(made: Table, row: int, how: Callable[[str], str]) -> list[str]:
    return [how(made.text(row, column)) for column in made.columns]


def as_json(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The leaderboard for a program: the same rows with all their numbers."""
    check_comparable(results)
    rows = [
        {
            "file": path,
            "name": result["name"],
            "model": result["model"],
            "method": method["name"],
            **method["scores"],
            "certificate": method["certificate"],
            "realised": method["realised"],
        }
        for path, result in results.items()
        for method in result["methods"]
    ]
    rows.sort(key=_by_gain)
    first = next(iter(results.values()))
    return dict(
        json.loads(json_text({"data_sha256": first["data"]["sha256"], "metric": first["metric"], "rows": rows}))
    )

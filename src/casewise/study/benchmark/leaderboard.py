"""The methods of one result file or of several as a table: text, Markdown, a page, JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from casewise.core.brief import counted
from casewise.core.errors import BadInput, Mismatch, Refused
from casewise.core.formats import json_text
from casewise.render.tables import Column, Table, table
from casewise.study.benchmark.check import file_problems

NO_GO = "NO-GO"  # how the note of such a policy begins
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
    """Refuse other data or metrics, a file twice, files that contradict themselves, and decisions after the labels."""
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
    known = {first["sha256"]: first_path}
    for path, result in rest:
        if (same := known.setdefault(result["sha256"], path)) != path:
            raise Refused(f"{path} is the same result as {same}, so its rows would stand there twice; leave one out")
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
    said = method["scores"]

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
        "promise": _promise(method),
    }


def _promise(method: Mapping[str, Any]) -> str:
    """What was promised and what came of it; of a policy that calibration advised against, that it was."""
    if any(str(note).startswith(NO_GO) for note in method["notes"]):
        return NO_GO
    promise = method["certificate"]
    return "" if promise is None else f"{promise['loss']} ≤ {promise['alpha']:g}, {method['realised']:.3f}"


def markdown(made: Table) -> str:
    """A table as Markdown."""
    lines = [[column.title for column in made.columns], ["---"] * len(made.columns)]
    lines += [_escaped(made, row, _without_bars) for row in range(len(made.rows))]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{made.caption}" if made.caption else text


def _without_bars(text: str) -> str:
    return html.escape(text.replace("|", "/").replace("\n", " "), quote=False).replace("&gt;", ">")


_KEYS = ("data_sha256", "metric", "rows")  # of a leaderboard as JSON


def is_leaderboard(path: Path) -> bool:
    """Whether a file holds a leaderboard in the form that its ending stands for; an empty one holds nothing to lose."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json" and text:
            found = json.loads(text)
            return isinstance(found, dict) and set(found) == set(_KEYS)
    except (OSError, ValueError, RecursionError):
        return False
    titles = [column.title for column in COLUMNS[:3]]
    if path.suffix == ".html":
        return not text or f"<tr><th>{'</th><th>'.join(titles)}</th>" in text
    return not text or text.startswith(f"| {' | '.join(titles)} |")


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
            "notes": method["notes"],
        }
        for path, result in results.items()
        for method in result["methods"]
    ]
    rows.sort(key=_by_gain)
    first = next(iter(results.values()))
    found = dict(zip(_KEYS, (first["data"]["sha256"], first["metric"], rows), strict=True))
    return dict(json.loads(json_text(found)))

"""``casewise monitor``: alarms over a stream of decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.options import NnUNetStyle, grouped, setting
from casewise.cli.printing import AS_JSON, answer
from casewise.core.text import UNIT, pluralize

if TYPE_CHECKING:
    from casewise.judge.monitors.watch import Watch

app = typer.Typer()

SHOWN = 5


@app.command(cls=NnUNetStyle)
@grouped
def monitor(
    stream: Path = typer.Argument(
        None,
        help="New decisions: a folder of casewise predict, JSON lines, or a CSV with case, cluster, value, agreement, "
        "foreground and, for audited cases, loss. Without it, a watch is only started.",
    ),
    state: Path = typer.Option(Path("watch.json"), help="State of the monitors; continued if the file exists."),
    calibration: Path | None = typer.Option(
        None, help="Deployment of fit, or calibration archive; needed to start a watch."
    ),
    policy: Path | None = typer.Option(None, help="Policy that made the decisions; default: that of --calibration."),
    certificate: Path | None = typer.Option(None, help="Certificate whose alpha is the limit of monitor audit."),
    monitors: str = typer.Option(
        "exchangeability,go-live",
        help="Monitors, separated by commas: {monitors}; audit needs labels of some new cases.",
    ),
    first: int = setting(20, help="Number of first patients that go-live compares with calibration."),
    suspend_on_harm: bool = setting(False, help="Also return to the original masks after an alarm of audit."),
    delta: float = typer.Option(0.05, help="Probability that a monitor ever raises a false alarm."),
    limit: float | None = setting(None, help="Limit of the risk for audit; default: alpha of the certificate."),
    as_json: bool = AS_JSON,
) -> None:
    """Watch new decisions and raise an alarm when calibration no longer applies.

    Example:

        casewise monitor masks --calibration deployment

    Exit code 1: there is an alarm.
    """
    from casewise.archive.store import as_archive
    from casewise.core.errors import BadInput
    from casewise.core.records import CALIBRATION
    from casewise.deployment.saved import archive_of
    from casewise.judge.certificates.certificate import read_certificate
    from casewise.judge.monitors.watch import read_watch, start_watch, watch_lock, write_watch
    from casewise.judge.policy import read_policy

    with watch_lock(state):
        if state.exists():
            watch = read_watch(state)
        elif calibration is None:
            raise BadInput(f"{state} does not exist; give --calibration DEPLOYMENT to start one")
        else:
            decides = read_policy(policy or calibration)
            ladders = tuple(decides.ladders) or ((decides.ladder,) if decides.ladder else ())
            watch = start_watch(
                as_archive(archive_of(calibration), ladders).marked(CALIBRATION),
                decides,
                [name for name in monitors.split(",") if name],
                delta=delta, limit=limit, first=first, suspend_on_harm=suspend_on_harm,
                certificate=None if certificate is None else read_certificate(certificate),
            )  # fmt: skip
        passed_over = []
        for row in _rows(stream) if stream is not None else ():
            watch, whole = _taken(watch, row)
            passed_over += [] if whole else [str(row.get("case") or row.get("case_id"))]
        write_watch(state, watch)
    content = {"state": state, "decisions": len(watch.decided), "audits": len(watch.audited), "alarms": watch.alarms,
               "suspended": watch.suspended, "passed_over": passed_over}  # fmt: skip
    answer("\n".join([_summary(watch), *_unread(passed_over), *_approximate(calibration)]), content, as_json=as_json)
    raise typer.Exit(1 if watch.alarms else 0)


def _rows(stream: Path) -> Iterator[dict[str, Any]]:
    from casewise.core.errors import BadInput
    from casewise.core.formats import parsed_json, read_csv

    if not stream.exists():
        raise BadInput(f"{stream} does not exist; give a prediction folder, JSON lines or a CSV")
    if stream.is_dir():
        yield from _decisions(stream)
        return
    if stream.suffix == ".csv":
        yield from read_csv(stream)
        return
    try:
        with stream.open(encoding="utf-8") as lines:
            yield from (dict(parsed_json(line)) for line in lines if line.strip())
    except (ValueError, TypeError) as error:
        raise BadInput(f"{stream} has a line that is not a JSON object ({error}); no decision was read") from None


def _decisions(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the decisions of a prediction folder in their order."""
    from casewise.core.errors import BadInput
    from casewise.judge.monitors.watch import numbers_of
    from casewise.run.prediction_folder import decisions_in

    if not (folder / "audit.jsonl").is_file():
        raise BadInput(f"{folder} is not a folder of casewise predict: no audit.jsonl; give what predict got as -o")
    for decision in decisions_in(folder):
        yield {"case": decision.case_id, "cluster": decision.cluster, **numbers_of(decision)}


def _taken(watch: Watch, row: dict[str, Any]) -> tuple[Watch, bool]:
    """Return the watch after a row, and whether the row was complete: something, and no NaN."""
    from casewise.core.errors import BadInput
    from casewise.judge.monitors.watch import WATCHED

    case = row.get("case") or row.get("case_id")
    if not case:
        raise BadInput(f"a row of the stream needs 'case' or 'case_id', got {', '.join(row) or 'nothing'}")
    cluster = str(row.get("cluster") or "") or None
    numbers = {name: _number(row, name) for name in (*WATCHED, "loss") if row.get(name) not in (None, "")}
    loss = numbers.get("loss")
    watched = {name: value for name, value in numbers.items() if name != "loss" and value is not None}
    if watched:
        watch = watch.decision(str(case), watched, cluster)
    if loss is not None:
        watch = watch.audit(str(case), loss, cluster)
    return watch, bool(numbers) and None not in numbers.values()


def _number(row: dict[str, Any], name: str) -> float | None:
    """A cell as a number; None for NaN, which is no decision and no audit, neither good nor bad."""
    from casewise.core.errors import BadInput

    try:
        number = float(row[name])
    except (TypeError, ValueError):
        case = row.get("case") or row.get("case_id")
        raise BadInput(f"{name} of case {case} must be a number, got {row[name]!r}; correct the stream") from None
    return None if math.isnan(number) else number


def _unread(cases: list[str]) -> Iterator[str]:
    """Warn about rows without a number to watch, if there are any."""
    if cases:
        more = f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else ""
        yield (
            f"! {pluralize(len(cases), 'row')} have NaN or no number and were skipped: {', '.join(cases[:SHOWN])}{more}"
        )


def _approximate(calibration: Path | None) -> Iterator[str]:
    """Warn that the rate of false alarms is not a bound if the calibration cases were predicted by other weights."""
    if calibration is not None and (calibration / "tuned").is_dir() and not (calibration / "held-out").is_dir():
        yield (
            "! each labelled case was predicted by weights tuned without it, new cases by the mean of all weights, so "
            "the probability of a false alarm is approximate; fit --promise sets cases aside for which it holds"
        )


def _summary(watch: Watch) -> str:
    from casewise.judge.monitors.watch import UNSEEN

    decided, audited = len(watch.decided_patients), len(watch.audited_patients)
    lines = [
        f"{pluralize(len(watch.decided), 'decision')} ({pluralize(decided, *UNIT)}) and "
        f"{pluralize(len(watch.audited), 'audit')} ({audited} counted) seen"
    ]
    if watch.waiting is not None:
        lines.append(f"  the audits of {watch.waiting[0]} are counted when those of another {UNIT[0]} begin")
    for name, one in watch.monitors.items():
        said = "silent" if one.alarm_at is None else f"ALARM after {pluralize(one.alarm_at, *UNIT)}"
        if decided and not getattr(one, "stream", True):
            said = "these cases have no such number, so nothing is watched"
        lines.append(f"  {name}: {said} (false with probability at most {one.delta:.2g})")
    return "\n".join([*lines, *(said for said in (watch.suspension, watch.void) if said), UNSEEN])

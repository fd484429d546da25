"""``casewise monitor``: alarms over a stream of decisions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import UNIT, counted

if TYPE_CHECKING:
    from casewise.judge.monitors.watch import Watch

app = typer.Typer()

SHOWN = 5


@app.command()
def monitor(
    stream: Path = typer.Argument(
        None, help="decisions.jsonl, or a CSV with case, value, (audited cases) loss, and cluster; none only starts."
    ),
    state: Path = typer.Option(Path("watch.json"), help="What the monitors remember; continued if it is there."),
    calibration: Path | None = typer.Option(None, help="Calibration archive, to start a new watch."),
    policy: Path | None = typer.Option(None, help="Policy that decides the stream. Default: the archive's."),
    certificate: Path | None = typer.Option(None, help="Certificate whose alpha the audits are held against."),
    exchangeability: bool = typer.Option(True, help="Do coordinates still look like calibration? Suspends the policy."),
    go_live: bool = typer.Option(
        True, help="Compare the first patients or sequences with calibration, once. Suspends the policy."
    ),
    first: int = typer.Option(20, help="How many patients or sequences --go-live compares."),
    quota: bool = typer.Option(False, "--quota", help="Do as many cases fall into each bucket as at calibration?"),
    audit: bool = typer.Option(False, "--audit", help="Labelled audits against the promised risk."),
    suspend_on_harm: bool = typer.Option(False, help="An alarm of --audit or --reference deploys M0, too."),
    reference: bool = typer.Option(False, "--reference", help="Labelled audits against the calibration risk."),
    proxy: bool = typer.Option(False, "--proxy", help="Label-free exceedances; an indication, not a certificate."),
    delta: float = typer.Option(0.05, help="False-alarm probability of each monitor, for all time."),
    limit: float | None = typer.Option(None, help="Promised risk for --audit."),
    tolerance: float = typer.Option(0.0, help="Rise of the risk that --reference and --proxy tolerate."),
    loss: str = typer.Option("ha", help="Calibration loss for --reference and --proxy: ha, harmed or dice."),
    as_json: bool = AS_JSON,
) -> None:
    """Watch a stream of decisions; alarm when calibration no longer applies. Exit code 1 means alarm."""
    from casewise.archive.store import open_archive
    from casewise.core.errors import BadInput
    from casewise.core.records import CALIBRATION
    from casewise.judge.certificates.certificate import read_certificate
    from casewise.judge.monitors.watch import alone, read_watch, start_watch, write_watch
    from casewise.judge.policy import read_policy

    asked = {
        "exchangeability": exchangeability, "go-live": go_live, "quota": quota, "audit": audit,
        "reference": reference, "proxy": proxy,
    }  # fmt: skip
    with alone(state):
        if state.exists():
            watch = read_watch(state)
        elif calibration is None:
            raise BadInput(f"there is no watch at {state}; give --calibration ARCHIVE to start one")
        else:
            promised = read_certificate(certificate).alpha if certificate is not None else limit
            decides = read_policy(policy or calibration)
            watch = start_watch(
                open_archive(calibration, ladder=decides.ladder or None).marked(CALIBRATION),
                decides,
                [name for name, wanted in asked.items() if wanted],
                delta=delta, limit=promised, tolerance=tolerance, loss=loss, first=first,
                suspend_on_harm=suspend_on_harm,
            )  # fmt: skip
        passed_over = []
        for row in _rows(stream) if stream is not None else ():
            watch, whole = _taken(watch, row)
            passed_over += [] if whole else [str(row.get("case") or row.get("case_id"))]
        write_watch(state, watch)
    content = {"state": state, "decisions": len(watch.decided), "audits": len(watch.audited), "alarms": watch.alarms,
               "suspended": watch.suspended, "passed_over": passed_over}  # fmt: skip
    answer("\n".join([_summary(watch), *_unread(passed_over)]), content, as_json=as_json)
    raise typer.Exit(1 if watch.alarms else 0)


def _rows(stream: Path) -> Iterator[dict[str, Any]]:
    from casewise.core.errors import BadInput
    from casewise.core.formats import read_csv

    if not stream.exists():
        raise BadInput(f"there is no stream at {stream}; give decisions.jsonl of a prediction folder, or a CSV")
    if stream.suffix == ".csv":
        yield from read_csv(stream)
        return
    try:
        with stream.open(encoding="utf-8") as lines:
            yield from (dict(json.loads(line)) for line in lines if line.strip())
    except (ValueError, TypeError) as error:
        raise BadInput(f"{stream} holds a line that is no JSON object ({error}); nothing was taken from it") from None


def _taken(watch: Watch, row: dict[str, Any]) -> tuple[Watch, bool]:
    """The watch after a row, and whether the row said all it should: something, and no NaN."""
    from casewise.core.errors import BadInput

    case = row.get("case") or row.get("case_id")
    if not case:
        raise BadInput(f"a row of the stream needs 'case' or 'case_id', got {', '.join(row) or 'nothing'}")
    cluster = str(row.get("cluster") or "") or None
    numbers = {name: _number(row, name) for name in ("value", "loss") if row.get(name) not in (None, "")}
    value, loss = numbers.get("value"), numbers.get("loss")
    if value is not None:
        watch = watch.decision(str(case), value, cluster, row.get("bucket") or None)
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
        raise BadInput(f"{name} of case {case} is a number, got {row[name]!r}; mend the stream") from None
    return None if math.isnan(number) else number


def _unread(cases: list[str]) -> Iterator[str]:
    """That rows held no number to watch, where some did."""
    if cases:
        more = f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else ""
        yield (
            f"! {counted(len(cases), 'row')} with NaN, or without value and loss, counted as no decision and no audit: "
            f"{', '.join(cases[:SHOWN])}{more}"
        )


def _summary(watch: Watch) -> str:
    decided, audited = len(watch.decided_patients), len(watch.audited_patients)
    lines = [
        f"{counted(len(watch.decided), 'decision')} ({counted(decided, *UNIT)}) and "
        f"{counted(len(watch.audited), 'audit')} "
        f"({audited} counted) seen"
    ]
    if watch.waiting is not None:
        lines.append(f"  the audits of {watch.waiting[0]} count when those of another {UNIT[0]} begin")
    for name, one in watch.monitors.items():
        said = "silent" if one.alarm_at is None else f"ALARM after {counted(one.alarm_at, *UNIT)}"
        lines.append(f"  {name}: {said} (false with probability at most {one.delta:g})")
    return "\n".join([*lines, *(said for said in (watch.suspension, watch.void) if said)])

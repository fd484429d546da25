"""``casewise replay``: apply a controller to recorded cases."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import NnUNetStyle, grouped, named_values, setting
from casewise.cli.printing import AS_JSON, answer
from casewise.core.formats import json_text
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Controller, Decision, Policy

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def replay(
    archive: Path = typer.Argument(..., help="Archive of casewise record."),
    controller: str = typer.Argument(..., help="policy.json or its folder, {controllers}, or package.module:Name."),
    out: Path = typer.Option(None, "--out", "-o", help="Write the decisions here, one JSON object per line."),
    option: list[str] = typer.Option([], help="Option of the controller as name=value, such as step=2; repeatable."),
    own: str = setting(None, "--controller", help="Your own controller (package.module:Name)."),
    ladder: str = typer.Option(None, help="Method to use, if the archive has several."),
    as_json: bool = AS_JSON,
) -> None:
    """Apply a controller or a policy to recorded cases; needs no network and no GPU.

    Example:

        casewise replay archive fixed-k --option step=2 -o decisions.jsonl
    """
    import casewise
    from casewise.core.durable import write_durably

    opened = casewise.open_archive(archive, ladder=ladder)
    _check_place(out)
    decisions = casewise.replay(opened, _chosen(opened, controller, option, own))
    if out is not None:
        write_durably(out, "".join(json_text(one.as_dict()) + "\n" for one in decisions).encode())
    content = {"decisions": [one.as_dict() for one in decisions]}
    answer(_summary(decisions), content, as_json=as_json)


def _check_place(out: Path | None) -> None:
    """Refuse to replace a file that holds anything but decisions."""
    from casewise.core.errors import BadInput

    if out is None or not out.exists():
        return
    try:
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        held = all({"case_id", "action", "state"} <= set(row) for row in rows)
    except (OSError, ValueError, TypeError):
        held = False
    if not held:
        raise BadInput(f"{out} exists and replay did not write it; give -o another name")


def _chosen(archive: Archive, name: str, option: list[str], own: str | None) -> Controller | Policy:
    from casewise.judge.controllers import CONTROLLERS
    from casewise.judge.policy import controller_of, read_policy, ready_policy

    if Path(name).exists():
        return read_policy(name, typed=own)
    if ":" not in name:
        CONTROLLERS[name]
    return controller_of(ready_policy(name, archive.steps, named_values(option)))


def _summary(decisions: list[Decision]) -> str:
    """Counts of actions, and the mean depth that was deployed and executed."""
    if not decisions:
        return "the archive has no case"
    counts = Counter(one.action.value for one in decisions)
    deployed = sum(one.deployed for one in decisions) / len(decisions)
    executed = sum(one.executed for one in decisions) / len(decisions)
    actions = ", ".join(f"{action} {count}" for action, count in sorted(counts.items()))
    return (
        f"{pluralize(len(decisions), 'case')}: {actions}; mean steps deployed {deployed:.3f}, executed {executed:.3f}"
    )

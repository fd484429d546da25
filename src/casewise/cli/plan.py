"""``casewise plan``: how many labelled cases a certificate needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from casewise.cli.printing import AS_JSON, answer

if TYPE_CHECKING:
    from casewise.judge.certificates.sample_size import Plan

app = typer.Typer()


@app.command()
def plan(
    alpha: float = typer.Option(0.1, help="Promised risk: at most this much harm."),
    delta: float = typer.Option(0.1, help="Chance that a high-probability promise may fail."),
    cases: int | None = typer.Option(None, "-n", "--cases", min=1, help="Labelled cases (patients) at hand."),
    as_json: bool = AS_JSON,
) -> None:
    """How many labelled cases a certificate needs, and what the ones you have can buy."""
    from casewise.judge.certificates import sample_size as planning

    found = planning.plan(alpha, delta, cases)
    words = [
        f"To promise a risk of at most {alpha:g} you need at least",
        f"  {found.crc_cases:4d} labelled cases in expectation (CRC)",
        f"  {found.ltt_cases:4d} labelled cases with probability {1 - delta:g} (LTT), if none of them shows any loss",
        *(["\n" + _reach(found)] if found.cases is not None else []),
        f"\n  alpha   CRC   LTT (delta {delta:g})   LTT (delta 0.05)",
    ]
    for level in planning.ALPHAS:
        row = (planning.plan(level, delta), planning.plan(level, 0.05))
        words.append(f"  {level:5.2f}  {row[0].crc_cases:4d}  {row[0].ltt_cases:15d}  {row[1].ltt_cases:16d}")
    words.append("\nA case here is an independent one: count patients, not scans.")
    answer("\n".join(words), asdict(found), as_json=as_json)


def _reach(found: Plan) -> str:
    lines = [f"Your {found.cases} cases can promise"]
    lines.append(f"  alpha >= {found.crc_alpha:.3f} in expectation (CRC)")
    lines.append(f"  alpha >= {found.ltt_alpha:.3f} with probability {1 - found.delta:g} (LTT), if none shows any loss")
    crc = "infeasible" if found.crc_budget is None else f"the kept cases may lose {found.crc_budget:.2f} in total"
    ltt = "infeasible" if found.ltt_budget is None else f"{found.ltt_budget} of {found.cases} kept cases may be harmed"
    return "\n".join([*lines, f"For alpha = {found.alpha:g}: CRC: {crc}; LTT: {ltt}."])

"""Simulated validity of certificates and monitors, as the tables of results/6-validity.md.

    python benchmarks/validity_tables.py [--repetitions 2000] [--write]

Without --write the tables are printed. With it they replace what stands between the markers in the document.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.gains import SETTING, TAILS, cohort
from worlds.risks import (
    SEVERITIES,
    Outcome,
    crc_cut,
    empirical_cut,
    gate_outcomes,
    grid_outcome,
    ltt_cuts,
    router_outcome,
)
from worlds.streams import (
    audit_alarms,
    exchangeability_alarms,
    fixed_pool_alarms,
)

from casewise.judge.calibration.adoption import ALLOWED_HURT
from casewise.judge.calibration.design_comparison import Fits, compare_designs, nested_gains
from casewise.judge.calibration.designs import DESIGNS
from casewise.judge.certificates.certify_router import Promise

DOCUMENT = Path(__file__).parent / "results" / "6-validity.md"
CELLS = (
    (10, 0.15), (10, 0.20), (10, 0.30), (20, 0.10), (20, 0.20), (20, 0.30), (50, 0.10), (50, 0.20), (50, 0.30),
)  # fmt: skip
GRIDS = (
    (10, 0.35, "binary", "hoeffding-bentkus"),
    (10, 0.40, "binary", "hoeffding-bentkus"),
    (10, 0.50, "binary", "hoeffding-bentkus"),
    (10, 0.35, "continuous", "hoeffding-bentkus"),
    (20, 0.20, "binary", "hoeffding-bentkus"),
    (20, 0.25, "binary", "hoeffding-bentkus"),
    (20, 0.30, "binary", "hoeffding-bentkus"),
    (20, 0.20, "continuous", "hoeffding-bentkus"),
    (20, 0.25, "discrete", "hoeffding-bentkus"),
    (20, 0.25, "discrete", "betting"),
    (50, 0.15, "binary", "hoeffding-bentkus"),
    (50, 0.20, "binary", "hoeffding-bentkus"),
    (50, 0.30, "binary", "hoeffding-bentkus"),
    (50, 0.15, "continuous", "hoeffding-bentkus"),
    (50, 0.20, "continuous", "hoeffding-bentkus"),
)


def bold(text: str, broken: bool) -> str:
    """Broken promises stand out."""
    return f"**{text}**" if broken else text


def router_table(repetitions: int) -> str:
    """T2-T4 and T6 by the rollback cut."""
    rows = [
        "| n | alpha | losses | CRC: mean risk | kept | LTT betting: P(risk > alpha) | kept "
        "| LTT HB / binomial: P(risk > alpha) | kept | naive cut (empirical risk <= alpha): mean risk |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n, alpha in CELLS:
        for severity in SEVERITIES:
            same = {"n": n, "alpha": alpha, "severity": severity, "repetitions": repetitions}
            kind = "binomial" if severity == "binary" else "hoeffding-bentkus"
            crc = router_outcome(lambda ts, a=alpha: [crc_cut(t, a) for t in ts], **same)
            bets = router_outcome(lambda ts, a=alpha: ltt_cuts(ts, a, 0.1, "betting", 25), **same)
            tests = router_outcome(lambda ts, a=alpha, k=kind: ltt_cuts(ts, a, 0.1, k), **same)
            naive = router_outcome(lambda ts, a=alpha: [empirical_cut(t, a) for t in ts], **same)
            rows.append(
                f"| {n} | {alpha:.2f} | {severity} | {bold(f'{crc.risk:.3f}', not crc.holds_in_expectation(alpha))} "
                f"| {crc.kept:.2f} | {bold(f'{bets.violated:.3f}', not bets.holds_with_probability(0.1))} "
                f"| {bets.kept:.2f} | {bold(f'{tests.violated:.3f}', not tests.holds_with_probability(0.1))} "
                f"| {tests.kept:.2f} | {bold(f'{naive.risk:.3f}', not naive.holds_in_expectation(alpha))} |"
            )
    return "\n".join(rows)


def gate_rows(repetitions: int) -> str:
    """T1 by its own measure, then T1 and T5: the deployed HA of a gate certified on this or that."""
    rows = [
        "| n | alpha | T1: the surrogate itself | certified on the surrogate (T1), read as deployed HA "
        "| certified on the envelope (T5) | CRC on the raw HA (no guarantee) |",
        "|---|---|---|---|---|---|",
    ]
    for n, alpha in CELLS:
        found = gate_outcomes(n=n, alpha=alpha, repetitions=repetitions, population=10_000)
        cells = [
            bold(f"{found[name].risk:.3f}", not found[name].holds_in_expectation(alpha))
            for name in ("own", "surrogate", "envelope", "raw")
        ]
        rows.append(f"| {n} | {alpha:.2f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def grid_table(repetitions: int, delta: float = 0.1) -> str:
    """T6 and T8 over a grid: P(risk > alpha), and how often nothing is certified."""
    rows = [
        "| n | alpha | losses | p-value | T6 | T8 | naive (empirical risk <= alpha) |",
        "|---|---|---|---|---|---|---|",
    ]
    both = ("ha", "harmed")
    columns = [("chains", ("ha",)), ("chains", both), ("naive", ("ha",))]
    for n, alpha, severity, kind in GRIDS:
        cells = []
        for family, losses in columns:
            asked = Promise(losses, (alpha,) * len(losses), delta)
            found = grid_outcome(family, asked, n=n, severity=severity, repetitions=repetitions, kind=kind)
            cells.append(_grid_cell(found, delta))
        rows.append(f"| {n} | {alpha:.2f} | {severity} | {kind} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _grid_cell(found: Outcome, delta: float) -> str:
    broken = bold(f"{found.violated:.3f}", not found.holds_with_probability(delta))
    return f"{broken} ({found.refused:.2f}; {found.kept:.2f})"


def monitor_table(repetitions: int, length: int = 200) -> str:
    """False alarms on healthy streams."""
    rows = [
        "| n | delta | audit, continuous | discrete | exchangeability, ties | none | fixed pool (naive) |",
        "|---|---|---|---|---|---|---|",
    ]
    for n in (10, 20, 50):
        for delta in (0.05, 0.1, 0.2):
            same = {"n": n, "length": length, "repetitions": repetitions, "delta": delta}
            kinds = [audit_alarms(severity=severity, **same) for severity in ("continuous", "discrete")]
            ranks = [exchangeability_alarms(severity=severity, **same) for severity in ("discrete", "continuous")]
            shares = [*kinds, *ranks, fixed_pool_alarms(**same)]
            limit = delta + 3 * (delta * (1 - delta) / repetitions) ** 0.5
            rows.append(f"| {n} | {delta} | {' | '.join(bold(f'{one:.3f}', one > limit) for one in shares)} |")
    return "\n".join(rows)


def adoption_table(repetitions: int) -> str:
    """How often `default` adopts a design where none gains, before and after the nested estimate is asked."""
    fewer = max(repetitions // 10, 1)
    rows = [
        f"Here {fewer} repetitions, half of them with 40 patients.",
        "",
        "| patients | changes | size | passes every test | nested estimate of these below 0; exactly 0 | adopted "
        "| mean nested estimate of the adopted |",
        "|---|---|---|---|---|---|---|",
    ]
    for tails in TAILS:
        for spread in (0.005, 0.03):
            for patients in (5, 8, 10, 20, 40):
                count = fewer if patients < 40 else max(fewer // 2, 1)
                found = np.array(nested_of_useless(patients, tails, spread, count))
                adopted = found[found >= 0]
                mean = f"{adopted.mean():+.4f}" if len(adopted) else ""
                below, zero = ((found < 0).mean(), (found == 0).mean()) if len(found) else (0.0, 0.0)
                rows.append(
                    f"| {patients} | {tails} | {spread:g} | {len(found) / count:.3f} | {below:.2f}; {zero:.2f} "
                    f"| {len(adopted) / count:.3f} | {mean} |"
                )
    return "\n".join(rows)


def nested_of_useless(patients: int, tails: str, spread: float, repetitions: int) -> list[float]:
    """The nested estimate of every design without gain that passes all tests of the default."""
    rng, found = np.random.default_rng([patients, len(tails), int(1000 * spread)]), []
    for _ in range(repetitions):
        known = cohort(rng, patients, tails=tails, spread=spread)
        if compare_designs(known, SETTING, DESIGNS, nested=False).chosen != "m0":
            found.append(nested_gains(Fits(known, SETTING, DESIGNS), ALLOWED_HURT).gain)
    return found


TABLES = {
    "adoption": adoption_table,
    "router": router_table,
    "gate": gate_rows,
    "grid": grid_table,
    "monitors": monitor_table,
}


def main() -> None:
    """Print the tables, or put them into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=list(TABLES), default=None)
    options = parser.parse_args()
    for name, make in TABLES.items():
        if options.only not in (None, name):
            continue
        table = f"{options.repetitions:,} repetitions.\n\n{make(options.repetitions)}"
        if options.write:
            text = DOCUMENT.read_text(encoding="utf-8")
            block = rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
            DOCUMENT.write_text(re.sub(block, rf"\g<1>{table}\g<2>", text, flags=re.DOTALL), encoding="utf-8")
        else:
            print(f"{name}\n{table}\n", flush=True)


if __name__ == "__main__":
    main()

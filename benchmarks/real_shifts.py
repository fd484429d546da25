"""One table per real shift: every proposer, consensus and decision on the same development cases, in one run.

    python benchmarks/real_shifts.py --data DATA -o OUT [hearts driving ...]      after real_ladders.py; prints Markdown

Reads the archives below OUT; development labels are read through the exposure ledger of each archive. What is fitted is
fitted on the calibration cases, or by cross-fitting over clusters where the row says so. Numbers of every case go to
OUT/tables/SHIFT.json, from which ``real_across.py`` leaves one shift out at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import repeat
from pathlib import Path

import pandas as pd
from real_consensus import consensus_rows, curve_lines, rungs_of
from real_decisions import WITH_BEST, decision_rows, design_lines, ladder_rows
from real_folders import SPLITS, print_small
from real_ladders import HOME, Shift, shifts
from real_promises import GRADIENTS, promise_lines, quality_lines
from real_rows import COLUMNS, Bench, Row, interval_of

from casewise.adapt.views import SETS, views_of
from casewise.archive.store import open_archive
from casewise.core.records import Controller
from casewise.judge.calibration.design_comparison import compare_designs
from casewise.judge.calibration.designs import DESIGNS, Known, gather
from casewise.judge.deciding import Setting, setting_of
from casewise.judge.ledger import unlock
from casewise.judge.outcomes import POINT
from casewise.study.benchmark.method_scores import POOR
from casewise.study.statistics.resample import clusters_of

BLOCKS = ("Views and their consensus", "Decisions", "Gradient ladders")
PATIENCE = 12  # of source_training.py


def rows_of(bench: Bench) -> Iterator[tuple[str, Row]]:
    """(part of the table, line), M0 first."""
    first = bench.recorded[0]
    yield BLOCKS[0], replace(bench.fixed(first, 0, forwards=1), name="M0")
    for block, make in zip(BLOCKS, (consensus_rows, decision_rows), strict=False):
        for ladder in bench.views:
            yield from ((block, replace(row, name=f"{ladder}: {row.name}")) for row in make(bench, ladder))
    for ladder in bench.begun:
        if ladder in GRADIENTS:
            yield from ((BLOCKS[2], row) for row in ladder_rows(bench, ladder))


def oracle_of(bench: Bench) -> float:
    """What the best recorded candidate of each case would gain."""
    frames = [bench.frame(name) for name in bench.recorded]
    best = pd.concat(frames).groupby("case")["metric"].max()
    source = frames[0].loc[frames[0]["step"] == 0].set_index("case")["metric"]
    return float((best - source).mean())


def tell(shift: Shift, out: Path) -> None:
    """Print everything about one shift."""
    calibration, development = (open_archive(shift.archive(out, split)) for split in SPLITS)
    development = unlock(development.locked(), purpose="benchmarks/real_shifts.py: the table of this shift")
    bench = Bench(shift, calibration, development)
    first = bench.frame(bench.recorded[0])
    source = first.loc[first["step"] == 0]
    oracle = oracle_of(bench)
    lost = [name for name in shift.ladders if name not in bench.begun]
    units, before = clusters_of(source).max() + 1, len(calibration.cases or calibration.entries)
    print(f"\n### {shift.name}: {len(source)} development cases of {units} clusters, calibrated on {before}\n")
    print(f"M0 {source['metric'].mean():.4f}, {int((source['metric'] < POOR).sum())} cases below .7. The best recorded "
          f"candidate of each case (needs the label) would gain {oracle:+.4f}."
          + (f" Not recorded: {', '.join(lost)}." if lost else ""))  # fmt: skip
    for line in (*beside_the_set(bench), *source_of(shift, out)):
        print(f"\n{line}")
    bench.kept |= {"source": float(source["metric"].mean()), "oracle": oracle, "rows": {}}
    heading = ""
    for block, row in rows_of(bench):
        if block != heading:
            heading = block
            print(f"\n{heading}:\n\n| method | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
        print(f"| {row.name} | {' | '.join(row.cells(oracle))} |", flush=True)
        bench.kept["rows"][row.name] = {
            **interval_of(row.cases), "forwards": row.forwards,
            "hurt": int((row.cases["change"] < -POINT).sum()), "n": len(row.cases),
            "changes": dict(zip(row.cases["case"], row.cases["change"].astype(float).round(5), strict=True)),
        }  # fmt: skip
    for line in (*curve_lines(bench), *design_lines(bench)):
        print(line)
    for ladder in bench.views:
        print(f"\nQuality of M0 from `{ladder}` (both splits):\n")
        print("\n".join(quality_lines(bench, ladder)), flush=True)
    print("\nPromised on calibration, realised on development:\n")
    for line in promise_lines(bench):
        print(line, flush=True)
    if bench.refused:
        print(f"\nRefused: {'; '.join(dict.fromkeys(bench.refused))}.")
    (out / "tables").mkdir(exist_ok=True)
    (out / "tables" / f"{shift.name}.json").write_text(json.dumps(bench.kept, indent=1, default=float))


def beside_the_set(bench: Bench) -> Iterator[str]:
    """Views that a ladder holds and the named set of today does not."""
    for ladder in bench.views:
        names, shipped = (
            rungs_of(bench.development.on(ladder)),
            set(map(str, views_of(ladder) if ladder in SETS else ())),
        )
        more = [f"`{name}`" for name in names if name not in shipped]
        if more and shipped.issubset(names) and shipped:
            yield (
                f"`{ladder}` was recorded with {', '.join(more)} beside the views of the set: rows called "
                f'"set `{ladder}`" leave that out; "mean of all", "calibrated" and the decisions may use it.'
            )


def source_of(shift: Shift, out: Path) -> Iterator[str]:
    """How the source model was trained, where our script trained it; whether validation or the last epoch ended it."""
    if shift.seed is not None:
        said = json.loads((out / "sources" / f"{shift.cohort}-{shift.seed}.json").read_text())
        best, epochs = said["best_epoch"], said["epochs"]
        limit = f"; its learning rate ran out before {PATIENCE} epochs without a better one had stopped it"
        yield (
            f"Source model: seed {shift.seed}, Dice {said['validation_dice']:.3f} on {said['validation_images']} "
            f"held-out source images, best epoch {best} of {epochs}{limit if epochs - best < PATIENCE else ''}."
        )


def tell_designs(shift: Shift, out: Path) -> None:
    """Print the designs alone, cross-fitted over the clusters of both splits; ``default`` compares within each fold."""
    calibration, development = (open_archive(shift.archive(out, split)) for split in SPLITS)
    development = unlock(development.locked(), purpose="benchmarks/real_shifts.py --designs: cross-fitted designs")
    bench = Bench(shift, calibration, development)
    for ladder in bench.views:
        setting = setting_of(development.on(ladder))
        known = [one for archive in (calibration, development) for one in gather(archive.on(ladder), setting)]
        chosen: list[str] = []

        def default(some: Sequence[Known], setting: Setting, chosen: list[str] = chosen) -> Controller:
            """What ``--policy default`` deploys: designs are compared within these cases, the chosen one is fitted."""
            chosen.append(compare_designs(some, setting).chosen)
            return DESIGNS[chosen[-1]](some, setting)

        both = compare_designs(known, setting, {**WITH_BEST, "default": default}, level=0.975)
        rows = {"designs": {ladder: {"both": [vars(row) for row in both.rows]}}}
        print(f"\n### {shift.name}, {len(known)} cases; in its folds `default` takes {', '.join(chosen)}")
        print("\n".join(design_lines(replace(bench, kept=rows))), flush=True)


def _said(say: Callable[[Shift, Path], None], shift: Shift, out: Path) -> str:
    """What would be printed about one shift, for a process beside others."""
    with redirect_stdout(StringIO()) as text:
        say(shift, out)
    return text.getvalue()


def main() -> None:
    """Print the tables of the shifts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shifts", nargs="*", metavar="SHIFT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"))
    parser.add_argument("--designs", action="store_true", help="only the cross-fitted designs, default among them")
    parser.add_argument("--jobs", type=int, default=1, help="shifts at a time, each in a process of its own")
    options = parser.parse_args()
    sys.path.insert(0, str(HOME.parent))
    out = options.out.resolve()
    known = shifts((options.weights or options.data.resolve().parent / "weights").resolve(), out)
    print_small(out)
    say = tell_designs if options.designs else tell
    asked = [known[name] for name in options.shifts or known]
    if options.jobs == 1:
        for shift in asked:
            say(shift, out)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for text in pool.map(partial(_said, say), asked, repeat(out)):
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()

"""The gradient arms of 0.1 and of the paper on three real shifts: record, calibrate, certify, study, each on its own.

Every stage goes through the command line of the users, and a recording goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import real_shifts
from real_folders import SPLITS, WRITERS, small_run, start_run, write_folders
from real_shifts import HOME, train_source

from casewise.judge.ledger import LEDGER

RATES = ("5e-4", "1e-3", "2e-3", "4e-3")
WANTED_DELTA = 7e-4  # the geometric middle of the paper's step-1 coverage, 5e-4 to 1e-3
CHOSEN = "chosen"


@dataclass(frozen=True)
class Arm:
    """One objective at one rate: its options for ``casewise record``, and what it is judged with."""

    name: str
    options: tuple[str, ...]
    policy: str | None = None  # None: the shift's
    gated: bool = False  # recorded with region scores, so that the region gate can be certified too
    ladder: tuple[str, str] | None = None  # (shift, ladder) of real_question.py that is this arm, recorded there


@dataclass(frozen=True)
class Shift:
    """A model, a cohort, its arms, and the policy of the paper that belongs to it; the first arm is the main one."""

    name: str
    model: tuple[str, ...]
    common: tuple[str, ...]
    policy: str
    arms: tuple[Arm, ...]
    fitted: tuple[str, ...] = ()  # how the paper's policy is calibrated there, for ``casewise calibrate``
    exchangeable: bool = True  # frames of a few sequences are not, so nothing can be certified from them

    def archive(self, arm: Arm, out: Path, split: str) -> Path:
        """Where the recording of one arm lies."""
        if arm.ladder is not None:
            name, ladder = arm.ladder
            fitted = ladder == "tuned" and split == "calibration"  # cross-fitted candidates, made by fit
            return out / "question" / name / ("fit/archive" if fitted else split)
        return out / self.name / arm.name / split


def _arm(name: str, objective: str, rate: str, *more: str, policy: str | None = None, gated: bool = False) -> Arm:
    return Arm(name, ("--set", f"objective={objective}", "--lr", rate, *more), policy, gated)


def _taken(name: str, shift: str, ladder: str, *, policy: str | None = None) -> Arm:
    return Arm(name, (), policy, ladder=(shift, ladder))


def shifts(weights: Path, out: Path) -> dict[str, Shift]:
    """What is run; objectives and rates as in the paper, ``chosen`` stands for the rate that no label chose."""
    measured = out / "cardiac" / "eata-chosen" / "calibration"
    subset = ("--set", "modulation=param-subset", "--set", f"statistics={measured}")
    cardiac = (
        _arm("eata-chosen", "eata", CHOSEN, "--set", "signals=augmentation_disagreement,drop", gated=True),
        _arm("eata-5e-4", "eata", "5e-4"),
        _taken("tent", "hearts", "tent"),
        _arm("sar", "sar", "5e-4"),
        _arm("deyo", "deyo", "5e-4"),
        _taken("tuned", "hearts-mirrored", "tuned", policy="prostate"),  # low and mid take the first candidate
        _arm("cotta", "cotta", "5e-4"),
        _arm("memo", "memo", "5e-4"),
        _arm("grata-1e-4", "grata", "1e-4"),
        _arm("grata-5e-4", "grata", "5e-4"),
        _arm("eata-subset", "eata", CHOSEN, *subset, policy="frag-subset"),
    )
    fundus = (
        _taken("tent", "fundus-0", "tent"),
        _arm("eata", "eata", "5e-4"),
        _arm("tent-5e-3", "tent", "5e-3"),
        _arm("tent-5e-3-classes", "tent", "5e-3", "--set", "classes=true"),  # rim and cup apart, not the whole disc
    )
    driving = (
        _arm("tent-aggressive", "tent", "2e-3", "--steps", "8"),
        _arm("tent-mild", "tent", "1e-4", policy="default"),
    )
    vit = ("-m", "benchmarks.efficientvit:model", "--weights", str(weights / "efficientvit_b0_cityscapes.pth"))
    unet = ("-m", "benchmarks.source_training:fundus", "--weights", str(out / "sources" / "fundus-0.safetensors"))
    nnunet = ("-m", str(weights / "nnunet_mnms_vendorA"), "--disable_tta")
    return {
        "cardiac": Shift("cardiac", nnunet, (), "cardiac", cardiac),
        "fundus": Shift("fundus", unet, (), "cardiac", fundus),
        "driving": Shift(
            "driving",
            vit,
            ("--set", "classes=true", "--metric", "miou", "--set", "min-area=51"),
            "driving",
            driving,
            fitted=("--set", "mode=per-group"),  # cut-points of each condition, as in the paper
            exchangeable=False,
        ),
    }


def casewise(*arguments: str | Path, allowed: Sequence[int] = (0,)) -> str:
    """Run a command of casewise in the repository, one thread, and give back what it printed."""
    command = [sys.executable, "-m", "casewise", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HOME.parent, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in allowed:
        raise SystemExit(f"casewise {' '.join(map(str, arguments))}\nended with exit code {done.returncode}")
    return done.stdout


def record(shift: Shift, arm: Arm, out: Path, *, rate: str | None, split: str) -> None:
    """Record one arm on one split; an archive that is whole is left alone."""
    folder = out / shift.name / "folders" / split
    options = [rate if option == CHOSEN and rate else option for option in arm.options]
    cases = ("-i", folder / "images", "-l", folder / "labels", "--groups", folder / "cases.csv")
    casewise("record", *shift.model, *shift.common, *cases, "-o", shift.archive(arm, out, split), *options)


def chosen_rate(shift: Shift, out: Path) -> str:
    """The rate whose mean step-1 delta on the calibration images is nearest to the paper's; labels are not given."""
    folder, seen = out / shift.name / "folders" / "calibration", {}
    for rate in RATES:
        archive = out / shift.name / "rates" / rate
        images = ("-i", folder / "images", "--groups", folder / "cases.csv", "-o", archive)
        one = ("--set", "objective=eata", "--lr", rate, "--steps", "1", "--set", "shrink=")
        casewise("record", *shift.model, *shift.common, *images, *one)
        seen[rate] = _mean_delta(archive)
    best = min(seen, key=lambda rate: abs(np.log(seen[rate] / WANTED_DELTA)))
    (out / shift.name / "rates.json").write_text(json.dumps({"mean step-1 delta": seen, "chosen": best}, indent=1))
    return best


def _mean_delta(archive: Path) -> float:
    from casewise.archive.store import open_archive

    signals = open_archive(archive).signals()
    return float(signals.loc[signals["step"] == 1, "delta"].mean())


def judge(shift: Shift, arm: Arm, out: Path, others: Sequence[Arm]) -> Path:
    """Calibrate the paper's policy and ``default``, certify, and study both; the folder of the paper's report."""
    home = out / shift.name / arm.name
    calibration, development = (shift.archive(arm, out, split) for split in SPLITS)
    named = () if arm.ladder is None else ("--ladder", arm.ladder[1])
    more = [f"--other={other.name}={','.join(str(shift.archive(other, out, split)) for split in SPLITS[::-1])}"
            for other in others]  # fmt: skip
    home.mkdir(parents=True, exist_ok=True)
    main_policy = arm.policy or shift.policy
    for policy in dict.fromkeys((main_policy, "default")):
        file, own = home / f"policy-{policy}.json", policy == shift.policy
        options = shift.fitted if own else ()
        said = casewise("calibrate", calibration, *named, "--policy", policy, *options, "-o", file)
        (home / f"preflight-{policy}.txt").write_text(said)
        report = home / f"report-{policy}"
        study = ("study", development, "--calibration", calibration, "--policy", file, "-o", report)
        casewise(*study, *(more if policy == main_policy else ()), "--disable_progress_bar")
    return home / f"report-{main_policy}"


def certify(shift: Shift, arm: Arm, out: Path) -> None:
    """What 20 calibration cases can promise about deployed HA and about the share of harmed cases."""
    home = out / shift.name / arm.name
    calibration, development = (shift.archive(arm, out, split) for split in SPLITS)
    unread = home / "calibration-unread"  # the paper fixed its router, so what was compared here did not choose it
    shutil.copytree(calibration, unread, ignore=shutil.ignore_patterns(LEDGER), dirs_exist_ok=True)
    for loss, method, alpha in (("ha", "crc", "0.2"), ("harmed", "crc", "0.3"), ("ha", "ltt", "0.3")):
        where = home / f"certificate-{loss}-{method}"
        policy = home / f"policy-{arm.policy or shift.policy}.json"
        question = ("--loss", loss, "--method", method, "--alpha", alpha)
        where.mkdir(exist_ok=True)
        also = ("--set", f"evaluation={development}", "--out", where)
        # 1: infeasible; what the holdout advises against is certified all the same: the tables say "no-go" beside it
        casewise("certify", unread, "--policy", policy, *question, *also, "--set", "force=true", allowed=(0, 1))


def certify_gate(shift: Shift, arm: Arm, out: Path) -> None:
    """The paper's region gate, certified for its surrogate at the paper's budgets (L5)."""
    home = out / shift.name / arm.name
    for alpha in ("0.10", "0.15", "0.20", "0.30"):
        where = home / f"certificate-gate-{alpha}"
        where.mkdir(exist_ok=True)
        question = ("--policy", "region-gate", "--loss", "surrogate", "--alpha", alpha, "--set", "population=scored")
        also = ("--set", f"evaluation={home / 'development'}", "--out", where)
        refused = () if small_run(out) is None else (2,)  # a few slices may hold no region at all
        casewise("certify", home / "calibration", *question, *also, allowed=(0, 1, *refused))  # 1: infeasible


def main() -> None:
    """Run the shifts that are asked for, arm by arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "shifts", nargs="*", metavar="SHIFT", help="cardiac, fundus, driving, or a name of real_shifts.py; all"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with mnms_cardiac, fundus_disc_cup, driving")
    parser.add_argument("--weights", type=Path, help="folder of the source models; default: weights beside DATA")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench-real"), help="archives and reports")
    parser.add_argument("--arms", nargs="*", help="only these arms")
    parser.add_argument(
        "--cases", type=int, help="a small run: so many cases of each split, source models half trained"
    )
    parser.add_argument("--jobs", type=int, default=1, help="arms at a time, each on one thread")
    options = parser.parse_args()
    data, out = options.data.resolve(), options.out.resolve()
    weights = (options.weights or data.parent / "weights").resolve()
    known, ladders = shifts(weights, out), real_shifts.shifts(weights, out)
    start_run(out, options.cases)
    asked = [ladders[name].cohort if name in ladders else name for name in options.shifts or known]
    for name in dict.fromkeys(asked):
        if name in known:
            run(known[name], data, out, options.arms, options.jobs)
        elif name in WRITERS:
            print(f"{name}: no gradient arm of 0.1 was ever run there")
        else:
            parser.error(f"no shift is called {name!r}; there are {', '.join(known)}")


def run(shift: Shift, data: Path, out: Path, only: Sequence[str] | None, jobs: int = 1) -> None:
    """One shift: folders, recordings, certificates, studies."""
    write_folders(shift.name, data, out)
    if shift.name == "fundus":
        train_source(f"{shift.name}-0", data, out)
    arms = [arm for arm in shift.arms if not only or arm.name in only]
    if not arms:
        raise SystemExit(f"no arm of {shift.name} is asked for; it has {', '.join(arm.name for arm in shift.arms)}")
    rate = chosen_rate(shift, out) if any(CHOSEN in arm.options for arm in arms) else None

    def recorded(arm: Arm) -> None:
        for split in SPLITS:
            print(f"{shift.name}: {arm.name}, {split}", flush=True)
            record(shift, arm, out, rate=rate, split=split)

    own = [arm for arm in arms if arm.ladder is None]
    for arm in own[:1]:
        recorded(arm)  # another arm may read its statistics
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(recorded, own[1:]))
    alike = [arm for arm in arms if arm is not shift.arms[0] and arm.policy is None]

    def judged(arm: Arm) -> None:
        report = judge(shift, arm, out, alike if arm is shift.arms[0] else ())
        if shift.exchangeable and arm.policy is None:  # what is certified is a router
            certify(shift, arm, out)
        if arm.gated:
            certify_gate(shift, arm, out)
        print(f"{shift.name}: {arm.name}: {report / 'report.html'}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(judged, arms))


if __name__ == "__main__":
    main()

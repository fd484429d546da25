"""``casewise demo``: the whole chain on the embedded phantom, with the files that a user would have."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Policy

app = typer.Typer()

MODEL = "casewise.adapt.networks:phantom_cardiac"
RATE = 2e-2
"""Chosen on phantoms of another split: step 1 changes about three voxels in a thousand, and edits form regions."""


@app.command()
def demo(
    out: Path = typer.Option(Path("demo-report"), "-o", "--out", help="Where everything goes."),
    calibration: int = typer.Option(20, help="Labelled calibration cases."),
    target: int = typer.Option(60, help="Cases of the target vendor."),
    steps: int = typer.Option(4, help="Updates for each case."),
    alpha: float = typer.Option(0.15, help="Promised harmful accepted area of the certificate."),
    jobs: int = typer.Option(2, "-j", help="Processes."),
) -> None:
    """Show the whole system on an embedded phantom cohort and leave a report to look at.

    Makes a cohort of hearts as NIfTI files, records EATA on calibration and target cases, calibrates the paper's
    cardiac router, certifies it, studies what it did, and prints the commands that do the same on your own data.
    """
    from casewise.judge.calibration.fit import calibrate
    from casewise.judge.policy import write_policy
    from casewise.run.local import keep_freed_memory

    keep_freed_memory()
    began = time.perf_counter()
    archives = {}
    for split, cases in (("calibration", calibration), ("target", target)):
        _say(f"making and adapting {cases} {split} cases")
        archives[split] = _recorded(out, split, cases, steps, jobs)
    _say("calibrating the cardiac router on the calibration cases")
    policy = calibrate(archives["calibration"], "cardiac")
    write_policy(archives["calibration"].path, policy)
    _say("certifying")
    promised = _certified(archives["calibration"], policy, alpha)
    _say("studying")
    page = _studied(archives, policy, out)
    typer.echo(f"\n{_sentence(archives, policy)}\n\n{promised}\n")
    typer.echo(f"Look at {page}  ({time.perf_counter() - began:.0f} s)\n\n{_commands(out)}")


def _say(what: str) -> None:
    typer.echo(f"... {what}", err=True)


def _recorded(out: Path, split: str, cases: int, steps: int, jobs: int) -> Archive:
    """Write phantoms of vendor B as files, then record them exactly as ``casewise record`` does."""
    from tqdm import tqdm

    from casewise.adapt.adaptation import Adaptation
    from casewise.data.datasets.plain import write_cohort
    from casewise.data.folders import NAME as TABLE
    from casewise.data.phantom import cardiac_cohort
    from casewise.deployment import Deployment, Model
    from casewise.run.assemble import gathered_cases
    from casewise.run.local import LocalEngine
    from casewise.run.record_folder import SHRUNK, RecordCase, record_folder

    cohort = cardiac_cohort("B", cases, split=split)
    folder = write_cohort(cohort, out / "data" / split)
    model = Model(MODEL)
    files = gathered_cases(model, folder / "images", labels=folder / "labels", groups=folder / TABLE)
    how = Adaptation("eata", RATE, steps=steps, shrink=SHRUNK)
    work = RecordCase(Deployment(model, (how,)), {case.id: case for case in files})
    archive, results = record_folder(
        work, LocalEngine(jobs), out / f"{split}-archive", dataset=cohort.name, notice=cohort.notice
    )
    for result in tqdm(results, total=len(files), unit="case", disable=not sys.stderr.isatty()):
        if result.error is not None:
            raise RuntimeError(f"{result.case_id}: {result.error}")
    return archive


def _certified(archive: Archive, policy: Policy, alpha: float) -> str:
    """Certificate, its page and the certified policy beside the archive; the promise in words."""
    from casewise.core.errors import Refused
    from casewise.judge.certificates.certificate import write_certificate
    from casewise.judge.certificates.certify_router import Promise, certify_router
    from casewise.judge.policy import write_policy
    from casewise.report.certificate_page import certificate_page

    try:
        certificate, certified = certify_router(archive, policy, Promise(alphas=(alpha,)))
    except Refused as error:  # a NO-GO of the calibration: the demo goes on and says so
        return str(error)
    write_certificate(archive.path, certificate)
    (archive.path / "certificate.html").write_text(certificate_page(certificate), encoding="utf-8")
    write_policy(archive.path / "policy-certified.json", certified)
    return certificate.statement if certificate.feasible else certificate.advice


def _studied(archives: dict[str, Archive], policy: Policy, out: Path) -> Path:
    from casewise.report.study_report import build

    return build(archives["target"], archives["calibration"], policy, out / "report", progress=sys.stderr.isatty())


def _sentence(archives: dict[str, Archive], policy: Policy) -> str:
    """What happened, in one sentence: the mean, the cases, the harm, and what was rolled back."""
    from casewise.judge.calibration.fixed_budget import budget
    from casewise.judge.outcomes import deployed, outcomes
    from casewise.replay import replay

    target = archives["target"]
    scored, k = outcomes(target), budget(outcomes(archives["calibration"]))
    plain = scored[scored["shrink"] == 0].set_index(["case", "step"])
    last = plain.xs(target.steps, level="step")
    change = last["metric"] - plain.xs(0, level="step")["metric"]
    routed = deployed(scored, replay(target, policy))
    at_budget, rolled_back = plain.xs(k, level="step")["ha"].mean(), routed["rolled_back"].mean()
    return (
        f"{target.steps} steps of EATA on {len(last)} cases moved the mean Dice by {change.mean():+.4f} and made "
        f"{(change < 0).mean():.0%} of the cases worse; harmful accepted area is {last['ha'].mean():.3f} after step "
        f"{target.steps}, {at_budget:.3f} at the budget that the calibration cases choose "
        f"(step {k}), and {routed['ha'].mean():.3f} under the router, which rolls {rolled_back:.0%} back."
    )


def _commands(out: Path) -> str:
    """The same chain as a user types it; it makes an archive of its own."""
    data, target = out / "data", out / "target-archive"
    holdout = f"-i {data}/calibration/images -l {data}/calibration/labels --groups {data}/calibration/cases.csv"
    return "\n".join(
        [
            "The same by hand, and on your own data:",
            f"  casewise record -m {MODEL} {holdout} --lr {RATE:g} -o my-archive",
            "  casewise calibrate my-archive --policy cardiac",
            "  casewise certify my-archive --alpha 0.15",
            f"  casewise study {target} --calibration my-archive -o my-report",
            f"  casewise predict -m {MODEL} -i {data}/target/images -o my-predictions --policy my-archive",
        ]
    )

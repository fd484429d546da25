"""``casewise demo``: the whole chain on the embedded phantom, with the files that a user would have."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.printing import AS_JSON, answer

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Policy
    from casewise.judge.certificates.certificate import Certificate

app = typer.Typer()

MODEL = "casewise.adapt.networks:phantom_cardiac"
RATE = 2e-2
"""Of TENT; chosen on phantoms of another split, as the shift itself was."""
POINT = 0.01
POOR = 0.7
HOME = 12  # hearts of the source vendor, to say what the shift costs
FIXED = "TENT on every case"


@app.command()
def demo(
    out: Path = typer.Option(Path("demo-report"), "-o", "--out", help="Where everything goes."),
    calibration: int = typer.Option(20, help="Labelled cases: how far to trust the views, what can be promised."),
    target: int = typer.Option(60, help="Cases of the new scanner that are segmented."),
    views: str = typer.Option("mri", help="Views whose readings are the candidates."),
    steps: int = typer.Option(4, help="Updates of the fixed adaptation that stands beside it."),
    alpha: float = typer.Option(0.1, help="Promised share of cases that lose more than a point."),
    jobs: int = typer.Option(2, "-j", help="Processes."),
    as_json: bool = AS_JSON,
) -> None:
    """Show the whole system on embedded phantom hearts of another scanner, and leave a report to look at.

    The frozen model loses several points there. Other views of the same model propose better masks; twenty labelled
    cases say what can be promised of their consensus and how quality shows without a label, and sixty others are
    segmented: what was gained, who was hurt, who is flagged for a person, what is promised. Beside it stands what
    four updates of TENT on every case would have done.
    """
    from casewise.judge.calibration.fit import calibrate
    from casewise.judge.policy import write_policy
    from casewise.run.local import keep_freed_memory

    _check_place(out)
    keep_freed_memory()
    began = time.perf_counter()
    archives = {}
    for split, cases in (("calibration", calibration), ("target", target)):
        _say(f"{cases} {split} cases: M0, {steps} updates of TENT, views:{views}")
        archives[split] = _recorded(out, split, cases, views, steps, jobs)
    ladders = {split: archive.on(_ladder(views)) for split, archive in archives.items()}
    _say("calibrating the flags, and what can be promised, on the calibration cases")
    policy = calibrate(ladders["calibration"], "consensus", flag_below=POOR)
    write_policy(archives["calibration"].path, policy)
    certificate, deployed = _certified(ladders["calibration"], policy, alpha)
    _say("studying what was deployed on the target cases")
    page = _studied(archives, ladders, deployed, certificate, out)
    told, content = _told(page, ladders["target"].configuration["notice"])
    seconds, next_ = time.perf_counter() - began, _commands(out, views)
    words = f"\n{told}\n\nLook at {page}  ({seconds:.0f} s)\n\nThe same by hand, and on your own data:\n"
    content = {**content, "said": told, "page": page, "seconds": seconds, "commands": next_}
    answer(words + "\n".join(f"  {line}" for line in next_), content, as_json=as_json)


def _check_place(out: Path) -> None:
    """Refuse to write over what no earlier demo left: its archives say that there was one."""
    from casewise.archive.layout import MANIFEST
    from casewise.core.errors import BadInput

    there = [name for name in ("data", "report") if (out / name).exists()]
    if there and not (out / "calibration-archive" / MANIFEST).is_file():
        raise BadInput(f"{out} holds {', '.join(there)}, which no casewise demo wrote; choose another folder with -o")


def _say(what: str) -> None:
    typer.echo(f"... {what}", err=True)


def _ladder(views: str) -> str:
    from casewise.adapt.proposers import named_proposal

    return named_proposal(f"views:{views}")[0]


def _recorded(out: Path, split: str, cases: int, views: str, steps: int, jobs: int) -> Archive:
    """Write phantoms of vendor B as files, then record them exactly as ``casewise record`` does."""
    from tqdm import tqdm

    from casewise.adapt.adaptation import Adaptation
    from casewise.data.datasets.plain import write_cohort
    from casewise.data.folders import NAME as TABLE
    from casewise.data.phantom import cardiac_cohort
    from casewise.deployment import Deployment, Model
    from casewise.run.assemble import gathered_cases
    from casewise.run.local import LocalEngine
    from casewise.run.record_folder import RecordCase, record_folder

    cohort = cardiac_cohort("B", cases, split=split)
    folder = write_cohort(cohort, out / "data" / split)
    model = Model(MODEL)
    files = gathered_cases(model, folder / "images", labels=folder / "labels", groups=folder / TABLE)
    proposers = (Adaptation("tent", RATE, steps=steps), Adaptation(f"views:{views}", RATE, steps=steps))
    deployment = Deployment(model, proposers, ladders=("tent", _ladder(views)))
    work = RecordCase(deployment, {case.id: case for case in files})
    archive, results = record_folder(
        work, LocalEngine(jobs), out / f"{split}-archive", dataset=cohort.name, notice=cohort.notice
    )
    for result in tqdm(results, total=len(files), unit="case", disable=not sys.stderr.isatty()):
        if result.error is not None:
            raise RuntimeError(f"{result.case_id}: {result.error}")
    return archive


def _certified(cases: Archive, policy: Policy, alpha: float) -> tuple[Certificate | None, Policy]:
    """Certificate and its page in the calibration archive, and the policy that is deployed: certified or not."""
    from casewise.core.errors import CasewiseError
    from casewise.judge.certificates.certificate import write_certificate
    from casewise.judge.certificates.certify_router import Promise, certify_router
    from casewise.judge.policy import write_policy
    from casewise.report.certificate_page import certificate_page

    try:
        certificate, certified = certify_router(cases, policy, Promise(("harmed",), (alpha,), margin=POINT))
    except CasewiseError as error:  # too few cases: the demo goes on and says so
        _say(f"no promise: {error}")
        return None, policy
    place = cases.path
    write_certificate(place, certificate)
    (place / "certificate.html").write_text(certificate_page(certificate), encoding="utf-8")
    write_policy(place / "policy-certified.json", certified)
    return certificate, certified if certificate.feasible else policy


def _studied(
    archives: Mapping[str, Archive],
    ladders: Mapping[str, Archive],
    policy: Policy,
    certificate: Certificate | None,
    out: Path,
) -> Path:
    from casewise.report.study_report import build
    from casewise.study.study import Extras

    extras = Extras(
        others={FIXED: archives["target"].on("tent")},
        holdouts={FIXED: archives["calibration"].on("tent")},
        certificate=certificate,
    )
    return build(
        ladders["target"], ladders["calibration"], policy, out / "report", extras=extras, progress=sys.stderr.isatty()
    )


def _told(page: Path, notice: str) -> tuple[str, dict[str, Any]]:
    """What happened, in words and as data: the shift, a row for each answer to it, whom they hurt, flags, promise."""
    import json

    results = json.loads((page.parent / "results.json").read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in results["findings"]["quality.captured"]["rows"]}
    ours, last = [name for name in rows if name != FIXED][-1], [name for name in rows if name.startswith("fixed-")][-1]
    shown = {FIXED: FIXED, last: "views' consensus on every case", ours: f"casewise ({ours})"}
    if all(rows[last][name] == rows[ours][name] for name in ("gain", "helped", "hurt")):
        del shown[last]  # nothing was rolled back
    said, fixed = results["story"]["answers"], rows[FIXED]
    home, source = _at_home(), sum(case["metric_source"] for case in results["cases"]) / len(results["cases"])
    words = "\n".join(
        [
            notice,
            "",
            f"The frozen model (M0) has Dice {home:.3f} on the scanner that it was trained on and {source:.3f} "
            f"on the new one ({len(results['cases'])} cases).",
            "",
            f"{'':36}{'Dice against M0':^28}{'helped : hurt':>14}{'by > 1 point':>14}",
            *(_row(title, rows[name]) for name, title in shown.items()),
            "",
            f"{FIXED} hurts {fixed['hurt']}, the worst ({fixed['worst_case']}) by {-fixed['worst']:.3f}.",
            f"Hurt:     {said['hurt']}",
            f"Flagged:  {said['flagged']}",
            f"Promised: {said['promised']}",
        ]
    )
    answers = {title: rows[name] for name, title in shown.items()}
    return words, {"notice": notice, "source_at_home": home, "source_here": source, "answers": answers, "story": said}


def _row(title: str, row: Mapping[str, Any]) -> str:
    spread = f"{row['gain']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
    pair = f"{row['helped']} : {row['hurt']}"
    return f"{title:36}{spread:^28}{pair:>14}{row['hurt_by_a_point']:>14}"


def _at_home() -> float:
    """Mean Dice of M0 on held-out hearts of the scanner that the model was trained for."""
    from statistics import fmean

    from casewise.data.phantom import cardiac_cohort
    from casewise.deployment import Model
    from casewise.measure.metrics.overlap import dice
    from casewise.run.assemble import assembled

    hearts, plain = cardiac_cohort("A", HOME, split="held-out"), assembled(Model(MODEL), "m0", asked={})
    return fmean(dice(plain.segment(case).mask, hearts.label(case.id)) for case in hearts)


def _commands(out: Path, views: str) -> list[str]:
    """The same chain as a user types it; it makes an archive of its own."""
    holdout, target = out / "data" / "calibration", out / "data" / "target"
    cases = f"-i {holdout}/images -l {holdout}/labels --groups {holdout}/cases.csv"
    return [
        f"casewise record -m {MODEL} {cases} --propose views:{views} -o my-archive",
        f"casewise calibrate my-archive --policy consensus --flag-below {POOR:g}",
        f"casewise certify my-archive --loss harmed --margin {POINT:g} --alpha 0.1",
        f"casewise predict -m {MODEL} -i {target}/images -o my-predictions --policy my-archive/policy-certified.json",
    ]

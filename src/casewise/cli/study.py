"""casewise study: every table and figure of the paper, on your own archive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.options import NnUNetStyle, grouped, setting
from casewise.cli.printing import AS_JSON, answer, warn

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Policy

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def study(
    evaluation: Path = typer.Argument(..., help="Archive of the evaluation cases, with labels."),
    calibration: Path = typer.Option(
        ..., "--calibration", "-c", help="Archive of the calibration cases that the policy was fitted on."
    ),
    policy: Path = typer.Option(None, "-p", "--policy", help="policy.json or its folder; default: CALIBRATION."),
    controller: str = setting(None, help="Your own controller (package.module:Name), if the policy names one."),
    out: Path = typer.Option(None, "--out", "-o", help="Folder for the report; default: EVALUATION/report."),
    only: list[str] = typer.Option([], help="Run this analysis only: {analyses}; repeat for several."),
    other: list[str] = typer.Option(
        [],
        help="NAME=EVALUATION[,CALIBRATION]: another method on the same cases; of archives with several methods, "
        "method NAME is used. Repeat for several.",
    ),
    rerun: Path = typer.Option(None, help="Archive of a second recording of the same cases, to compare."),
    sweep: list[str] = typer.Option(
        [], help="RATE=EVALUATION[,CALIBRATION]: archives at another learning rate; repeat for several."
    ),
    backbone: list[str] = typer.Option(
        [], help="NAME=ARCHIVE: archive of another model on the same cases; repeat for several."
    ),
    other_modality: Path = typer.Option(None, help="Archive of another modality, for the analysis 'scale'."),
    frozen: Path = typer.Option(None, help="An earlier policy whose design was fixed before this one."),
    images: Path = typer.Option(None, help="Images of the evaluation cases, for the pictures."),
    include_first_step: bool = setting(
        False, help="Correlate changes between steps from M0 on, instead of from step 1 on."
    ),
    substitute: str = setting(
        "", help="Also run the matched controls with the masks of this method (fixed-4, tau-stop) for all kept cases."
    ),
    pictures: int = setting(150, min=0, help="Largest number of cases with pictures, worst first."),
    resamples: int = setting(5000, min=100, help="Number of bootstrap samples."),
    seed: int = setting(1000, help="Seed of the bootstrap and of the random controls."),
    quiet: bool = typer.Option(False, "--disable_progress_bar", help="No progress bar."),
    measures: Path = setting(None, help="measures.toml: formulas over volumes, such as the ejection fraction."),
    jobs: int = typer.Option(1, "-j", min=1, help="Number of processes."),
    ladder: str = typer.Option(
        None, help="Method to use, if the archives have several; default: the (first) method of the policy."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Make the tables and figures of the paper from your own archive.

    Example, after `casewise record` and `casewise calibrate holdout`:

        casewise study evaluation --calibration holdout

    Reads two archives and a policy, replays every method, and writes one folder: report.html (one file, no network),
    results.json (every number at full precision), tables/ (CSV and LaTeX) and figures/ (SVG and PNG). An
    analysis whose inputs are missing says "not run", and what it needs. The report checks its sums; if they disagree,
    nothing is written and the exit code is 1. A study reads labels of evaluation cases, so it adds a line to the log of
    such readings in their archive (exposures.jsonl).
    """
    from casewise.archive.store import open_archive
    from casewise.core.errors import BadInput, Refused
    from casewise.core.records import CALIBRATION, EVALUATION
    from casewise.judge.certificates.certificate import CERTIFICATE, read_certificate
    from casewise.judge.policy import read_policy
    from casewise.report.study_report import build
    from casewise.study.plan import read_measures
    from casewise.study.study import Extras, images_of

    place = out if out is not None else evaluation / "report"
    known = read_policy(policy or calibration, typed=controller)
    if known.ladders and ladder not in (None, *known.ladders):
        raise BadInput(f"--ladder must be one that the policy reads ({', '.join(known.ladders)}), got {ladder!r}")
    named = ladder or known.ladder or next(iter(known.ladders), None)
    judged, holdout = (open_archive(path, ladder=named).only_ladder() for path in (evaluation, calibration))
    pairs = {name: _two(paths, name) for name, paths in _pairs("--other", other)}
    further = [name for name in known.ladders if name != named and name not in pairs]
    others = {name: first for name, (first, _) in pairs.items()}
    holdouts = {name: second for name, (_, second) in pairs.items() if second is not None}
    given = Extras(
        others={**others, **{name: judged.ladder(name).marked(EVALUATION) for name in further}},
        holdouts={**holdouts, **{name: holdout.ladder(name).marked(CALIBRATION) for name in further}},
        rerun=_opened(rerun, named) if rerun else None,
        sweep=dict(_swept(name, paths, named) for name, paths in _pairs("--sweep", sweep)),
        backbones={name: _opened(path, named) for name, path in _pairs("--backbone", backbone)},
        other_modality=_opened(other_modality, named) if other_modality else None,
        frozen=read_policy(frozen) if frozen else None,
        certificate=read_certificate(calibration) if (calibration / CERTIFICATE).exists() else None,
        images=images_of(images) if images else None,
        first_step=include_first_step,
        substitute=substitute,
        measures=() if measures is None else read_measures(measures),
    )
    if jobs > 1:
        judged = _measured(judged, holdout, known, jobs)
    try:
        page = build(
            judged, holdout, known, place, extras=given, only=only, pictures=pictures, resamples=resamples, seed=seed,
            progress=not quiet and sys.stderr.isatty(),
        )  # fmt: skip
    except Refused as error:
        if type(error) is not Refused:  # Mismatch and Overlap are about the input
            raise
        typer.echo(f"casewise: {error}", err=True)
        raise typer.Exit(1) from None
    said, results = _summary(page)
    found = {name: results[name] for name in ("summary", "warnings", "not_run")}
    answer(said, {"page": page, "results": page.parent / "results.json", **found}, as_json=as_json)
    for sentence in results["warnings"]:
        warn(sentence)


def _measured(evaluation: Archive, calibration: Archive, policy: Policy, jobs: int) -> Archive:
    """Return the evaluation archive, unlocked, after several processes scored both archives; the study finds the tables
    beside them."""
    from casewise.core.records import CALIBRATION, EVALUATION
    from casewise.run.local import LocalEngine
    from casewise.run.record_folder import scored
    from casewise.study.study import unlocked

    judged = unlocked(evaluation.marked(EVALUATION), policy)
    for archive in (judged, calibration.marked(CALIBRATION)):
        scored(archive, LocalEngine(jobs))
    return judged


def _pairs(option: str, given: list[str]) -> list[tuple[str, str]]:
    """NAME=VALUE as two words."""
    from casewise.core.errors import BadInput

    pairs = []
    for word in given:
        name, _, value = word.partition("=")
        if not name or not value:
            raise BadInput(f"{option} takes NAME=ARCHIVE, got {word!r}")
        pairs.append((name, value))
    return pairs


def _swept(name: str, paths: str, ladder: str | None) -> tuple[float, Any]:
    """Return a rate and its archives; refuse archives that were recorded at another rate."""
    from casewise.core.errors import BadInput, Mismatch

    try:
        rate = float(name)
    except ValueError:
        form = "RATE=ARCHIVE, such as 5e-4=eval"
        raise BadInput(f"--sweep takes {form}, got {name!r}") from None
    pair = _two(paths, ladder)
    for archive in filter(None, pair):
        recorded = archive.configuration.get("learning_rate")
        if any(entry.rungs for entry in archive.entries.values()):
            raise Mismatch(f"--sweep {name}={archive.path}: its candidates have no learning rate; leave it out")
        if recorded is not None and float(recorded) != rate:
            raise Mismatch(f"--sweep {name}={archive.path}: recorded at {recorded:g}; give --sweep {recorded:g}=...")
    return rate, pair


def _two(paths: str, ladder: str | None) -> Any:
    """EVALUATION[,CALIBRATION], opened."""
    first, _, second = paths.partition(",")
    return _opened(first, ladder), _opened(second, ladder) if second else None


def _opened(path: str | Path, ladder: str | None) -> Archive:
    """Open an archive with the ladder of this name in view, or with its only ladder."""
    from casewise.archive.store import open_archive

    there = open_archive(path)
    return there.only_ladder(ladder if len(there.ladders) > 1 else None)


def _summary(page: Path) -> tuple[str, dict[str, Any]]:
    """Summary of a study as text, and the content of results.json."""
    import json

    results: dict[str, Any] = json.loads((page.parent / "results.json").read_text(encoding="utf-8"))
    summary = results["summary"]
    said = (summary["headline"], *summary["answers"].values(), summary["second"], "", f"Open {page}")
    return "\n".join(said), results

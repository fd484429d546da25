"""casewise study: every table and figure of the paper, on your own archive."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from casewise.cli.printing import answer

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Policy

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def study(
    evaluation: Annotated[Path, typer.Argument(help="Archive of the evaluation cases, with labels.")],
    calibration: Annotated[
        Path, typer.Option("--calibration", "-c", help="Archive of the holdout that the policy was fitted on.")
    ],
    policy: Annotated[
        Path | None,
        typer.Option("--policy", "-p", help="policy.json, or the folder that holds it.  [default: CALIBRATION]"),
    ] = None,
    controller: Annotated[
        str | None, typer.Option("--controller", help="package.module:Name that the policy was calibrated with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the report goes.  [default: EVALUATION/report]")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Run this analysis only; repeat for more. A wrong name lists them all."),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option(
            "--other",
            help="NAME=EVALUATION[,CALIBRATION] of another objective on the same cases (TENT, MEMO), and the ladder "
            "NAME of archives that hold several; repeat.",
        ),
    ] = None,
    rerun: Annotated[
        Path | None, typer.Option("--rerun", help="A second recording of the same cases, to align.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="RATE=EVALUATION[,CALIBRATION] at another learning rate; repeat."),
    ] = None,
    backbone: Annotated[
        list[str] | None,
        typer.Option("--backbone", help="NAME=ARCHIVE of another backbone on the same cohort; repeat."),
    ] = None,
    away: Annotated[
        Path | None, typer.Option("--away", help="Archive of another modality, for the scale probe.")
    ] = None,
    frozen: Annotated[
        Path | None, typer.Option("--frozen", help="The policy whose design was frozen before this one.")
    ] = None,
    criteria: Annotated[
        Path | None, typer.Option("--criteria", help="Criteria that were declared before the run.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="Images of the evaluation cases, for the pictures' input column.")
    ] = None,
    include_first_step: Annotated[
        bool, typer.Option("--include-first-step", help="Association of differences: begin with M0 to step 1.")
    ] = False,
    min_area_mm: Annotated[
        list[float] | None,
        typer.Option("--min-area-mm", min=1e-6, help="Sweep the smallest region in mm² or mm³ too; repeat."),
    ] = None,
    substitute: Annotated[
        str,
        typer.Option(
            "--substitute",
            help="Matched controls also with what this method (fixed-4, tau-stop) deployed for every kept case.",
        ),
    ] = "",
    pictures: Annotated[
        int, typer.Option("--pictures", min=0, help="Cases with pictures, worst first; bounds the page.")
    ] = 150,
    resamples: Annotated[int, typer.Option("--resamples", "-B", min=100, help="Bootstrap draws.")] = 5000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the bootstrap and of the random controls.")] = 1000,
    quiet: Annotated[bool, typer.Option("--disable_progress_bar", help="No progress bar.")] = False,
    engine: Annotated[str, typer.Option("--engine", help="Measures the cases: local or ray.")] = "local",
    address: Annotated[str | None, typer.Option("--address", help="Ray cluster to join, with --engine ray.")] = None,
    jobs: Annotated[int, typer.Option("-j", min=1, help="Processes or workers that measure the cases.")] = 1,
    ladder: Annotated[
        str | None,
        typer.Option(
            "--ladder",
            help="Which ladder, where the archives hold several; default: the policy's, the first of several.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Every table and figure of the paper, on your own archive.

    Reads two archives and a policy, replays every method, and writes one folder: report.html (one file, no network),
    results.json (every number at full precision), tables/ (CSV and LaTeX) and figures/ (SVG and PNG). What cannot be
    computed from what you gave says "not run", and what it needs. The report checks its own sums; if they disagree,
    nothing is written and the exit code is 1.

    Example, after `casewise record` and `casewise calibrate holdout`:

        casewise study evaluation --calibration holdout

    That a study was made is written into the evaluation archive's exposure ledger, because its labels were read.
    """
    from casewise.archive.store import open_archive
    from casewise.core.errors import BadInput, Refused
    from casewise.core.records import CALIBRATION, EVALUATION
    from casewise.judge.policy import read_policy
    from casewise.report.study_report import build
    from casewise.run.assemble import chosen_engine

    place = out if out is not None else evaluation / "report"
    known = read_policy(policy or calibration, typed=controller)
    if known.ladders and ladder not in (None, *known.ladders):
        raise BadInput(f"--ladder is one of those that the policy reads ({', '.join(known.ladders)}), got {ladder!r}")
    named = ladder or known.ladder or next(iter(known.ladders), None)
    given = replace(
        _extras(calibration, other, rerun, sweep, backbone, away, frozen, criteria, images, named),
        first_step=include_first_step,
        min_areas_mm=tuple(min_area_mm or ()),
        substitute=substitute,
    )
    judged, holdout = (open_archive(path, ladder=named).one() for path in (evaluation, calibration))
    further = [name for name in known.ladders if name != named and name not in given.others]
    given = replace(
        given,
        others={**given.others, **{name: judged.on(name).marked(EVALUATION) for name in further}},
        holdouts={**given.holdouts, **{name: holdout.on(name).marked(CALIBRATION) for name in further}},
    )
    if engine != "local" or jobs > 1:
        judged = _measured(judged, holdout, known, chosen_engine(engine, jobs=jobs, address=address))
    bar = not quiet and sys.stderr.isatty()
    try:
        page = build(
            judged,
            holdout,
            known,
            place,
            extras=given,
            only=only,
            pictures=pictures,
            resamples=resamples,
            seed=seed,
            progress=bar,
        )
    except Refused as error:
        if type(error) is not Refused:  # Mismatch and Overlap are about the input
            raise
        typer.echo(f"casewise: {error}", err=True)
        raise typer.Exit(1) from None
    said, results = _summary(page)
    found = {name: results[name] for name in ("story", "warnings", "not_run")}
    answer(said, {"page": page, "results": page.parent / "results.json", **found}, as_json=as_json)
    for sentence in results["warnings"]:
        typer.echo(f"! {sentence}", err=True)


def _measured(evaluation: Archive, calibration: Archive, policy: Policy, engine: Any) -> Archive:
    """The evaluation archive, unlocked, after an engine scored both; the study finds the tables beside them."""
    from casewise.core.records import CALIBRATION, EVALUATION
    from casewise.run.record_folder import scored
    from casewise.study.study import unlocked

    judged = unlocked(evaluation.marked(EVALUATION), policy)
    for archive in (judged, calibration.marked(CALIBRATION)):
        scored(archive, engine)
    return judged


def _extras(
    calibration: Path,
    other: list[str] | None,
    rerun: Path | None,
    sweep: list[str] | None,
    backbone: list[str] | None,
    away: Path | None,
    frozen: Path | None,
    criteria: Path | None,
    images: Path | None,
    ladder: str | None,
) -> Any:
    """The optional archives, opened; the certificate that lies beside the calibration archive."""
    from casewise.judge.certificates.certificate import CERTIFICATE, read_certificate
    from casewise.judge.policy import read_policy
    from casewise.study.preregistration import read_criteria
    from casewise.study.study import Extras, images_of

    others = {name: _two(paths, name) for name, paths in _pairs("--other", other)}
    return Extras(
        others={name: first for name, (first, _) in others.items()},
        holdouts={name: second for name, (_, second) in others.items() if second is not None},
        rerun=_opened(rerun, ladder) if rerun else None,
        sweep=dict(_swept(name, paths, ladder) for name, paths in _pairs("--sweep", sweep)),
        backbones={name: _opened(path, ladder) for name, path in _pairs("--backbone", backbone)},
        away=_opened(away, ladder) if away else None,
        frozen=read_policy(frozen) if frozen else None,
        criteria=read_criteria(criteria) if criteria else None,
        certificate=read_certificate(calibration) if (calibration / CERTIFICATE).exists() else None,
        images=images_of(images) if images else None,
    )


def _pairs(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    """NAME=VALUE as two words."""
    from casewise.core.errors import BadInput

    pairs = [tuple(word.partition("=")[::2]) for word in given or ()]
    for (name, value), word in zip(pairs, given or (), strict=True):
        if not name or not value:
            raise BadInput(f"{option} takes NAME=ARCHIVE, got {word!r}")
    return [(name, value) for name, value in pairs]


def _rate(name: str) -> float:
    from casewise.core.errors import BadInput

    try:
        return float(name)
    except ValueError:
        raise BadInput(
            f"--sweep takes RATE=ARCHIVE with a number as its rate, such as 5e-4=eval, got {name!r}"
        ) from None


def _swept(name: str, paths: str, ladder: str | None) -> tuple[float, Any]:
    """A rate and its archives, as far as they say how they were recorded at that very rate."""
    from casewise.core.errors import Mismatch

    rate, pair = _rate(name), _two(paths, ladder)
    for archive in filter(None, pair):
        recorded = archive.configuration.get("learning_rate")
        if any(entry.rungs for entry in archive.entries.values()):
            raise Mismatch(
                f"--sweep {name}={archive.path}: its candidates have names and no learning rate; leave it out"
            )
        if recorded is not None and float(recorded) != rate:
            raise Mismatch(
                f"--sweep {name}={archive.path}: it was recorded at {recorded:g}; say --sweep {recorded:g}=..."
            )
    return rate, pair


def _two(paths: str, ladder: str | None) -> Any:
    """EVALUATION[,CALIBRATION], opened."""
    first, _, second = paths.partition(",")
    return _opened(first, ladder), _opened(second, ladder) if second else None


def _opened(path: str | Path, ladder: str | None) -> Archive:
    """An archive with the ladder of this name in view, where it holds several, or else its only one."""
    from casewise.archive.store import open_archive

    there = open_archive(path)
    return there.one(ladder if len(there.ladders) > 1 else None)


def _summary(page: Path) -> tuple[str, dict[str, Any]]:
    """The story and where to look, and the content of results.json."""
    import json

    results: dict[str, Any] = json.loads((page.parent / "results.json").read_text(encoding="utf-8"))
    story = results["story"]
    said = (story["headline"], *story["answers"].values(), story["second"], "", f"Open {page}")
    return "\n".join(said), results

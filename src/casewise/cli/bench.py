"""``casewise bench``: a benchmark on one's own data, whose result others can check and compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from casewise.cli.options import (
    AdaptationOptions,
    EngineOptions,
    ModelOptions,
    NnUNetStyle,
    PrintingOptions,
    grouped,
)
from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.deployment import Deployment
    from casewise.judge.certificates.certify_router import Promise
    from casewise.study.benchmark.sides import Sides

app = typer.Typer()

FOUND_WRONG, NOT_ALL_DONE = 1, 3


@dataclass(frozen=True)
class BenchmarkOptions:
    """What is measured, and on whom."""

    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder of the benchmark; a leaderboard's .md, .html or .json."),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Folder of calibration cases; all of DATA evaluates then."),
    ] = None
    share: Annotated[
        float,
        typer.Option(
            help="Share of patients or sequences drawn to calibrate, where no column and no folder says who does."
        ),
    ] = 0.3
    propose: Annotated[
        list[str] | None,
        typer.Option(help="What makes candidates: tent, NAME=views:gamma(1.4), ...; repeat. Default: views:light."),
    ] = None
    policy: Annotated[
        list[str] | None, typer.Option(help="Designs to calibrate and to score; repeat. Default: default.")
    ] = None
    metric: Annotated[str, typer.Option(help="dice or miou.")] = "dice"
    shrink: Annotated[str, typer.Option(help="Interpolated states of updates, as step:alpha with commas.")] = ""
    loss: Annotated[
        str, typer.Option(help="What a certificate promises about: ha, harmed, dice, worse-voxels, or none.")
    ] = "ha"
    alpha: Annotated[float, typer.Option(help="The promised risk.")] = 0.2
    delta: Annotated[
        float | None, typer.Option(help="Chance that the promise may fail; without it the promise is about the mean.")
    ] = None
    margin: Annotated[float, typer.Option(help="--loss harmed: a case is harmed where it loses more than this.")] = 0.0
    name: Annotated[str | None, typer.Option(help="What tables call this benchmark; default: the model's name.")] = None

    @property
    def designs(self) -> list[str]:
        """Designs to calibrate; a wrong name is an error before anything is recorded."""
        from casewise.judge.policy import design_of

        named = list(dict.fromkeys(self.policy or ["default"]))
        for design in named:
            design_of(design)
        return named

    @property
    def promise(self) -> Promise | None:
        """What certificates are asked for."""
        from casewise.judge.certificates.certify_router import Promise

        if self.loss == "none":
            return None
        return Promise((self.loss,), (self.alpha,), self.delta, margin=self.margin)


@app.command(cls=NnUNetStyle)
@grouped
def bench(
    what: BenchmarkOptions,
    source: ModelOptions,
    how: AdaptationOptions,
    where: EngineOptions,
    telling: PrintingOptions,
    paths: list[Path] = typer.Argument(
        None, metavar="DATA...", help="Folder with images/, labels/ and cases.csv, or a dataset that casewise knows."
    ),
    check: Path = typer.Option(None, "--check", help="Check a result file; with DATA also images, labels and scores."),
    leaderboard: bool = typer.Option(False, "--leaderboard", help="One table over result files, given as DATA."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure on your own data what proposals and policies gain and whom they hurt; others can check the result.

    casewise bench DATA -m MODEL -o OUT records M0 and the proposals on all cases, fits the policies on calibration
    cases only, decides on evaluation cases while their labels are closed, writes and hashes every decision, and only
    then opens the labels, once, which a ledger notes. OUT/result.json holds data, model, policies, decisions, masks and
    scores by hash. The same command again goes on where it was stopped.

    casewise bench --check OUT/result.json [DATA...] fits, decides and scores again, as far as archives and data allow.

    casewise bench --leaderboard A.json B.json prints one table; other data, or labels seen too early, are refused.

    Exit codes: 0 done, 1 --check found something wrong, 2 wrong arguments, 3 some cases could not be recorded.
    """
    from casewise.core.errors import BadInput

    given = list(paths or [])
    if check is not None and leaderboard:
        raise BadInput("--check FILE and --leaderboard FILE... are two questions; ask one of them")
    if check is not None:
        _check(check, given, as_json)
    elif leaderboard:
        _leaderboard(given, what.out, as_json)
    elif len(given) != 1 or what.out is None:
        raise BadInput(
            "a benchmark needs one folder of data, a model and a place: casewise bench DATA -m MODEL -o OUT "
            f"(got {counted(len(given), 'folder')}{'' if what.out else ', no -o'}); calibration cases in a folder of "
            "their own: --calibration FOLDER"
        )
    else:
        _run(what, given[0], what.out, source, how, where, telling, as_json)


def _run(
    what: BenchmarkOptions,
    data: Path,
    out: Path,
    source: ModelOptions,
    how: AdaptationOptions,
    where: EngineOptions,
    telling: PrintingOptions,
    as_json: bool,
) -> None:
    from casewise.adapt.adaptation import Adaptation
    from casewise.cli.record import proposals
    from casewise.core.durable import write_json
    from casewise.core.errors import BadInput
    from casewise.core.records import CALIBRATION, EVALUATION
    from casewise.deployment import Deployment
    from casewise.run.local import keep_freed_memory
    from casewise.run.record_folder import parsed_states
    from casewise.study.benchmark.case_scores import label_source, opened, scored
    from casewise.study.benchmark.decisions import decide_all, seal
    from casewise.study.benchmark.leaderboard import markdown, result_table
    from casewise.study.benchmark.result import RESULT, result_of
    from casewise.study.benchmark.sides import check_plan, sides_of

    if how.preset is not None:
        raise BadInput(
            f"bench takes no --preset; give what {how.preset} stands for: --metric miou --classes --min-area N, and "
            "the drive of each frame as cluster in cases.csv"
        )
    designs, promise, model = what.designs, what.promise, source.chosen()
    keep_freed_memory()
    plain = Adaptation(**how.asked(model), shrink=parsed_states(what.shrink))
    ladders, proposers = proposals(plain, what.propose or ["views:light"], how.objective)
    deployment = Deployment(model, proposers, ladders=ladders)
    how.check_used(deployment)
    sides = sides_of(data, what.calibration, share=what.share)
    images = sides.images()
    check_plan(out, {"images": images, "metric": what.metric, "model": model.load().fingerprint})
    known, unseen = (
        _recorded(deployment, split, sides, out, what.metric, where.chosen(), telling)
        for split in (CALIBRATION, EVALUATION)
    )
    _say("calibrating, and deciding without evaluation labels", telling)
    methods, refused = decide_all(known, unseen, designs, promise=promise)
    sealed = seal(out, methods, unseen)
    _say(f"{counted(len(methods), 'method')} sealed ({sealed.sha256[:12]}); opening the evaluation labels", telling)
    table = getattr(model.load(), "table", None)  # of merged classes
    labelled = opened(sealed, unseen, label_source(sides.evaluation, unseen, table))
    found = scored(labelled, sealed.methods, {method.name: method.policy for method in methods})
    result = result_of(
        found, sealed, name=what.name or model.load().name, sides=sides, images=images, calibration=known,
        evaluation=unseen, promise=promise, refused=refused, label_table=table,
    )  # fmt: skip
    write_json(out / RESULT, result)
    answer("\n".join([markdown(result_table(result)), "", *_words(result, out)]), result, as_json=as_json)


def _say(what: str, telling: PrintingOptions) -> None:
    if not telling.quiet:
        typer.echo(f"... {what}", err=True)


def _recorded(
    deployment: Deployment, split: str, sides: Sides, out: Path, metric: str, engine: Any, telling: PrintingOptions
) -> Archive:
    """One side in an archive; evaluation cases are recorded without the paths of their labels."""
    from casewise.archive.store import open_archive
    from casewise.core.records import CALIBRATION
    from casewise.run.record_folder import RecordCase, record_folder
    from casewise.study.benchmark.sides import COPIES, part_of

    cohort = sides.calibration if split == CALIBRATION else sides.evaluation
    files = sides.files(split, out / COPIES)
    work = RecordCase(deployment, {case.id: case for case in files})
    made, results = record_folder(
        work,
        engine,
        out / split,
        metric=metric,
        dataset=cohort.name,
        notice=cohort.notice,
        told=lambda note: typer.echo(f"casewise: {split} {note}", err=True),
    )
    failed = []
    with telling.progress(len(files), done=sum(case.id in made.entries for case in files)) as progress:
        for result in results:
            failed += [] if result.error is None else [result.case_id]
            said = f"{split} {result.case_id}: {result.error or 'recorded'}"
            progress.step(said, bad=result.error is not None)
    if failed:
        typer.echo(
            f"casewise: {len(failed)} {split} cases could not be recorded ({', '.join(failed[:3])}), so there is no "
            f"result: mend them or take them out of the data, and run the same command again",
            err=True,
        )
        raise typer.Exit(NOT_ALL_DONE)
    return part_of(open_archive(out / split), [case.id for case in files], deployment.ladders)


def _words(result: dict[str, Any], out: Path) -> list[str]:
    from casewise.study.benchmark.result import RESULT

    said = result["methods"][0]["scores"]
    lines = [
        f"{counted(said['cases'], 'evaluation case')} of {counted(said['clusters'], 'cluster')}, fitted on "
        f"{len(result['data']['calibration'])} calibration cases; intervals by cluster."
    ]
    if said["low"] is None:
        lines.append("There are fewer than five clusters, so no interval is given.")
    if result["oracle"] is not None:
        lines.append(
            f"The best recorded candidate of each case, which only the label knows, gains {result['oracle']:+.4f}."
        )
    lines += [f"! refused: {reason}" for reason in result["refused"]]
    lines += [f"! {note}" for method in result["methods"] for note in method["notes"]]
    if result["labels_seen_before_decisions"]:
        lines.append(
            "! Evaluation labels had been opened in this folder before these decisions were taken; the result says so, "
            "and no leaderboard takes it."
        )
    return [*lines, f"wrote {out / RESULT}; check it with: casewise bench --check {out / RESULT} DATA"]


def _check(file: Path, data: list[Path], as_json: bool) -> None:
    from casewise.archive.layout import MANIFEST
    from casewise.core.records import EVALUATION
    from casewise.study.benchmark.check import check
    from casewise.study.benchmark.result import read_result

    result = read_result(file)
    beside = file.parent if (file.parent / EVALUATION / MANIFEST).is_file() else None
    problems, open_ends = check(result, beside, data)
    words = [*(f"! {one}" for one in problems), *(f"- {one}" for one in open_ends)]
    words.append(f"{file}: {len(problems)} problems" if problems else f"{file} holds, as far as it was checked")
    content = {"file": file, "holds": not problems, "problems": problems, "not_checked": open_ends}
    answer("\n".join(words), content, as_json=as_json)
    if problems:
        raise typer.Exit(FOUND_WRONG)


def _leaderboard(files: list[Path], out: Path | None, as_json: bool) -> None:
    from casewise.core.durable import write_durably, write_json
    from casewise.core.errors import BadInput
    from casewise.study.benchmark import leaderboard as board
    from casewise.study.benchmark.result import read_result

    if out is not None and out.suffix not in (".md", ".html", ".json"):
        raise BadInput(f"a leaderboard is written as .md, .html or .json, got {out.name}")
    results = {str(file): read_result(file) for file in files}
    made = board.leaderboard(results)
    content = board.as_json(results)
    if out is not None:
        if out.exists() and any(out.samefile(file) for file in files):
            raise BadInput(f"{out} is one of the results that the table is made of; write it to another file")
        if out.exists() and not board.is_leaderboard(out):
            raise BadInput(f"{out} is there and holds no leaderboard; give -o another name")
        if out.suffix == ".json":
            write_json(out, content)
        else:
            write_durably(out, (board.markdown(made) if out.suffix == ".md" else board.html_page(made)).encode())
    answer(board.markdown(made), content, as_json=as_json)

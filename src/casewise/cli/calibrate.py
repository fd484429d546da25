"""``casewise calibrate`` a policy, and ``casewise choose-views``: both read the labels of a calibration archive."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.archive.store import Archive
    from casewise.core.records import Policy


app = typer.Typer()


@app.command()
def calibrate(
    archive: Path = typer.Argument(..., help="An archive of calibration cases."),
    policy: str = typer.Option(
        "default", help="default, cardiac, prostate, driving, fixed-k, frag-stop, ..., or package.module:Name."
    ),
    out: Path = typer.Option(
        None, "--out", "-o", help="Where to write the policy; default: policy.json in the archive."
    ),
    mode: str = typer.Option("union", help="union, pooled, per-group, robust or inferred."),
    percentiles: str = typer.Option(
        None, help="medical (33.33/66.67), driving (33/66) or rank; default: the design's."
    ),
    coordinate: str = typer.Option(None, help="Route on another signal, e.g. regions, or -msp (higher is riskier)."),
    budget_rule: str = typer.Option("ha", help="fixed-k: ha, metric, ha-half-metric or ha-metric."),
    tau_quantile: float = typer.Option(0.5, help="tau-stop: quantile of the risk at the oracle step."),
    hybrid: bool = typer.Option(False, help="Let the pool grow with the stream; cut-points then depend on the stream."),
    window: int = typer.Option(None, help="hybrid: refit on this many latest cases only."),
    unshrunk: bool = typer.Option(False, help="Keep mid at its full depth, for archives without shrunk states."),
    reviews: Path = typer.Option(None, help="Reviewer decisions (JSON lines) as labels of helped and hurt."),
    evaluation: Path = typer.Option(None, help="Evaluation archive: ids and label-free signals are read, and logged."),
    source_metric: float = typer.Option(None, help="The model's metric on its own domain: is M0 usable here?"),
    ladder: list[str] = typer.Option(
        [], help="Which ladder, where the archive holds several; repeat to choose among the candidates of several."
    ),
    consensus: str = typer.Option(None, help="Which candidate is the consensus of the others, if none is called so."),
    allowed_hurt: float = typer.Option(0.1, help="default, choose: share of cases that may lose more than a point."),
    flag_below: float = typer.Option(None, help="Ask a person where the metric may lie below this."),
    at: float = typer.Option(0.9, help="--flag-below: chance that the lower bound of the metric holds."),
    as_json: bool = AS_JSON,
) -> None:
    """Fit a policy's cut-points on a holdout archive, examine it, and write policy.json."""
    from casewise.core.errors import CasewiseWarning
    from casewise.judge.calibration.fit import calibrate as fitted
    from casewise.judge.calibration.preflight import in_words, read_reviews
    from casewise.judge.ledger import expose
    from casewise.judge.policy import write_policy

    holdout = in_view(archive, ladder)
    held_out = None if evaluation is None else in_view(evaluation, ladder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CasewiseWarning)
        made = fitted(
            holdout,
            policy,
            mode=mode,
            percentiles=percentiles,
            coordinate=coordinate,
            budget_rule=budget_rule,
            tau_quantile=tau_quantile,
            hybrid=hybrid,
            window=window,
            unshrunk=unshrunk,
            reviews=None if reviews is None else read_reviews(reviews, holdout),
            evaluation=held_out,
            source_metric=source_metric,
            consensus=consensus,
            allowed_hurt=allowed_hurt,
            flag_below=flag_below,
            at=at,
        )
    if held_out is not None:
        expose(held_out.path, choice="calibrate looked at label-free signals", policy=made, labels_visible=False)
    kept = _kept_previous(out or archive, made)
    file = write_policy(out or archive, made)
    for warning in caught:
        typer.echo(f"! {warning.message}", err=True)
    words = [*in_words(made), *([] if kept is None else [f"the policy that was there is now {kept}"]), f"wrote {file}"]
    answer("\n".join(words), {"file": file, "previous": kept, **asdict(made)}, as_json=as_json)


def in_view(path: Path, ladders: list[str]) -> Archive:
    """An archive with the ladders that are read: the one that is named or there, or several together."""
    from casewise.archive.store import open_archive

    opened = open_archive(path)
    return opened.together(ladders) if len(ladders) > 1 else opened.one(*ladders)


def _kept_previous(place: Path, made: Policy) -> Path | None:
    """A policy that is there and says something else is moved aside, never overwritten."""
    from casewise.core.errors import CasewiseError
    from casewise.judge.policy import POLICY, read_policy

    file = place / POLICY if place.is_dir() else place
    if not file.is_file():
        return None
    try:
        if asdict(read_policy(file, typed=made.controller)) == asdict(made):
            return None
    except CasewiseError:  # damaged, edited or of another version: worth keeping all the same
        pass
    number = 1
    while (aside := file.with_name(f"{file.stem}-previous-{number}.json")).exists():
        number += 1
    return file.rename(aside)


@app.command()
def choose_views(
    archive: Path = typer.Argument(..., help="Archive of labelled calibration cases, recorded with --keep-ballots."),
    ladder: str = typer.Option(None, help="Which ladder of views, where the archive holds several."),
    most: int = typer.Option(12, min=1, help="Views at most."),
    slack: float = typer.Option(
        1.0, min=0.0, help="Standard errors by which a larger set may lie below the best; 0 takes the best."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Choose on calibration labels which views enter the consensus; say what such a choice gains on clusters left out.

    Of the sets that grow view by view the largest that is not surely worse than the best: averaging more hurts fewer.
    Prints a proposal for casewise record --propose and casewise predict --objective. The estimate leaves one patient or
    sequence out at a time; the gain on the cases that chose is shown beside it and is no promise.
    """
    from casewise.archive.store import open_archive
    from casewise.core.records import CALIBRATION
    from casewise.judge.calibration.view_selection import chosen_views, read_case
    from casewise.judge.outcomes import POINT

    opened = open_archive(archive, ladder=ladder).one().marked(CALIBRATION)
    cases = [read_case(opened, case_id) for case_id in opened.ids]
    found = chosen_views(cases, most=most, slack=slack)
    clusters = len({case.cluster for case in cases})
    useless = not found.names or found.left_out <= 0
    words = [
        f"{counted(len(cases), 'case')} of {counted(clusters, 'cluster')}, {counted(len(cases[0].names), 'view')}",
        f"mean gain of all views together: {found.everything:+.4f}",
        f"mean gain of chosen views on clusters left out: {found.left_out:+.4f} (in sample {found.in_sample:+.4f})",
        f"cases left out that lost more than {POINT:g}: {found.hurt:.0%}",
    ]
    if found.set_aside:
        random = counted(found.set_aside, "random view")
        words.insert(1, f"{random} set aside: drawn anew for each case, so no name makes them again")
    if useless:
        words.append("no choice gains on clusters left out: keep M0, or record other views")
    elif found.left_out < found.everything:
        words.append("all views together gain more than a choice among them: deploy them all")
    if not useless:
        words.append(f"--propose '{found.proposal}'")
    content = {"cases": len(cases), "clusters": clusters, "proposal": None if useless else found.proposal}
    answer("\n".join(words), {**content, **asdict(found)}, as_json=as_json)
    if useless:
        raise typer.Exit(1)

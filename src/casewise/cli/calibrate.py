"""``casewise calibrate``."""

from __future__ import annotations

import warnings
from pathlib import Path

import typer

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
    ladder: str = typer.Option(None, help="Which ladder, where the archive holds several."),
    consensus: str = typer.Option(None, help="Which candidate is the consensus of the others, if none is called so."),
    allowed_hurt: float = typer.Option(0.1, help="default: share of cases that may lose more than a point."),
    flag_below: float = typer.Option(None, help="Ask a person where the metric may lie below this."),
    at: float = typer.Option(0.9, help="--flag-below: chance that the lower bound of the metric holds."),
) -> None:
    """Fit a policy's cut-points on a holdout archive, examine it, and write policy.json."""
    from casewise.archive.store import open_archive
    from casewise.core.errors import CasewiseWarning
    from casewise.judge.calibration.fit import calibrate as fitted
    from casewise.judge.calibration.policy_sentences import in_words
    from casewise.judge.calibration.reviews import read_reviews
    from casewise.judge.ledger import expose
    from casewise.judge.policy import write_policy

    held_out = None if evaluation is None else open_archive(evaluation, ladder=ladder).one()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CasewiseWarning)
        made = fitted(
            open_archive(archive, ladder=ladder).one(),
            policy,
            mode=mode,
            percentiles=percentiles,
            coordinate=coordinate,
            budget_rule=budget_rule,
            tau_quantile=tau_quantile,
            hybrid=hybrid,
            window=window,
            unshrunk=unshrunk,
            reviews=None if reviews is None else read_reviews(reviews),
            evaluation=held_out,
            source_metric=source_metric,
            consensus=consensus,
            allowed_hurt=allowed_hurt,
            flag_below=flag_below,
            at=at,
        )
    if held_out is not None:
        expose(held_out.path, choice="calibrate looked at label-free signals", policy=made, labels_visible=False)
    file = write_policy(out or archive, made)
    for line in in_words(made):
        typer.echo(line)
    for warning in caught:
        typer.echo(f"! {warning.message}", err=True)
    typer.echo(f"wrote {file}")

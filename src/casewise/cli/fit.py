"""``casewise fit``: from a model and labelled cases to a deployment."""

from __future__ import annotations

from pathlib import Path

import typer

from casewise.cli.options import ModelOptions, NnUNetStyle, PrintingOptions, grouped, setting
from casewise.cli.printing import AS_JSON, answer

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def fit(
    source: ModelOptions,
    telling: PrintingOptions,
    images: Path = typer.Option(..., "-i", help="Folder with the labelled images."),
    labels: Path = typer.Option(..., "-l", "--labels", help="Folder with their labels, under the same names."),
    out: Path = typer.Option(
        ..., "-o", "--out", help="Folder to write the deployment to; repeat the command to resume."
    ),
    groups: Path = typer.Option(None, help="CSV with case and cluster (patient); default: cases.csv beside images."),
    views: str = typer.Option(
        None, help="Views (transformed images) to predict: {views}; '' for none; default: chosen from the images."
    ),
    learn: bool = typer.Option(True, "--learn/--no-learn", help="Tune the weights of the model on the labels."),
    parameters: str = typer.Option(
        "norm+head", help="Weights that are tuned: norm+head, norm, all, or patterns of names."
    ),
    propose: list[str] = typer.Option([], help="Further proposers, such as members:folds; repeat for several."),
    metric: str = setting(None, help="{metrics}; default: chosen from the classes."),
    flag_below: float = typer.Option(
        None,
        "--flag-below",
        help="Flag cases whose metric may be below this; default: 0.7 (Dice), 0.5 (mIoU); 0: no flags.",
    ),
    allowed_hurt: float = setting(0.1, help="Share of patients that may lose more than 0.01 of the metric."),
    promise: float = typer.Option(
        None,
        help="Promise that at most this share of new cases is harmed, such as 0.2; some patients are set aside to "
        "certify it.",
    ),
    loss: str = typer.Option("harmed", help="Loss that --promise bounds: {losses}."),
    measures: Path = typer.Option(None, help="measures.toml: clinical measures such as the ejection fraction."),
    learning_curve: bool = typer.Option(
        True, "--learning-curve/--no-learning-curve", help="Estimate the gain with half of the labelled patients."
    ),
    jobs: int = typer.Option(None, "-j", help="Processes; default: one for each core."),
    copy_model: bool = typer.Option(False, "--copy-model", help="Store a copy of the model in the deployment."),
    as_json: bool = AS_JSON,
) -> None:
    """Build a deployment from a model and a few labelled cases.

    Example:

        casewise fit -m MODEL -i images -l labels -o deployment

    fit makes candidate masks, tunes the model on the labels, compares the results on patients that were left out, and
    keeps the best if it is better than the model alone. It writes one folder with a page (fit.html). Use the folder
    with casewise predict -i IN -o OUT -m FOLDER.
    """
    from casewise.fit import fit as run_fit
    from casewise.learn.tuning import NAMED, Tuning
    from casewise.run.local import keep_freed_memory

    keep_freed_memory()
    with telling.steps() as progress:
        deployment = run_fit(
            source.as_model(), images, labels, patients=groups, out=out, views=views, learn=learn, propose=propose,
            tuning=Tuning(parameters if parameters in NAMED else tuple(parameters.split(","))),
            metric=metric, flag_below=flag_below, allowed_hurt=allowed_hurt, promise=promise, loss=loss,
            learning_curve=learning_curve, measures=measures or (), jobs=jobs, copy_model=copy_model,
            on_progress=progress, on_note=None if telling.quiet else lambda said: typer.echo(f"{said}.", err=True),
        )  # fmt: skip
    answer(deployment.summary(), {"folder": out, "page": out / "fit.html"}, as_json=as_json)

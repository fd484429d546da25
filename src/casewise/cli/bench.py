"""``casewise bench``: compare methods and policies on labelled cases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from casewise.cli.options import (
    SETTINGS,
    AdaptationOptions,
    EngineOptions,
    ModelOptions,
    NnUNetStyle,
    PrintingOptions,
    grouped,
    setting,
)
from casewise.cli.printing import AS_JSON, answer

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def bench(
    source: ModelOptions,
    how: Annotated[AdaptationOptions, SETTINGS],
    where: EngineOptions,
    telling: PrintingOptions,
    data: Path = typer.Argument(
        ..., help="Folder with images/, labels/ and cases.csv, a dataset that casewise knows, or an archive."
    ),
    out: Path = typer.Option(..., "-o", "--out", help="Folder for archives, tables and result.json."),
    calibration: Path | None = typer.Option(
        None, "--calibration", help="Calibration cases: a folder, or an archive if DATA is an archive."
    ),
    share: float = setting(
        0.3,
        help="Share of patients drawn for calibration if --calibration and a column split are missing.",
    ),
    propose: list[str] | None = typer.Option(
        None,
        help="Method: {objectives}, views:SET (SET is {views}), NAME=views:gamma(1.4), members:FOLDER or "
        "package.module:function; repeat for several. Default: views:light.",
    ),
    policy: list[str] | None = typer.Option(
        None,
        help="Policy to calibrate and score: {policies}, or package.module:Name; repeat for several. Default: default.",
    ),
    metric: str = typer.Option("dice", help="Metric that labels are scored with: {metrics}."),
    shrink: str = setting("", help="Interpolated states of updates, as step:alpha with commas."),
    loss: str = typer.Option("ha", help="Loss that is certified: {losses}, or none."),
    alpha: float = typer.Option(0.2, help="Largest allowed risk."),
    delta: float | None = typer.Option(
        None, help="Probability that the bound may fail; without it, the mean risk is bounded."
    ),
    margin: float = setting(0.0, help="With --loss harmed: a case is harmed if it loses more than this."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare methods and policies on your labelled data.

    Example:

        casewise bench DATA -m MODEL -o OUT --propose views:mri --propose tent --policy default --policy choose

    Records all candidates in OUT/calibration and OUT/evaluation, fits every policy on the calibration cases, decides
    the evaluation cases without their labels, and then scores the decisions. An archive is not recorded again. Writes
    OUT/bench.html, OUT/result.json, the table as CSV and LaTeX (OUT/tables) and the fitted policies (OUT/policies).
    Repeat the command to resume an interrupted run.
    """
    from casewise.adapt.adaptation import Adaptation
    from casewise.bench import DESIGNS, METHODS, policy_file
    from casewise.bench import bench as run_bench
    from casewise.cli.record import proposals
    from casewise.run.local import keep_freed_memory
    from casewise.run.record_folder import parsed_states

    keep_freed_memory()
    model = adaptation = None
    if not (data / "manifest.json").is_file():
        model = source.as_model()
        adaptation = Adaptation(**how.as_fields(model), shrink=parsed_states(shrink))
        how.check_used(proposals(adaptation, propose or list(METHODS), how.objective))
    with telling.steps() as progress:
        found = run_bench(
            model, data, methods=propose or METHODS, policies=policy or DESIGNS,
            calibration=calibration, share=share, metric=metric,
            loss=None if loss == "none" else loss, alpha=alpha, delta=delta, margin=margin,
            adaptation=adaptation, out=out, jobs=where.as_engine(), on_progress=progress,
            on_warning=lambda note: typer.echo(f"casewise: {note}", err=True),
        )  # fmt: skip
    lines = [found.summary(), f"Wrote {out}: bench.html, result.json, tables/"]
    if model is not None and found.policies:
        first = policy_file(next(iter(found.policies)))
        archives = f"{out}/evaluation -c {out}/calibration"
        lines.append(f"All tables of the paper: casewise study {archives} -p {out}/policies/{first}")
    answer("\n".join(lines), dict(found.result), as_json=as_json)

"""``casewise calibrate``: a policy from the labels of a calibration archive."""

from __future__ import annotations

import shutil
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import NnUNetStyle, grouped, setting
from casewise.cli.printing import AS_JSON, answer, warn

if TYPE_CHECKING:
    from casewise.core.records import Policy


app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def calibrate(
    archive: Path = typer.Argument(..., help="Archive of labelled calibration cases (from casewise record)."),
    policy: str = typer.Option("default", help="Policy to fit: {policies}, or package.module:Name."),
    out: Path = typer.Option(None, "--out", "-o", help="File to write; default: policy.json in the archive."),
    mode: str = setting(
        "union", help="Cut-points of groups: union (one for all), per-group, or robust (the lowest of all groups)."
    ),
    percentiles: str = setting(None, help="medical (33.33/66.67) or driving (33/66); default: the design's."),
    coordinate: str = setting(
        None, help="Signal that cases are routed by, such as regions or -msp (higher is riskier)."
    ),
    budget_rule: str = setting("ha", help="fixed-k: rule that chooses k: ha, metric, ha-half-metric or ha-metric."),
    tau_quantile: float = setting(0.5, help="tau-stop: quantile of the risk at the best step of each case."),
    hybrid: bool = setting(
        False, help="Add new cases to the calibration pool; cut-points then depend on the order of cases."
    ),
    window: int = setting(None, help="hybrid: refit on this many latest cases only."),
    unshrunk: bool = setting(
        False, help="Use the full update in the bucket mid, for archives without interpolated states."
    ),
    source_metric: float = setting(None, help="Metric of the model on its own data, to warn if it is much lower here."),
    ladder: list[str] = typer.Option([], help="Method to use, if the archive has several; repeat for several."),
    consensus: str = setting(None, help="Name of the candidate that combines the others."),
    allowed_hurt: float = typer.Option(0.1, help="default, choose: share of patients that may lose more than 0.01."),
    flag_below: float = typer.Option(None, help="Flag cases whose metric may be below this."),
    confidence: float = typer.Option(0.9, help="--flag-below: probability that the lower bound holds."),
    as_json: bool = AS_JSON,
) -> None:
    """Fit a policy on labelled calibration cases, check it, and write policy.json.

    Example:

        casewise calibrate archive --policy default

    default: if the archive has views or members, designs are compared on patients left out, and the best one that
    passes all tests is fitted; else a router, which keeps the original mask where the largest changed region is large.
    """
    from casewise.archive.store import as_archive
    from casewise.core.errors import CasewiseWarning
    from casewise.core.records import CALIBRATION
    from casewise.judge.calibration.calibrate import calibrate as fitted
    from casewise.judge.calibration.preflight import in_words
    from casewise.judge.calibration.quality import too_few_for_flags
    from casewise.judge.policy import write_policy

    holdout = as_archive(archive, ladder)
    unflagged = None if flag_below is None else too_few_for_flags(holdout.marked(CALIBRATION), confidence)
    if unflagged:  # checked before anything is computed
        warn(unflagged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CasewiseWarning)
        made = fitted(
            holdout, policy, mode=mode, percentiles=percentiles, coordinate=coordinate, budget_rule=budget_rule,
            tau_quantile=tau_quantile, hybrid=hybrid, window=window, unshrunk=unshrunk,
            source_metric=source_metric,
            consensus=consensus, allowed_hurt=allowed_hurt, flag_below=flag_below, confidence=confidence,
            progress=_progress,
        )  # fmt: skip
    kept = _kept_previous(out or archive, made)
    file = write_policy(out or archive, made)
    for warning in caught:
        warn(str(warning.message))
    words = [*in_words(made), *([] if kept is None else [f"the earlier policy was copied to {kept}"]), f"wrote {file}"]
    answer("\n".join(words), {"file": file, "previous": kept, **asdict(made)}, as_json=as_json)


def _progress(what: str, done: int, total: int) -> None:
    """Show progress in one line that is overwritten, on a terminal only."""
    if sys.stderr.isatty():
        typer.echo(f"\r{what}: {done} of {total}\x1b[K{chr(10) * (done == total)}", err=True, nl=False)


def _kept_previous(place: Path, made: Policy) -> Path | None:
    """Copy an earlier, different policy aside before it is overwritten."""
    from casewise.core.errors import CasewiseError
    from casewise.judge.policy import POLICY, read_policy

    file = place / POLICY if place.is_dir() else place
    if not file.is_file():
        return None
    with suppress(CasewiseError):  # damaged, edited or of another version: it is kept, too
        if asdict(read_policy(file, typed=made.controller)) == asdict(made):
            return None
    number = 1
    while (aside := file.with_name(f"{file.stem}-previous-{number}.json")).exists():
        number += 1
    return Path(shutil.copyfile(file, aside))  # not renamed: another calibrate may be reading or replacing it

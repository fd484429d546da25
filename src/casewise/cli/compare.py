"""``casewise compare``: may the new masks replace the old ones?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from casewise.cli.options import NnUNetStyle, grouped, setting
from casewise.cli.printing import AS_JSON, NO_PATIENT, answer, warn
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from casewise.run.local import LocalEngine
    from casewise.study.compare import Outcome

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def compare(
    old: Path = typer.Argument(None, help="Folder with the masks in use (.nii.gz, .nii, .png, .npy, DICOM)."),
    new: Path = typer.Argument(None, help="Folder with the masks that may replace them, under the same names."),
    out: Path = typer.Option(None, "--out", "-o", help="Folder for the page, the tables and the verdict."),
    labels: Path = typer.Option(None, "--labels", "-l", help="Folder with labels of the same names."),
    images: Path = typer.Option(None, "--images", "-i", help="Folder with images, for the pictures."),
    plan: Path = typer.Option(None, help="plan.toml: criteria, fixed and sealed before NEW is opened."),
    new_plan: bool = typer.Option(False, "--new-plan", help="Write a commented plan to --plan (plan.toml) and stop."),
    how_many: bool = typer.Option(False, "--how-many", help="Print how many labelled patients --plan needs and stop."),
    measures: Path = typer.Option(None, help="measures.toml: formulas over volumes, such as the ejection fraction."),
    cases: Path = typer.Option(None, help="CSV with case, group (site), cluster (patient) and scan (ED, ES)."),
    names: Path = typer.Option(None, help="CSV with case, old, new (label, image) where file names differ."),
    allow: list[str] = typer.Option(
        [],
        help="Problem that does not count as a failure: missing, unlabelled, empty, labels, ...; repeat for several.",
    ),
    resample: str = typer.Option(None, help="nearest: resample new masks to the grid of the old ones."),
    label_names: str = typer.Option(
        None, help="Names of labels: 1=LV,2=MYO, or a dataset.json; default: the dataset.json beside the masks."
    ),
    classes: str = typer.Option(None, help="Compare these labels only, such as 1,2,3; others become background."),
    metric: str = typer.Option("dice", help="Metric that labels are scored with: {metrics}."),
    good: float = typer.Option(
        0.7, help="A case is good if its metric is at least this; the page lists cases that are no longer good."
    ),
    pictures: int = typer.Option(10, help="Number of cases on the page, most suspicious first."),
    take_over: Path = typer.Option(
        None,
        help="Policy (casewise calibrate --policy update) that chooses the old or new mask by case; writes OUT/masks.",
    ),
    jobs: int = typer.Option(0, "-j", "--jobs", help="Processes; 0: one for each core."),
    fresh: bool = typer.Option(False, help="Compare every pair again; do not use results of an earlier run in OUT."),
    spacing: tuple[float, float, float] = setting(
        (0, 0, 0), help="Spacing in mm (slices, rows, columns), for files without spacing.", show_default=False
    ),
    zero_is_label: bool = setting(
        None,
        "--zero-is-label/--zero-is-background",
        help="Treat label 0 as a class (in driving, 0 is road); default: true if it has a name other than background.",
        show_default=False,
    ),
    ignore: int = setting(None, help="Label of voxels that are left out, such as 255."),
    foreground: bool = setting(False, help="Compare foreground with background only, not label with label."),
    min_area: int = setting(16, help="Smallest changed region that counts, in voxels (driving: 200)."),
    surfaces: str = setting(
        "moved", help="Distances: none, moved (old to new where a label moved), all (also HD95 to the label; slower)."
    ),
    certificate: Path = setting(None, help="With --take-over: certificate that must hold for the policy."),
    method: str = setting("imported", help="With --take-over: method that made NEW, as given to casewise import."),
    model: str = setting("imported", help="With --take-over: model that made OLD, as given to casewise import."),
    force: bool = setting(False, help="With --take-over: use a policy that calibration advised against (NO-GO)."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare two folders of masks, case by case, with or without labels.

    Example:

        casewise compare old_masks new_masks -l labels -o comparison

    Exit codes: 0 accepted, or compared without a plan, 2 wrong arguments or inputs, 3 a pair has a problem (no partner,
    another shape, ...) that --allow does not name, 4 rejected by the plan, 5 too few patients to decide.
    """
    from tqdm import tqdm

    from casewise.core.errors import BadInput
    from casewise.report.comparison_page import write_comparison
    from casewise.study.compare import WRITTEN, check_place, compare_folders
    from casewise.study.compared_pairs import alone

    if new_plan or how_many:
        _about_plan(plan or Path("plan.toml"), write=new_plan, as_json=as_json)
        return
    if old is None or new is None or out is None:
        raise BadInput("compare needs two folders and an output folder: casewise compare OLD NEW -o OUT")
    check_place(out, (old, new, labels, images))
    with alone(out):
        for name in WRITTEN:  # remove results of an earlier run
            (out / name).unlink(missing_ok=True)
        outcome = compare_folders(
            old, new, labels=labels, images=images, cases=cases, names=names, plan=plan, measures=measures,
            label_names=label_names, zero_is_label=zero_is_label, allow=allow, good=good, out=out,
            engine=_engine(jobs, old), fresh=fresh,
            progress=lambda lines, total: tqdm(lines, total=total, unit="pair", disable=None),
            spacing_mm=tuple(spacing) if any(spacing) else None,
            classes=None if classes is None else _numbers(classes), min_area=min_area, foreground=foreground,
            ignore=ignore, metric=metric, surfaces=surfaces, resample=resample,
        )  # fmt: skip
        write_comparison(out, outcome, old=old.name, new=new.name, pictures=pictures)
        code = outcome.exit_code
        taken: dict[str, Any] = {}
        if take_over is not None:
            options: dict[str, Any] = {"model": model, "method": method, "certificate": certificate, "force": force}
            code, taken = _take_over(outcome, out, take_over, **options)
    if as_json:
        answer("", {**outcome.as_dict(), **taken}, as_json=True)
    else:
        _print(outcome, out)
        for line in taken.get("lines", ()):
            typer.echo(line)
    if plan is not None and cases is None and not as_json:
        typer.echo(NO_PATIENT, err=True)
    raise typer.Exit(code)


def _about_plan(plan: Path, *, write: bool, as_json: bool) -> None:
    """Write a commented plan, or say how many patients a plan needs."""
    from casewise.core.durable import write_durably
    from casewise.core.errors import BadInput
    from casewise.study.plan import POWER, TEMPLATE, how_many, read_plan

    if write:
        if plan.exists():
            raise BadInput(f"{plan} exists; edit it, or name another file with --plan")
        write_durably(plan, TEMPLATE.encode())
        answer(f"{plan}: edit it before you look at the new masks, then run casewise compare --plan {plan} --how-many",
               {"plan": plan}, as_json=as_json)  # fmt: skip
        return
    read = read_plan(plan)
    rows = how_many(read)
    known = [row.patients for row in rows if row.patients is not None]
    lines = [
        f"{row.criterion} on {row.scope}: {'' if row.patients is None else pluralize(row.patients, 'patient')}{row.why}"
        for row in rows
    ]
    needed, unknown = max(known, default=0), len(rows) - len(known)
    if unknown:
        lines.append(
            f"The number of patients is unknown: {pluralize(unknown, 'criterion', 'criteria')} above without a number."
        )
    else:
        lines.append(
            f"{needed} labelled patients are needed: if the expected values are right, all criteria are met with a "
            f"chance of {POWER:.0%}. For a criterion on a group, size or label, only its patients count."
        )
        if read.patients is not None and read.patients < needed:
            lines.append(f"The plan has patients = {read.patients}, which is too few.")
    plain = [vars(row) for row in rows]
    answer("\n".join(lines), {"patients": None if unknown else needed, "criteria": plain}, as_json=as_json)


def _numbers(text: str) -> tuple[int, ...]:
    from casewise.core.errors import BadInput

    try:
        return tuple(sorted({int(part) for part in text.replace(",", " ").split()}))
    except ValueError:
        raise BadInput(f"--classes takes label numbers such as 1,2,3, got {text!r}") from None


def _engine(jobs: int, old: Path) -> LocalEngine:
    """Return the engine; by default with a process for every 64 pairs, because a process takes long to start."""
    from casewise.run.local import LocalEngine

    cases = sum(1 for _ in old.iterdir()) if old.is_dir() else 1
    return LocalEngine(jobs or max(1, min(os.cpu_count() or 1, cases // 64)))


def _print(outcome: Outcome, out: Path) -> None:
    from casewise.measure.changes import label_name
    from casewise.measure.measures import UNIT_SPACING
    from casewise.report import comparison_text as text

    summary = outcome.as_dict()
    typer.echo(text.headline(summary))
    if "metric_old" in summary["summary"]:
        typer.echo(text.change_sentence(summary["summary"]).replace("→", "->").replace("−", "-"))
    if text.worse_parts(summary):
        typer.echo(text.worse_parts(summary).replace("−", "-"))
    pieces = {"holes_gained": "gained holes", "components_gained": "gained pieces", "components_lost": "lost pieces"}
    for row in summary["summary"]["labels"]:
        drift = row["drift"]
        words = [f"{label_name(row['label'], outcome.names)}: {row['changed']} of {row['cases']} changed"]
        if drift is not None and drift["estimate"] is not None:
            words.append(f"volume {drift['estimate']:+.1%}")
        words += [f"{said}: {row[name]}" for name, said in pieces.items() if row[name]]
        if row.get("metric_old") is not None:
            words.append(f"Dice {row['metric_old']:.3f} -> {row['metric_new']:.3f}")
        typer.echo(", ".join(words))
    for line in (*text.measure_lines(summary), *text.check_lines(summary)):
        typer.echo(line.replace("−", "-"))
    if summary["checks"]:
        typer.echo(text.unseen_harm(summary))
    if summary["unit_spacing"]:
        warn(UNIT_SPACING)
    for kind, count in summary["problems_by_kind"].items():
        of = [problem for problem in outcome.problems if problem.kind == kind]
        others = ", ".join([*(one.case for one in of[1:3]), *([f"{count - 3} more"] if count > 3 else [])])
        warn(f"{count} {kind}{' (allowed)' * of[0].allowed}: {of[0].message}{f' (also {others})' if others else ''}")
    typer.echo(f"{outcome.verdict}; see {out / 'report.html'}")


def _take_over(outcome: Outcome, out: Path, policy: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    """Let a policy choose old or new for every case; return the exit code and the text to print."""
    from casewise.judge.policy import read_policy
    from casewise.run.take_over import take_over_folders, take_over_lines
    from casewise.study.compare import FAILED

    if outcome.verdict in ("rejected", "undecided"):
        return outcome.exit_code, {"lines": [f"no mask was taken over: the verdict of the plan is {outcome.verdict}"]}
    chosen = read_policy(policy)
    masks = out / "masks"
    taken = list(take_over_folders(list(outcome.files.values()), chosen, masks, **options))
    code = FAILED if any(not one.compared for one in taken) else outcome.exit_code
    kinds = {one.case_id: one.taken for one in taken}
    return code, {"taken": kinds, "masks": str(masks), "lines": take_over_lines(taken, chosen, masks)}

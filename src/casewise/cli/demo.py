"""``casewise demo``: fit and predict on embedded phantom hearts of another scanner."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import NnUNetStyle
from casewise.cli.printing import AS_JSON, StepProgress, answer

if TYPE_CHECKING:
    from casewise.data.splits import Cohort, Member

app = typer.Typer()

MODEL = "casewise.adapt.networks:phantom_cardiac"
LABELLED, NEW, OTHER = 19, 20, 2  # hearts: labelled, new, and new from a third scanner
HOME = 12  # hearts of the scanner that the model was trained on
PROMISE = 0.2  # share of new hearts that may lose more than a point
UPDATES = 40  # of tuning; the default of fit is 80
VIEWS = "light"


@app.command(cls=NnUNetStyle)
def demo(
    out: Path = typer.Option(Path("demo-report"), "-o", "--out", help="Folder for data, masks and the report."),
    jobs: int = typer.Option(2, "-j", help="Number of processes."),
    as_json: bool = AS_JSON,
) -> None:
    """Run fit and predict on simulated hearts, and write a page.

    Example:

        casewise demo -o demo-report

    A model was trained on one simulated scanner; the hearts come from another. Some labelled hearts tune the model,
    others certify the result; then new hearts are segmented and scored. The hearts are simulated: they show how
    casewise works and are not evidence.
    """
    from casewise.fit import fit
    from casewise.learn.tuning import Tuning
    from casewise.report.demo_page import demo_facts, write_demo
    from casewise.run.local import keep_freed_memory

    _check_place(out)
    keep_freed_memory()
    began = time.perf_counter()
    taught, unseen = out / "data" / "labelled", out / "data" / "new"
    cohort = _write_data(taught, unseen)
    with StepProgress() as progress:
        deployment = fit(
            MODEL, taught / "images", taught / "labels", out=out / "deployment", views=VIEWS,
            tuning=Tuning(updates=UPDATES), promise=PROMISE, learning_curve=False, jobs=jobs, on_progress=progress,
        )  # fmt: skip
    typer.echo(f"... predicting {len(cohort.ids)} new hearts", err=True)
    found = deployment.predict_folder(
        unseen / "images", out / "masks", labels=unseen / "labels", jobs=jobs, save_candidates=True, overwrite=True
    )
    facts = demo_facts(cohort, found.entries, out, home=_at_home())
    page = write_demo(facts, cohort, out)
    seconds = time.perf_counter() - began
    commands = [
        f"casewise fit -m {MODEL} -i {taught}/images -l {taught}/labels --promise {PROMISE:g} -o my-deployment",
        f"casewise predict -m my-deployment -i {unseen}/images -o my-masks",
    ]
    words = [
        cohort.notice,
        "",
        *facts.sentences,
        "",
        f"Page: {page}  ({seconds:.0f} s)",
        "",
        "To repeat it with the default settings of fit:",
    ]
    content = {**facts.as_plain(), "page": page, "seconds": seconds, "commands": commands}
    answer("\n".join([*words, *(f"  {line}" for line in commands)]), content, as_json=as_json)


def _check_place(out: Path) -> None:
    """Refuse a folder with files that no earlier demo wrote."""
    from casewise.core.errors import BadInput
    from casewise.report.demo_page import PAGE

    there = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if there and not {"data", "deployment"} >= set(there) and PAGE not in there:
        raise BadInput(f"{out} has {there[0]}, which casewise demo did not write; choose another folder with -o")


def _write_data(taught: Path, unseen: Path) -> Cohort:
    """Write the phantoms as files, as a user has them; return the new ones, with a few of a third scanner."""
    from casewise.data.datasets.plain import write_cohort
    from casewise.data.phantom import cardiac_cohort

    def without_group(members: Mapping[str, Member]) -> dict[str, Member]:
        return {name: replace(member, group=None) for name, member in members.items()}  # no scanner

    first = cardiac_cohort("B", LABELLED, split="labelled")
    write_cohort(replace(first, members=without_group(first.members)), taught)
    second, third = cardiac_cohort("B", NEW, split="new"), cardiac_cohort("C", OTHER, split="new")
    both = replace(
        second,
        members=without_group({**second.members, **third.members}),
        read_case=lambda member: (third if member.id in third.members else second).read_case(member),
    )
    write_cohort(both, unseen)
    return both


def _at_home() -> float:
    """Return the mean Dice of the model on hearts of the scanner that it was trained on."""
    from casewise.data.phantom import cardiac_cohort
    from casewise.deployment import Deployment
    from casewise.measure.metrics.overlap import dice

    hearts, plain = cardiac_cohort("A", HOME, split="held-out"), Deployment(MODEL)
    return fmean(dice(plain.predict(case).mask, hearts.label(case.id)) for case in hearts)

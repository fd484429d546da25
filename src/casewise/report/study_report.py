"""The report of a study: from archives and a policy to tables, figures, results.json and one page."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from tqdm import tqdm

from casewise.archive.store import Archive, open_archive
from casewise.core.errors import CasewiseError
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.judge.policy import read_policy
from casewise.report import cases
from casewise.report.gathering import gather
from casewise.report.material import Extras, Material
from casewise.report.section import Section
from casewise.report.sections import SECTIONS
from casewise.report.writing import check_place, whole_folder, write_report
from casewise.study.accounting import accounting
from casewise.study.audit import check_audit
from casewise.study.deployment import bucket_decomposition
from casewise.study.helphurt import help_hurt


def build(
    evaluation: Archive | str | Path,
    calibration: Archive | str | Path,
    policy: Policy | str | Path,
    out: str | Path,
    *,
    extras: Extras | None = None,
    only: Collection[str] | None = None,
    pictures: int = cases.PICTURES,
    resamples: int = 5000,
    seed: int = RESAMPLING_SEED,
    progress: bool = True,
) -> Path:
    """Write the report of a study into the folder ``out`` and give the path of its page.

    ``only`` names analyses of :data:`casewise.report.sections.SECTIONS`; the story and the case table are always there.
    The folder is written beside its place and moved there when it is whole. A report that contradicts itself is
    refused (Q7-Q10), with the error :class:`casewise.core.errors.Refused`.
    """
    analyses = {name: SECTIONS[name] for name in (only or SECTIONS)}
    check_place(Path(out))
    known = policy if isinstance(policy, Policy) else read_policy(policy)
    with tqdm(total=len(analyses) + 6, disable=not progress, unit="part", leave=False) as bar:

        def tick(what: str) -> None:
            bar.set_description(what)
            bar.update()

        material = gather(
            _archive(evaluation),
            _archive(calibration),
            known,
            extras=extras,
            resamples=resamples,
            seed=seed,
            progress=tick,
        )
        tick("checking the arithmetic")
        checked = self_audit(material)
        sections = [_section(name, make, material, tick) for name, make in analyses.items()]
        tick("pictures of the cases")
        shown = list(cases.shown_cases(material, pictures=pictures))
        tick("writing")
        with whole_folder(Path(out)) as folder:
            write_report(folder, material, sections, shown, checked)
    return Path(out) / "report.html"


def _archive(given: Archive | str | Path) -> Archive:
    return given if isinstance(given, Archive) else open_archive(given)


def self_audit(material: Material) -> int:
    """Recompute sums and identities; a report that contradicts itself is not written."""
    return check_audit(
        material.methods,
        deployment=material.method_table,
        accounting=accounting(material.methods, buckets_of=(material.ours,) if material.is_router else ()),
        helphurt=help_hurt(material.methods),
        decomposition=bucket_decomposition(material.router) if material.is_router else None,
    )


def _section(
    name: str, make: Callable[[Material], Section], material: Material, tick: Callable[[str], None]
) -> Section:
    """One section; what cannot be computed from this archive says so instead of stopping the report."""
    tick(name)
    try:
        return make(material)
    except CasewiseError as error:
        return Section(name, name.capitalize(), missing={name: str(error)})

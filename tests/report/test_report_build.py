"""The whole report: every part on disk, every number in results.json, nothing of this machine in it."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.cohorts import synthetic_archive
from worlds.identities import audit_study

from casewise.core.errors import BadInput, Overlap, UnknownName
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.report.study_report import build, check_place
from casewise.study.analyses import ANALYSES, elsewhere
from casewise.study.study import Extras, Study


@pytest.fixture(scope="module")
def results(page):
    return json.loads((page.parent / "results.json").read_text(), parse_constant=pytest.fail)


def test_every_part_is_there(page):
    assert {part.name for part in page.parent.iterdir()} == {"report.html", "results.json", "tables", "figures"}
    tables, figures = page.parent / "tables", page.parent / "figures"
    assert {file.stem for file in tables.glob("*.csv")} == {file.stem for file in tables.glob("*.tex")}
    assert {file.stem for file in figures.glob("*.svg")} == {file.stem for file in figures.glob("*.png")}


PAPER = set(
    "budget-sweep signal-ha methods helphurt routing depth-variation edit-geometry helphurt-by-group learning-rates "  # noqa: SIM905
    "methods-by-group matched matched-by-group prereg three-lines clustered-ci per-step auroc accounting "
    "calibration-sensitivity min-area algorithm compute frozen objectives".split()
)
FIGURES = ["teaser", "qualitative-1", "ha-hd95", "pareto", "crc", "qualitative-2", "backbone-edits"]
"""Tables and figures of the paper by id; driving-1 is made of archives of many classes (test_inputs.py)."""


def missing_of(page):
    made = [{file.stem for file in (page.parent / kind).iterdir()} for kind in ("tables", "figures")]
    return PAPER - made[0] | {*FIGURES} - made[1]


def test_most_of_the_paper_is_made_from_two_archives(page):
    assert missing_of(page) == {"learning-rates", "frozen", "crc", "backbone-edits"}


def test_numbers_are_at_full_precision(study, results):
    row = next(one for one in results["findings"]["deployment.methods"]["rows"] if one["method"] == "router")
    assert row["ha"] == float(study.policy_rows["ha"].mean())
    written = {one["case"]: one["ha"] for one in results["cases"]}
    assert written == dict(zip(study.policy_rows["case"], study.policy_rows["ha"].astype(float), strict=True))


def test_every_interval_of_the_report_is_in_the_single_list(results):
    ids = [row["id"] for row in results["findings"]["deployment.intervals"]["rows"]]
    assert len(ids) == len(set(ids)) > 10


def test_every_finding_says_its_n_and_spec(results):
    for name, found in results["findings"].items():
        assert found["n"] > 0 or name == "cost.signals", name  # a price list rests on no case
        assert found["spec"] or name == "measures", name  # the paper has no clinical measures


def test_the_report_names_no_path_of_the_machine(page, sources):
    folder = str(sources.evaluation.path.parent)
    for file in page.parent.rglob("*.*"):
        if file.suffix in {".html", ".json", ".csv", ".tex", ".svg"}:
            text = file.read_text()
            assert folder not in text, file
            assert str(Path.home()) + "/" not in text, file


def test_the_page_fetches_nothing(page):
    text = page.read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="(?!data:)', text)


def test_hostile_group_names_are_escaped_everywhere(page):
    text = page.read_text()
    assert "<img src=x" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_the_notice_of_the_archive_is_shown(page):
    assert '<p class="banner">Synthetic discs, not patients.</p>' in page.read_text()


def test_no_table_has_a_blank_cell(page):
    for file in (page.parent / "tables").glob("*.tex"):
        for line in file.read_text().splitlines():
            if line.endswith(r"\\") and "&" in line:
                assert all(cell.strip() for cell in line.removesuffix(r"\\").split("&")), (file.name, line)


def test_no_csv_has_a_blank_cell(page):
    for file in (page.parent / "tables").glob("*.csv"):
        for line in csv.reader(file.read_text().splitlines()):
            assert all(cell.strip() for cell in line), (file.name, line)


@pytest.fixture(scope="module")
def everything(sources, tmp_path_factory):
    """The report when every further archive is given."""
    root = tmp_path_factory.mktemp("everything")
    options = {"groups": ("A", "B"), "shrink": ()}
    grata = synthetic_archive(root / "grata", cases=26, seed=5, split="evaluation", **options)
    held = synthetic_archive(root / "held", cases=16, seed=6, prefix="held", **options)
    levels = ({"alpha": 0.1, "risk": 0.05}, {"alpha": 0.2, "risk": 0.12})
    extras = Extras(
        others={"GraTa": grata},
        holdouts={"GraTa": held},
        rerun=sources.evaluation,
        sweep={1e-4: (sources.evaluation, None), 5e-4: (sources.evaluation, sources.calibration)},
        backbones={"swin": sources.evaluation},
        other_modality=sources.evaluation,
        frozen=sources.policy,
        certificate=Certificate(
            kind="T2", statement="Mean HA is at most 0.10.", loss="HA", method="crc", alpha=0.1, delta=None,
            population="all", units=16, cases=16, floor=1 / 17, needed=9, cut=0.02, bound=0.08, kept=0.5,
            deployed={"certified": {"ha": 0.05}}, advice="",
            reliability=levels, reliability_from="leave-one-out", policy=policy_digest(sources.policy),
        ),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elsewhere, "BAND", (0.1, 1.0))  # the synthetic source is better than the paper's band
        return build(
            sources.evaluation, sources.calibration, sources.policy, root / "report", extras=extras, resamples=100,
            pictures=2, progress=False,
        )  # fmt: skip


@pytest.mark.slow
def test_all_26_tables_and_8_figures_are_made_where_everything_is_given(everything):
    assert not missing_of(everything)
    for file in (*everything.parent.glob("tables/*"), *everything.parent.glob("figures/*")):
        assert file.stat().st_size > 20, file  # a table without rows has its heads
    test_no_table_has_a_blank_cell(everything)
    test_no_csv_has_a_blank_cell(everything)


@pytest.mark.slow
def test_the_interval_list_holds_each_controller_against_each_budget(everything):
    rows = list(csv.DictReader((everything.parent / "tables" / "intervals.csv").read_text().splitlines()))
    assert len({row["id"] for row in rows}) == len(rows)
    for method in ("frag-stop", "tau-stop", "router"):
        for quantity in ("ha", "metric"):
            own = [row for row in rows if row["id"].startswith(f"{method}~") and row["id"].endswith(f":{quantity}")]
            assert {tier for row in own for tier in row["tier"].split("+")} >= {"A", "A'", "B", "C"}, (method, quantity)


def test_the_case_table_is_worst_first(page, study):
    rows = list(csv.DictReader((page.parent / "tables" / "cases.csv").read_text().splitlines()))
    change = [float(row["change_reference"]) for row in rows]
    assert change == sorted(change)
    assert len(rows) == len(study.policy_rows)


def test_only_so_many_cases_have_pictures(page):
    body = page.read_text().split('id="case-table"')[1].split("</table>")[0]
    assert body.count('src="data:image/png') == 4 * 20
    assert body.count("<tr data-case=") == 26


def test_only_runs_what_is_asked_for(sources, tmp_path):
    made = build(
        sources.evaluation,
        sources.calibration,
        sources.policy,
        tmp_path / "report",
        only=["helphurt"],
        pictures=0,
        resamples=100,
        progress=False,
    )
    results = json.loads((made.parent / "results.json").read_text())
    assert {name.split(".")[0].split("[")[0] for name in results["findings"]} == {"helphurt"}


def test_a_wrong_analysis_is_named_with_its_neighbours(sources, tmp_path):
    with pytest.raises(UnknownName, match=r"no analysis is called 'helphut'\. Did you mean 'helphurt'"):
        build(sources.evaluation, sources.calibration, sources.policy, tmp_path / "report", only=["helphut"])


def test_cases_may_not_be_in_both_archives(sources, tmp_path):
    with pytest.raises(Overlap, match="share 16 cases"):
        build(sources.calibration, sources.calibration, sources.policy, tmp_path / "report", progress=False)
    assert not (tmp_path / "report").exists()


def test_a_folder_with_something_else_is_left_alone(sources, tmp_path):
    (tmp_path / "thesis.docx").write_text("years of work")
    with pytest.raises(BadInput, match=r"holds thesis\.docx"):
        build(sources.evaluation, sources.calibration, sources.policy, tmp_path)
    assert (tmp_path / "thesis.docx").exists()


def test_folders_that_are_called_as_those_of_a_report_are_left_alone(sources, page, tmp_path):
    paper = tmp_path / "paper"
    for name in ("figures/anatomy.png", "tables/raters.csv", "report.html", "results.json"):
        (paper / name).parent.mkdir(parents=True, exist_ok=True)
        (paper / name).write_text("{}")
    with pytest.raises(BadInput, match=r"holds figures, figures/anatomy\.png, report\.html"):
        build(sources.evaluation, sources.calibration, sources.policy, paper)
    assert (paper / "figures" / "anatomy.png").exists()
    again = shutil.copytree(page.parent, tmp_path / "again")
    check_place(again)  # an earlier report goes
    (again / "figures" / "anatomy.png").write_text("drawn by hand")
    with pytest.raises(BadInput, match=r"holds figures/anatomy\.png"):
        check_place(again)


def test_the_sums_of_a_study_agree(sources):
    study = Study.of(sources.evaluation, sources.calibration, sources.policy, resamples=100)
    assert audit_study(study) == []


def test_section_names_are_their_ids(study):
    for name in ("deployment", "helphurt", "certificate", "rerun", "learning-rates", "min-area", "frozen"):
        assert ANALYSES[name](study).id == name


def test_intervals_of_a_few_sequences_are_warned_of(sources, tmp_path):
    from casewise.study.summary_text import FEWEST

    def warned(units):
        archive = sources.evaluation
        kept = {name: replace(entry, cluster=f"drive-{number % units}")
                for number, (name, entry) in enumerate(archive.entries.items())}  # fmt: skip
        one = replace(archive, entries=kept, cases=None)
        page = build(one, sources.calibration, sources.policy, tmp_path / str(units), only=["cost"], resamples=100,
                     pictures=0, progress=False)  # fmt: skip
        return json.loads((page.parent / "results.json").read_text())["warnings"]

    few = [said for said in warned(2) if said.startswith("FEW: only 2 patients")]
    assert len(few) == 1
    assert not [said for said in warned(FEWEST) if said.startswith("FEW")]


def test_a_no_go_stands_on_top_of_the_page(page, sources, tmp_path):
    kept = {"go": False, "helped": 2, "hurt": 7}
    policy = replace(sources.policy, preflight={**sources.policy.preflight, "retained": kept, "guard": None})
    advised = build(
        sources.evaluation, sources.calibration, policy, tmp_path / "r", only=["cost"], resamples=100, pictures=0,
        progress=False,
    )  # fmt: skip
    said = json.loads((advised.parent / "results.json").read_text())["warnings"]
    assert said[0].startswith("NO-GO: ")
    assert "2 were helped and 7 were hurt" in said[0]
    assert '<p class="banner">NO-GO: ' in advised.read_text()

"""An analysis is one file and one line: page, results.json, CSV, LaTeX and --only take it from there."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from casewise.core.errors import TooFewCases, UnknownName
from casewise.core.registry import Registry
from casewise.report.study_report import build
from casewise.study import analyses
from casewise.study.finding import Finding, Section, show
from casewise.study.study import Study


def section(study: Study) -> Section:
    """How large the edits are that the policy deploys."""
    edits = study.policy_rows.groupby("action")["area"].agg(["count", "mean"]).reset_index()
    found = Finding("sizes", edits, len(study.policy_rows), "")
    return Section(
        "sizes",
        "How large deployed edits are",
        f"{len(found.table)} kinds of decisions.",
        (show("sizes", "Changed voxels by action", found),),
        findings=(found,),
    )


@pytest.fixture
def registered(monkeypatch):
    """Add the line to the registry."""
    listed = Registry("analysis", {**analyses.ANALYSES, "sizes": section})
    monkeypatch.setattr(analyses, "ANALYSES", listed)


def test_a_new_analysis_is_on_the_page_in_the_results_and_in_the_tables(registered, sources, tmp_path):
    page = build(
        sources.evaluation, sources.calibration, sources.policy, tmp_path / "report", only=["sizes"], pictures=0,
        resamples=100, progress=False,
    )  # fmt: skip
    assert '<section id="sizes">' in page.read_text()
    rows = json.loads((page.parent / "results.json").read_text())["findings"]["sizes"]["rows"]
    assert sum(row["count"] for row in rows) == 26
    written = pd.read_csv(page.parent / "tables" / "sizes.csv")
    assert written["mean"].tolist() == [row["mean"] for row in rows]
    assert r"\begin{tabular}{lcc}" in (page.parent / "tables" / "sizes.tex").read_text()


def test_an_analysis_that_is_not_registered_is_unknown(sources, tmp_path):
    with pytest.raises(UnknownName, match="no analysis is called 'sizes'"):
        build(sources.evaluation, sources.calibration, sources.policy, tmp_path / "report", only=["sizes"])


def test_an_analysis_that_cannot_be_run_says_why_and_the_others_go_on(study, monkeypatch):
    def refuses(study: Study) -> Section:
        raise TooFewCases("needs a thousand cases")

    found = analyses.sections_of(study, {"huge": refuses, "sizes": section})
    assert found[0].missing == {"huge": "needs a thousand cases"}
    assert found[1].findings[0].n == 26

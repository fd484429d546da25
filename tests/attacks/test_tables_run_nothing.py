"""Names from outside in tables: a spreadsheet shows them and does not run them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from casewise.core.formats import csv_cell, from_csv_cell
from casewise.data.folders import read_table
from casewise.serve.review_log import as_csv

FORMULAS = ("=1+1", "+SUM(A1)", "-2+3", "@cmd", "\tx", "\r=1", "=cmd|' /C calc'!A0")


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_a_text_and_comes_back(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    assert from_csv_cell(csv_cell(text)) == text


@pytest.mark.parametrize("value", ["-0.5", "+3", "1e-3", "-inf", "case_1", "", "it's", "'quoted'", -1, 2.5, None])
def test_numbers_and_plain_texts_stay_as_they_are(value: object) -> None:
    assert csv_cell(value) == value
    assert not isinstance(value, str) or from_csv_cell(value) == value


def test_the_table_of_reviews_and_that_of_cases_hold_no_formula(tmp_path: Path) -> None:
    rows = list(csv.reader(io.StringIO(as_csv([{"case": "a", "note": "=HYPERLINK(1)", "reviewer": "@me"}]))))
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "@"))]
    (tmp_path / "cases.csv").write_text("case,group\na,'=site\n")
    assert read_table(tmp_path / "cases.csv").rows["a"]["group"] == "=site"


def test_the_tables_of_compare_hold_no_formula(tmp_path: Path) -> None:
    from casewise.cli import app

    for name, voxels in (("old", 9), ("new", 4)):
        (tmp_path / name).mkdir()
        mask = np.zeros((8, 8), np.uint8)
        mask.flat[:voxels] = 1
        np.save(tmp_path / name / "a.npy", mask)
    (tmp_path / "cases.csv").write_text("case,group\na,'=1+1\n")
    folders = [str(tmp_path / name) for name in ("old", "new")]
    asked = ["compare", *folders, "-o", str(tmp_path / "out"), "--cases", str(tmp_path / "cases.csv")]
    outcome = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "cases.csv").read_text())))
    assert [row["group"] for row in rows] == ["'=1+1"]
    labels = (tmp_path / "out" / "labels.csv").read_text()
    assert ",-0.55" in labels  # a number stays a number


def test_the_tables_of_a_study_hold_no_formula(tmp_path: Path) -> None:
    from casewise.render.tables import Column, Table, write_csv

    columns = [Column("case", "case", text=True), Column("change", "change")]
    write_csv(tmp_path / "a.csv", Table("t", "T", columns, [{"case": "=1+1", "change": -0.5}]))
    assert (tmp_path / "a.csv").read_text().splitlines()[1] == "'=1+1,-0.5"

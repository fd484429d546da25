"""Names from outside in tables: a spreadsheet shows them and does not run them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

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


def test_the_tables_of_compare_hold_no_formula() -> None:
    from casewise.cli.compare import _csv

    assert "'=1+1" in _csv([{"case": "a", "group": "=1+1", "change": -0.5}])
    assert ",-0.5" in _csv([{"case": "a", "group": "=1+1", "change": -0.5}])


def test_the_tables_of_a_study_hold_no_formula(tmp_path: Path) -> None:
    from casewise.render.tables import Column, table, write_csv

    columns = [Column("case", "case", text=True), Column("change", "change")]
    write_csv(tmp_path / "a.csv", table("t", "T", columns, [{"case": "=1+1", "change": -0.5}]))
    assert (tmp_path / "a.csv").read_text().splitlines()[1] == "'=1+1,-0.5"

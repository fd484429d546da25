"""Tables on disk: CSV at full precision, LaTeX in the paper's shape."""

from __future__ import annotations

import csv

import pandas as pd

from casewise.render.tables import NOT_RUN, Column, Estimate, Table, best, rows_of, tex, undefined, write_csv

COLUMNS = (
    Column("method", "Method", text=True),
    Column("ha", "HA", interval=("low", "high")),
    Column("share", "share (%)", 1, percent=True),
    Column("n", "n"),
)
FRAME = pd.DataFrame(
    {
        "method": ["router", "fixed_4"],
        "ha": [1 / 3, float("nan")],
        "low": [0.1, float("nan")],
        "high": [0.5, float("nan")],
        "share": [0.587, 0.413],
        "n": [230, 0],
    }
)


def test_a_frame_becomes_rows_with_intervals_and_undefined_cells():
    rows = rows_of(FRAME, COLUMNS)
    assert rows[0]["ha"] == Estimate(1 / 3, 0.1, 0.5)
    assert rows[1]["ha"] == undefined(0)


def test_a_column_that_is_not_there_is_not_run():
    rows = rows_of(FRAME, [Column("ba", "BA")])
    assert rows[0]["ba"] is None
    assert Table("t", "T", [Column("ba", "BA")], rows).text(0, Column("ba", "BA")) == "not run"


def test_csv_keeps_full_precision_and_spreads_intervals(tmp_path):
    made = Table("t", "T", COLUMNS, rows_of(FRAME, COLUMNS))
    write_csv(tmp_path / "t.csv", made)
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert float(rows[0]["ha"]) == 1 / 3
    assert (rows[0]["ha_low"], rows[0]["ha_high"]) == ("0.1", "0.5")
    assert rows[1]["ha"] == "undefined (n=0)"
    assert float(rows[0]["share"]) == 0.587
    assert rows[0]["n"] == "230"


def test_latex_is_booktabs_with_rules_and_bold():
    made = Table("t", "T", COLUMNS, rows_of(FRAME, COLUMNS), rules={1}, bold={(0, "share")})
    text = tex(made)
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    assert text.count(r"\midrule") == 2
    assert r"\textbf{58.7}" in text
    assert r"fixed\_4" in text


def test_latex_has_only_characters_that_every_engine_sets():
    """The table of the algorithm writes the masks of M0 and of the first step with letters that pdflatex refuses."""
    names = "predict ŷ₀ and ŷ₁, −1 ≤ δ ≥ τ × 2 → ∞"
    assert tex(Table("t", "T", (Column("a", "A", text=True),), [{"a": names}])).isascii()


def test_best_values_are_those_that_print_the_same():
    rows = [{"ha": 0.1301}, {"ha": 0.1304}, {"ha": 0.2}, {"ha": NOT_RUN}]
    assert best(rows, "ha", range(4), min) == {(0, "ha"), (1, "ha")}
    assert best(rows, "ha", [0, 3], max) == {(0, "ha")}

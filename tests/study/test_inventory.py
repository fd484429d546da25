"""26 tables and 8 figures: each is here, or says what it needs."""

from __future__ import annotations

import pytest

from casewise.study.inventory import CLOCK, FIGURES, INPUT_COLUMN, ITEMS, TABLES, counts, inventory_table


def test_the_inventory_is_that_of_the_paper():
    assert len(ITEMS) == TABLES + FIGURES == 34
    assert [item.paper.split(":")[0] for item in ITEMS] == ["tab"] * TABLES + ["fig"] * FIGURES
    assert len({item.paper for item in ITEMS}) == 34


def test_what_is_missing_says_what_it_needs():
    rows = inventory_table((), others=False).rows
    assert all(str(row["state"]).startswith("not run: ") and len(str(row["state"])) > 20 for row in rows)


@pytest.mark.parametrize(
    ("paper", "id", "part", "need"),
    [
        ("fig:acdc-qual-supp", "driving-1", INPUT_COLUMN, "--images"),
        ("tab:app-compute", "compute", CLOCK, "recording"),
    ],
)
def test_what_is_there_in_part_says_what_the_rest_needs(paper, id, part, need):
    def state(missing):
        rows = inventory_table({id}, others=True, missing=missing).rows
        return str(next(row["state"] for row in rows if row["paper"] == paper))

    assert state(()) == id
    assert state({part}).startswith(f"{id}; {part} not run: needs")
    assert need in state({part})


def test_what_is_there_is_counted():
    assert counts({"methods", "teaser"}) == {"tables": 3, "figures": 1}

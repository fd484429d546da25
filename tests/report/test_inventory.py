"""26 tables and 8 figures: each is here, or says what it needs."""

from __future__ import annotations

from casewise.report.inventory import FIGURES, ITEMS, TABLES, counts, inventory_table


def test_the_inventory_is_that_of_the_paper():
    assert len(ITEMS) == TABLES + FIGURES == 34
    assert [item.paper.split(":")[0] for item in ITEMS] == ["tab"] * TABLES + ["fig"] * FIGURES
    assert len({item.paper for item in ITEMS}) == 34


def test_what_is_missing_says_what_it_needs():
    rows = inventory_table((), others=False, inputs=False).rows
    assert all(str(row["state"]).startswith("not run: ") and len(str(row["state"])) > 20 for row in rows)


def test_driving_pictures_without_their_input_say_so():
    states = {
        inputs: next(
            row["state"]
            for row in inventory_table({"driving-1"}, others=True, inputs=inputs).rows
            if row["paper"] == "fig:acdc-qual-supp"
        )
        for inputs in (True, False)
    }
    assert states[True] == "driving-1"
    assert "need --images" in str(states[False])


def test_what_is_there_is_counted():
    assert counts({"methods", "teaser"}) == {"tables": 3, "figures": 1}

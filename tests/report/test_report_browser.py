"""The page in a real browser: it sorts, filters, opens cases, changes its theme, and asks the network for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from worlds.browsers import browser, needs_chromium, sticking_out

__all__ = ["browser"]
pytestmark = needs_chromium


@pytest.fixture
def opened(browser: Any, page: Any) -> Iterator[Any]:
    """The report at desktop size; at the end the page must have had no error and no request to other hosts."""
    tab = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="light")
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: None if _local(request.url) else wrong.append(request.url))
    tab.goto(page.as_uri())
    yield tab
    tab.close()
    assert wrong == []


def _local(url: str) -> bool:
    return url.startswith(("file:", "data:"))


def column(tab: Any, table: str, number: int) -> list[str]:
    return tab.locator(f"#{table} tbody tr td:nth-child({number})").all_inner_texts()


def test_a_table_sorts_up_and_down(opened):
    heading = opened.locator("#table-methods th:nth-child(3) button")
    heading.click()
    rising = [float(text) for text in column(opened, "table-methods", 3)]
    assert rising == sorted(rising)
    assert opened.locator("#table-methods th:nth-child(3)").get_attribute("aria-sort") == "ascending"
    heading.click()
    assert [float(text) for text in column(opened, "table-methods", 3)] == rising[::-1]


def test_cells_without_a_number_sort_last(opened):
    for _ in range(2):
        opened.locator("#table-methods th:nth-child(7) button").click()
        assert column(opened, "table-methods", 7)[-1] == "—"


def test_the_bucket_filter_keeps_its_bucket(opened):
    opened.select_option("#by-bucket", "hard")
    rows = opened.locator("#case-table tbody tr:visible")
    assert 0 < rows.count() < 26
    assert set(rows.evaluate_all("rows => rows.map(row => row.dataset.bucket)")) == {"hard"}
    assert opened.inner_text("#shown") == f"{rows.count()} of 26 cases"


def test_filters_combine_with_a_hostile_group(opened):
    opened.select_option("#by-group", "<img src=x onerror=alert(1)>")
    assert opened.locator("#case-table tbody tr:visible").count() == 13
    opened.fill("#by-id", "0001")
    assert opened.locator("#case-table tbody tr:visible").count() == 1


def test_only_cases_made_worse_can_be_shown(opened):
    opened.check("#only-worse")
    rows = opened.locator("#case-table tbody tr:visible")
    assert set(rows.evaluate_all("rows => rows.map(row => row.dataset.worse)")) == {"1"}


def test_a_case_opens_with_large_panels_and_moves_on(opened):
    opened.locator("#case-table tbody tr").first.click()
    dialog = opened.locator("#case-view")
    assert dialog.is_visible()
    assert dialog.locator("img").count() == 4
    first = opened.inner_text("#case-name")
    assert first == opened.locator("#case-table tbody tr").first.get_attribute("data-case")
    assert "HA, deployed" in opened.inner_text("#case-list")
    assert dialog.locator(".candidates > div").count() == 5  # M0 and four updates
    assert dialog.locator(".candidates > .chosen").count() == 1
    opened.keyboard.press("ArrowRight")
    assert opened.inner_text("#case-name") != first
    opened.keyboard.press("Escape")
    assert not dialog.is_visible()


def test_a_case_opens_from_the_keyboard(opened):
    opened.locator("#case-table .open").nth(2).focus()
    opened.keyboard.press("Enter")
    assert opened.locator("#case-view").is_visible()


def test_a_case_without_pictures_opens_too(opened):
    opened.locator("#case-table tbody tr").last.click()
    assert opened.locator("#case-panels .blank").count() == 4


def test_the_theme_changes_the_page_and_its_figures(opened):
    before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    text = "document.querySelector('#summary figure svg text')"
    ink = opened.evaluate(f"getComputedStyle({text}).fill")
    opened.click("#theme")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert opened.evaluate(f"getComputedStyle({text}).fill") != ink


@pytest.mark.parametrize(("width", "media"), [(390, "screen"), (1366, "screen"), (702, "print")])
def test_nothing_is_wider_than_a_phone_a_laptop_or_a_sheet_of_paper(browser, page, width, media):
    tab = browser.new_page(viewport={"width": width, "height": 844})
    tab.goto(page.as_uri())
    tab.emulate_media(media=media)
    assert sticking_out(tab) == []
    tab.close()


@pytest.mark.parametrize(("width", "media"), [(1366, "screen"), (702, "print")])
def test_a_frame_name_and_a_number_stay_in_one_line(browser, page, width, media):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(page.as_uri())
    tab.emulate_media(media=media)
    tab.evaluate("document.querySelectorAll('.open').forEach(one => { one.textContent = 'GOPR0351_frame_000079'; })")
    lines = """one => {
      const text = document.createRange();
      text.selectNodeContents(one);
      return new Set([...text.getClientRects()].map(box => Math.round(box.top))).size;
    }"""
    cells = "'#case-table .open, #case-table tbody td:not(.text) span'"
    assert set(tab.evaluate(f"[...document.querySelectorAll({cells})].map({lines})")) == {1}
    assert sticking_out(tab) == []
    scrolled = "document.querySelector('#case-table').parentElement"
    assert tab.evaluate(f"{scrolled}.scrollWidth - {scrolled}.clientWidth") <= 0  # the last column is in sight
    tab.close()


def test_classes_have_a_legend(opened):
    assert opened.locator("#classes span").all_inner_texts() == ["<b>disc</b>", "car"]  # ground is background here
    color = "getComputedStyle(document.querySelectorAll('#classes i')[1]).backgroundColor"
    assert opened.evaluate(color) == "rgb(0, 0, 142)"  # as everyone who knows Cityscapes expects


def test_dark_is_the_systems_choice(browser, page):
    tab = browser.new_page(color_scheme="dark")
    tab.goto(page.as_uri())
    shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in shade.removeprefix("rgb(").removesuffix(")").split(",")) < 150
    tab.close()

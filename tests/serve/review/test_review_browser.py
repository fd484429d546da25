"""The page in a real browser: load, scroll, toggle, decide with the keyboard, reload, export; nothing from outside."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds.browsers import browser, needs_chromium
from worlds.predictions import decisions_of

from casewise.core.chain import Chain

__all__ = ["browser"]
pytestmark = needs_chromium


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """``open_page(server, case)``; at the end the page must have had no error and no request to other hosts."""
    wrong: list[str] = []
    tabs = []

    def opened(server: Any, case: str | None = None, **options: Any) -> Any:
        tab = browser.new_page(**{"viewport": {"width": 1300, "height": 850}, "color_scheme": "light", **options})
        tab.set_default_timeout(60_000)
        tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: None if r.url.startswith(server.url) else wrong.append(r.url))
        tab.goto(server.url + ("" if case is None else f"#{case}"))
        tab.wait_for_selector("canvas[data-case]")
        tabs.append(tab)
        return tab

    yield opened
    for tab in tabs:
        tab.close()
    assert wrong == []


def painted(tab: Any, slice: int, axis: int = 0) -> None:
    tab.wait_for_selector(f'#canvas[data-painted="{axis}/{slice}"]')


def measured(tab: Any, script: str) -> int:
    """The result of a script over ``d``, the bytes of what the canvas shows."""
    copy = "const c = document.getElementById('canvas'), o = new OffscreenCanvas(c.width, c.height);"
    read = "const t = o.getContext('2d', { willReadFrequently: true }); t.drawImage(c, 0, 0);"
    return tab.evaluate(f"() => {{ {copy} {read} const d = t.getImageData(0, 0, c.width, c.height).data; {script} }}")


def pixels(tab: Any) -> int:
    """A hash of what the canvas shows."""
    return measured(tab, "let h = 7; for (const v of d) h = (Math.imul(h, 31) + v) | 0; return h;")


def colored(tab: Any, color: tuple[int, int, int]) -> int:
    """How many pixels of the canvas have exactly this color."""
    test = " && ".join(f"d[i + {channel}] === {value}" for channel, value in enumerate(color))
    return measured(tab, f"let n = 0; for (let i = 0; i < d.length; i += 4) if ({test}) n += 1; return n;")


def colors(tab: Any) -> int:
    """How many different colors the canvas shows."""
    each = "for (let i = 0; i < d.length; i += 4) s.add(65536 * d[i] + 256 * d[i + 1] + d[i + 2]);"
    return measured(tab, f"const s = new Set(); {each} return s.size;")


def saved(tab: Any, name: str, folder: Path) -> str:
    with tab.expect_download() as waiting:
        tab.click(f'a[href="export/{name}"]')
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path.read_text()


def decide(tab: Any, key: str, decision: str) -> None:
    tab.keyboard.press(key)
    tab.wait_for_selector(f'[data-decision="{decision}"][aria-pressed="true"]')


def test_a_reviewer_goes_through_the_folder_with_the_keyboard(predictions, serve, open_page, tmp_path):
    out = predictions.layout.out
    with serve(out, images=predictions.images) as server:
        tab = open_page(server)
        assert tab.locator("#cases .id").all_inner_texts() == ["broken", "undone", "unsaved", "kept"]
        assert "<b>truncated</b>" in tab.inner_text("#nothing")
        assert tab.locator('[data-decision="keep-m0"]').is_disabled()

        tab.keyboard.press("f")
        assert "your name first" in tab.inner_text("#said")
        assert not (out / "reviews.jsonl").exists()
        tab.keyboard.type("Ada <i>L</i>")
        tab.keyboard.press("Escape")
        decide(tab, "f", "flag")

        tab.keyboard.press("j")
        tab.wait_for_selector('#canvas[data-case="undone"]')
        decide(tab, "k", "keep-m0")
        tab.keyboard.press("n")
        tab.wait_for_selector('#canvas[data-case="unsaved"]')
        decide(tab, "a", "keep-adapted")
        decide(tab, "w", "both-wrong")
        decide(tab, "f", "flag")
        assert tab.inner_text("#progress") == "3 of 4 cases decided"
        tab.click("#edit")
        tab.wait_for_selector("#edit-commands li:nth-child(2)")
        assert tab.inner_text("#edit-commands li").startswith("itksnap -g ")

        tab.reload()
        tab.wait_for_selector('#canvas[data-case="unsaved"]')
        assert tab.inner_text("#progress") == "3 of 4 cases decided"
        assert tab.locator('[data-decision="flag"]').get_attribute("aria-pressed") == "true"
        assert "Ada <i>L</i>" in tab.inner_text("#said")
        assert tab.input_value("#reviewer") == "Ada <i>L</i>"

        rows = list(csv.DictReader(saved(tab, "reviews.csv", tmp_path).splitlines()))
        saved(tab, "reviews.jsonl", tmp_path)
    wanted = {"broken": "flag", "undone": "keep-m0", "unsaved": "flag"}
    assert {row["case"]: row["decision"] for row in rows} == wanted
    assert decisions_of(tmp_path / "reviews.jsonl") == {"broken": "flag", "undone": "keep-m0", "unsaved": "flag"}


def test_slices_scroll_by_key_wheel_and_slider(predictions, serve, open_page):
    with serve(predictions.layout.out, images=predictions.images) as server:
        tab = open_page(server, "undone")
        slices = int(tab.inner_text("#slice-number").split()[-1])
        start = int(tab.inner_text("#slice-number").split()[0]) - 1
        painted(tab, start)
        first = pixels(tab)
        tab.keyboard.press("ArrowDown")
        painted(tab, start + 1)
        assert pixels(tab) != first
        tab.keyboard.press("ArrowUp")
        painted(tab, start)
        assert pixels(tab) == first
        tab.hover("#canvas")
        tab.mouse.wheel(0, -100)
        painted(tab, start - 2)
        tab.locator("#slice").fill(str(slices - 1))
        painted(tab, slices - 1)
        tab.keyboard.press("ArrowDown")
        assert tab.inner_text("#slice-number") == f"{slices} of {slices}"
        tab.select_option("#plane", "1")
        tab.wait_for_selector('#canvas[data-painted^="1/"]')
        assert tab.inner_text("#slice-number").endswith("of 96")


def test_each_layer_can_be_switched_off_and_on(predictions, serve, open_page):
    """Without images the ground is one color, so every layer's own color can be counted."""
    m0, adapted, deployed = (240, 198, 74), (63, 214, 194), (255, 255, 255)
    with serve(predictions.layout.out) as server:
        tab = open_page(server, "undone")
        tab.wait_for_selector("#canvas[data-painted]")
        assert "no images" in tab.inner_text("#image-note")
        tab.locator("#opacity").fill("100")
        added = (70, 140, 230)
        shown = [colored(tab, color) for color in (m0, adapted, added)]
        assert min(shown) > 50
        tab.keyboard.press("4")
        assert colored(tab, added) == 0
        tab.keyboard.press("2")
        assert colored(tab, adapted) == 0
        assert colored(tab, m0) > shown[0]
        tab.keyboard.press("1")
        assert colored(tab, m0) == 0
        assert colors(tab) == 2
        tab.click("label.deployed")
        assert tab.locator("[data-layer=deployed]").is_checked()
        assert colors(tab) > 2
        tab.keyboard.press("5")
        assert colored(tab, (86, 180, 233)) > 100, "label 2 in its palette color: labels arrive exactly"
        for key in "124":
            tab.keyboard.press(key)
        assert colored(tab, deployed) == 0, "no region is selected, and the white outline is see-through"


def test_a_region_is_jumped_to(predictions, serve, open_page):
    with serve(predictions.layout.out, images=predictions.images) as server:
        tab = open_page(server, "undone")
        rows = tab.locator("#regions tbody tr")
        areas = [int(text) for text in tab.locator("#regions tbody td:nth-child(2)").all_inner_texts()]
        assert areas == sorted(areas, reverse=True)
        last = rows.nth(rows.count() - 1)
        tab.locator("#slice").fill("0")
        painted(tab, 0)
        last.click()
        tab.wait_for_selector('#canvas:not([data-painted="0/0"])')
        assert last.get_attribute("aria-selected") == "true"
        tab.keyboard.press("r")
        assert rows.first.get_attribute("aria-selected") == "true"


def test_what_was_not_saved_cannot_be_kept(predictions, serve, open_page):
    folder = predictions
    source = np.zeros((3, 20, 20), np.uint8)
    source[1, 4:9, 4:9] = 1
    folder.add("lost", source.astype(float), source, 1 - source, value=0.7, candidates=False)
    with serve(folder.layout.out, reviewer="Ada") as server:
        tab = open_page(server, "lost")
        assert "--set save-candidates=true" in tab.inner_text("#region-note")
        assert tab.locator("[data-layer=adapted]").is_disabled()
        tab.keyboard.press("a")
        assert "was not saved" in tab.inner_text("#said")
        decide(tab, "k", "keep-m0")


def test_changes_that_are_all_too_small_to_list_are_counted_as_such(predictions, serve, open_page):
    source = np.zeros((3, 20, 20), np.uint8)
    source[1, 4:9, 4:9] = 1
    adapted = source.copy()
    adapted[1, 4, 4] = 0
    predictions.add("tiny", source.astype(float), source, adapted, value=0.1)
    with serve(predictions.layout.out) as server:
        tab = open_page(server, "tiny")
        assert tab.inner_text("#region-note") == "Only places too small to list changed, 1 voxel in all."


def test_a_picture_is_shown_without_slices(tmp_path, new_folder, serve, open_page):
    folder = new_folder(tmp_path / "out", ".png")
    source = np.zeros((40, 60), np.uint8)
    source[5:12, 5:12] = 1
    adapted = source.copy()
    adapted[20:30, 30:50] = 2
    folder.add("street", np.full((40, 60), 90, np.uint8), source, adapted, value=0.1)
    with serve(folder.layout.out, images=folder.images) as server:
        tab = open_page(server)
        painted(tab, 0)
        assert not tab.locator("#scroll").is_visible()
        assert colored(tab, (90, 90, 90)) > 1000
        before = pixels(tab)
        tab.hover("#canvas")
        tab.mouse.wheel(0, -100)
        assert pixels(tab) != before, "the wheel zooms where there are no slices"
        tab.keyboard.press("0")
        assert pixels(tab) == before


def test_dark_is_the_systems_choice_and_a_phone_is_wide_enough(predictions, serve, open_page):
    with serve(predictions.layout.out) as server:
        tab = open_page(server, "kept", color_scheme="dark", viewport={"width": 390, "height": 800})
        shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(int(part) for part in shade.removeprefix("rgb(").removesuffix(")").split(",")) < 150
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        tab.click("#theme")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != shade


def test_a_street_has_a_legend_and_nothing_is_removed_from_the_road(new_folder, serve, open_page, tmp_path):
    folder = new_folder(tmp_path / "out", ".png")
    run = {"adaptation": {"min_area": 4, "foreground": False}, "classes": {"0": "road", "1": "<i>car</i>"}}
    Chain(folder.layout.audit).append("run-started", run)
    source = np.ones((24, 32), np.uint8)
    adapted = source.copy()
    adapted[4:12, 4:12] = 0  # became road
    folder.add("frame", source * 90, source, adapted, value=0.1)
    with serve(tmp_path / "out", images=folder.images) as server:
        tab = open_page(server, "frame")
        assert tab.locator("#legend li").all_inner_texts() == ["road", "<i>car</i>"]
        assert tab.locator("#regions tbody td:first-child").all_inner_texts() == ["relabeled"]
        assert colored(tab, (43, 108, 176)) == 0
        tab.keyboard.press("4")
        tab.keyboard.press("5")
        assert colors(tab) > 2


def test_a_stale_tab_shows_what_somebody_else_decided_before_it_overrules_that(predictions, serve, browser):
    with serve(predictions.layout.out, images=predictions.images) as server:
        tabs = [browser.new_page(), browser.new_page()]
        for tab, name in zip(tabs, ("Ada", "Bob"), strict=True):
            tab.goto(f"{server.url}#kept")
            tab.wait_for_selector('#canvas[data-case="kept"]')
            tab.fill("#reviewer", name)
            tab.keyboard.press("Escape")
        ada, bob = tabs
        decide(ada, "k", "keep-m0")
        decide(bob, "a", "keep-m0")  # Ada's decision is shown, his is not written
        assert "Ada decided 'keep original' for case kept since you opened it" in bob.inner_text("#said")
        decide(bob, "a", "keep-adapted")
        for tab in tabs:
            tab.close()
    assert decisions_of(predictions.layout.out / "reviews.jsonl") == {"kept": "keep-adapted"}

"""The page, the Markdown and the JUnit file of a comparison: nothing from a file becomes markup, and it can be read."""

from __future__ import annotations

import base64
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image
from worlds.browsers import CHROMIUM, FLAGS, needs_chromium
from worlds.updates import heart, planted

from casewise.measure.comparison import comparison
from casewise.report.comparison_page import case_pictures, comparison_page, headline, junit_xml, markdown_summary
from casewise.study.comparison import ComparedCase, Comparisons

EVIL = "<img src=x onerror=alert(1)>|`@you`"


def summary(labelled: bool = True) -> dict:
    """summary.json of three cases at a site with a dangerous name."""
    masks = [(heart(), planted(kind, heart())) for kind in ("hole", "swapped", "")]
    cases = tuple(
        ComparedCase(f"h{number}", comparison(old, new, old if labelled else None), EVIL, f"p{number}")
        for number, (old, new) in enumerate(masks)
    )
    found = Comparisons(cases)
    problem = {"kind": "shape", "case": "h9", "message": EVIL, "allowed": False}
    check = {"name": "max_ha", "scope": f"group {EVIL}", "says": EVIL, "limit": 0.1, "margin": 0.0, "value": 0.5}
    check |= {"bound": None, "cases": 3, "patients": 3, "undefined": 0, "holds": False, "reason": EVIL}
    return {
        "verdict": "rejected",
        "exit_code": 4,
        "pairs": 4,
        "compared": 3,
        "problems": [problem],
        "problems_by_kind": {"shape": 1},
        "checks": [check],
        "summary": found.summary,
        "worst_first": [case.id for case in found.worst_first],
        "casewise": "0",
    }


def page(labelled: bool = True) -> str:
    found = comparison(heart(), planted("swapped", heart()), heart() if labelled else None)
    pictures = case_pictures(heart(), planted("swapped", heart()), heart() if labelled else None)
    shown = {**found.as_dict(), "id": "h1", "group": EVIL, "pictures": pictures, "change": -0.5 if labelled else None}
    return comparison_page(
        summary(labelled),
        [shown],
        {"old": EVIL, "new": "v2", "unit": "mm", "hd95": True, "min_area": 16, "notable": 0.01, "many": 200},
    )


def test_a_criterion_that_fails_within_its_limit_says_why():
    found = summary()
    found["checks"][0] |= {"value": 0.05, "reason": "a bound needs at least 10 patients, got 3"}
    facts = {"old": "v1", "new": "v2", "unit": "mm", "hd95": False, "min_area": 16, "notable": 0.01, "many": 200}
    for text in (markdown_summary(found), comparison_page(found, [], facts)):
        assert "A bound needs at least 10 patients, got 3." in text
    assert "A bound" not in page()  # 0.5 is above 0.1: the row speaks for itself


def test_nothing_from_a_file_becomes_markup():
    for labelled in (True, False):
        text = page(labelled)
        assert "<img src=x" not in text
        assert "&lt;img src=x onerror=alert(1)&gt;" in text
    said = markdown_summary(summary())
    assert EVIL not in said
    assert "\\<img src=x onerror=alert(1)\\>\\|\\`\\@you\\`" in said
    suite = ElementTree.fromstring(junit_xml(summary(), ["h0", "h1", "h2"]).encode())[0]
    assert suite.find("testcase/failure").text == EVIL
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "1")


def test_shares_of_helped_and_hurt_have_intervals_and_flipped_cases_are_named():
    text = page()
    assert "became better 0.000 [0.000, 0.000], worse 0.667 [" in text
    assert "At or above 0.7 before and below it now: h1." in text
    assert "(worse-voxels)" in text
    assert "worse 0.667 [" in markdown_summary(summary())
    assert "became better" not in page(labelled=False)


def test_the_headline_counts():
    assert headline(summary()) == "2 of 3 cases changed; 0 became better, 2 worse, and 1 fell below 0.7."
    assert headline(summary(labelled=False)) == "2 of 3 cases changed; 2 should be looked at."


def test_the_page_says_which_color_is_which_label_and_where_a_region_lies():
    found = comparison(heart(), planted("vanished", heart()), heart())
    region = found.regressions[0]
    low, high = region.low, region.high
    text = comparison_page(
        summary(),
        [{**found.as_dict(), "id": "h1", "group": "", "pictures": [], "change": -0.5}],
        {"old": "v1", "new": "v2", "unit": "mm", "hd95": False, "min_area": 16, "notable": 0.01, "many": 200},
    )
    assert f"rows {low[1] + 1} to {high[1]}, columns {low[2] + 1} to {high[2]}</dd>" in text  # slice 1 is the first
    for label, color in ((1, (230, 175, 60)), (2, (110, 190, 160))):
        assert f'background: rgb{color}"></span>label {label}<' in text
        drawn = pixels(dict(case_pictures(np.full((9, 9), label), np.eye(9, dtype=int) * label))["old"])
        assert drawn[drawn.shape[0] // 2, drawn.shape[1] // 2].argmax() == np.argmax(color)
    assert "a region has at least 16 voxels" in text


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("RGB")).astype(int)


def test_pictures_show_what_was_removed_and_what_is_wrong_now():
    shown = dict(case_pictures(heart(), planted("vanished", heart()), heart(), heart() * 60))
    assert [title.split(",")[0] for title in shown] == ["image", "old", "new", "change", "label", "judgement"]
    for title in ("change", "judgement"):
        red = pixels(shown[title])
        assert ((red[..., 0] > 200) & (red[..., 1] < 110) & (red[..., 2] < 80)).any(), title


@pytest.mark.parametrize("image", [None, np.zeros((3, 3)), np.zeros((28, 32, 3), np.uint8)])
def test_pictures_of_planes_bear_any_image(image):
    old, new = heart()[2], planted("hole", heart())[2]
    assert len(case_pictures(old, new, old, image)) == (5 if image is None else 6)


def test_a_street_has_its_own_colors_and_nothing_is_removed_from_the_road():
    old = np.ones((16, 24), np.uint8)
    new = old.copy()
    new[2:8, 2:8] = 0
    drawn = {
        zero: {
            title: pixels(uri)
            for title, uri in case_pictures(old, new, names={0: "road", 1: "car"}, zero_is_label=zero)
        }
        for zero in (True, False)
    }
    inside = (slice(60, 70), slice(60, 70))  # of the new road, enlarged
    purple, blank = drawn[True]["new"][inside].mean(axis=(0, 1)), drawn[False]["new"][inside].mean(axis=(0, 1))
    assert purple[0] > purple[1] + 15  # half of (128, 64, 128)
    assert blank.tolist() == [22, 22, 22]
    assert drawn[True]["change"][inside].mean(axis=(0, 1)).round().tolist() == pytest.approx([214, 120, 190], abs=3)
    assert drawn[False]["change"][inside].mean(axis=(0, 1)).round().tolist() == pytest.approx([226, 84, 48], abs=3)
    facts = {"old": "a", "new": "b", "unit": "mm", "hd95": True, "min_area": 16, "notable": 0.01, "many": 200}
    named = {**summary(), "names": {"1": "car", "2": "Road"}}
    text = comparison_page(named, [], {**facts, "zero_is_label": True})
    assert "pink is another class" in text
    assert 'background: rgb(0, 0, 142)"></span>' in text
    assert "red removed" in comparison_page(named, [], facts)


@needs_chromium
def test_the_page_fits_wide_and_narrow_in_light_and_dark_and_asks_the_network_for_nothing(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "report.html"
    file.write_text(page(), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        colors = set()
        for width, scheme in ((1300, "light"), (390, "dark")):
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            wrong: list[str] = []
            tab.on("console", lambda message, wrong=wrong: wrong.append(message.text))
            tab.on(
                "request", lambda one, wrong=wrong: None if one.url[:5] in ("file:", "data:") else wrong.append(one.url)
            )
            tab.goto(file.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("article img").count() == 5
            colors.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert wrong == []
        printed = browser.new_page(viewport={"width": 687, "height": 900})  # A4 without its margins
        printed.goto(file.as_uri())
        printed.emulate_media(media="print")
        assert printed.evaluate("document.documentElement.scrollWidth") <= 687  # nothing is cut
        assert printed.evaluate("[...document.images].every(one => one.loading !== 'lazy' && one.naturalWidth > 0)")
        browser.close()
    assert len(colors) == 2

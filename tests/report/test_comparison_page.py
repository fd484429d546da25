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
from casewise.report.comparison_page import case_pictures, comparison_page
from casewise.report.comparison_text import (
    check_lines,
    headline,
    junit_xml,
    known_limits,
    markdown_summary,
    worse_parts,
)
from casewise.study.compared_cohort import ComparedCase, Comparisons

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
    check |= {"verdict": "broken", "worst": ["h1"], "needed": None}
    return {
        "verdict": "rejected",
        "exit_code": 4,
        "notes": [],
        "plan": {"confidence": 0.95, "sha256": "0", "description": {"change": EVIL}, "impact": {"risks": EVIL}}
        | {"patients": None, "subgroups": [EVIL]},
        "seal": {"time": "2026", "log": "plan.log.jsonl", "lines": 2, "tip": "0"},
        "hashes": {"old": "0", "label": "1"},
        "measures": [],
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
    shown |= {"crossings": [EVIL]}
    return comparison_page(
        summary(labelled),
        [shown],
        {"old": EVIL, "new": "v2", "unit": "mm", "hd95": True, "min_area": 16, "notable": 0.01, "many": 200},
    )


def test_nothing_from_a_file_becomes_markup():
    for labelled in (True, False):
        text = page(labelled)
        assert "<img src=x" not in text
        assert "&lt;img src=x onerror=alert(1)&gt;" in text
    said = markdown_summary(summary())
    assert EVIL not in said
    assert "\\<img src=x onerror=alert(1)\\>\\|\\`\\@you\\`" in said
    suite = ElementTree.fromstring(junit_xml(summary(), ["h0", "h1", "h2"]).encode())[0]
    assert suite.find("testcase/failure").text == f"{EVIL}: h1"
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "2", "1")


def test_the_page_says_whether_the_change_is_significant_and_in_which_unit_sizes_are():
    assert "not statistically significant (5 % level, by patient)" in page()
    mask = heart()
    cases = []
    for at in range(9):
        label = mask.copy()
        label[:, : 2 * at] = 0
        cases.append(ComparedCase(f"h{at}", comparison(mask, mask, label, spacing_mm=(1, 1, 1)), None, f"p{at}"))
    sizes = Comparisons(tuple(cases)).summary["sizes"]
    assert [row["unit"] for row in sizes] == ["ml"] * 3


def test_shares_of_helped_and_hurt_have_intervals_and_flipped_cases_are_named():
    text = page()
    assert "became better 0.000 [0.000, 0.708], worse 0.667 [" in text
    assert "At or above 0.7 before and below it now: h1." in text
    assert "(worse-voxels)" in text
    assert "worse 0.667 [" in markdown_summary(summary())
    assert "became better" not in page(labelled=False)


def test_the_headline_counts():
    counted = "2 of 3 cases changed; 0 became better, 2 worse, and 1 fell below 0.7."
    assert headline(summary()) == f"Rejected: 1 of 1 criterion is broken (max_ha on group {EVIL}). {counted}"
    plain = {**summary(labelled=False), "verdict": "compared", "checks": []}
    assert headline(plain) == "2 of 3 cases changed; 2 should be looked at."
    late = {**summary(), "notes": ["the plan was changed"]}
    assert headline(late).startswith("Rejected, but the plan was changed: ")


def undecided(**more):
    check = summary()["checks"][0]
    return {**check, "verdict": "undecided", "says": "mean fall", "worst": [], **more}


def test_a_verdict_that_cannot_be_had_is_not_called_rejected():
    checks = [undecided(reason="mean fall: too few", scope=f"label {at}") for at in range(9)]
    found = {**summary(), "verdict": "undecided", "checks": checks}
    assert headline(found).startswith("Not decided: 3 patients cannot decide 9 of 9 criteria; none is broken")
    assert check_lines(found) == [
        "?    9 criteria (max_ha on label 0, max_ha on label 1, max_ha on label 2, ...): too few"
    ]
    assert check_lines({**found, "checks": checks[:2]}) == [
        "?    2 criteria (max_ha on label 0, max_ha on label 1): too few"
    ]
    suite = ElementTree.fromstring(junit_xml(found, []).encode())[0]
    assert (suite.get("failures"), suite.get("errors")) == ("0", "10")  # nine criteria, one pair
    assert suite.find("testcase/error").get("type") == "undecided"


def test_the_part_that_fell_most_is_named_where_its_patients_are_too_few_for_a_test():
    """Three patients of a second site lose a chamber, twelve of the first keep their masks."""
    old = heart()
    new = np.where(old == 2, 0, old).astype(old.dtype)
    cases = tuple(
        ComparedCase(f"h{at}", comparison(old, new if at < 3 else old, old), "B" if at < 3 else "A", f"p{at}")
        for at in range(15)
    )
    said = worse_parts({"summary": Comparisons(cases).summary})
    assert said.startswith("Largest loss: group B −")
    assert said.endswith(", 3 patients; it is not statistically significant.")
    assert worse_parts({"summary": Comparisons(cases[3:]).summary}) == ""
    crumb = old.copy()
    crumb[tuple(np.argwhere(old == 2)[0])] = 0  # less than a point
    little = tuple(ComparedCase(f"h{at}", comparison(old, crumb, old), None, f"p{at}") for at in range(2))
    assert worse_parts({"summary": Comparisons(little).summary}) == ""


def test_the_limits_of_a_comparison_are_the_ones_that_hold():
    found = known_limits(summary())
    assert found[0].startswith("With 3 patients, harm that occurred in none of them")
    assert "1 problem with pairs; these are not in the numbers." in found
    assert all(f"<li>{one}</li>" in page() for one in found)
    assert not any("no labels" in one or "rare large errors" in one for one in found)
    assert any("no labels" in one for one in known_limits(summary(labelled=False)))
    rising = {**summary()["checks"][0], "name": "max_error_rise"}
    assert any("rare large errors" in one for one in known_limits({**summary(), "checks": [rising]}))


def test_one_patient_is_reported_once_and_has_no_interval():
    checks = [undecided(reason=f"mean fall: {at}", scope=f"label {at}", patients=1) for at in range(27)]
    (line,) = check_lines({**summary(), "checks": checks})
    assert "one patient is not enough" in line
    mask = heart()
    cases = tuple(ComparedCase(f"h{at}", comparison(mask, mask, mask), None, "p") for at in range(3))
    change = Comparisons(cases).summary["change"]
    assert (change["estimate"], change["low"], change["shown"]) == (0.0, None, False)
    found = {**summary(), "summary": Comparisons(cases).summary}
    assert "no interval)" in markdown_summary(found)


def test_a_case_that_broke_a_criterion_is_a_failed_test_and_named():
    suite = ElementTree.fromstring(junit_xml(summary(), ["h0", "h1", "h2"]).encode())[0]
    failed = {test.get("name"): test.find("failure").text for test in suite if test.find("failure") is not None}
    assert failed["h1"].startswith("broke max_ha on group")
    assert check_lines(summary())[0].endswith(": h1")


def test_the_page_says_which_color_is_which_label_and_where_a_region_lies():
    found = comparison(heart(), planted("vanished", heart()), heart())
    region = found.regressions[0]
    low, high = region.low, region.high
    text = comparison_page(
        summary(),
        [{**found.as_dict(), "id": "h1", "group": "", "pictures": [], "change": -0.5, "crossings": []}],
        {"old": "v1", "new": "v2", "unit": "mm", "hd95": False, "min_area": 16, "notable": 0.01, "many": 200},
    )
    assert f"rows {low[1] + 1} to {high[1]}, columns {low[2] + 1} to {high[2]}</dd>" in text  # slice 1 is the first
    for label, color in ((1, (230, 159, 0)), (2, (86, 180, 233))):
        assert f'background:#{bytes(color).hex()}"></i>label {label}<' in text
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
        assert ((red[..., 0] > 140) & (red[..., 1] < 110) & (red[..., 2] < 80)).any(), title


@pytest.mark.parametrize("image", [None, np.zeros((3, 3)), np.zeros((28, 32, 3), np.uint8)])
def test_pictures_of_planes_work_with_any_image(image):
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
    inside = (slice(50, 60), slice(50, 60))  # of the new road, enlarged
    purple, blank = drawn[True]["new"][inside].mean(axis=(0, 1)), drawn[False]["new"][inside].mean(axis=(0, 1))
    assert purple[0] > purple[1] + 15  # half of (128, 64, 128)
    assert blank.tolist() == [22, 22, 22]
    assert drawn[True]["change"][inside].mean(axis=(0, 1)).round().tolist() == pytest.approx([166, 100, 137], abs=8)
    assert drawn[False]["change"][inside].mean(axis=(0, 1)).round().tolist() == pytest.approx([160, 52, 25], abs=8)
    facts = {"old": "a", "new": "b", "unit": "mm", "hd95": True, "min_area": 16, "notable": 0.01, "many": 200}
    named = {**summary(), "names": {"1": "car", "2": "Road"}}
    text = comparison_page(named, [], {**facts, "zero_is_label": True})
    assert "pink is another class" in text
    assert 'background:#00008e"></i>' in text
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

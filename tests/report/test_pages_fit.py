"""No page is wider than its window, on a phone, a laptop or a sheet of paper, whatever the names in it are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from typer.testing import CliRunner
from worlds.browsers import browser, needs_chromium, sticking_out
from worlds.cohorts import synthetic_archive
from worlds.predictions import hearts, serving
from worlds.updates import update

import casewise
from casewise.adapt.adaptation import Adaptation
from casewise.adapt.model import Model
from casewise.cli import app
from casewise.core.prediction_record import PredictedCase
from casewise.core.records import Action, Decision, Policy, State
from casewise.deployment import Deployment
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.render.ink import change_svg
from casewise.render.mask_pictures import STREET, Preview, data_uri, overlay_png
from casewise.report.bench_page import bench_page
from casewise.report.certificate_page import certificate_page
from casewise.report.demo_page import DemoFacts, ScoredHeart
from casewise.report.fit_page import fit_page
from casewise.report.page import render_page
from casewise.report.prediction_page import prediction_page
from casewise.serve.access import ServiceSettings
from casewise.serve.app import create_app, service_page
from casewise.study.benchmark import COLUMNS, result_table

__all__ = ["browser"]
pytestmark = [needs_chromium, pytest.mark.filterwarnings("ignore::casewise.core.errors.CasewiseWarning")]

LONG = "a-very-long-identifier-without-any-space-in-it_" * 2 + "frame_000161"
SENTENCE = "a sentence of quite some words that goes on for a while and names " + LONG
PHONE, LAPTOP, PAPER, LANDSCAPE = 390, 1366, 687, 1032  # paper: A4 without its margins


def prediction(folder: Path) -> str:
    """One kept street with every class, one failure with a long error."""
    mask = np.arange(18 * 32).reshape(18, 32) % len(STREET)
    names = dict(enumerate(STREET))
    shown = Preview(np.zeros((18, 32), np.uint8), mask, mask.T.reshape(18, 32), mask, None, names, background=False)
    (folder / f"overlays/{LONG}.png").parent.mkdir(parents=True)
    (folder / f"overlays/{LONG}.png").write_bytes(overlay_png(shown))
    decision = Decision(LONG, Action.KEEP, State(1), 1, "router", coordinate="delta_foreground", value=0.1,
                        cut_low=0.05, cut_high=0.3, bucket="low", reason=SENTENCE)  # fmt: skip
    entries = [
        PredictedCase(LONG, "done", decision, group=LONG, outputs={f"overlays/{LONG}.png": ""}, timing={"total_s": 1}),
        PredictedCase("broken", "failed", error=SENTENCE, notes=(SENTENCE,)),
    ]
    facts = {"model": LONG, "policy": LONG, "calibration_id": "0" * 64, "scores": {}, "versions": {"torch": LONG}}
    facts |= {"classes": {**names, 19: LONG}, "background": False, "warnings": [SENTENCE], "promise": SENTENCE}
    return prediction_page(entries, facts)


def certificate(folder: Path) -> str:
    archive = synthetic_archive(folder / "site", cases=24, harmful=0.4)
    found, _ = certify_router(archive, calibrate(archive, "cardiac"), Promise(("ha",), (0.3,)), force=True)
    return certificate_page(
        replace(found, policy_name=LONG, cohort=LONG, groups=(LONG, "B"), warnings=(SENTENCE,), advice=SENTENCE)
    )


def compared(folder: Path) -> str:
    """Every planted regression, at a site with a long name."""
    root = update(folder, cases=12)
    (root / "cases.csv").write_text((root / "cases.csv").read_text().replace(",A,", f",{LONG},"))
    for part in ("old", "new", "labels"):
        (root / part / "h03.nii.gz").rename(root / part / f"{LONG}.nii.gz")
    (root / "cases.csv").write_text((root / "cases.csv").read_text().replace("h03,", f"{LONG},"))
    (root / "new" / "h11.nii.gz").unlink()
    words = ["compare", root / "old", root / "new", "-l", root / "labels", "-i", root / "labels", "--cases"]
    done = CliRunner().invoke(app, [str(one) for one in (*words, root / "cases.csv", "-o", root / "out")])
    assert (root / "out" / "report.html").is_file(), done.output
    return (root / "out" / "report.html").read_text(encoding="utf-8")


def fit(folder: Path) -> str:
    """Two designs and one case, with long names."""
    row = {"design": "m0", "gain": 0.0, "low": 0.0, "high": 0.0, "helped": 0, "hurt": 0, "hurt_by_a_point": 0,
           "cases": 9, "worst": 0.0, "p": 1.0, "fails": []}  # fmt: skip
    designs = [row, {**row, "design": LONG, "fails": [SENTENCE, "p 0.300"]}]
    compared = {
        "chosen": LONG,
        "why": SENTENCE,
        "rows": designs,
        "nested": {"gain": 0.01, "patients": 10},
    }
    facts = {
        "model": LONG, "cases": 9, "patients": 9, "ladders": [LONG, "views"], "metric": "dice", "cleanup": "",
        "preflight": {"comparison": compared}, "flagged": False, "promise": SENTENCE, "notes": [SENTENCE],
        "seconds": 60.0, "steps_s": {"learn": 30.0}, "case_s": 1.0, "next": f"casewise predict -i IN -o OUT -m {LONG}",
    }  # fmt: skip
    case = {"case": LONG, "patient": LONG, "source": 0.8, "metric": 0.9, "state": LONG}
    picture = data_uri(np.zeros((264, 264, 3), np.uint8))
    return fit_page(facts, [case], [{**case, "pictures": [picture, picture]}])


def demo(folder: Path) -> str:
    """Two hearts, one of another scanner."""
    row = {"design": "m0", "gain": 0.0}
    fitted = {"preflight": {"comparison": {"rows": [row], "chosen": LONG}}, "patients": 10}
    dice = {"m0": 0.8, "views": 0.81, "tuned": 0.7, "deployed": 0.85}
    hearts = (ScoredHeart(LONG, dice, False, False, False), ScoredHeart("other", dice, True, True, True))
    facts = DemoFacts(hearts, 0.9, fitted, {"alpha": 0.2, "units": 9})
    panel = (SENTENCE, data_uri(np.zeros((264, 264, 3), np.uint8)))
    return render_page(
        "demo.html.j2", facts=facts, notice=SENTENCE, changes=Markup(change_svg([(LONG, 0.8, 0.9)], metric="Dice")),
        pictures=[[panel, panel]], legend=[(LONG, "#123456")], undone=hearts[1].rollback_sentence,
    )  # fmt: skip


def benchmark(folder: Path) -> str:
    scores = {one.key: 0.0123 for one in COLUMNS[1:-1]} | {"low": -0.0123, "high": 0.0456, "cases": 9, "clusters": 9}
    cases = [{"case": name, "change": 0.1, "rolled_back": False} for name in (LONG, "b")]
    promise = {"loss": "harmed", "alpha": 0.15, "realized": 0.123, "missed": True}
    method = {"name": "cotta: default, certified", "took": "router", "design": "default", "scores": scores,
              "cases": cases, "promise": promise, "notes": []}  # fmt: skip
    result = {"name": LONG, "metric": "dice", "evaluation": [LONG], "calibration": [],
              "labels_seen_before_decisions": 0, "methods": [method] * 9}  # fmt: skip
    return bench_page(result, result_table(result), [SENTENCE])


def test_the_columns_of_a_benchmark_fit_a_laptop_and_methods_without_a_picture_are_counted(
    browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(benchmark(tmp_path), encoding="utf-8")
    tab = browser.new_page(viewport={"width": LAPTOP, "height": 900})
    tab.goto((tmp_path / "page.html").as_uri())
    assert tab.evaluate("[...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)")
    assert "1 further method of the table is not drawn." in tab.inner_text("figcaption")
    tab.close()


def service(folder: Path) -> str:
    deployment = Deployment(
        Model("casewise.adapt.networks:PlainUNet"),
        Policy(LONG, "fixed-k", {"step": 1}, 1),
        {"": Adaptation(steps=1)},
    )
    app = create_app(deployment, ServiceSettings())
    return service_page(app, LONG, deployment)


PAGES: dict[str, Callable[[Path], str]] = {
    "report/templates/prediction.html.j2": prediction,
    "report/templates/demo.html.j2": demo,
    "report/templates/certificate.html.j2": certificate,
    "report/templates/comparison.html.j2": compared,
    "report/templates/fit.html.j2": fit,
    "report/templates/bench.html.j2": benchmark,
    "serve/assets/service.html": service,
}
"""What makes each page; test_report_browser.py tries report.html.j2, and the last test here review.html."""


ENTIRE = re.compile('<!doctype html>|{% extends "base.html.j2" %}')


def test_every_page_of_casewise_is_tried_here() -> None:
    root = Path(casewise.__file__).parent
    files = [path for path in root.rglob("*") if path.suffix in (".py", ".html", ".j2")]
    pages = {str(path.relative_to(root)) for path in files if ENTIRE.search(path.read_text(encoding="utf-8"))}
    assert pages - {"report/templates/base.html.j2"} == {
        *PAGES,
        "report/templates/report.html.j2",
        "serve/assets/review.html",
    }


@pytest.fixture
def widths(browser: Any) -> Iterator[Callable[[str], dict[int, list[str]]]]:
    """What sticks out of a page, by the width of the window; the narrow window is dark, and paper is printed on."""
    with ExitStack() as opened:

        def measured(url: str, ready: str = "body") -> dict[int, list[str]]:
            found = {}
            for width, scheme in ((PHONE, "dark"), (LAPTOP, "light"), (PAPER, "light")):
                tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                opened.callback(tab.close)
                tab.goto(url)
                tab.wait_for_selector(ready)
                if width == PAPER:
                    tab.emulate_media(media="print")
                    if "size: A4 landscape" in tab.content():
                        tab.set_viewport_size({"width": LANDSCAPE, "height": 900})
                found[width] = sticking_out(tab)
            return found

        yield measured


FITS: dict[int, list[str]] = {PHONE: [], LAPTOP: [], PAPER: []}


@pytest.mark.parametrize("made", PAGES.values(), ids=lambda made: made.__name__)
def test_a_page_fits(made: Callable[[Path], str], widths: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(made(tmp_path), encoding="utf-8")
    assert widths((tmp_path / "page.html").as_uri()) == FITS


def test_the_reviewers_page_fits(widths: Any, tmp_path: Path) -> None:
    folder = hearts(tmp_path / "out")
    folder.entry(LONG, status="failed", error=SENTENCE, error_kind="BadInput")
    kept = json.loads(folder.layout.entry("kept").read_text())
    first = "casewise/candidates/kept/1.nii.gz"
    shutil.copy(tmp_path / "out" / first, tmp_path / "out" / first.replace("/1.", "/2."))
    outputs = {**kept["outputs"], first.replace("/1.", "/2."): kept["outputs"][first]}
    folder.entry("kept", **{**kept, "outputs": outputs, "names": {"1": SENTENCE, "2": SENTENCE}})
    with serving(tmp_path / "out", images=folder.images) as server:
        assert widths(server.url, "canvas[data-case]") == FITS
        assert widths(f"{server.url}#kept", "canvas[data-case=kept]") == FITS


@pytest.mark.parametrize(("tuned", "said"), [(0.7, "here the better one"), (0.9, "the worse one")])
def test_the_demo_says_whether_a_rollback_was_right(tuned: float, said: str) -> None:
    heart = ScoredHeart("other", {"m0": 0.8, "tuned": tuned, "deployed": 0.8}, True, True, True)
    assert said in heart.rollback_sentence
    assert "third scanner" in heart.rollback_sentence


@pytest.mark.parametrize(("views", "deployed", "said"), [
    (0.85, 0.9, "Tuning on labelled hearts recovers more."),
    (0.95, 0.9, "Tuning on labelled hearts does not recover more."),
])  # fmt: skip
def test_the_demo_names_the_hearts_that_each_way_hurts(views: float, deployed: float, said: str) -> None:
    good = {"m0": 0.8, "views": views, "tuned": 0.7, "deployed": deployed}
    hurt = {"m0": 0.8, "views": views, "tuned": 0.7, "deployed": 0.7}
    hearts = [ScoredHeart("a", good, False, True, False)] * 9 + [ScoredHeart("b", hurt, False, False, False)]
    compared = {"comparison": {"chosen": "tuned/1", "rows": [{}] * 3}}
    facts = DemoFacts(tuple(hearts), 0.97, {"preflight": compared, "patients": 10}, {"alpha": 0.2, "units": 9})
    fall, gain, harm, promise = facts.sentences
    assert "0.970" in fall
    assert said in gain
    assert harm.startswith(
        "1 of 10 hearts lose more than a point of Dice (0.01), for a mean gain of +0.080; "
        f"with the mean of the views alone none, for {views - 0.8:+.3f}; with the tuned weights alone 10, for -0.100."
    )
    assert promise.endswith("1 of 10 did: the promise was kept.")

"""certify and plan from the command line, and the page that a clinician reads."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner
from worlds.candidates import views_archive

from casewise.cli import app
from casewise.core.errors import BadInput, Refused, UnknownName
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certificate import read_certificate
from casewise.judge.certificates.certify import certify
from casewise.judge.certificates.certify_gate import certify_gate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.risk_control import plan
from casewise.judge.policy import READY, read_policy
from casewise.report.certificate_page import certificate_page

RUN = CliRunner()


def run(*words, code=0):
    result = RUN.invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_plan_prints_both_sample_sizes_and_what_n_can_promise():
    said = run("certify", "--sample-size", "--alpha", 0.1, "--delta", 0.1, "--set", "cases=20")
    assert re.search(r"\b9 for the mean risk", said)
    assert re.search(r"\b22 with probability 0.9", said)
    assert re.search(r"\b23 the same for other losses", said)
    assert "alpha >= 0.048 for the mean risk" in said
    assert "ltt: not possible" in said
    assert "labelled patients (not scans or frames)" in said


@pytest.mark.parametrize(("scans", "loss", "alpha"), [(1, "harmed", 0.1), (1, "ha", 0.1), (2, "harmed", 0.05)])
def test_plan_and_certify_need_the_same_number(scans, loss, alpha, tmp_path):
    archive = views_archive(tmp_path, cases=6 * scans, per_cluster=scans)
    made = calibrate(archive, "consensus")
    planned = plan(alpha)
    either = planned.ltt_cases if (scans, loss) == (1, "harmed") else planned.betting_cases
    assert certify(archive, made, loss=loss, alpha=alpha, method="ltt", force=True).certificate.needed == either
    assert certify(archive, made, loss=loss, alpha=alpha, force=True).certificate.needed == planned.crc_cases


def test_certify_writes_certificate_page_and_policy(site, tmp_path):
    said = run("certify", site.path, "--alpha", 0.1, "--out", tmp_path)
    plain = json.loads((tmp_path / "certificate.json").read_text())
    assert plain["kind"] == "T2"
    assert plain["statement"] in said
    assert "deployed on the calibration cases" in said
    assert read_policy(tmp_path / "policy-certified.json").name == "cardiac-certified"
    assert (tmp_path / "certificate.html").read_text().startswith("<!doctype html>")


def test_certify_writes_into_the_archive_by_default(site, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(site.path, folder)
    run("certify", folder, "--loss", "harmed", "--alpha", 0.3, "--method", "ltt")
    assert json.loads((folder / "certificate.json").read_text())["details"]["p_value"] in ("binomial", "betting")
    assert (folder / "policy-certified.json").exists()


def test_an_infeasible_certificate_exits_with_one(site, tmp_path):
    said = run("certify", site.path, "--alpha", 0.02, "--out", tmp_path, code=1)
    assert "needs at least 49" in said
    assert not (tmp_path / "policy-certified.json").exists()  # nothing is certified


def test_the_gate_is_certified_from_the_command_line(site, other, tmp_path):
    run(
        "certify",
        site.path,
        "--loss",
        "surrogate",
        "--alpha",
        0.1,
        "--set",
        f"evaluation={other.path}",
        "--out",
        tmp_path,
    )
    assert json.loads((tmp_path / "certificate.json").read_text())["kind"] == "T1"
    run("certify", site.path, "--method", "envelope", "--alpha", 0.1, "--out", tmp_path)
    assert json.loads((tmp_path / "certificate.json").read_text())["kind"] == "T5"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--method", "inflated"], "a method must be one of crc, ltt, envelope"),
        (["--method", "magic"], "got 'magic'"),
        (["--loss", "harmed", "--method", "envelope"], "needs --loss surrogate"),
        (["--loss", "size"], "no loss is called 'size'"),
    ],
)
def test_what_cannot_be_certified_says_why(site, tmp_path, words, says):
    with pytest.raises(BadInput, match=says):
        run("certify", site.path, *words, "--out", tmp_path)


def test_a_policy_may_be_named(site, tmp_path):
    with pytest.raises((BadInput, UnknownName)):
        run("certify", site.path, "--policy", "fixed-k", "--out", tmp_path)


class Page(HTMLParser):
    """Collects what a page loads, and checks that every tag is closed."""

    VOID = frozenset({"meta", "link", "br", "path", "polyline", "circle", "polygon"})

    def __init__(self, html):
        super().__init__()
        self.open, self.links, self.words = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href") and value != "data:,"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.9])
def test_the_page_is_whole_and_loads_nothing(site, alpha):
    certificate, _ = certify_router(site.archive, site.policy, Promise(("ha",), (alpha,)))
    page = Page(certificate_page(certificate))
    assert not page.open
    assert not page.links
    words = " ".join(page.words)
    assert certificate.statement in words
    assert all(reason in words for reason in certificate.invalid_if)
    assert certificate.policy in words
    assert "labels used to certify" in words
    listed = replace(certificate, details={**certificate.details, "alphas": ["consensus", "merge"]})
    assert "consensus, merge" in " ".join(Page(certificate_page(listed)).words)
    assert ("Nothing is promised" in words) == (alpha == 0.02)


def test_the_surrogate_page_warns_that_it_does_not_bound_the_deployed_harm(site):
    certificate, _ = certify_gate(site.archive, READY["region-gate"], loss="surrogate", alpha=0.1)
    page = certificate_page(certificate)
    assert "this certificate does not bound it" in page
    assert "Harmful share of the accepted change (HA)" in page


def test_names_on_the_page_are_escaped(site):
    certificate, _ = certify_router(site.archive, site.policy, Promise(("ha",), (0.1,)))
    assert "<script>" not in certificate_page(replace(certificate, policy_name="<script>alert(1)</script>"))


@pytest.mark.parametrize(
    "change", [{"statement": "Nobody is ever harmed."}, {"alpha": 0.001}, {"invalid_if": []}, {"seal": None}]
)
def test_a_certificate_that_a_hand_changed_promises_nothing_until_it_is_issued_again(site, tmp_path, change):
    run("certify", site.path, "--alpha", 0.1, "--out", tmp_path)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(Refused, match="was changed after it was issued, so it promises nothing"):
        read_certificate(tmp_path)
    run("certify", site.path, "--alpha", 0.1, "--out", tmp_path)
    assert read_certificate(tmp_path).alpha == 0.1

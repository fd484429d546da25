"""Sections that depend on what else was given: a certificate, another backbone, other kinds of policies."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from casewise.core.records import Policy
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.monitors.quota import quota_of
from casewise.judge.outcomes import judged_share
from casewise.study.analyses import ANALYSES, elsewhere, sections_of
from casewise.study.analyses.cut_points import quota_found, refit_of
from casewise.study.study import Extras, Study

PROMISE = "The mean harmful area of a new case is at most 0.10."


def certificate(cut: float | None, reliability=()) -> Certificate:
    return Certificate(
        kind="T2",
        statement=PROMISE,
        loss="HA",
        method="crc",
        alpha=0.10,
        delta=None,
        population="all",
        units=16,
        cases=16,
        floor=1 / 17,
        needed=9,
        cut=cut,
        bound=0.08,
        kept=0.5,
        deployed={"certified": {"ha": 0.05}},
        advice="nine cases would do",
        reliability=reliability,
        reliability_from="leave-one-out",
    )


def given(study, **extras):
    if isinstance(extras.get("certificate"), Certificate) and not extras["certificate"].policy:
        extras["certificate"] = replace(extras["certificate"], policy=policy_digest(study.policy))
    return replace(study, extras=Extras(**extras))


def test_a_certificate_of_another_policy_is_not_shown(study):
    section = ANALYSES["certificate"](given(study, certificate=replace(certificate(0.02), policy="another")))
    assert PROMISE not in section.lead
    assert "belongs to another policy" in next(iter(section.missing.values()))


def test_a_certificate_speaks_in_its_own_words(study):
    levels = ({"alpha": 0.1, "risk": 0.05}, {"alpha": 0.2, "risk": 0.12})
    section = ANALYSES["certificate"](given(study, certificate=certificate(0.02, levels)))
    assert section.lead == PROMISE
    assert [picture.id for picture in section.pictures] == ["crc"]
    assert {row["name"]: row["value"] for row in section.tables[0].rows}["certified: ha"] == 0.05


def test_a_failed_attempt_is_not_shown_as_a_promise(study):
    section = ANALYSES["certificate"](given(study, certificate=certificate(None)))
    assert section.lead.startswith("Nothing is certified")
    assert PROMISE not in section.lead
    assert "reliability diagram (fig:crc)" in section.missing


def test_without_a_certificate_the_section_says_what_it_needs(study):
    assert "casewise certify" in str(ANALYSES["certificate"](study).missing)


def test_the_case_of_two_backbones_has_the_median_change():
    home = pd.DataFrame({"case": list("abcd"), "step": 0, "shrink": 0.0, "metric": [0.7, 0.7, 0.7, 0.9], "area": 0})
    last = home.assign(step=4, area=[5, 90, 30, 40])
    both = pd.concat([home, last])
    assert elsewhere.chosen_case(both, both) == "c"
    assert elsewhere.chosen_case(home.assign(metric=0.95), both) is None


def test_two_backbones_are_drawn_in_two_rows(study, monkeypatch):
    monkeypatch.setattr(elsewhere, "BAND", (0.1, 1.0))
    picture = elsewhere.backbone_picture(study, "swin", study.evaluation)
    assert picture is not None
    assert len(picture.figure.axes) == 6
    assert "median changed volume under swin" in picture.caption


@pytest.mark.parametrize("name", ["routing", "controls", "sensitivity", "min-area", "criteria", "objectives"])
def test_a_policy_without_buckets_is_refused_by_sections_about_buckets(sources, name):
    fixed = Policy("fixed-k", "fixed-k", {"step": 2}, 4)
    section = ANALYSES[name](Study.of(sources.evaluation, sources.calibration, fixed, resamples=100))
    assert not section.tables
    assert "fixed-k" in str(section.missing)


def clocked(study, seconds, **more):
    entries = {case: replace(entry, seconds=seconds, **more) for case, entry in study.evaluation.entries.items()}
    return replace(study, evaluation=replace(study.evaluation, entries=entries))


def test_the_cost_of_an_update_is_the_time_that_the_archive_stored(study):
    section = ANALYSES["cost"](clocked(study, (0.5, 1.5, 2.0, 2.5, 2.0)))
    compute = next(one for one in section.tables if one.id == "compute")
    assert [row["milliseconds"] for row in compute.rows[:2]] == [500, 2000]
    assert "median of 104 updates of 26 cases" in compute.caption
    assert next(one for one in section.findings if one.name == "cost.seconds").n == 26
    assert not section.missing


def test_what_each_signal_took_stands_in_the_report(study):
    spent = {"fragmentation": (37.0, 0.0), "augmentation_disagreement": (800.0, 120.5)}
    section = ANALYSES["cost"](clocked(study, (0.5, 1.0, 1.0, 1.0, 1.0), spent=spent))
    compute = next(one for one in section.tables if one.id == "compute")
    rows = {name: row for row in compute.rows for name in str(row["signal"]).split(", ")}
    assert (rows["regions"]["milliseconds"], rows["regions"]["megabytes"]) == (37.0, 0.0)
    assert rows["augmentation_disagreement"]["megabytes"] == 120.5
    assert rows["delta"] is rows["regions"]  # one row for all that need no pass
    assert "median of 26 cases" in compute.caption


def test_without_a_clock_the_cost_table_has_passes_only(study):
    section = ANALYSES["cost"](study)
    compute = next(one for one in section.tables if one.id == "compute")
    assert all(not isinstance(row["milliseconds"], float) and isinstance(row["forwards"], int) for row in compute.rows)
    assert "was not recorded" in compute.caption
    assert "was not recorded" in str(section.missing)


def test_refitted_cuts_say_where_the_deployed_ones_differ(sources, study):
    """The table refits one pair of tertiles; a policy that was closed, or has cuts by group, deploys others (K)."""
    assert refit_of(study).notes == ()
    shut = replace(sources.policy, options={**sources.policy.options, "cut_low": -1.0, "cut_high": -1.0})
    closed = Study.of(sources.evaluation, sources.calibration, shut, resamples=100)
    section = ANALYSES["sensitivity"](closed)
    assert any("refitted for all cases here" in note and note.endswith("HA 0.000.") for note in section.notes)


def with_quota(study, quota):
    return replace(study, policy=replace(study.policy, preflight={**study.policy.preflight, "quota": quota}))


def test_quotas_that_are_not_those_of_calibration_are_one_sentence_of_routing(study):
    here = quota_of(study.decisions[study.ours])
    assert "QUOTA" not in ANALYSES["routing"](with_quota(study, here)).lead
    least = min(here, key=here.get)
    other = with_quota(study, {**dict.fromkeys(here, 0), least: 40})
    section = ANALYSES["routing"](other)
    assert "QUOTA: the buckets differ" in section.lead
    found = next(one for one in section.findings if one.name == "routing.quota")
    assert found.number("deployed", bucket=least) == here[least]
    assert found.number("calibrated", bucket=least) == 40
    assert found.made["p"] < 0.05
    assert quota_found(with_quota(study, {})).reason


def test_every_table_and_picture_of_ha_says_how_much_of_the_edit_ha_judged(study):
    share = f"HA judged {judged_share(study.uncontrolled):.0%} of the edit"
    sections = sections_of(study)
    with_ha = [one for part in sections for one in part.tables if any(c.title.split()[0] == "HA" for c in one.columns)]
    assert {"methods", "matched", "accounting"} <= {one.id for one in with_ha}
    silent = [one.id for one in with_ha if "HA judged" not in one.caption]
    assert not silent
    assert any(share in one.caption for one in with_ha)
    assert all("HA judged" in one.caption for part in sections for one in part.pictures if " HA" in one.caption)

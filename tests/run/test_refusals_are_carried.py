"""Every output shows the warnings of calibration and monitors: NO-GO, void certificates, calibration cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from casewise.core.errors import Overlap, Refused
from casewise.core.prediction_record import OUTSIDE
from casewise.core.records import Policy
from casewise.deployment import Deployment
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.monitors.audits import Audit
from casewise.judge.monitors.watch import Watch, Watching, write_watch
from casewise.report.prediction_page import prediction_page
from casewise.run.dicom import certificate_sentence
from casewise.run.local import LocalEngine
from casewise.run.predict_case import PredictCase
from casewise.run.predict_folder import check_scorable, predict_folder
from casewise.run.summary import promised, run_report

Maker = Callable[..., PredictCase]
AGAINST = {"retained": {"go": False, "helped": 2, "hurt": 7}}
NO_GO = Policy("fixed-k", "fixed-k", {"step": 1}, 1, calibration_id="made-up", preflight=AGAINST)


def test_a_no_go_is_not_deployed_without_force(work: Maker) -> None:
    with pytest.raises(Refused, match=r"NO-GO: .* 2 were helped and 7 were hurt; .* add --set force=true"):
        work(policy=NO_GO)


def test_a_forced_no_go_is_in_every_entry_the_report_and_the_page(work: Maker, tmp_path: Path) -> None:
    made = work(policy=NO_GO, force=True)
    entries = list(predict_folder(made, LocalEngine()))
    assert all("NO-GO" in entry.policy["no_go"] and "NO-GO" in entry.notes[0] for entry in entries)
    assert not any("are of labelled patients" in said for said in promised(made.deployment, entries)[1])
    report = run_report(made, tmp_path, entries, 1.0, {})
    assert "NO-GO" in report["policy"]["no_go"]
    assert set(report["warnings"]) == {entry.case for entry in entries}
    facts: dict[str, Any] = {"model": "m", "policy": "p", "calibration_id": "", "scores": {}, "versions": {}}
    assert "NO-GO" in prediction_page(entries, {**facts, "warnings": made.deployment.warnings})


def certificate(policy: Policy, **changes: Any) -> Certificate:
    plain: dict[str, Any] = {
        "kind": "T2", "statement": "at most a tenth is harmed", "loss": "ha", "method": "crc", "alpha": 0.1,
        "delta": None, "population": "cases", "units": 50, "cases": 50, "floor": 0.02, "needed": 9, "cut": 0.3,
        "bound": 0.09, "kept": 0.5, "deployed": {}, "policy": policy_digest(policy),
    }  # fmt: skip
    return Certificate(**{**plain, **changes})


def test_an_audit_alarm_voids_the_certificate_in_predict(work: Maker, tmp_path: Path) -> None:
    policy = replace(NO_GO, preflight={})
    watch = Watch("made-up", {"audit": Audit(0.1)})
    for t in range(8):
        watch = watch.audit(f"old{t}", 1.0)
    write_watch(tmp_path / "w.json", watch)
    made = work(policy=policy, certificate=certificate(policy))
    made = replace(made, deployment=replace(made.deployment, watch=Watching(tmp_path / "w.json")))
    entries = list(predict_folder(made, LocalEngine()))
    assert all(entry.certificate["void"] for entry in entries)
    assert all("the certificate is void: the audit alarm" in entry.notes[0] for entry in entries)
    assert run_report(made, tmp_path, entries, 1.0, {})["certificate"]["why_void"].startswith("the certificate is void")


@pytest.mark.parametrize(
    ("preflight", "why"),
    [
        (AGAINST, "its policy is a NO-GO"),
        ({"quota": {"low": 0, "mid": 0, "hard": 40}}, "the buckets have other shares"),
    ],
)
def test_what_speaks_against_a_promise_voids_it_in_the_report_and_the_last_line(
    work: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preflight: Any, why: str
) -> None:
    policy = replace(NO_GO, preflight=preflight)
    made = work(policy=policy, certificate=certificate(policy), force=True)
    entries = list(predict_folder(made, LocalEngine()))
    monkeypatch.setattr("casewise.run.summary.quota_of", lambda _: {"low": 40, "mid": 0, "hard": 0})
    statement, said = promised(made.deployment, entries)
    assert statement is None
    assert any(f"the certificate is void: {why}" in sentence for sentence in said)
    found = run_report(made, tmp_path, entries, 1.0, {})["certificate"]
    assert (found["void"], why in found["why_void"]) == (True, True)


def test_cases_outside_the_certificate_are_counted_beside_the_promise(work: Maker, tmp_path: Path) -> None:
    policy = replace(NO_GO, preflight={})
    made = work(policy=policy, certificate=certificate(policy, details={"batch_inputs": {"other": "0" * 64}}))
    entries = list(predict_folder(made, LocalEngine()))
    n = len(entries)
    statement, said = promised(made.deployment, entries)

    def outside(some: list[Any]) -> str:
        named = ", ".join(one.case for one in some[:3]) + ", ..." * (len(some) > 3)
        return f"{len(some)} of {n} cases ({named}) are {OUTSIDE}: no estimate or promise holds for them"

    assert statement is None  # the certificate covers none of them
    assert all(entry.certificate["void"] and entry.certificate["why_void"] == entry.uncovered for entry in entries)
    assert said == ["the certificate does not hold here: it covers none of these cases", outside(entries)]
    short = run_report(made, tmp_path, entries, 1.0, {})["certificate"]
    assert (short["void"], short["why_void"]) == (True, said[0])
    covered = [replace(entries[0], notes=()), *entries[1:]]
    assert promised(made.deployment, covered) == ("at most a tenth is harmed", [outside(entries[1:])])
    sentences = [certificate_sentence(entry, "at most a tenth is harmed") for entry in covered[:2]]
    assert sentences[0] == "at most a tenth is harmed"
    assert sentences[1].startswith(f"the certificate does not cover this case: {OUTSIDE}: ")


def test_the_quotas_of_all_parts_decide_what_is_promised(
    work: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(NO_GO, preflight={"quota": {"low": 0, "mid": 0, "hard": 40}})
    made = work(policy=policy, certificate=certificate(policy), force=True)
    entries = list(predict_folder(made, LocalEngine()))
    monkeypatch.setattr(
        "casewise.run.summary.quota_of", lambda some: {"low": 40 * (len(list(some)) > 1), "mid": 0, "hard": 0}
    )
    alone = run_report(made, tmp_path, entries[:1], 1.0, {})["certificate"]
    among = run_report(made, tmp_path, entries[:1], 1.0, {}, entries)["certificate"]
    assert (alone["void"], among["void"]) == (False, True)


def test_a_calibration_image_is_recognised_under_any_name(work: Maker) -> None:
    plain = work(policy=replace(NO_GO, preflight={}))
    digest = _digest(plain.deployment, plain.cases["case_1"])
    known = {"calibration_cases": ("other", "case_2"), "calibration_inputs": (digest, "0" * 64)}
    made = work(policy=replace(NO_GO, preflight={}, **known))
    found = {entry.case: entry.notes for entry in predict_folder(made, LocalEngine())}
    assert "this image is calibration case other" in found["case_1"][0]
    assert found["case_2"] == ()  # only its name is that of a calibration case
    with pytest.raises(Overlap, match=r"under other names \(case_1 is other\)"):
        check_scorable(made.deployment, list(made.cases.values()))


def _digest(deployment: Deployment, files: Any) -> str:
    from casewise.archive.layout import image_sha256

    found = image_sha256(deployment.backbone.read(files).case.image)
    assert found is not None
    return found

"""Reading evaluation labels leaves a trace that cannot be taken out unnoticed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from worlds.candidates import views_archive
from worlds.cohorts import synthetic_archive

from casewise import replay
from casewise.archive import store
from casewise.archive.store import open_archive
from casewise.core.errors import BadInput, CasewiseError, DamagedArchive, Locked, Overlap, Refused
from casewise.judge.calibration.calibrate import calibrate
from casewise.judge.certificates.certify_designs import certify_designs
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.controllers import CONTROLLERS
from casewise.judge.ledger import (
    LEDGER,
    PAPER,
    compared_as,
    compared_designs,
    expose,
    ledger_problems,
    note_comparison,
    read_ledger,
    unlock,
)
from casewise.judge.outcomes import outcomes
from casewise.judge.policy import READY, read_policy, write_policy
from casewise.study.benchmark import decide_all, score
from casewise.study.study import unlocked


def test_the_papers_ledger_has_four_exposures_and_three_constants():
    assert sum("labels" in line["seen"] for line in PAPER) == 4
    assert sum(line["seen"] == "never varied" for line in PAPER) == 3


def test_unlocking_is_written_down_with_its_policy(tmp_path):
    policy = calibrate(synthetic_archive(tmp_path / "a", cases=6), "cardiac")
    evaluation = synthetic_archive(tmp_path / "e", cases=2, prefix="eval", split="evaluation")
    unlocked = unlock(evaluation, purpose="study", policy=policy)
    assert unlock(unlocked, purpose="study", policy=policy) is unlocked  # one reading, one line
    unlock(evaluation, purpose="study again")
    first, second = read_ledger(tmp_path / "e")
    assert (first["choice"], first["policy"], first["calibration_id"]) == ("study", "cardiac", policy.calibration_id)
    assert second["previous"] == first["hash"]


def test_a_policy_is_not_unlocked_on_its_own_cases_and_leaves_no_line(tmp_path):
    archive = synthetic_archive(tmp_path, cases=6)
    policy = calibrate(archive, "cardiac")
    before = read_ledger(tmp_path)
    with pytest.raises(Overlap, match="share 6 cases"):
        unlock(archive, purpose="study", policy=policy)
    assert read_ledger(tmp_path) == before


def test_evaluation_labels_are_locked_until_the_ledger_says_why(tmp_path):
    evaluation = synthetic_archive(tmp_path, cases=2, split="evaluation")
    with pytest.raises(Locked, match=r"labels of 1 evaluation cases .* are locked \(case-0000\); state the purpose"):
        evaluation.label("case-0000")
    with pytest.raises(Locked, match="labels of 2 evaluation cases"):
        outcomes(evaluation)
    assert read_ledger(tmp_path) == []
    unlocked = unlock(evaluation, purpose="a look")
    assert unlocked.unlocked_by == read_ledger(tmp_path)[0]["hash"]
    assert unlocked.label("case-0000").any()
    assert len(outcomes(unlocked.select(ids=["case-0001"])))


def test_a_table_that_was_scored_before_is_locked_too(tmp_path):
    outcomes(unlock(synthetic_archive(tmp_path, cases=2, split="evaluation"), purpose="study"))
    with pytest.raises(Locked):
        outcomes(open_archive(tmp_path))


def test_the_line_is_written_before_the_first_label_is_read(tmp_path, monkeypatch):
    archive = synthetic_archive(tmp_path, cases=1, split="evaluation")
    read, lines = store.unpacked, []
    monkeypatch.setattr(store, "unpacked", lambda file: (lines.append(len(read_ledger(tmp_path))), read(file))[1])
    unlock(archive, purpose="study").label(archive.ids[0])
    assert lines == [1]


def test_an_archive_given_for_evaluation_is_locked_whatever_its_splits_say(tmp_path):
    archive = synthetic_archive(tmp_path, cases=2)
    assert archive.label("case-0000").any()
    with pytest.raises(Locked):
        archive.locked().label("case-0000")
    with pytest.raises(Locked):
        unlock(archive, purpose="study").locked().label("case-0000")


def test_signals_and_decisions_need_no_key(tmp_path):
    evaluation = synthetic_archive(tmp_path, cases=2, split="evaluation")
    assert len(replay(evaluation, CONTROLLERS.build("frag-stop", cap=4))) == 2
    assert not outcomes(synthetic_archive(tmp_path / "u", cases=1, split="evaluation", labelled=False)).empty


def test_a_reason_must_be_given(tmp_path):
    with pytest.raises(BadInput, match="give the purpose"):
        unlock(synthetic_archive(tmp_path, cases=1), purpose=" ")


@pytest.mark.parametrize("damage", ["drop", "edit", "cut"])
def test_a_ledger_that_was_tampered_with_is_noticed(tmp_path, damage):
    for choice in ("one", "two", "three"):
        expose(tmp_path, choice=choice)
    assert ledger_problems(tmp_path) == []
    lines = (tmp_path / LEDGER).read_text().splitlines()
    if damage == "drop":
        lines.pop(1)
    elif damage == "edit":
        lines[1] = json.dumps({**json.loads(lines[1]), "choice": "nothing"})
    else:
        lines[2] = lines[2][:20]
    (tmp_path / LEDGER).write_text("\n".join(lines) + "\n")
    with pytest.raises(DamagedArchive, match="edited or cut"):
        read_ledger(tmp_path)
    assert ledger_problems(tmp_path)


def test_a_design_that_a_comparison_included_cannot_be_certified_by_its_name(tmp_path):
    """calibrate default, calibrate consensus, certify: the labels chose the consensus."""
    archive = views_archive(tmp_path / "a", cases=24)
    plain = calibrate(archive, "consensus")
    asked = Promise(("harmed",), (0.2,))
    certify_router(archive, plain, asked, force=True)  # a design that was named before anything was compared
    note_comparison(archive, ["m0", "consensus", "medoid"])
    note_comparison(archive, ["m0", "consensus"])  # says nothing new
    lines = (archive.path / "exposures.jsonl").read_text()
    assert lines.count("compared") == 2 * 2  # calibrate and the comparison; each line has the word twice
    with pytest.raises(Refused, match=r"'consensus' was compared with medoid .* cannot certify it"):
        certify_router(archive, calibrate(archive, "consensus"), asked, force=True)
    assert (archive.path / "exposures.jsonl").read_text() == lines  # a refused question is no attempt
    assert compared_designs(archive) == {"consensus", "medoid"}


def test_designs_that_were_calibrated_one_after_the_other_were_compared(tmp_path):
    """calibrate consensus, calibrate medoid, certify the better one: the labels chose it. Both together are valid."""
    archive = views_archive(tmp_path / "a", cases=24)
    made = [calibrate(archive, name) for name in ("consensus", "medoid")]
    for one in made:
        with pytest.raises(Refused, match="was compared with"):
            certify_router(archive, one, Promise(("harmed",), (0.2,)), force=True)
    certify_designs(archive, made, Promise(("harmed",), (0.5,), 0.1), force=True)
    note_comparison(archive, ["m0", "merge"])
    with pytest.raises(Refused, match="was compared with merge"):
        certify_designs(archive, made, Promise(("harmed",), (0.5,), 0.1), force=True)


def test_a_comparison_notes_all_that_took_part(tmp_path):
    archive = views_archive(tmp_path / "a", cases=24)
    rows = calibrate(archive, "default").preflight["comparison"]["rows"]
    assert compared_designs(archive) == {row["design"] for row in rows} - {"m0"}


HARMED = Promise(("harmed",), (0.4,))
TOGETHER = Promise(("harmed",), (0.4,), 0.1)


def used_before(certificate):
    return [one for one in certificate.warnings if "used before" in one]


def refused(archive, policy, other):
    with pytest.raises(Refused, match=f"was compared with .*{other}.* cannot certify it"):
        certify_router(archive, policy, HARMED, force=True)


def test_routers_that_were_calibrated_one_after_the_other_are_certified_together_or_not_at_all(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=24)
    routers = [calibrate(archive, "cardiac")]
    first, certified = certify_router(archive, routers[0], HARMED, force=True)
    assert not used_before(first)
    routers.append(calibrate(archive, "default"))
    refused(archive, routers[0], "default")
    refused(archive, routers[1], "cardiac")
    refused(archive, certified, "default")  # the policy of the first certificate is the same router
    together, _ = certify_designs(archive, routers, TOGETHER, force=True)
    assert not used_before(together)  # the bound is corrected for the choice among them
    calibrate(
        archive, "cardiac", percentiles="driving"
    )  # other cut-points: the bound holds for every cut below its own
    certify_designs(archive, routers, TOGETHER, force=True)


DEEPER = replace(READY["cardiac"], options={**READY["cardiac"].options, "low": {"action": "depth", "depth": 4}})


@pytest.mark.parametrize("other", [{"coordinate": "-msp"}, {"unshrunk": True}, {"design": DEEPER}])
def test_a_router_with_another_coordinate_or_action_is_another_router(tmp_path, other):
    archive = synthetic_archive(tmp_path / "a", cases=40, prefix="r", seed=3)
    with pytest.raises(CasewiseError, match="was not recorded"):
        calibrate(archive, "stop-router")  # showed no result
    made = [calibrate(archive, "cardiac"), calibrate(archive, **{"design": "cardiac", **other})]
    refused(archive, made[0], "cardiac by")
    refused(archive, made[1], "cardiac by delta")
    assert "stop-router" not in str(compared_designs(archive))
    for one in made:
        certify_router(archive, read_policy(write_policy(tmp_path, one)), HARMED, force=True, together=None)
    certify_designs(archive, made, TOGETHER, force=True)


def test_a_region_gate_that_was_calibrated_on_these_labels_is_another_design(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=24)
    calibrate(archive, "region-gate")
    refused(archive, calibrate(archive, "cardiac"), "region-gate")


def test_a_renamed_router_is_certified_with_a_warning(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=24)
    renamed = replace(calibrate(archive, "cardiac"), name="mine")
    (said,) = used_before(certify_router(archive, renamed, HARMED, force=True)[0])
    assert "calibrate fitted cardiac by delta" in said


def test_a_consensus_that_the_user_named_is_another_design_for_each_candidate(tmp_path):
    """calibrate consensus for one candidate after the other, certify the best: the labels chose it."""
    archive = views_archive(tmp_path / "a", cases=24)
    first = calibrate(archive, "consensus", consensus="1")
    assert not used_before(certify_router(archive, first, HARMED, force=True)[0])
    made = [first, calibrate(archive, "consensus", consensus="2"), calibrate(archive, "consensus")]
    assert compared_designs(archive) == {"consensus of candidate 1", "consensus of candidate 2", "consensus"}
    for one in made:
        refused(archive, read_policy(write_policy(tmp_path, one)), "consensus")
    together, _ = certify_designs(archive, made, TOGETHER, force=True)
    assert not used_before(together)


def test_one_design_on_a_named_ladder_was_compared_with_nothing(tmp_path):
    archive = views_archive(tmp_path / "a", cases=24, ladder="mri").only_ladder()
    policy = calibrate(archive, "consensus")
    assert compared_designs(archive) == {"consensus on mri"}
    assert not used_before(certify_router(archive, policy, HARMED, force=True)[0])


def test_the_same_router_on_another_ladder_is_another_router():
    router = READY["cardiac"]
    names = {compared_as(replace(router, ladder=one)) for one in ("", "tent", "eata")}
    assert names == {"cardiac by delta", "cardiac by delta on tent", "cardiac by delta on eata"}


def test_what_a_study_showed_with_these_labels_cannot_be_certified_with_them(tmp_path):
    archive, other = (synthetic_archive(tmp_path / one, cases=24, prefix=one, split=None) for one in "ab")
    studied = calibrate(other, "cardiac")
    unlock(archive, purpose="study", policy=studied)
    (said,) = used_before(certify_router(archive, studied, HARMED, force=True)[0])
    assert "study of cardiac" in said  # alone: it may have been certified because the study was good
    second = calibrate(other, "default")
    (said,) = used_before(certify_router(archive, second, HARMED, force=True)[0])
    assert "study of cardiac" in said  # not shown, so these labels did not choose it
    unlock(archive, purpose="study", policy=second)
    refused(archive, studied, "default")
    refused(archive, second, "cardiac")
    together, _ = certify_designs(archive, [studied, second], TOGETHER, force=True)
    assert len(used_before(together)) == 1


def test_a_study_of_a_learned_design_shows_the_consensus_too(tmp_path):
    archive, other, third = (views_archive(tmp_path / one, cases=24, prefix=one, split=None) for one in "abc")
    policy = calibrate(other, "default")
    unlocked(archive, policy)
    assert len(compared_designs(archive)) == 2
    refused(archive, policy, "consensus")
    refused(archive, calibrate(other, "consensus"), "default")
    assert compared_as(policy) != compared_as(calibrate(third, "default"))


def test_what_a_benchmark_showed_cannot_be_certified_with_its_labels(tmp_path):
    holdout, archive = (synthetic_archive(tmp_path / one, cases=24, prefix=one, split=None) for one in "ab")
    made, _ = decide_all(holdout, archive, ["cardiac", "default"], promise=HARMED)
    assert [one.certificate is not None for one in made if one.design] == [False, True] * 2  # fixed in advance
    score(made, archive, "0")
    refused(archive, made[2].policy, "default")

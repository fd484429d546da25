"""Reading evaluation labels leaves a trace that cannot be taken out unnoticed."""

from __future__ import annotations

import json

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
    compared_designs,
    expose,
    ledger_problems,
    note_comparison,
    read_ledger,
    unlock,
)
from casewise.judge.outcomes import outcomes


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


def used_before(certificate):
    return [one for one in certificate.warnings if "used before" in one]


def test_a_certificate_names_the_routers_and_studies_that_looked_at_its_labels_before(tmp_path):
    archive, other = (synthetic_archive(tmp_path / one, cases=24, prefix=one) for one in "ab")
    routers, asked = [calibrate(archive, "cardiac"), calibrate(archive, "default")], Promise(("harmed",), (0.3,))
    alone, _ = certify_router(other, calibrate(other, "cardiac"), asked, force=True)
    assert not used_before(alone)
    (said,) = used_before(certify_router(archive, routers[0], asked, force=True)[0])
    assert "calibrate fitted default" in said
    together, _ = certify_designs(archive, routers, Promise(("harmed",), (0.3,), 0.1), force=True)
    assert not used_before(together)  # the bound is corrected for the choice among them
    unlock(other, purpose="study", policy=routers[0])
    (said,) = used_before(certify_router(other, routers[0], asked, force=True)[0])
    assert "study of cardiac" in said


def test_a_certificate_names_the_other_coordinates_of_a_router_and_a_benchmark(tmp_path):
    archive, asked = synthetic_archive(tmp_path / "a", cases=40, prefix="r", seed=3), Promise(("harmed",), (0.4,))
    with pytest.raises(CasewiseError, match="was not recorded"):
        calibrate(archive, "stop-router")  # showed no result
    made = [calibrate(archive, "cardiac", coordinate=one) for one in ("delta", "-msp")]
    (said,) = used_before(certify_router(archive, made[0], asked, force=True)[0])
    assert "calibrate fitted cardiac by -msp" in said
    assert "stop-router" not in said
    unlock(archive, purpose="bench")
    together, _ = certify_designs(archive, made, Promise(("harmed",), (0.4,), 0.1), force=True)
    (said,) = used_before(together)
    assert "(bench; " in said

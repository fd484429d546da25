"""The chosen masks are written; cases without a review, or with a review of an earlier output, stay open."""

from __future__ import annotations

import shutil
import threading

import pytest
from typer.testing import CliRunner
from worlds.predictions import decisions_of

from casewise.cli.review import app
from casewise.core.chain import Chain
from casewise.core.durable import TEMPORARY, file_lock, file_sha256
from casewise.core.errors import BadInput, Refused
from casewise.run.prediction_folder import verify_predictions
from casewise.serve.review_cases import Predictions, ReviewCase, worst_first
from casewise.serve.review_log import APPLIED, REVIEWS, Overtaken, Review, ReviewLog, apply_reviews


def reviewed(out, *said):
    """Reviews of (case, decision, adapted state) about what lies in the folder now."""
    folder = Predictions(out)
    log = ReviewLog(out / REVIEWS)
    for case_id, decision, state in said:
        log.append(Review(case_id, decision, "Ada", folder.about(case_id), adapted=state))


def test_every_choice_becomes_its_mask(predictions, tmp_path):
    out, layout = predictions.layout.out, predictions.layout
    reviewed(out, ("kept", "keep-m0", "1"), ("undone", "keep-adapted", "1"), ("unsaved", "flag", "1"))
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    chosen = tmp_path / "chosen"
    assert file_sha256(chosen / "kept.nii.gz") == file_sha256(layout.source("kept"))
    assert file_sha256(chosen / "undone.nii.gz") == file_sha256(layout.candidates("undone") / "1.nii.gz")
    assert file_sha256(chosen / "unsaved.nii.gz") == file_sha256(layout.mask("unsaved"))
    assert {name: one.taken for name, one in done.items()} == {
        "kept": "m0", "undone": "adapted", "unsaved": "deployed", "broken": "none",
    }  # fmt: skip
    assert {name for name, one in done.items() if one.open} == {"unsaved", "broken"}
    log = Chain(chosen / APPLIED)
    assert not log.problems
    assert [line["reviewer"] for line in log.lines() if line.get("case") == "kept"] == ["Ada"]


def test_a_case_that_nobody_reviewed_keeps_what_was_deployed(predictions, tmp_path):
    done = {one.case: one for one in apply_reviews(predictions.layout.out, tmp_path / "chosen")}
    assert done["kept"].taken == "deployed"
    assert not done["kept"].open
    assert done["kept"].sha256 == file_sha256(predictions.layout.mask("kept"))


def test_the_deployed_state_can_be_kept_without_saved_candidates(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("unsaved", "keep-adapted", "1"))
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert done["unsaved"].taken == "adapted"
    assert done["unsaved"].sha256 == file_sha256(predictions.layout.mask("unsaved"))


def test_a_review_of_another_output_decides_nothing(predictions, tmp_path):
    out = predictions.layout.out
    log = ReviewLog(out / REVIEWS)
    log.append(Review("kept", "keep-m0", "Ada", "0" * 64, adapted="1"))
    one = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}["kept"]
    assert one.taken == "deployed"
    assert one.open
    assert "an earlier output" in one.why


def facts(out, **changed):
    about = Predictions(out).about("kept")
    said = {"case": "kept", "decision": "keep-m0", "reviewer": "Eve", "about": about, "adapted": "1", "note": ""}
    return {name: value for name, value in {**said, **changed}.items() if value is not None}


@pytest.mark.parametrize("changed", [{"decision": "bogus"}, {"decision": None}, {"case": None}, {"case": ["kept"]}])
def test_a_line_that_is_no_review_decides_nothing(predictions, tmp_path, changed):
    out = predictions.layout.out
    Chain(out / REVIEWS).append("review", facts(out, **changed))
    assert not ReviewLog(out / REVIEWS).latest()
    with pytest.raises(Refused, match="holds 1 line without a review"):
        apply_reviews(out, tmp_path / "chosen")


def test_an_edited_log_and_a_full_folder_are_refused(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "keep-m0", "1"))
    with pytest.raises(Refused, match=r"is not empty .*; reviewed masks need an empty folder"):
        apply_reviews(out, predictions.images)
    text = (out / REVIEWS).read_text()
    (out / REVIEWS).write_text(text.replace("keep-m0", "keep-adapted"))
    with pytest.raises(Refused, match="the reviews cannot be trusted"):
        apply_reviews(out, tmp_path / "chosen")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BadInput, match="is an archive without mask files"):
        apply_reviews(tmp_path, tmp_path / "x")


def test_a_mask_that_was_changed_is_not_copied_and_affects_no_other(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "keep-m0", "1"))
    shutil.copyfile(predictions.layout.mask("undone"), predictions.layout.source("kept"))
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert done["kept"].taken == "none"
    assert "changed after it was written" in done["kept"].why
    assert done["undone"].taken == "deployed"


def test_the_command_says_what_is_open(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "flag", "1"))
    result = CliRunner().invoke(app, ["review", str(out), "--apply", "-o", str(tmp_path / "chosen")])
    assert result.exit_code == 3  # one case has no output
    assert "! kept is open: Ada flagged it" in result.output
    assert "4 cases, 1 reviewed: 3 as written by predict, 1 without a mask." in result.output


def test_a_case_that_a_killed_run_did_not_reach_is_named(predictions, tmp_path):
    Chain(predictions.layout.audit).append("run-started", {"to_do": ["never"]})
    done = {one.case: one for one in apply_reviews(predictions.layout.out, tmp_path / "chosen")}
    assert (done["never"].taken, done["never"].open) == ("none", True)


def test_a_case_with_two_wrong_masks_gets_none_and_is_named_for_contouring(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "both-wrong", "1"))
    result = CliRunner().invoke(app, ["review", str(out), "--apply", "-o", str(tmp_path / "chosen")])
    assert result.exit_code == 3
    assert "! kept is open: Ada marked both masks as wrong: contour it again" in result.output
    assert not (tmp_path / "chosen" / "kept.nii.gz").exists()
    assert decisions_of(out / REVIEWS) == {"kept": "both-wrong"}


def test_flagged_cases_come_first_and_then_the_lowest_quality():
    low = {"a": 0.9, "b": 0.5, "c": 0.7}
    cases = {name: ReviewCase(name, "", quality_low=value, flagged=name == "c") for name, value in low.items()}
    cases["failed"] = ReviewCase("failed", "", status="failed")
    assert worst_first(cases) == ["failed", "c", "b", "a"]


def test_an_entry_that_is_broken_or_gone_is_reported_and_affects_no_other_case(predictions, tmp_path):
    out, layout = predictions.layout.out, predictions.layout
    reviewed(out, ("kept", "keep-m0", "1"))
    layout.entry("undone").write_text('{"half')
    layout.entry("unsaved").unlink()
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert file_sha256(tmp_path / "chosen" / "kept.nii.gz") == file_sha256(layout.source("kept"))
    assert {name for name, one in done.items() if one.taken == "none"} == {"broken", "undone", "unsaved"}
    assert done["undone"].why == "there is no output: undone.json does not belong to the case; predict the case again"
    assert done["unsaved"].why == "its JSON file is missing; predict it again"
    assert sum(line["event"] == "applied" for line in Chain(tmp_path / "chosen" / APPLIED).lines()) == 4


def test_reviewers_who_disagree_are_named_and_the_last_decision_counts(predictions, tmp_path):
    out = predictions.layout.out
    folder = Predictions(out)
    said = (("Ada", "kept", "keep-m0"), ("Bob", "kept", "keep-adapted"), ("Ada", "unsaved", "flag"))
    for who, case_id, word in (*said, ("Bob", "unsaved", "flag")):
        ReviewLog(out / REVIEWS).append(Review(case_id, word, who, folder.about(case_id), adapted="1"))
    told = CliRunner().invoke(app, ["review", str(out), "--apply", "-o", str(tmp_path / "chosen")], color=True)
    yellow = "\x1b[33m\x1b[1m"  # on a terminal
    assert f"{yellow}! kept: reviewers disagree, the last counts: Bob keeps the new mask, state 1" in told.output
    assert "before: Ada: keep original" in told.output
    assert "unsaved: reviewers disagree" not in told.output
    lines = Chain(tmp_path / "chosen" / APPLIED).lines()
    held = {line["case"]: line["overruled"] for line in lines if line["event"] == "applied"}
    assert held == {"broken": "", "kept": "Ada: keep original", "undone": "", "unsaved": ""}


def test_of_two_that_apply_at_once_one_writes_and_the_other_stops(predictions, tmp_path):
    said, barrier = [], threading.Barrier(2)

    def apply():
        barrier.wait()
        try:
            said.append(len(apply_reviews(predictions.layout.out, tmp_path / "chosen")))
        except Refused as error:
            said.append(str(error))

    both = [threading.Thread(target=apply) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    (words,) = [one for one in said if isinstance(one, str)]
    assert "is not empty" in words or "is being written by another process" in words
    (count,) = [one for one in said if isinstance(one, int)]
    log = Chain(tmp_path / "chosen" / APPLIED)
    assert (sum(line["event"] == "applied" for line in log.lines()), log.problems) == (count, [])


def test_a_folder_that_another_process_began_is_left_to_it(predictions, tmp_path):
    with (
        file_lock(tmp_path / "chosen" / ".applying"),
        pytest.raises(Refused, match="is being written by another process; wait for it, or choose another folder"),
    ):
        apply_reviews(predictions.layout.out, tmp_path / "chosen")
    assert not (tmp_path / "chosen" / APPLIED).exists()


@pytest.mark.parametrize("after", range(5))
def test_a_run_that_was_killed_is_incomplete_and_the_next_one_finishes(predictions, tmp_path, monkeypatch, after):
    """Killed after so many lines of its log, with half a mask on the disk."""
    append, lines = Chain.append, []

    def killed(self, event, facts):
        if self.path.name == APPLIED and len(lines) == after:
            (self.path.parent / f"{TEMPORARY}0-1-0-kept.nii.gz").write_bytes(b"half")
            raise SystemExit
        lines.append(event)
        return append(self, event, facts)

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "append", killed)
        with pytest.raises(SystemExit):
            apply_reviews(predictions.layout.out, tmp_path / "chosen")
    if after:
        assert any("incomplete" in problem for problem in verify_predictions(tmp_path / "chosen"))
    done = apply_reviews(predictions.layout.out, tmp_path / "chosen")
    assert verify_predictions(tmp_path / "chosen") == []
    assert sorted(path.name for path in (tmp_path / "chosen").iterdir()) == sorted(
        [APPLIED, *(one.mask for one in done if one.mask)]
    )
    with pytest.raises(Refused, match="is not empty"):
        apply_reviews(predictions.layout.out, tmp_path / "chosen")


def test_two_pages_on_one_folder_overrule_nothing_unseen(tmp_path):
    said, log = [], ReviewLog(tmp_path / REVIEWS)

    def decide(who):
        for number in range(20):
            try:
                log.append(Review(f"c{number}", "flag", who, "0" * 64), seen="")
                said.append(who)
            except Overtaken:
                continue

    both = [threading.Thread(target=decide, args=(who,)) for who in ("Ada", "Bob")]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(said) == len(log.lines()) == len(log.latest()) == 20
    assert log.problems == []

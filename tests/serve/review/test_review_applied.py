"""What reviewers chose is what is written; what they did not look at, or looked at before it changed, stays open."""

from __future__ import annotations

import shutil
import threading

import pytest
from typer.testing import CliRunner
from worlds.candidates import views_archive

from casewise.cli.review import app
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256
from casewise.core.errors import BadInput, Refused
from casewise.core.formats import json_bytes
from casewise.judge.calibration.preflight import read_reviews
from casewise.run.prediction_folder import review_facts, review_problems, verify_predictions
from casewise.serve.review_cases import ReviewCase, worst_first
from casewise.serve.review_log import APPLIED, REVIEWS, Overtaken, Review, ReviewLog, apply_reviews
from casewise.serve.review_sources import Predictions


def reviewed(out, *said):
    """Reviews of (case, decision, adapted state) about what lies in the folder now."""
    folder = Predictions(out)
    log = ReviewLog(out / REVIEWS, folder.audit)
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
    assert [line["reviewer"] for line in log.lines() if line["case"] == "kept"] == ["Ada"]


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
    log = ReviewLog(out / REVIEWS, Predictions(out).audit)
    log.append(Review("kept", "keep-m0", "Ada", "0" * 64, adapted="1"))
    one = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}["kept"]
    assert one.taken == "deployed"
    assert one.open
    assert "another output" in one.why


def facts(out, **changed):
    about = Predictions(out).about("kept")
    said = {"case": "kept", "decision": "keep-m0", "reviewer": "Eve", "about": about, "adapted": "1", "note": ""}
    return {name: value for name, value in {**said, **changed}.items() if value is not None}


@pytest.mark.parametrize("taken_away", [False, True])
def test_a_review_that_one_of_the_two_logs_lacks_is_refused(predictions, tmp_path, taken_away):
    out = predictions.layout.out
    if taken_away:
        reviewed(out, ("kept", "keep-m0", "1"))
        (out / REVIEWS).unlink()
    else:
        Chain(out / REVIEWS).append("review", facts(out))
    with pytest.raises(Refused, match="do not hold the same reviews: added or removed"):
        apply_reviews(out, tmp_path / "chosen")
    assert not (tmp_path / "chosen").exists()


@pytest.mark.parametrize("changed", [{"decision": "bogus"}, {"decision": None}, {"case": None}, {"case": ["kept"]}])
def test_a_line_that_is_no_review_decides_nothing(predictions, tmp_path, changed):
    out = predictions.layout.out
    for log in (Predictions(out).audit, out / REVIEWS):
        Chain(log).append("review", facts(out, **changed))
    assert not ReviewLog(out / REVIEWS).latest()
    with pytest.raises(Refused, match="holds 1 line of no review"):
        apply_reviews(out, tmp_path / "chosen")


def test_two_reviewers_at_once_are_no_problem(predictions, tmp_path):
    out = predictions.layout.out
    first, second = facts(out), facts(out, case="undone", about=Predictions(out).about("undone"))
    for log, said in ((Predictions(out).audit, (first, second)), (out / REVIEWS, (second, first))):
        for one in said:
            Chain(log).append("review", one)
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert done["kept"].taken == done["undone"].taken == "m0"


def killed_between_the_logs(monkeypatch, out, *said):
    """A review whose process is killed after the audit log has it and before reviews.jsonl does."""
    append = Chain.append

    def dying(chain, event, about):
        if chain.path.name == REVIEWS:
            raise KeyboardInterrupt
        return append(chain, event, about)

    with monkeypatch.context() as patched:
        patched.setattr(Chain, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            reviewed(out, said)


def log_of(out):
    return ReviewLog(out / REVIEWS, Predictions(out).audit)


def test_half_a_review_is_set_aside_and_its_case_is_open_until_somebody_decides_again(
    predictions, tmp_path, monkeypatch
):
    out = predictions.layout.out
    reviewed(out, ("kept", "keep-adapted", "1"), ("undone", "keep-m0", "1"))
    killed_between_the_logs(monkeypatch, out, "kept", "keep-m0", "1")
    with pytest.raises(Refused, match="sets aside what a killed process left"):
        apply_reviews(out, tmp_path / "early")
    (told,) = log_of(out).settle()
    assert told.startswith("Ada decided keep-m0 for case kept (")
    assert told.endswith("It is set aside; decide the case again")
    assert review_problems(out) == []
    assert verify_predictions(out) == []
    assert log_of(out).settle() == []
    for path in (out / REVIEWS, Predictions(out).audit):  # the word is kept, and counts nowhere
        assert Chain(path).lines()[-1]["review"]["decision"] == "keep-m0"
        assert read_reviews(path) == {"undone": -1.0}
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert (done["kept"].taken, done["kept"].open) == ("deployed", True)
    assert (done["undone"].taken, done["undone"].open) == ("m0", False)
    reviewed(out, ("kept", "keep-m0", "1"))
    again = {one.case: one for one in apply_reviews(out, tmp_path / "again")}
    assert (again["kept"].taken, again["kept"].open) == ("m0", False)


def test_a_process_killed_while_it_sets_aside_is_gone_on_with(predictions, monkeypatch):
    out = predictions.layout.out
    killed_between_the_logs(monkeypatch, out, "kept", "keep-m0", "1")
    Chain(out / "audit.jsonl").append("review-set-aside", {"case": "kept", "line": "0" * 64, "review": {}})
    assert len(log_of(out).settle()) == 1
    assert review_problems(out) == []


def test_what_no_killed_process_leaves_is_left_as_it_is_and_said(predictions, monkeypatch):
    out = predictions.layout.out
    reviewed(out, ("undone", "keep-m0", "1"))
    said = ["reviews.jsonl and audit.jsonl do not hold the same reviews: added or removed"]
    for _ in range(2):
        killed_between_the_logs(monkeypatch, out, "kept", "keep-m0", "1")
    before = (out / REVIEWS).read_bytes()
    assert log_of(out).settle() == said  # two words are missing
    assert (out / REVIEWS).read_bytes() == before


def test_a_review_that_was_added_to_the_reviews_alone_is_not_set_aside(predictions):
    out = predictions.layout.out
    Chain(out / REVIEWS).append("review", facts(out))
    assert log_of(out).settle() == ["reviews.jsonl and audit.jsonl do not hold the same reviews: added or removed"]
    assert "kept" not in log_of(out).reopened()


def test_a_review_that_both_logs_hold_cannot_be_set_aside_by_hand(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "keep-m0", "1"))
    line = Chain(out / "audit.jsonl").lines()[-1]
    for named, problem in ((line["hash"], "do not hold the same reviews"), ("0" * 64, "sets a review aside that")):
        before = (out / REVIEWS).read_bytes()
        Chain(out / REVIEWS).append("review-set-aside", {"case": "kept", "line": named, "review": review_facts(line)})
        with pytest.raises(Refused, match=problem):
            apply_reviews(out, tmp_path / "chosen")
        (out / REVIEWS).write_bytes(before)


def test_an_edited_log_and_a_full_folder_are_refused(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "keep-m0", "1"))
    with pytest.raises(Refused, match="is not empty; masks that a person chose go into a folder of their own"):
        apply_reviews(out, predictions.images)
    text = (out / REVIEWS).read_text()
    (out / REVIEWS).write_text(text.replace("keep-m0", "keep-adapted"))
    with pytest.raises(Refused, match="the reviews cannot be trusted"):
        apply_reviews(out, tmp_path / "chosen")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BadInput, match="is an archive and holds no mask files"):
        apply_reviews(tmp_path, tmp_path / "x")


def test_a_mask_that_was_changed_is_not_copied_and_costs_no_other(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "keep-m0", "1"))
    shutil.copyfile(predictions.layout.mask("undone"), predictions.layout.source("kept"))
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert done["kept"].taken == "none"
    assert "changed after it was written" in done["kept"].why
    assert done["undone"].taken == "deployed"


def test_half_a_review_is_told_on_the_page_when_it_starts(predictions, serve, monkeypatch):
    out = predictions.layout.out
    killed_between_the_logs(monkeypatch, out, "kept", "keep-m0", "1")
    with serve(out) as server:
        (told,) = server.desk.said_at_start
        assert "only audit.jsonl holds it" in told
        assert "kept" not in server.desk.log.latest()


def test_the_command_says_what_is_open(predictions, tmp_path):
    out = predictions.layout.out
    reviewed(out, ("kept", "flag", "1"))
    result = CliRunner().invoke(app, ["review", str(out), "--apply", "-o", str(tmp_path / "chosen")])
    assert result.exit_code == 3  # one case has no output
    assert "! kept is open: Ada flagged it" in result.output
    assert "deployed: 3, none: 1" in result.output


def test_flagged_cases_come_first_and_then_the_lowest_quality():
    low = {"a": 0.9, "b": 0.5, "c": 0.7}
    cases = {name: ReviewCase(name, "", quality_low=value, flagged=name == "c") for name, value in low.items()}
    cases["failed"] = ReviewCase("failed", "", status="failed")
    assert worst_first(cases) == ["failed", "c", "b", "a"]


def test_an_entry_that_is_broken_or_gone_is_said_and_costs_no_other_case(predictions, tmp_path):
    out, layout = predictions.layout.out, predictions.layout
    reviewed(out, ("kept", "keep-m0", "1"))
    layout.entry("undone").write_text('{"half')
    layout.entry("unsaved").unlink()
    done = {one.case: one for one in apply_reviews(out, tmp_path / "chosen")}
    assert file_sha256(tmp_path / "chosen" / "kept.nii.gz") == file_sha256(layout.source("kept"))
    assert {name for name, one in done.items() if one.taken == "none"} == {"broken", "undone", "unsaved"}
    assert done["undone"].why == "there is no output: undone.json is not its entry; predict the case again"
    assert done["unsaved"].why == "its entry is gone; predict it again"
    assert len(Chain(tmp_path / "chosen" / APPLIED).lines()) == 4


def test_reviewers_who_disagree_are_named_and_the_last_decision_counts(predictions, tmp_path):
    out = predictions.layout.out
    folder = Predictions(out)
    said = (("Ada", "kept", "keep-m0"), ("Bob", "kept", "keep-adapted"), ("Ada", "unsaved", "flag"))
    for who, case_id, word in (*said, ("Bob", "unsaved", "flag")):
        ReviewLog(out / REVIEWS, folder.audit).append(Review(case_id, word, who, folder.about(case_id), adapted="1"))
    told = CliRunner().invoke(app, ["review", str(out), "--apply", "-o", str(tmp_path / "chosen")])
    assert "! kept: reviewers disagree, the last decision counts: Bob keeps the adaptation, state 1" in told.output
    assert "before: Ada keep-m0" in told.output
    assert "unsaved: reviewers disagree" not in told.output
    held = {line["case"]: line["overruled"] for line in Chain(tmp_path / "chosen" / APPLIED).lines()}
    assert held == {"broken": "", "kept": "Ada keep-m0", "undone": "", "unsaved": ""}


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
    assert (len(log.lines()), log.problems) == (count, [])


def test_a_folder_that_another_process_began_is_left_to_it(predictions, tmp_path, monkeypatch):
    apply_reviews(predictions.layout.out, tmp_path / "chosen")
    before = (tmp_path / "chosen" / APPLIED).read_bytes()
    monkeypatch.setattr("casewise.serve.review_log._check_empty", lambda out: None)  # it was, when this one looked
    with pytest.raises(Refused, match="is being written by another process; wait for it, or choose another folder"):
        apply_reviews(predictions.layout.out, tmp_path / "chosen")
    assert (tmp_path / "chosen" / APPLIED).read_bytes() == before


def test_two_pages_on_one_archive_overrule_nothing_unseen(tmp_path):
    said = []

    def decide(who):
        for number in range(20):
            try:
                ReviewLog(tmp_path / REVIEWS).append(Review(f"c{number}", "flag", who, "0" * 64), seen="")
                said.append(who)
            except Overtaken:
                continue

    both = [threading.Thread(target=decide, args=(who,)) for who in ("Ada", "Bob")]
    for one in both:
        one.start()
    for one in both:
        one.join()
    log = ReviewLog(tmp_path / REVIEWS)
    assert len(said) == len(log.lines()) == len(log.latest()) == 20
    assert log.problems == []


def test_a_named_ladder_of_an_archive_can_be_reviewed(tmp_path, serve):
    archive = views_archive(tmp_path / "a", cases=2, ladder="some")
    with serve(archive.path, ladder="some") as server:
        desk = server.desk
        for case in desk.folder.cases.values():
            plain = {"case": case.id, "decision": "keep-m0", "reviewer": "Ada", "about": case.about, "seen": ""}
            assert desk.write("decide", json_bytes(plain)).status == 200
    assert len(ReviewLog(archive.path / REVIEWS).latest()) == 2

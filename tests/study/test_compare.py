"""Two folders compared: planted regressions are found, problems counted, and nothing is done twice."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from worlds.updates import PLANTED, heart, update, write

from casewise.core.errors import BadInput, Refused, UnknownName
from casewise.data.pairs import find_pairs
from casewise.run.local import LocalEngine
from casewise.study.acceptance import acceptance_of
from casewise.study.compare import csv_rows, outcome_of
from casewise.study.compared_pairs import LOG, CompareCase, Settings, alone, case_log, compare_pairs
from casewise.study.plan import ChangePlan


def lines_of(root, out, *, labels=True, engine=None, fresh=False, **settings):
    pairs = find_pairs(root / "old", root / "new", labels=root / "labels" if labels else None, cases=root / "cases.csv")
    work = CompareCase({pair.id: pair for pair in pairs}, Settings(labels_given=labels, **settings))
    return list(compare_pairs(work, engine or LocalEngine(), out, fresh=fresh))


def judged_by(criteria):
    return ChangePlan(Path("plan.toml"), "0" * 64, acceptance_of(criteria))


def case_of(outcome, case_id):
    return next(case.found for case in outcome.found.cases if case.id == case_id)


@pytest.mark.parametrize("labels", [True, False])
def test_every_planted_regression_is_found_with_and_without_labels(tmp_path, labels):
    outcome = outcome_of(lines_of(update(tmp_path), tmp_path / "out", labels=labels))
    found = {kind: case_of(outcome, case_id) for kind, case_id in PLANTED.items()}
    assert found["hole"].warnings == ("label 1: 1 hole, 1.7 % of it",)
    assert found["lost"].warnings == ("label 3: 1 piece lost, 3.2 % of it",)
    assert [row.agreement for row in found["swapped"].labels if row.label in (1, 3)] == [0.0, 0.0]
    assert all(row.shift_hd95 == pytest.approx(1.5) for row in found["shifted"].labels)
    assert found["gained"].warnings == ("label 1: 1 piece gained, 2.2 % of it",)
    assert found["vanished"].warnings == ("label 3 is gone",)
    planted = set(PLANTED.values())
    assert {case.id for case in outcome.found.cases if case.found.changed} == planted
    assert {case.id for case in outcome.found.worst_first[:6]} == planted
    if labels:
        assert set(outcome.found.summary["flipped"]) == {"h03", "h06"}
        assert outcome.found.summary["hurt"] == 6
        assert {row["case"] for name, row in csv_rows(outcome) if name == "regions.csv"} >= {"h03", "h04", "h06"}


def test_one_bad_site_is_found_and_named(tmp_path):
    lines = lines_of(update(tmp_path, cases=48, wrong=False, bad_site="B"), tmp_path / "out")
    few = {"max_harmed_share": {"limit": 0.9, "margin": 0.05}}
    plain = {"max_mean_drop": 0.2, "each_group": {"max_mean_drop": 0.02}, "each_label": {"max_mean_drop": 0.5}}
    plain = {**plain, **few, "each_group": {**plain["each_group"], **few}, "each_label": {**plain["each_label"], **few}}
    outcome = outcome_of(lines, plan=judged_by(plain))
    assert {check.scope for check in outcome.checks if not check.holds} == {"group B"}
    groups = {row["group"]: row for row in outcome.found.summary["groups"]}
    assert (groups["A"]["hurt"], groups["B"]["hurt"]) == (0, 24)
    assert groups["B"]["change"]["clusters"] == 12  # two cases per patient
    assert (outcome.verdict, outcome.exit_code) == ("rejected", 4)


def test_a_regression_of_one_label_or_of_small_ones_is_found_and_named(tmp_path):
    """The whole looks fine: one label of three, or one size class of three, does not."""
    root = update(tmp_path, cases=48, wrong=False)
    for number in range(48):
        mask = heart(6.0 + number % 3)
        for name in ("old", "new", "labels"):
            write(root / name, f"h{number:02d}", mask)
        if number % 3 == 0:
            small = mask.copy()
            small[:, :, 22:] = 0  # the second chamber, of small hearts only
            write(root / "new", f"h{number:02d}", small)
    lines = lines_of(root, tmp_path / "out")
    criteria = {"max_mean_drop": 0.3, "max_harmed_share": 0.99, "each_size": {"max_flipped_share": 0.5}}
    criteria["each_label"] = {"max_flipped_share": 0.25}
    outcome = outcome_of(lines, plan=judged_by(criteria))
    assert {check.scope for check in outcome.checks if check.verdict == "broken"} == {"size small", "label 3"}
    sizes = {row["size"]: row["hurt"] for row in outcome.summary["sizes"]}
    assert sizes == {"small": 16, "medium": 0, "large": 0}


def test_equal_folders_are_accepted(tmp_path):
    lines = lines_of(update(tmp_path, cases=24, wrong=False), tmp_path / "out")
    plain = {"max_mean_drop": 0.001, "max_harmed_share": 0.25, "max_ha": 0.25, "each_label": {"max_holed_share": 0.25}}
    outcome = outcome_of(lines, plan=judged_by(plain))
    assert (outcome.verdict, outcome.exit_code, outcome.found.summary["changed"]) == ("accepted", 0, 0)


def test_problems_are_named_counted_and_change_the_exit_code(tmp_path):
    root = update(tmp_path, wrong=False)
    (root / "new" / "h00.nii.gz").unlink()
    (root / "labels" / "h01.nii.gz").unlink()
    write(root / "new", "h02", np.zeros_like(heart()))
    write(root / "new", "h03", heart()[:, 1:])
    write(root / "new", "h04", np.where(heart() == 3, 4, heart()).astype(np.uint8))
    (root / "new" / "h05.nii.gz").write_bytes(b"\x1f\x8b nothing")
    lines = lines_of(root, tmp_path / "out")
    outcome = outcome_of(lines)
    counted = outcome.as_dict()["problems_by_kind"]
    assert counted == {"empty": 1, "labels": 1, "missing": 1, "shape": 1, "unlabelled": 1, "unreadable": 1}
    assert (outcome.pairs, len(outcome.found.cases), outcome.exit_code) == (12, 9, 3)
    named = next(one for one in outcome_of(lines, names={4: "odd"}).problems if one.kind == "labels")
    assert named.message.startswith("odd (4) is in 1 new masks (such as h04) and in no old one")
    assert outcome_of(lines, allow=tuple(counted)).exit_code == 0
    assert outcome_of(lines, allow=tuple(set(counted) - {"shape"})).exit_code == 3
    with pytest.raises(UnknownName, match="no kind of problem is called 'shap'"):
        outcome_of(lines, allow=("shap",))


def test_an_empty_mask_is_right_where_the_label_is_empty(tmp_path):
    root = update(tmp_path, wrong=False)
    for name in ("old", "new", "labels"):
        write(root / name, "h00", np.zeros_like(heart()))
    assert outcome_of(lines_of(root, tmp_path / "out")).exit_code == 0
    assert outcome_of(lines_of(root, tmp_path / "out2", labels=False)).exit_code == 3


def test_nothing_comparable_is_an_error_with_the_first_reason(tmp_path):
    root = update(tmp_path, cases=2, wrong=False)
    for case_id in ("h00", "h01"):
        write(root / "new", case_id, heart()[:, 1:])
    with pytest.raises(BadInput, match=r"none of 2 pairs could be compared; the first one: h00: old has shape"):
        outcome_of(lines_of(root, tmp_path / "out"))


class Counting:
    """The local engine, and which cases it was given."""

    def __init__(self):
        self.given = []

    def map(self, work, case_ids):
        self.given += case_ids
        return LocalEngine().map(work, case_ids)


def test_a_second_run_compares_only_what_changed(tmp_path):
    root, out = update(tmp_path), tmp_path / "out"
    first = lines_of(root, out)
    write(root / "new", "h09", heart(6.0))
    log = out / "cases.jsonl"
    log.write_text(log.read_text() + '{"case": "h10", "torn')  # killed while it wrote
    engine = Counting()
    again = lines_of(root, out, engine=engine)
    assert engine.given == ["h09"]
    assert len(again) == len(first) == len(log.read_text().splitlines())
    for options in ({"fresh": True}, {"min_area": 4}):
        engine = Counting()
        lines_of(root, out, engine=engine, **options)
        assert len(engine.given) == 12


def test_lines_survive_a_kill_while_an_earlier_log_is_tidied(tmp_path):
    """The log is replaced whole, never emptied first; and a second line of a case is no second case."""
    root, out = update(tmp_path), tmp_path / "out"
    lines_of(root, out)
    log = out / "cases.jsonl"
    text = log.read_text()
    log.write_text(text + text.splitlines()[0] + "\n[1]\n{}\n")
    stream = compare_pairs(CompareCase({}, Settings()), LocalEngine(), out)
    assert list(stream) == []  # another set of pairs: nothing of it is kept
    log.write_text(text + text.splitlines()[0] + "\n[1]\n{}\n")
    engine = Counting()
    assert len(lines_of(root, out, engine=engine)) == 12
    assert engine.given == []
    pairs = find_pairs(root / "old", root / "new", cases=root / "cases.csv", labels=root / "labels")
    work = CompareCase({pair.id: pair for pair in pairs}, Settings(labels_given=True))
    stream = compare_pairs(work, LocalEngine(), out)
    next(stream)
    stream.close()  # killed after the first line was handed on
    assert len(log.read_text().splitlines()) == 12


def test_several_processes_give_the_same_lines(tmp_path):
    root = update(tmp_path)
    one, two = (lines_of(root, tmp_path / f"out{jobs}", engine=LocalEngine(jobs)) for jobs in (1, 2))
    by_case = [{line["case"]: json.dumps(line, sort_keys=True) for line in lines} for lines in (one, two)]
    assert by_case[0] == by_case[1]


def test_every_setting_reaches_the_comparison(tmp_path):
    root = update(tmp_path)
    plain = {line["case"]: line["comparison"] for line in lines_of(root, tmp_path / "plain")}
    swapped, hole = PLANTED["swapped"], PLANTED["hole"]

    def with_settings(name, **settings):
        return {line["case"]: line["comparison"] for line in lines_of(root, tmp_path / name, **settings)}

    assert with_settings("fg", foreground=True)[swapped]["changed"] == 0 < plain[swapped]["changed"]
    assert with_settings("area", min_area=2)[hole]["regions"] == 1 > plain[hole]["regions"]
    assert len(with_settings("classes", classes=(1, 2))[hole]["labels"]) == 2
    assert with_settings("miou", metric="miou")[hole]["metric"] == "miou"
    assert with_settings("none", surfaces="none")[hole]["labels"][0]["shift_hd95"] is None
    assert with_settings("all", surfaces="all")[hole]["labels"][0]["hd95_new"] is not None
    assert with_settings("ignore", ignore=1)[hole]["made_wrong"] == 0
    ml = with_settings("spacing", spacing_mm=(1.0, 1.0, 1.0))[hole]["labels"][0]["volume_old_ml"]
    assert ml == pytest.approx(plain[hole]["labels"][0]["volume_old_ml"] / 18)
    zero = with_settings("zero", zero_is_label=True)[hole]
    assert [row["label"] for row in zero["labels"]] == [0, 1, 2, 3]
    write(root / "new", "h07", heart()[:, 1:])
    assert with_settings("nearest", resample="nearest")["h07"] is not None


def test_the_log_gives_the_outcome_that_the_lines_gave_and_is_read_again_in_any_order(tmp_path):
    lines = lines_of(update(tmp_path), tmp_path / "out")
    log = case_log(tmp_path / "out")
    assert (len(log), log[3]["case"], [line["case"] for line in log[1:3]]) == (12, "h03", ["h01", "h02"])
    with pytest.raises(IndexError):
        log[12]
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    backwards = case_log(tmp_path)
    assert backwards[0]["case"] == "h11"
    criteria = judged_by({"max_mean_drop": 0.01, "each_label": {"max_ha": 0.5}, "each_group": {"max_ha": 0.5}})
    first, second, third = (outcome_of(given, plan=criteria) for given in (lines, log, backwards))
    assert json.dumps(first.as_dict()) == json.dumps(second.as_dict()) == json.dumps(third.as_dict())
    assert [row for _, row in csv_rows(second)][:4] == [row for _, row in csv_rows(third)][:4]
    assert [case.id for case in third.found.worst_first] == third.as_dict()["worst_first"]
    assert [case.id for case in third.found.cases] == sorted(case.id for case in third.found.cases)


def bytes_held(tmp_path, line, cases):
    """What stays in memory, and the most that was, of an outcome over so many cases with three labels each."""
    out = tmp_path / f"log{cases}"
    out.mkdir()
    with (out / LOG).open("w") as file:
        file.writelines(json.dumps({**line, "case": f"case{at:05d}"}) + "\n" for at in range(cases))
    criteria = judged_by({"max_mean_drop": 0.01, "each_label": {"max_ha": 0.5}})
    gc.collect()  # what earlier tests left
    tracemalloc.start()
    outcome = outcome_of(case_log(out), plan=criteria)
    summary = outcome.as_dict()
    rows = sum(1 for _ in csv_rows(outcome))
    gc.collect()
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (summary["compared"], rows >= 4 * cases) == (cases, True)
    return held, most


def test_memory_does_not_grow_with_the_rows_but_by_a_few_numbers_per_case(tmp_path):
    """Three labels: a row is 3 kB of JSON and 8 kB as records; ids, places and numbers of a case are below 0.7 kB."""
    (line,) = [line for line in lines_of(update(tmp_path), tmp_path / "out") if line["case"] == PLANTED["swapped"]]
    line = {**line, "cluster": None}
    bytes_held(tmp_path, line, 470)  # first the imports, caches and the table of all strings of the process
    few, many = bytes_held(tmp_path, line, 210), bytes_held(tmp_path, line, 460)
    assert (many[0] - few[0]) / 250 < 700
    assert (many[1] - few[1]) / 250 < 2500


@pytest.mark.slow
def test_a_run_that_is_killed_continues_where_it_was(tmp_path):
    """kill -9 in the middle of the command; the second run compares the rest, and the outcome is that of one run."""
    root = update(tmp_path, cases=300)
    words = [sys.executable, "-m", "casewise", "compare", root / "old", root / "new", "-l", root / "labels", "-j", "1"]

    def log_of(out):
        return (out / "cases.jsonl").read_text().splitlines() if (out / "cases.jsonl").is_file() else []

    killed = subprocess.Popen([str(word) for word in [*words, "-o", root / "out"]], stdout=subprocess.DEVNULL)
    while killed.poll() is None and len(log_of(root / "out")) < 20:
        time.sleep(0.002)
    killed.kill()
    killed.wait()
    before = log_of(root / "out")
    assert 20 <= len(before) < 300
    for out in ("out", "whole"):
        subprocess.run([str(word) for word in [*words, "-o", root / out]], check=True, stdout=subprocess.DEVNULL)
    assert len(log_of(root / "out")) == 300
    summaries = [json.loads((root / out / "summary.json").read_text()) for out in ("out", "whole")]
    assert summaries[0] == summaries[1]


def test_a_case_that_breaks_off_is_a_line_with_its_reason(tmp_path, monkeypatch):
    import casewise.study.compared_pairs as module

    def broken(*_, **__):
        raise ZeroDivisionError("by zero")

    root = update(tmp_path, cases=2)
    monkeypatch.setattr(module, "comparison", broken)
    (first, _) = lines_of(root, tmp_path / "out")
    (problem,) = first["problems"]
    assert (first["status"], problem["kind"]) == ("failed", "broke")
    assert problem["message"].startswith("h00: by zero (ZeroDivisionError in test_compare.py")


def test_a_mask_that_vanishes_or_changes_meanwhile_affects_only_its_own_pair(tmp_path, monkeypatch):
    import casewise.study.compared_pairs as module

    root, read = update(tmp_path, cases=4), module.read_pair

    def changing(pair, **options):
        if pair.id == "h00":
            (root / "new" / "h01.nii.gz").unlink()
        found = read(pair, **options)
        if pair.id == "h02":
            write(root / "new", "h02", heart())
        return found

    monkeypatch.setattr(module, "read_pair", changing)
    lines = {line["case"]: line for line in lines_of(root, tmp_path / "out")}
    assert {name: line["status"] for name, line in lines.items()} == {
        "h00": "compared", "h01": "failed", "h02": "compared", "h03": "compared",
    }  # fmt: skip
    assert lines["h01"]["problems"] == [{"kind": "unreadable", "message": "h01.nii.gz is not a file"}]
    monkeypatch.undo()
    write(root / "new", "h01", heart())
    engine = Counting()
    lines_of(root, tmp_path / "out", engine=engine)
    assert engine.given == ["h01", "h02"]  # what was read is not what lies there now


def test_a_case_that_broke_is_compared_again(tmp_path, monkeypatch):
    root, engine = update(tmp_path, cases=2), Counting()
    monkeypatch.setattr("casewise.study.compared_pairs.comparison", lambda *_, **__: 1 / 0)
    lines_of(root, tmp_path / "out")
    monkeypatch.undo()
    assert {line["status"] for line in lines_of(root, tmp_path / "out", engine=engine)} == {"compared"}
    assert engine.given == ["h00", "h01"]


def test_one_comparison_at_a_time_writes_to_a_folder(tmp_path):
    said = r"another casewise compare writes into .*out; wait until it ends"
    with alone(tmp_path / "out"), pytest.raises(Refused, match=said):
        alone(tmp_path / "out").__enter__()
    with alone(tmp_path / "out"):
        pass

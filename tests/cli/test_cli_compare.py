"""``casewise compare`` and ``casewise merge`` as a user types them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.updates import heart, update, write

from casewise.cli import app
from casewise.core.chain import Chain
from casewise.judge.policy import read_policy, write_policy
from casewise.run.compare import LOCK


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A rejected update with one missing partner, and everything that was written."""
    root = update(tmp_path_factory.mktemp("update"), cases=24)
    (root / "new" / "h20.nii.gz").unlink()
    (root / "accept.json").write_text('{"max_mean_drop": 0.001, "each_label": {"max_lost_share": 0.5}}')
    words = ["compare", root / "old", root / "new", "-l", root / "labels", "-i", root / "labels", "--cases"]
    words += [root / "cases.csv", "--accept", root / "accept.json", "-o", root / "out"]
    return root, run(*words)


def test_a_rejected_update_ends_with_4_and_says_why(compared):
    _, result = compared
    assert result.exit_code == 4
    assert "FAIL max_mean_drop on all" in result.output
    assert "ok   max_lost_share on label 1" in result.output
    assert "h20 has old and no new mask" in result.output


def test_the_summary_is_strict_json_with_everything_in_it(compared):
    root, _ = compared
    summary = json.loads((root / "out" / "summary.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (summary["verdict"], summary["exit_code"], summary["compared"], summary["pairs"]) == ("rejected", 4, 23, 24)
    assert summary["problems_by_kind"] == {"missing": 1}
    assert summary["summary"]["change"]["clusters"] == 12
    assert [row["group"] for row in summary["summary"]["groups"]] == ["A", "B"]


def test_junit_counts_criteria_and_pairs(compared):
    root, _ = compared
    suite = ElementTree.parse(root / "out" / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("28", "1", "1")
    assert len(suite.findall("testcase")) == 28
    assert suite.find("testcase/failure").get("message").startswith("mean fall of the metric: at most")


def test_the_markdown_is_a_table_and_names_the_worst(compared):
    root, _ = compared
    text = (root / "out" / "summary.md").read_text()
    assert "❌ rejected" in text
    assert "| ❌ | `max_mean_drop` | all |" in text
    assert "Look first at: h03, h06" in text


def test_the_page_has_pictures_and_loads_nothing(compared):
    root, _ = compared
    page = (root / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6 * 6  # image, old, new, change, label, judgement of six cases
    assert "http://" not in page.replace("http-equiv", "")
    assert "https://" not in page
    assert "fell below 0.7" in page


def test_tables_have_a_row_for_every_case_label_and_worse_region(compared):
    root, _ = compared
    rows = {name: (root / "out" / f"{name}.csv").read_text().splitlines() for name in ("cases", "labels", "regions")}
    assert (len(rows["cases"]), len(rows["labels"])) == (1 + 23, 1 + 3 * 23)
    assert rows["regions"][0].startswith("case,group,cluster,voxels,worse,ml,low_0,high_0")


def test_patients_are_counted_only_where_they_are_named(compared, tmp_path):
    root, _ = compared
    for name in ("report.html", "summary.md"):
        assert "23 cases of 12 patients or sequences" in (root / "out" / name).read_text()
    update(tmp_path, cases=5)
    masks = (tmp_path / "old", tmp_path / "new")
    assert run("compare", *masks, "-l", tmp_path / "labels", "-o", tmp_path / "out").exit_code == 0
    for name in ("report.html", "summary.md"):
        said = (tmp_path / "out" / name).read_text()
        assert "5 cases (no patient or sequence is named: each case counts as one)" in said
        assert "5 cases of" not in said


def test_what_is_not_known_without_a_label_is_an_empty_cell(tmp_path):
    update(tmp_path, cases=3)
    assert run("compare", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "out").exit_code == 0
    header, *rows = csv.reader((tmp_path / "out" / "cases.csv").read_text().splitlines())
    assert {row[header.index("change")] for row in rows} == {""}
    assert not any("nan" in (tmp_path / "out" / name).read_text() for name in ("cases.csv", "labels.csv"))


def test_failed_cases_end_with_3_and_may_be_allowed(tmp_path):
    root = update(tmp_path, wrong=False)
    (root / "new" / "h00.nii.gz").unlink()
    words = ["compare", root / "old", root / "new", "-o", root / "out"]
    assert run(*words).exit_code == 3
    allowed = run(*words, "--allow", "missing")
    assert allowed.exit_code == 0
    assert "1 missing (allowed)" in allowed.output


def test_an_accepted_update_ends_with_0(tmp_path):
    root = update(tmp_path, cases=24, wrong=False)
    (root / "accept.json").write_text('{"max_mean_drop": 0.001}')
    words = ["compare", root / "old", root / "new", "-l", root / "labels", "--accept", root / "accept.json"]
    result = run(*words, "-o", root / "out", "-j", 1)
    assert result.exit_code == 0, result.output
    assert "accepted; look at" in result.output


def test_what_an_earlier_run_wrote_is_gone_before_anything_can_fail(tmp_path):
    root = update(tmp_path, cases=2, wrong=False)
    words = ["compare", root / "old", root / "new", "-o", root / "out"]
    assert run(*words).exit_code == 0
    for case_id in ("h00", "h01"):
        write(root / "new", case_id, heart()[:, 1:])
    assert "none of 2 pairs could be compared" in str(run(*words).exception)
    assert {path.name for path in (root / "out").iterdir()} == {"cases.jsonl", LOCK}


def test_every_option_has_an_effect(tmp_path):
    """An option that is dropped on the way shows in the output."""
    root = update(tmp_path)
    write(root / "new", "h07", heart()[:, 1:])

    def summary(*words):
        result = run(
            "compare", root / "old", root / "new", "-l", root / "labels", "-o", root / "out", "--pictures", 0, *words
        )
        assert result.exit_code in (0, 3), result.output
        return json.loads((root / "out" / "summary.json").read_text())

    plain = summary()
    assert summary("--foreground")["summary"]["changed"] < plain["summary"]["changed"]
    assert [row["label"] for row in summary("--classes", "1,2")["summary"]["labels"]] == [1, 2]
    assert summary("--metric", "miou")["summary"]["metric"] == "miou"
    assert summary("--good", "0.1")["summary"]["flips"] < plain["summary"]["flips"]
    assert summary("--resample", "nearest")["compared"] == plain["compared"] + 1
    assert summary("--surfaces", "none")["summary"]["labels"][0]["shift_hd95_max"] is None
    wide = summary("--spacing", "1", "1", "3")["summary"]["labels"][0]["shift_hd95_max"]
    assert wide > plain["summary"]["labels"][0]["shift_hd95_max"]
    assert summary("--ignore", "1")["summary"]["made_wrong"] < plain["summary"]["made_wrong"]
    summary("--pictures", "1")
    assert (root / "out" / "report.html").read_text().count("<article") == 1
    summary("--min-area", "1", "--holes", "slice", "--fresh")
    log = [json.loads(line) for line in (root / "out" / "cases.jsonl").read_text().splitlines()]
    assert next(line for line in log if line["case"] == "h01")["comparison"]["regions"] == 1


def test_names_of_labels_stand_on_the_page_in_tables_and_in_the_summary(tmp_path):
    root = update(tmp_path)
    (root / "new" / "dataset.json").write_text('{"labels": {"background": 0, "LV": 1, "MYO": 2, "<b>RV": 3}}')
    (root / "accept.json").write_text('{"confidence": null, "labels": {"LV": {"max_holed_share": 0.05}}}')
    words = ["compare", root / "old", root / "new", "-o", root / "out", "--accept", root / "accept.json"]
    result = run(*words)
    assert result.exit_code == 4
    assert "LV (1): 4 of 12 changed" in result.output
    assert "FAIL max_holed_share on LV (1)" in result.output
    written = {path.name: path.read_text() for path in (root / "out").iterdir()}
    assert "<td>LV (1)</td>" in written["report.html"]
    assert "LV (1): 1 hole, 1.7 % of it" in written["report.html"]
    assert "&lt;b&gt;RV (3)" in written["report.html"]
    assert "<b>RV" not in written["report.html"]
    assert "| LV (1) |" in written["summary.md"]
    assert "LV (1): 1 hole" in written["cases.csv"]
    assert ",name,label," in written["labels.csv"].splitlines()[0]
    assert json.loads(written["summary.json"])["names"]["1"] == "LV"
    renamed = json.loads(run(*words, "--label-names", "1=heart", "--json").output)
    assert (renamed["names"], renamed["verdict"]) == ({"1": "heart"}, "rejected")
    (root / "old" / "dataset.json").write_text('{"labels": {"background": 0, "LV": 2, "MYO": 1}}')
    (root / "accept.json").write_text('{"confidence": null, "max_holed_share": 1}')
    swapped = run(*words)
    assert swapped.exit_code == 3
    assert "label 1 is 'MYO' in" in swapped.output


def test_zero_has_a_row_where_it_has_a_name_or_is_said_to_be_a_label(tmp_path):
    root = update(tmp_path, cases=2)
    words = ["compare", root / "old", root / "new", "-o", root / "out"]

    def labels(*more):
        run(*words, *more)
        return [row["label"] for row in json.loads((root / "out" / "summary.json").read_text())["summary"]["labels"]]

    assert labels() == [1, 2, 3]
    assert labels("--zero-is-label") == [0, 1, 2, 3]
    (root / "new" / "dataset.json").write_text('{"labels": {"road": 0, "car": 1}}')
    assert labels() == [0, 1, 2, 3]
    assert labels("--zero-is-background") == [1, 2, 3]


def test_bad_words_are_refused_in_a_sentence(tmp_path):
    root = update(tmp_path, cases=2)
    words = ["compare", root / "old", root / "new", "-o", root / "out"]
    assert "--classes takes label numbers such as 1,2,3" in str(run(*words, "--classes", "a").exception)
    assert "no engine is called 'spark'" in str(run(*words, "--engine", "spark").exception)
    assert "add --engine ray" in str(run(*words, "--address", "ray://x").exception)
    assert "is not a folder" in str(run("compare", root / "nowhere", root / "new", "-o", root / "out").exception)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy fitted on an archive with one candidate, made of two folders."""
    root = tmp_path_factory.mktemp("calibration")
    draw = np.random.default_rng(3)
    for number in range(18):
        label = heart(8.0)
        new = label.copy()
        new[2, 8 : 9 + number // 2, 22:27] = 0  # larger and larger bites
        new[draw.integers(1, 4), 20, 22:26] = 3
        truth = new if number < 12 else label  # small changes are right, large ones wrong
        for name, mask in (("old", label), ("new", new), ("labels", truth)):
            write(root / name, f"k{number:02d}", mask)
    archive = root / "archive"
    words = ["import", "--old", root / "old", "--new", root / "new", "--labels", root / "labels", "-o", archive]
    made = run(*words, "--method", "v2", "--min-area", "1")
    assert made.exit_code == 0, made.output
    fitted = run("calibrate", archive, "--policy", "update", "-o", root / "update.json")
    assert fitted.exit_code == 0, fitted.output
    assert "low: depth 1; mid: ask; hard: rollback" in fitted.output
    return root


def test_merge_takes_small_changes_asks_about_middling_ones_and_keeps_the_old_of_large_ones(policy, tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    for case_id, rows in (("h00", 1), ("h02", 5), ("h01", 9)):
        new = heart(9.0 if case_id == "h01" else 8.0)
        new[2, 8 : 8 + rows, 22:27] = 0
        write(root / "new", case_id, new)
    result = run(
        "merge", root / "old", root / "new", "--policy", policy / "update.json", "--method", "v2", "-o", root / "m"
    )
    assert result.exit_code == 0, result.output
    lines = {line["case"]: line for line in map(json.loads, (root / "m" / "decisions.jsonl").read_text().splitlines())}
    assert {case_id: line["taken"] for case_id, line in lines.items()} == {
        "h00": "new", "h01": "old", "h02": "ask", "h03": "new",
    }  # fmt: skip
    for case_id, line in lines.items():
        chosen = "new" if line["taken"] == "new" else "old"
        name = f"{case_id}.nii.gz"
        assert (root / "m" / name).read_bytes() == (root / chosen / name).read_bytes()
    assert lines["h02"]["decision"]["flagged"] is True
    words = [
        "merge",
        root / "old",
        root / "new",
        "--policy",
        policy / "update.json",
        "--method",
        "v2",
        "-o",
        root / "m2",
    ]
    assert json.loads(run(*words, "--json").output)["taken"] == {"new": 2, "old": 1, "ask": 1}
    assert Chain(root / "m" / "audit.jsonl").problems == []


def merging(root, policy):
    """The command for an update, into root/m."""
    return ["merge", root / "old", root / "new", "--policy", policy / "update.json", "--method", "v2", "-o", root / "m"]


def test_merge_keeps_the_old_mask_of_what_cannot_be_compared(policy, tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    (root / "new" / "h00.nii.gz").unlink()
    (root / "old" / "h01.nii.gz").unlink()
    write(root / "new", "h02", heart()[:, 1:])
    result = run(*merging(root, policy))
    assert result.exit_code == 3
    lines = {line["case"]: line for line in map(json.loads, (root / "m" / "decisions.jsonl").read_text().splitlines())}
    assert [lines[case_id]["taken"] for case_id in ("h00", "h01", "h02")] == ["ask", "failed", "ask"]
    assert (root / "m" / "h02.nii.gz").read_bytes() == (root / "old" / "h02.nii.gz").read_bytes()
    assert not (root / "m" / "h01.nii.gz").exists()


def test_merge_refuses_a_policy_of_something_else_and_its_own_inputs(policy, tmp_path):
    root = update(tmp_path, cases=2, wrong=False)
    words = ["merge", root / "old", root / "new", "--policy", policy / "update.json"]
    assert "was fitted on another objective" in str(run(*words, "-o", root / "m").exception)
    inside = run(*words, "--method", "v2", "-o", root / "old")
    assert "holds the old or new masks themselves" in str(inside.exception)
    assert (root / "old" / "h00.nii.gz").is_file()


def test_merge_removes_no_mask_that_it_did_not_write(policy, tmp_path):
    root = update(tmp_path, cases=3, wrong=False)
    words = ["merge", root / "old", root / "new", "--policy", policy / "update.json", "--method", "v2", "-o"]
    labels = {path.name: path.read_bytes() for path in (root / "labels").iterdir()}
    assert "which no casewise merge wrote or which changed since" in str(run(*words, root / "labels").exception)
    assert {path.name: path.read_bytes() for path in (root / "labels").iterdir()} == labels
    for _ in range(2):
        assert run(*words, root / "m").exit_code == 0
    (root / "m" / "h01.nii.gz").write_bytes(b"edited by a person")
    assert "holds h01.nii.gz, which no casewise merge wrote" in str(run(*words, root / "m").exception)
    Chain(root / "m" / "audit.jsonl").append("merge-started", {"files": ["h01.nii.gz"]})  # of one that was killed
    assert run(*words, root / "m").exit_code == 0


def test_merge_follows_no_policy_that_calibration_advised_against(policy, tmp_path):
    root = update(tmp_path, cases=2, wrong=False)
    against = {"retained": {"go": False, "helped": 1, "hurt": 6}}
    write_policy(root / "against.json", replace(read_policy(policy / "update.json"), preflight=against))
    words = ["merge", root / "old", root / "new", "--policy", root / "against.json", "--method", "v2", "-o", root / "m"]
    assert "1 were helped and 6 were hurt; adapt less or choose another design" in str(run(*words).exception)
    assert not (root / "m").exists()
    forced = run(*words, "--force")
    assert forced.exit_code == 0
    assert "NO-GO" in forced.stderr
    assert "NO-GO" in Chain(root / "m" / "audit.jsonl").lines()[0]["no_go"]


def test_a_mask_that_vanishes_during_merge_costs_no_other_case(policy, tmp_path, monkeypatch):
    import casewise.run.merge as module

    root, read = update(tmp_path, cases=3, wrong=False), module.read_pair

    def vanishing(pair, **options):
        found = read(pair, **options)
        if pair.id == "h01":
            (root / "old" / "h01.nii.gz").unlink()
            (root / "new" / "h01.nii.gz").unlink()
        return found

    monkeypatch.setattr(module, "read_pair", vanishing)
    result = run(*merging(root, policy))
    assert result.exit_code == 3
    assert " mask is gone; " in result.stdout
    assert sorted(path.name for path in (root / "m").glob("*.nii.gz")) == ["h00.nii.gz", "h02.nii.gz"]


def test_one_candidate_archives_are_told_which_design_fits(policy, tmp_path):
    for design in ("cardiac", "default"):
        refused = run("calibrate", policy / "archive", "--policy", design, "-o", tmp_path / "policy.json")
        assert "update is the one for a single candidate" in str(refused.exception)


def test_an_update_policy_is_certified_as_any_router(policy, tmp_path):
    words = ["certify", policy / "archive", "--policy", policy / "update.json", "--alpha", 0.6, "--out", tmp_path / "c"]
    result = run(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "certified" in result.output


def test_import_needs_both_folders_and_every_partner(tmp_path):
    root = update(tmp_path, cases=2)
    assert "give --masks with" in str(run("import", "--old", root / "old", "-o", root / "a").exception)
    (root / "new" / "h01.nii.gz").unlink()
    words = ["import", "--old", root / "old", "--new", root / "new", "-o", root / "a"]
    assert "case h01 has no new mask" in str(run(*words).exception)


def test_comparing_needs_no_torch(tmp_path):
    """Also in its worker processes: a pipeline installs the core alone."""
    root = update(tmp_path, cases=4)
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('torch is not installed here')\n")
    places = os.pathsep.join([str(blocked), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "casewise", "compare", root / "old", root / "new", "-o", root / "out", "-j", "2"]
    done = subprocess.run(
        [str(word) for word in words], env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "3 of 4 cases changed" in done.stdout


def test_two_folds_of_an_nnunet_are_compared_as_predict_left_them(tmp_path):
    pytest.importorskip("nnunetv2")
    pytest.importorskip("dynamic_network_architectures")
    from miniature_nnunet import write_model, write_scans

    write_model(tmp_path / "model", folds=(0, 1), steps=0)
    names = write_scans(tmp_path / "scans", (1, 2))
    for fold in (0, 1):
        words = ["predict", "-m", tmp_path / "model", "-f", fold, "-i", tmp_path / "scans" / "images"]
        result = run(*words, "-o", tmp_path / f"fold{fold}", "--policy", "m0", "--disable_tta", "-device", "cpu")
        assert result.exit_code == 0, result.output
    for new, changed in (("fold1", 2), ("fold0", 0)):
        words = ["compare", tmp_path / "fold0", tmp_path / new, "-l", tmp_path / "scans" / "labels", "-o"]
        result = run(*words, tmp_path / new / "out", "--allow", "labels", "--allow", "empty")
        assert result.exit_code == 0, result.output
        summary = json.loads((tmp_path / new / "out" / "summary.json").read_text())
        assert (summary["compared"], summary["summary"]["changed"]) == (2, changed)
        assert sorted(summary["worst_first"]) == names


def test_a_table_of_the_user_is_never_replaced_by_one_of_the_outputs(tmp_path):
    root = update(tmp_path, cases=2)
    before = (root / "cases.csv").read_text()
    result = run("compare", root / "old", root / "new", "--cases", root / "cases.csv", "-o", root)
    assert "holds cases.csv, which no casewise compare wrote" in str(result.exception)
    assert (root / "cases.csv").read_text() == before
    for _ in range(2):  # what a comparison wrote itself is replaced by the next
        assert run("compare", root / "old", root / "new", "-o", root / "out").exit_code == 0


@pytest.mark.parametrize("named", [True, False])
def test_criteria_without_patients_are_said_to_count_cases(tmp_path, named):
    root = update(tmp_path, cases=2)
    (root / "accept.json").write_text('{"confidence": null, "max_changed_share": 1.0}')
    words = ["--cases", root / "cases.csv"] if named else []
    result = run("compare", root / "old", root / "new", "--accept", root / "accept.json", *words, "-o", root / "out")
    assert ("no patient or sequence is named" in result.output) is not named

"""``casewise compare`` as a user types it."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html import unescape

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.updates import heart, update, write

import casewise
from casewise.cli import app
from casewise.core.errors import BadInput
from casewise.study.compared_pairs import LOCK


def plan(root, criteria, confidence="0.95"):
    """A plan with these criteria, as words of the command."""
    path = root / "plan.toml"
    path.write_text(f"[protocol]\nconfidence = {confidence}\n[protocol.criteria]\n{criteria}\n")
    return ["--plan", path]


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A rejected update with one missing partner, and everything that was written."""
    root = update(tmp_path_factory.mktemp("update"), cases=24)
    (root / "new" / "h20.nii.gz").unlink()
    criteria = plan(root, "max_mean_drop = 0.001\neach_label.max_lost_share = 0.5")
    words = ["compare", root / "old", root / "new", "-l", root / "labels", "-i", root / "labels", "--cases"]
    words += [root / "cases.csv", *criteria, "-o", root / "out"]
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
    page = unescape((root / "out" / "report.html").read_text())
    assert (summary["facts"]["old"], summary["facts"]["new"]) == ("old", "new")
    assert [check["name"] for check in summary["checks"] if check["added"]] == ["max_harmed_share"]
    assert page.count("(0.05), added to the plan<") == 1
    assert "casewise adds a limit on the share of harmed cases" in page
    assert summary["limits"]
    assert all(f"<li>{sentence}</li>" in page for sentence in summary["limits"])
    assert [case["id"] for case in summary["shown"]] == re.findall('<article id="(.*?)">', page)
    assert any(case["regressions"] for case in summary["shown"])
    assert "pictures" not in summary["shown"][0]


def test_junit_counts_criteria_and_pairs(compared):
    root, _ = compared
    suite = ElementTree.parse(root / "out" / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("29", "7", "2")
    assert len(suite.findall("testcase")) == 29
    assert suite.find("testcase/failure").get("message").startswith("mean fall of the metric: observed")


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
        assert "23 cases of 12 patients" in (root / "out" / name).read_text()
    update(tmp_path, cases=5)
    masks = (tmp_path / "old", tmp_path / "new")
    assert run("compare", *masks, "-l", tmp_path / "labels", "-o", tmp_path / "out").exit_code == 0
    for name in ("report.html", "summary.md"):
        said = (tmp_path / "out" / name).read_text()
        assert "5 cases (no patient is named: each case counts as one patient)" in said
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


def test_every_case_with_a_problem_is_named_or_counted(tmp_path):
    root = update(tmp_path, cases=6, wrong=False)
    words = ["compare", root / "old", root / "new", "-o", root / "out"]
    for at, said in (
        (0, "1 missing: h00 has"),
        (1, "(also h01)"),
        (2, "(also h01, h02)"),
        (3, "(also h01, h02, 1 more)"),
    ):
        (root / "new" / f"h0{at}.nii.gz").unlink()
        assert said in run(*words).output


def test_an_accepted_update_ends_with_0(tmp_path):
    root = update(tmp_path, cases=24, wrong=False)
    criteria = plan(root, "max_mean_drop = 0.001\nmax_harmed_share = 0.2")
    words = ["compare", root / "old", root / "new", "-l", root / "labels", *criteria]
    result = run(*words, "-o", root / "out", "-j", 1)
    assert result.exit_code == 0, result.output
    assert "Accepted: all 2 criteria are met" in result.output


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
    assert summary("--set", "foreground=true")["summary"]["changed"] < plain["summary"]["changed"]
    assert [row["label"] for row in summary("--classes", "1,2")["summary"]["labels"]] == [1, 2]
    assert summary("--metric", "miou")["summary"]["metric"] == "miou"
    assert summary("--good", "0.1")["summary"]["flips"] < plain["summary"]["flips"]
    assert summary("--resample", "nearest")["compared"] == plain["compared"] + 1
    assert summary("--set", "surfaces=none")["summary"]["labels"][0]["shift_hd95_max"] is None
    wide = summary("--set", "spacing=1,1,3")["summary"]["labels"][0]["shift_hd95_max"]
    assert wide > plain["summary"]["labels"][0]["shift_hd95_max"]
    assert summary("--set", "ignore=1")["summary"]["made_wrong"] < plain["summary"]["made_wrong"]
    summary("--pictures", "1")
    assert (root / "out" / "report.html").read_text().count("<article") == 1
    summary("--set", "min-area=1", "--fresh")
    log = [json.loads(line) for line in (root / "out" / "cases.jsonl").read_text().splitlines()]
    assert next(line for line in log if line["case"] == "h01")["comparison"]["regions"] == 1


def test_names_of_labels_stand_on_the_page_in_tables_and_in_the_summary(tmp_path):
    root = update(tmp_path)
    (root / "new" / "dataset.json").write_text('{"labels": {"background": 0, "LV": 1, "MYO": 2, "<b>RV": 3}}')
    criteria = plan(root, "labels.LV.max_holed_share = 0.05", '"observed"')
    words = ["compare", root / "old", root / "new", "-o", root / "out", *criteria]
    result = run(*words)
    assert result.exit_code == 4
    assert "LV (1): 4 of 12 changed" in result.output
    assert "FAIL max_holed_share on LV (1)" in result.output
    written = {path.name: path.read_text() for path in (root / "out").iterdir()}
    assert ">LV (1)</td>" in written["report.html"]
    assert "LV (1): 1 hole, 1.7 % of it" in written["report.html"]
    assert "&lt;b&gt;RV (3)" in written["report.html"]
    assert "<b>RV" not in written["report.html"]
    assert "| LV (1) |" in written["summary.md"]
    assert "LV (1): 1 hole" in written["cases.csv"]
    assert ",name,label," in written["labels.csv"].splitlines()[0]
    assert json.loads(written["summary.json"])["names"]["1"] == "LV"
    plan(root, "labels.heart.max_holed_share = 0.05", '"observed"')
    renamed = json.loads(run(*words, "--label-names", "1=heart", "--json").output)
    assert (renamed["names"], renamed["verdict"]) == ({"1": "heart"}, "rejected")
    (root / "old" / "dataset.json").write_text('{"labels": {"background": 0, "LV": 2, "MYO": 1}}')
    plan(root, "max_holed_share = 0.99", '"observed"')
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
    assert labels("--set", "zero-is-label=true") == [0, 1, 2, 3]
    (root / "new" / "dataset.json").write_text('{"labels": {"road": 0, "car": 1}}')
    assert labels() == [0, 1, 2, 3]
    assert labels("--set", "zero-is-label=false") == [1, 2, 3]


def test_bad_words_are_refused_in_a_sentence(tmp_path):
    root = update(tmp_path, cases=2)
    words = ["compare", root / "old", root / "new", "-o", root / "out"]
    assert "--classes takes label numbers such as 1,2,3" in str(run(*words, "--classes", "a").exception)
    assert "is not a folder" in str(run("compare", root / "nowhere", root / "new", "-o", root / "out").exception)


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
    assert "holds cases.csv, which casewise compare did not write" in str(result.exception)
    assert (root / "cases.csv").read_text() == before
    for _ in range(2):  # what a comparison wrote itself is replaced by the next
        assert run("compare", root / "old", root / "new", "-o", root / "out").exit_code == 0


@pytest.mark.parametrize("named", [True, False])
def test_criteria_without_patients_say_that_they_count_cases(tmp_path, named):
    root = update(tmp_path, cases=2)
    criteria = plan(root, "max_changed_share = 0.99", '"observed"')
    words = ["--cases", root / "cases.csv"] if named else []
    result = run("compare", root / "old", root / "new", *criteria, *words, "-o", root / "out")
    assert ("no patient is named" in result.output) is not named


@pytest.mark.parametrize("place", ["old", "new", "labels"])
def test_nothing_is_written_among_the_inputs(tmp_path, place):
    root = update(tmp_path, cases=2)
    before = sorted(path.name for path in (root / place).iterdir())
    result = run("compare", root / "old", root / "new", "-l", root / "labels", "-o", root / place)
    assert "holds inputs of this comparison" in str(result.exception)
    with pytest.raises(BadInput, match="holds inputs of this comparison"):
        casewise.compare(str(root / "old"), root / "new", labels=str(root / "labels"), out=str(root / place))
    assert sorted(path.name for path in (root / place).iterdir()) == before


def test_one_odd_file_name_affects_no_other_case(tmp_path):
    root = update(tmp_path, cases=2)
    for name in ("old", "new"):
        write(root / name, "Fall Müller (1)", heart())
    result = run("compare", root / "old", root / "new", "-o", root / "out")
    assert result.exit_code == 0, result.output
    summary = json.loads((root / "out" / "summary.json").read_text())
    assert summary["compared"] == 3
    assert any(case_id.startswith("Fall_Muller_1-") for case_id in summary["worst_first"])


def test_too_few_patients_are_another_verdict_than_a_broken_criterion(tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    words = ["compare", root / "old", root / "new", "-l", root / "labels", "--cases", root / "cases.csv"]
    result = run(*words, *plan(root, "max_mean_drop = 0.01"), "-o", root / "out")
    assert result.exit_code == 5
    assert result.output.startswith("Not decided: 2 patients cannot decide 2 of 2 criteria; none is broken")
    assert "FAIL" not in result.output


def test_a_plan_is_made_counted_and_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("compare", "--new-plan").exit_code == 0
    assert "exists; edit it" in str(run("compare", "--new-plan").exception)
    counted = run("compare", "--plan", "plan.toml", "--how-many")
    assert counted.exit_code == 0
    assert "max_mean_drop on all: 36 patients" in counted.output
    assert "casewise compare OLD NEW -o OUT" in str(run("compare").exception)


@pytest.mark.parametrize(("spacing_mm", "doubted"), [(1.0, True), (1.5, False)])
def test_a_spacing_that_a_converter_may_have_made_up_is_reported_once(tmp_path, spacing_mm, doubted):
    for folder in ("old", "new"):
        for case_id in ("a", "b"):
            write(tmp_path / folder, case_id, heart(), np.diag([spacing_mm] * 3 + [1]))
    result = run("compare", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert result.output.count("1 x 1 x 1") == doubted
    assert (tmp_path / "out" / "report.html").read_text().count("1 x 1 x 1") == doubted


@pytest.mark.parametrize(
    ("criteria", "sentence"),
    [
        ('groups."site Z".max_ha = 0.9', "on group site Z, which no case has; there are: A, B"),
        ("labels.LA.max_ha = 0.9", "on label LA, which no case has; there are: none; name them: --label-names"),
        ("each_group.max_ha = 0.9", "on each_group, which no case has; there are: none; name them: --cases"),
        ("max_ha = 0.9", "max_ha on all needs labels; give them with -l"),
        ('max_changed_share = 0.9\n[measures]\nef = "volume(3, ED)"', "measure ef: no case is a scan ED"),
    ],
)
def test_a_plan_on_what_is_not_there_is_refused_before_the_new_masks_are_opened(tmp_path, criteria, sentence):
    root = update(tmp_path, cases=6)
    words = ["compare", root / "old", root / "new", *plan(root, criteria), "-o", root / "out"]
    words += [] if "needs labels" in sentence else ["-l", root / "labels"]
    words += ["--cases", root / "cases.csv"] if "site Z" in sentence else []
    assert sentence in str(run(*words).exception)
    assert "new-opened" not in (root / "plan.log.jsonl").read_text()  # the plan can still be corrected


def test_a_criterion_that_no_case_can_be_judged_by_is_not_called_a_matter_of_too_few_patients(tmp_path):
    root = update(tmp_path, cases=6)
    words = ["compare", root / "old", root / "new", "-l", root / "labels", "-o", root / "out"]
    result = run(*words, *plan(root, "labels.7.max_ha = 0.9"))
    assert result.exit_code == 5
    assert result.output.startswith("Not decided: there is no case to judge max_ha on label 7; no criterion is broken.")

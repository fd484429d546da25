"""``casewise compare --take-over``: a policy chooses the old or the new mask of each case, without a label."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds.updates import heart, update, write

from casewise.cli import app
from casewise.core.chain import Chain
from casewise.judge.policy import read_policy, write_policy


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


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
    made = run(*words, "--method", "v2", "--set", "min-area=1")
    assert made.exit_code == 0, made.output
    fitted = run("calibrate", archive, "--policy", "update", "-o", root / "update.json")
    assert fitted.exit_code == 0, fitted.output
    assert "low: depth 1; mid: ask; hard: rollback" in fitted.output
    return root


def taking(root, policy, *more):
    """The command for an update, into root/m."""
    words = ["compare", root / "old", root / "new", "--take-over", policy, "--set", "method=v2", "-o", root / "m"]
    return run(*words, *more)


def decisions(root):
    lines = map(json.loads, (root / "m" / "masks" / "decisions.jsonl").read_text().splitlines())
    return {line["case"]: line for line in lines}


def test_small_changes_are_taken_middling_ones_asked_about_and_large_ones_left(policy, tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    for case_id, rows in (("h00", 1), ("h02", 5), ("h01", 9)):
        new = heart(9.0 if case_id == "h01" else 8.0)
        new[2, 8 : 8 + rows, 22:27] = 0
        write(root / "new", case_id, new)
    result = taking(root, policy / "update.json")
    assert result.exit_code == 0, result.output
    lines = decisions(root)
    assert {case_id: line["taken"] for case_id, line in lines.items()} == {
        "h00": "new", "h01": "old", "h02": "ask", "h03": "new",
    }  # fmt: skip
    for case_id, line in lines.items():
        chosen = "new" if line["taken"] == "new" else "old"
        name = f"{case_id}.nii.gz"
        assert (root / "m" / "masks" / name).read_bytes() == (root / chosen / name).read_bytes()
    assert lines["h02"]["decision"]["flagged"] is True
    again = json.loads(taking(root, policy / "update.json", "--json").output)
    assert again["taken"] == {"h00": "new", "h01": "old", "h02": "ask", "h03": "new"}
    assert Chain(root / "m" / "masks" / "audit.jsonl").problems == []


def test_the_old_mask_stays_where_nothing_can_be_compared(policy, tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    (root / "new" / "h00.nii.gz").unlink()
    (root / "old" / "h01.nii.gz").unlink()
    write(root / "new", "h02", heart()[:, 1:])
    assert taking(root, policy / "update.json").exit_code == 3
    lines = decisions(root)
    assert [lines[case_id]["taken"] for case_id in ("h00", "h01", "h02")] == ["ask", "failed", "ask"]
    assert (root / "m" / "masks" / "h02.nii.gz").read_bytes() == (root / "old" / "h02.nii.gz").read_bytes()
    assert not (root / "m" / "masks" / "h01.nii.gz").exists()


def test_a_policy_of_something_else_is_refused(policy, tmp_path):
    root = update(tmp_path, cases=2, wrong=False)
    words = ["compare", root / "old", root / "new", "--take-over", policy / "update.json", "-o", root / "m"]
    assert "was fitted on another objective" in str(run(*words).exception)


def test_nothing_is_taken_over_where_the_plan_does_not_accept(policy, tmp_path):
    root = update(tmp_path, cases=4, wrong=False)
    (root / "plan.toml").write_text("[protocol.criteria]\nmax_mean_drop = 0.01\n")
    result = taking(root, policy / "update.json", "-l", root / "labels", "--plan", root / "plan.toml")
    assert result.exit_code == 5
    assert "the verdict of the plan is undecided" in result.output
    assert not (root / "m" / "masks").exists()


def test_no_mask_of_anybody_else_is_removed(policy, tmp_path):
    root = update(tmp_path, cases=3, wrong=False)
    for _ in range(2):
        assert taking(root, policy / "update.json").exit_code == 0
    masks = root / "m" / "masks"
    (masks / "h01.nii.gz").write_bytes(b"edited by a person")
    refused = taking(root, policy / "update.json")
    assert "holds h01.nii.gz, which casewise did not write or which changed since" in str(refused.exception)
    assert (masks / "h01.nii.gz").read_bytes() == b"edited by a person"
    Chain(masks / "audit.jsonl").append("take-over-started", {"files": ["h01.nii.gz"]})  # of one that was killed
    assert taking(root, policy / "update.json").exit_code == 0


def test_no_policy_is_followed_that_calibration_advised_against(policy, tmp_path):
    root = update(tmp_path, cases=2, wrong=False)
    against = {"retained": {"go": False, "helped": 1, "hurt": 6}}
    write_policy(root / "against.json", replace(read_policy(policy / "update.json"), preflight=against))
    refused = taking(root, root / "against.json")
    assert "1 were helped and 6 were hurt; adapt less or choose another design" in str(refused.exception)
    assert not (root / "m" / "masks").exists()
    forced = taking(root, root / "against.json", "--set", "force=true")
    assert forced.exit_code == 0
    assert "NO-GO" in forced.output
    assert "NO-GO" in Chain(root / "m" / "masks" / "audit.jsonl").lines()[0]["no_go"]


def test_a_mask_that_vanishes_meanwhile_affects_no_other_case(policy, tmp_path, monkeypatch):
    import casewise.run.take_over as module

    root, read = update(tmp_path, cases=3, wrong=False), module.read_pair

    def vanishing(pair, **options):
        found = read(pair, **options)
        if pair.id == "h01":
            (root / "old" / "h01.nii.gz").unlink()
            (root / "new" / "h01.nii.gz").unlink()
        return found

    monkeypatch.setattr(module, "read_pair", vanishing)
    result = taking(root, policy / "update.json")
    assert result.exit_code == 3
    assert " mask is gone; " in result.stdout
    assert sorted(path.name for path in (root / "m" / "masks").glob("*.nii.gz")) == ["h00.nii.gz", "h02.nii.gz"]


def test_one_candidate_archives_are_told_which_design_fits(policy, tmp_path):
    for design in ("cardiac", "default"):
        refused = run("calibrate", policy / "archive", "--policy", design, "-o", tmp_path / "policy.json")
        assert "update is the one for a single candidate" in str(refused.exception)


def test_an_update_policy_is_certified_as_any_router(policy, tmp_path):
    words = ["certify", policy / "archive", "--policy", policy / "update.json", "--alpha", 0.6, "--out", tmp_path / "c"]
    result = run(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "certified" in result.output

"""Reading evaluation labels leaves a trace that cannot be taken out unnoticed."""

from __future__ import annotations

import json

import pytest

from casewise.core.errors import BadInput, DamagedArchive, Overlap
from casewise.judge.calibration.fit import calibrate
from casewise.judge.ledger import LEDGER, PAPER, expose, ledger_problems, read_ledger, unlock
from casewise.judge.synthetic import synthetic_archive


def test_the_papers_ledger_has_four_exposures_and_three_constants():
    assert sum("labels" in line["seen"] for line in PAPER) == 4
    assert sum(line["seen"] == "never varied" for line in PAPER) == 3


def test_unlocking_is_written_down_with_its_policy(tmp_path):
    policy = calibrate(synthetic_archive(tmp_path / "a", cases=6), "cardiac")
    evaluation = synthetic_archive(tmp_path / "e", cases=2, prefix="eval", split="evaluation")
    assert unlock(evaluation, purpose="study", policy=policy) is evaluation
    unlock(evaluation, purpose="study again")
    first, second = read_ledger(tmp_path / "e")
    assert (first["choice"], first["policy"], first["calibration_id"]) == ("study", "cardiac", policy.calibration_id)
    assert second["previous"] == first["hash"]


def test_a_policy_is_not_unlocked_on_its_own_cases_and_leaves_no_line(tmp_path):
    archive = synthetic_archive(tmp_path, cases=6)
    with pytest.raises(Overlap, match="6 of 6"):
        unlock(archive, purpose="study", policy=calibrate(archive, "cardiac"))
    assert read_ledger(tmp_path) == []


def test_a_reason_must_be_given(tmp_path):
    with pytest.raises(BadInput, match="say why"):
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
    with pytest.raises(DamagedArchive, match="edited, cut or taken out"):
        read_ledger(tmp_path)
    assert ledger_problems(tmp_path)

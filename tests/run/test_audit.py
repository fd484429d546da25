"""The audit log shows edits, removals and another order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from casewise.run.audit import _tail, append_event, last_hash, verify_audit


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for number in range(4):
        append_event(tmp_path / "audit.jsonl", "case", {"case": f"c{number}"})
    return tmp_path / "audit.jsonl"


def test_an_untouched_log_has_no_problem(log: Path) -> None:
    assert verify_audit(log) == []
    assert last_hash(log)[0] == 4


def test_an_edit_is_seen(log: Path) -> None:
    log.write_text(log.read_text().replace('"c2"', '"c9"'))
    assert verify_audit(log) == ["audit.jsonl line 3 was edited"]


def test_an_edit_with_a_new_hash_is_seen_at_the_next_line(log: Path) -> None:
    from casewise.run.audit import chained

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rest = {key: value for key, value in lines[1].items() if key not in ("hash", "previous")} | {"case": "forged"}
    lines[1] = {**rest, "previous": lines[1]["previous"], "hash": chained(lines[1]["previous"], rest)}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verify_audit(log) == ["audit.jsonl line 3 does not follow line 2: removed, added or moved"]


def test_a_removal_and_another_order_are_seen(log: Path) -> None:
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], lines[2], lines[3]]) + "\n")
    assert len(verify_audit(log)) == 1
    log.write_text("\n".join([lines[1], lines[0], lines[2], lines[3]]) + "\n")
    assert len(verify_audit(log)) == 3


def test_a_line_that_a_killed_run_did_not_finish_is_cut_off_and_told(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b'{"event": "ca')
    append_event(log, "case", {"case": "c4"})
    assert verify_audit(log) == []
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()[-2:]] == ["torn-line-removed", "case"]


class CountedReads(io.BytesIO):
    """How many bytes were read."""

    amount = 0

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.amount += len(content)
        return content


@pytest.mark.parametrize("note", [10, 5_000, 50_000])
def test_the_end_of_a_log_is_found_without_reading_all_of_it(log: Path, note: int) -> None:
    for number in range(40):
        append_event(log, "case", {"case": f"more{number}", "note": "x" * note})
    file = CountedReads(log.read_bytes() + b'{"torn')
    assert _tail(file) == (last_hash(log)[1], 6)
    assert file.getvalue() == log.read_bytes()
    assert file.amount < max(5_000, 8 * note)

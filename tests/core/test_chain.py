"""A hash-chained log shows edits, removals and another order, survives a killed writer, and is shared by processes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from casewise.core.chain import BEGINNING, Chain, _tail, line_hash
from casewise.core.errors import DamagedArchive


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for number in range(4):
        Chain(tmp_path / "audit.jsonl").append("case", {"case": f"c{number}"})
    return tmp_path / "audit.jsonl"


def test_an_untouched_log_has_no_problem(log: Path) -> None:
    assert Chain(log).problems == []
    assert Chain(log).tip == (4, Chain(log).lines()[-1]["hash"])


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    log = Chain(tmp_path / "none.jsonl")
    assert (log.lines(), log.problems, log.torn, log.tip) == ([], [], False, (0, BEGINNING))


def test_an_edit_is_seen(log: Path) -> None:
    log.write_text(log.read_text().replace('"c2"', '"c9"'))
    assert Chain(log).problems == ["audit.jsonl line 3 was edited"]


def test_an_edit_with_a_new_hash_is_seen_at_the_next_line(log: Path) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[1]["case"] = "forged"
    lines[1]["hash"] = line_hash(lines[1])
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Chain(log).problems == ["audit.jsonl line 3 does not follow line 2: removed, added or moved"]


def test_a_removal_and_another_order_are_seen(log: Path) -> None:
    lines = log.read_text().splitlines()
    log.write_text("\n".join([lines[0], lines[2], lines[3]]) + "\n")
    assert len(Chain(log).problems) == 1
    log.write_text("\n".join([lines[1], lines[0], lines[2], lines[3]]) + "\n")
    assert len(Chain(log).problems) == 3


def test_a_line_that_a_killed_run_did_not_finish_is_passed_over_then_cut_off_and_told(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b'{"event": "ca')
    assert Chain(log).torn
    assert (len(Chain(log).lines()), Chain(log).problems) == (4, [])
    Chain(log).append("case", {"case": "c4"})
    assert Chain(log).problems == []
    assert [line["event"] for line in Chain(log).lines()[-2:]] == ["torn-line-removed", "case"]


def test_an_edit_before_half_a_line_is_seen(log: Path) -> None:
    log.write_text(log.read_text().replace('"c2"', '"c9"') + '{"event": "ca')
    assert Chain(log).problems == ["audit.jsonl line 3 was edited"]


@pytest.mark.parametrize("content", ["some notes\n", "[1, 2]\n", '{"no": "hash"}\n', "\n"])
def test_nothing_is_appended_to_another_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "notes.txt").write_text(content)
    with pytest.raises(DamagedArchive, match=r"notes\.txt does not end with a line of a hash-chained log; move"):
        Chain(tmp_path / "notes.txt").append("case", {})
    assert (tmp_path / "notes.txt").read_text() == content


def test_processes_that_share_a_log_make_one_chain(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from casewise.core.chain import Chain\n"
        "for number in range(20): Chain(Path(sys.argv[1])).append('case', {'case': number})"
    )
    path = tmp_path / "shared.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert (Chain(path).problems, Chain(path).tip[0]) == ([], 60)


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
        Chain(log).append("case", {"case": f"more{number}", "note": "x" * note})
    file = CountedReads(log.read_bytes() + b'{"torn')
    assert _tail(file, log) == (Chain(log).tip[1], 6)
    assert file.getvalue() == log.read_bytes()
    assert file.amount < max(5_000, 8 * note)

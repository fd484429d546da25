"""An archive that was cut or edited does not pass."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
from worlds.cohorts import synthetic_archive

from casewise.archive.verify import verify
from casewise.core.durable import file_sha256


@pytest.fixture
def archive(tmp_path):
    return synthetic_archive(tmp_path / "a", cases=3)


def test_a_fresh_archive_is_whole(archive):
    assert verify(archive.path) == []


@pytest.mark.parametrize("name", ["masks.npz", "signals.parquet", "label.npz"])
def test_an_edited_file_is_named(archive, name):
    file = archive.path / "cases/case-0001" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert verify(archive.path) == [f"case case-0001: {name} was changed or cut after it was written"]


@pytest.mark.parametrize("name", ["masks.npz", "signals.parquet", "label.npz"])
def test_a_cut_file_is_the_problem_of_its_own_case_only(archive, name):
    file = archive.path / "cases/case-0001" / name
    file.write_bytes(file.read_bytes()[:100])
    shutil.rmtree(archive.path / "cache", ignore_errors=True)
    assert verify(archive.path) == [f"case case-0001: {name} was changed or cut after it was written"]


def test_a_step_that_was_taken_out_of_the_signals_is_named(archive):
    file = archive.path / "cases/case-0001/signals.parquet"
    frame = pd.read_parquet(file)
    frame[frame["step"] != 2].to_parquet(file)
    entry = file.with_name("entry.json")
    plain = json.loads(entry.read_text())
    plain["files"]["signals.parquet"] = file_sha256(file)
    entry.write_text(json.dumps(plain))
    assert verify(archive.path) == [
        "case case-0001: entry.json is not the one that was sealed",
        "case case-0001: signals exist for 4 states, masks for 6",
    ]


def test_a_missing_file_and_a_strange_file_are_named(archive):
    (archive.path / "cases/case-0000/label.npz").unlink()
    (archive.path / "cases/case-0002/note.txt").write_text("hello")
    assert verify(archive.path) == [
        "case case-0000: label.npz is missing",
        "case case-0002: note.txt does not belong to the archive",
    ]


def test_an_entry_that_was_edited_with_its_hashes_is_noticed_by_the_seal(archive):
    file = archive.path / "cases/case-0001/entry.json"
    entry = json.loads(file.read_text())
    file.write_text(json.dumps({**entry, "split": "evaluation"}))
    assert verify(archive.path) == ["case case-0001: entry.json is not the one that was sealed"]


def test_a_folder_that_is_no_archive_says_so(tmp_path):
    assert "may not be an archive" in verify(tmp_path)[0]

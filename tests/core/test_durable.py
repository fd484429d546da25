"""A file is replaced whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from casewise.core.durable import file_sha256, json_sha256, replacing, sweep, text_sha256, write_durably, write_json


def test_a_write_makes_its_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_durably(tmp_path / "new" / "a.bin", b"content")
    assert (tmp_path / "new" / "a.bin").read_bytes() == b"content"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]


def test_after_an_error_the_old_content_stays(tmp_path: Path) -> None:
    path = tmp_path / "mask.nii.gz"
    path.write_bytes(b"old")

    def half() -> None:
        with replacing(path) as temporary:
            assert temporary.name.endswith("mask.nii.gz")
            temporary.write_bytes(b"half")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        half()
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["mask.nii.gz"]


def test_what_a_killed_writer_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".writing-1-a.png").touch()
    (tmp_path / "a.png").touch()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["a.png"]


def test_infinities_are_words_in_files(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"cut": float("inf"), "mean": float("nan")}, indent=None)
    assert (tmp_path / "a.json").read_text() == '{"cut": "inf", "mean": null}\n'


def test_hashes_are_sha256_of_bytes_whatever_the_order_of_keys(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_sha256(tmp_path / "a") == text_sha256("abc") == hashlib.sha256(b"abc").hexdigest()
    assert json_sha256({"b": 1, "a": [2]}) == json_sha256({"a": (2,), "b": 1})

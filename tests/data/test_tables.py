"""Tables as spreadsheets of all countries save them: every separator, blanks, marks at the start, other encodings."""

from __future__ import annotations

from pathlib import Path

import pytest

from casewise.core.errors import BadInput
from casewise.core.formats import read_csv
from casewise.data.folders import CaseFiles, read_table, with_table

ROWS = [{"case": "a", "cluster": "p1"}, {"case": "b", "cluster": ""}]


@pytest.mark.parametrize(
    "content",
    [
        b"case,cluster\na,p1\nb,\n",
        b"case;cluster\r\na;p1\r\nb;\r\n",
        b"case\tcluster\na\tp1\nb\n",
        b"\xef\xbb\xbfcase,cluster\na,p1\nb,\n",
        b" case , cluster \n a , p1 \nb,\n,\n\n",
        b"case,cluster\na,p1,more,than,asked\nb,\n",
    ],
)
def test_rows_are_the_same_however_a_spreadsheet_saved_them(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_bytes(content)
    assert read_csv(tmp_path / "cases.csv") == ROWS


@pytest.mark.parametrize(
    "content", ["case,cluster\nMüller,p\n".encode("cp1252"), "case,cluster\na,p\n".encode("utf-16")]
)
def test_another_encoding_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_bytes(content)
    with pytest.raises(BadInput, match=r"cases.csv is not UTF-8; save it as"):
        read_table(tmp_path / "cases.csv")


def test_a_table_that_is_not_there_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no table at"):
        read_table(tmp_path / "cases.csv")


def test_a_table_of_other_names_says_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text("case,cluster\na.nii.gz,p1\n")
    with pytest.raises(BadInput, match=r"no row for a \(1 of 1 cases; its first row is about a.nii.gz\)"):
        with_table([CaseFiles("a", (tmp_path / "a.nii.gz",))], read_table(tmp_path / "cases.csv"))

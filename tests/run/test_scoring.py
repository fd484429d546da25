"""Scoring on an engine gives the table that scoring in this process gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
from worlds.cohorts import synthetic_archive

from casewise.archive.store import open_archive
from casewise.core.errors import BadInput, CasewiseError
from casewise.judge.outcomes import outcomes
from casewise.run.local import LocalEngine, chosen_engine
from casewise.run.record_folder import scored


def test_two_processes_give_the_table_of_one(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "one", cases=6)
    shutil.copytree(archive.path, tmp_path / "two")
    alone = outcomes(archive)
    together = scored(open_archive(tmp_path / "two"), LocalEngine(jobs=2))
    pd.testing.assert_frame_equal(alone, together, check_exact=True)


def test_a_study_finds_what_was_scored(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "one", cases=4)
    table = scored(archive, LocalEngine())

    def never(*_: object) -> list[list[dict[str, object]]]:
        raise AssertionError("measured twice")

    pd.testing.assert_frame_equal(outcomes(archive, measured=never), table)


def test_a_case_that_cannot_be_scored_is_named(tmp_path: Path) -> None:
    archive = synthetic_archive(tmp_path / "one", cases=3)
    label = next((archive.path / "cases" / archive.ids[1]).glob("label*"))
    label.write_bytes(b"broken")
    with pytest.raises(CasewiseError, match=f"case {archive.ids[1]} cannot be scored"):
        scored(open_archive(archive.path), LocalEngine())


def test_an_address_without_ray_is_refused() -> None:
    with pytest.raises(BadInput, match="add --set engine=ray"):
        chosen_engine("local", jobs=1, address="head:6379")

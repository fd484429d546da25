"""casewise qc: folders of raters or models, archives of views; flags, refusals, one bad case among good ones."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner
from worlds.candidates import made_up_case, views_archive

from casewise.cli.review import app
from casewise.core.errors import BadInput
from casewise.measure.metrics.overlap import dice
from casewise.study.quality_control import archive_opinions, controlled, folder_opinions, quality_rows, read_quality


@pytest.fixture(scope="module")
def raters(tmp_path_factory):
    """Three folders of masks, one of labels, and a table of patients with two cases each."""
    home = tmp_path_factory.mktemp("raters")
    rng = np.random.default_rng(0)
    lines = ["case,cluster"]
    for number in range(40):
        masks, label = made_up_case(rng, views=2)
        for name, mask in zip(("model", "fold1", "fold2", "labels"), (*masks[:3], label), strict=True):
            (home / name).mkdir(exist_ok=True)
            np.save(home / name / f"case{number:02d}.npy", mask)
        lines.append(f"case{number:02d},patient{number // 2}")
    (home / "cases.csv").write_text("\n".join(lines))
    return home


def run(*arguments: object):
    return CliRunner().invoke(app, ["qc", *map(str, arguments)])


def test_the_masks_that_others_doubt_come_first(raters, tmp_path):
    folders = [raters / name for name in ("model", "fold1", "fold2")]
    result = run(
        *folders, "-l", raters / "labels", "--cases", raters / "cases.csv", "-o", tmp_path, "--confidence", "0.8"
    )
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "qc.csv")
    assert table["quality_low"].is_monotonic_increasing
    first = table.iloc[0]
    mask, label = (np.load(raters / name / f"{first['case']}.npy") for name in ("model", "labels"))
    assert first["metric"] == pytest.approx(dice(mask, label))
    worth = pd.read_csv(tmp_path / "signals.csv").set_index("signal")
    assert worth.loc["agreement", "rho"] > 0.4
    assert worth.loc["agreement", "aurc"] < worth.loc["agreement", "chance"]
    assert "flagged:" in result.output


def test_a_model_from_labelled_cases_flags_unlabelled_ones(raters, tmp_path):
    folders = [raters / name for name in ("model", "fold1", "fold2")]
    assert run(*folders, "-l", raters / "labels", "--cases", raters / "cases.csv", "-o", tmp_path).exit_code == 0
    again = run(*folders, "--quality", tmp_path / "quality.json", "-o", tmp_path / "new")
    assert again.exit_code == 0, again.output
    table = pd.read_csv(tmp_path / "new" / "qc.csv")
    assert table["metric"].isna().all()
    assert table["flagged"].notna().all()
    quality = json.loads((tmp_path / "quality.json").read_text())["quality"]
    gap = 1 - table["agreement"] + quality["softening"]
    assert table["quality_low"].to_numpy() == pytest.approx(np.clip(1 - quality["ratio"] * gap, 0, 1))


def test_nothing_is_promised_without_labels_or_with_too_few_patients(raters, tmp_path):
    folders = [raters / name for name in ("model", "fold1", "fold2")]
    result = run(*folders, "-o", tmp_path)
    assert result.exit_code == 0
    assert "! no lower bound: no case is labelled" in result.output
    assert not (tmp_path / "quality.json").exists()
    assert pd.read_csv(tmp_path / "qc.csv")["agreement"].is_monotonic_increasing
    few = quality_rows(folder_opinions(folders, labels=raters / "labels", cases=raters / "cases.csv")).head(8)
    assert "needs at least 9 patients" in controlled(few).refused


def test_the_bound_of_a_patient_comes_from_the_others(raters):
    folders = [raters / name for name in ("model", "fold1", "fold2")]
    rows = quality_rows(folder_opinions(folders, labels=raters / "labels", cases=raters / "cases.csv"))
    plain = controlled(rows, level=0.8).cases.set_index("case")
    changed = rows.copy()
    own = changed["cluster"] == "patient3"
    changed.loc[own, "metric"] = 0.0
    other = controlled(changed, level=0.8).cases.set_index("case")
    mine = rows.loc[own, "case"].tolist()
    assert other.loc[mine, "quality_low"].tolist() == plain.loc[mine, "quality_low"].tolist()
    rest = plain.index.drop(mine)
    assert (other.loc[rest, "quality_low"] <= plain.loc[rest, "quality_low"] + 1e-12).all()


def test_one_bad_case_affects_no_other_row(raters, tmp_path):
    import shutil

    home = tmp_path / "copy"
    shutil.copytree(raters, home)
    np.save(home / "fold1" / "case03.npy", np.zeros((3, 3), np.uint8))
    (home / "fold2" / "case05.npy").unlink()
    result = run(home / "model", home / "fold1", home / "fold2", "-l", home / "labels", "-o", tmp_path / "out")
    assert result.exit_code == 3
    table = pd.read_csv(tmp_path / "out" / "qc.csv").set_index("case")
    assert table["problem"].notna().sum() == 2
    assert len(table) == 40
    assert pd.isna(table.loc["case03", "agreement"])


def test_an_archive_of_views_is_controlled_without_its_consensus(tmp_path):
    archive = views_archive(tmp_path / "a", cases=20)
    for one in archive_opinions(archive):
        assert len(one.masks) == 6  # M0 and five views, not their vote
    result = run(archive.path, "-o", tmp_path / "out", "--confidence", "0.8")
    assert result.exit_code == 0, result.output
    assert run(archive.path, "-l", tmp_path, "-o", tmp_path / "out").exit_code != 0


def test_one_mask_per_case_is_refused(raters):
    with pytest.raises(BadInput, match="at least two folders of masks, got 1"):
        list(folder_opinions([raters / "model"], labels=None, cases=None))


def test_a_bound_without_named_patients_says_that_it_counts_cases(raters, tmp_path):
    folders = [raters / name for name in ("model", "fold1", "fold2")]
    told = "! no patient is named"
    assert told in run(*folders, "-l", raters / "labels", "-o", tmp_path / "a").output
    named = run(*folders, "-l", raters / "labels", "--cases", raters / "cases.csv", "-o", tmp_path / "b")
    assert told not in named.output
    assert told not in run(*folders, "--quality", tmp_path / "b" / "quality.json", "-o", tmp_path / "c").output


def test_a_quality_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "quality.json").write_text("{half")
    with pytest.raises(BadInput, match="run casewise qc"):
        read_quality(tmp_path / "quality.json")


def test_a_full_disk_leaves_the_table_of_the_run_before_whole(raters, tmp_path, monkeypatch):
    folders = [raters / name for name in ("model", "fold1", "fold2")]
    assert run(*folders, "-o", tmp_path).exit_code == 0
    before = (tmp_path / "qc.csv").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("casewise.core.durable.os.fsync", full)
    assert isinstance(run(*folders[:2], "-o", tmp_path).exception, OSError)
    assert (tmp_path / "qc.csv").read_bytes() == before

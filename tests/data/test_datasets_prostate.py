"""The two prostate datasets: sites, spellings, zones, floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.core.errors import BadInput, UnsafeInput
from casewise.data.datasets import recognize
from casewise.data.datasets.prostate import prostate158, saml_prostate

Write = Callable[..., Path]


def zones(dtype: type = np.uint8) -> NDArray[np.generic]:
    label = np.zeros((6, 5, 4), dtype)
    label[1:4, 1:4] = 1
    label[4, 1:4] = 2
    return label


@pytest.fixture
def sites(tmp_path: Path, volume: Write) -> Path:
    root = tmp_path / "Processed"
    for site, numbers, spelling in (
        ("BMC", (5, 29), "Segmentation"),
        ("UCL", (1, 26), "segmentation"),
        ("BIDMC", (0, 2, 5), "segmentation"),
    ):
        for number in numbers:
            volume(root / site / f"Case{number:02d}.nii.gz", np.full((6, 5, 4), number, np.int16))
            volume(root / site / f"Case{number:02d}_{spelling}.nii.gz", zones())
    (root / "BMC" / "._Case05.nii.gz").write_bytes(b"macOS")
    return root


def test_numbers_with_gaps_and_a_capital_letter_are_found(sites: Path) -> None:
    cohort = saml_prostate(sites)
    assert cohort.ids == (
        "BIDMC_Case00", "BIDMC_Case02", "BIDMC_Case05", "BMC_Case05", "BMC_Case29", "UCL_Case01", "UCL_Case26",
    )  # fmt: skip
    assert all(member.labelled for member in cohort.members.values())
    assert cohort.members["BMC_Case05"].group == "BMC"
    assert cohort.members["BMC_Case05"].cluster == "BMC_Case05"


def test_the_same_number_at_two_sites_is_two_cases(sites: Path) -> None:
    cohort = saml_prostate(sites)
    assert cohort.case("BMC_Case29").image.max() == 29
    assert cohort.case("BIDMC_Case05").image.shape == (1, 4, 5, 6)


def test_zones_are_merged_to_the_prostate(sites: Path) -> None:
    assert np.array_equal(saml_prostate(sites).label("BMC_Case05"), zones().T > 0)
    assert np.array_equal(saml_prostate(sites, zones=True).label("BMC_Case05"), zones().T)


def test_a_prostate_label_of_another_grid_is_refused(sites: Path, volume: Write) -> None:
    volume(sites / "UCL" / "Case01_segmentation.nii.gz", np.zeros((6, 5, 3), np.uint8))
    with pytest.raises(BadInput, match=r"UCL_Case01: label of shape \(3, 5, 6\), image of \(4, 5, 6\)"):
        saml_prostate(sites).label("UCL_Case01")


def test_a_case_without_segmentation_is_unlabelled(sites: Path) -> None:
    (sites / "UCL" / "Case01_segmentation.nii.gz").unlink()
    assert not saml_prostate(sites).members["UCL_Case01"].labelled


def test_sites_are_recognized_and_one_site_alone_is_plain(sites: Path) -> None:
    assert recognize(sites) == recognize(sites.parent) == "saml_prostate"
    assert recognize(sites / "BMC") == "plain"


@pytest.fixture
def downloads(tmp_path: Path, volume: Write) -> Path:
    header = (
        "ID,t2,adc,dwi,t2_anatomy_reader1,t2_anatomy_reader2,t2_tumor_reader1,adc_tumor_reader1,adc_tumor_reader2\n"
    )
    for part, table, numbers in (
        ("train", "train.csv", (20, 23)),
        ("train", "valid.csv", (41,)),
        ("test", "test.csv", (1,)),
    ):
        home, rows = tmp_path / f"prostate158_{part}", []
        for number in numbers:
            here = f"{part}/{number:03d}"
            for modality in ("t2", "adc", "dwi"):
                volume(home / here / f"{modality}.nii.gz", np.full((6, 5, 4), number, np.float32))
            volume(home / here / "t2_anatomy_reader1.nii.gz", zones(np.float64) + 1e-7)
            volume(home / here / "adc_tumor_reader1.nii.gz", zones(np.float32))
            second = f"{here}/t2_anatomy_reader2.nii.gz" if number == 23 else ""
            if second:
                volume(home / second, zones())
            images = ",".join(f"{here}/{modality}.nii.gz" for modality in ("t2", "adc", "dwi"))
            rows.append(
                f"{number},{images},{here}/t2_anatomy_reader1.nii.gz,{second},,{here}/adc_tumor_reader1.nii.gz,\n"
            )
        (home / table).write_text(header + "".join(rows))
    return tmp_path


def test_three_tables_are_three_splits(downloads: Path) -> None:
    cohort = prostate158(downloads)
    assert {case_id: member.split for case_id, member in cohort.members.items()} == {
        "P158_001": "test", "P158_020": "training", "P158_023": "training", "P158_041": "validation",
    }  # fmt: skip
    assert recognize(downloads) == recognize(downloads / "prostate158_test") == "prostate158"
    assert len(prostate158(downloads / "prostate158_train")) == 3


def test_float_masks_are_rounded_to_the_zones_they_mean(downloads: Path) -> None:
    label = prostate158(downloads).label("P158_020")
    assert np.issubdtype(label.dtype, np.integer)
    assert np.array_equal(label, zones().T)


def test_masks_that_are_not_whole_are_refused(downloads: Path, volume: Write) -> None:
    volume(downloads / "prostate158_train/train/020/t2_anatomy_reader1.nii.gz", zones(np.float32) * 0.7)
    with pytest.raises(BadInput, match="not whole numbers"):
        prostate158(downloads).label("P158_020")


def test_the_second_reader_is_often_missing(downloads: Path) -> None:
    second = prostate158(downloads, reader=2)
    assert [case_id for case_id, member in second.members.items() if member.labelled] == ["P158_023"]


def test_tumors_are_one_class(downloads: Path) -> None:
    cohort = prostate158(downloads, modalities="adc,dwi", target="adc_tumor")
    assert cohort.case("P158_041").image.shape == (2, 4, 5, 6)
    assert np.array_equal(cohort.label("P158_041"), zones().T > 0)


@pytest.mark.parametrize("options", [{"modalities": "t1"}, {"target": "lesion"}, {"reader": 3}])
def test_what_prostate158_does_not_have_is_refused(downloads: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="t2"):
        prostate158(downloads, **options)


def test_a_table_cannot_lead_out_of_its_folder(downloads: Path, volume: Write) -> None:
    volume(downloads / "secret.nii.gz", zones())
    table = downloads / "prostate158_test" / "test.csv"
    table.write_text(table.read_text().replace("test/001/t2.nii.gz", "../secret.nii.gz"))
    with pytest.raises(UnsafeInput, match="points outside"):
        prostate158(downloads)


def test_a_path_that_is_no_file_is_named(downloads: Path) -> None:
    (downloads / "prostate158_test/test/001/t2.nii.gz").unlink()
    with pytest.raises(BadInput, match=r"test.csv, ID 1: t2 is 'test/001/t2.nii.gz', which is not a file"):
        prostate158(downloads)

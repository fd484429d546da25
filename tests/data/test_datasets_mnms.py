"""M&Ms as it is downloaded: 4-D files, fake labels, a table with blanks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from casewise.core.errors import BadInput
from casewise.data.datasets import load_dataset, recognize
from casewise.data.datasets.mnms import contacts, mnms

Write = Callable[..., Path]
FRAMES = 5
OBLIQUE = np.array([[1.2, 0.1, 0.3, -90], [0.0, 1.3, 0.2, -80], [0.05, 0.0, 9.6, 4], [0, 0, 0, 1.0]])


def heart() -> NDArray[np.uint8]:
    """A blood pool wrapped by myocardium, with a right ventricle at its side; (x, y, z)."""
    label = np.zeros((16, 16, 3), np.uint8)
    label[3:11, 3:11] = 2
    label[5:9, 5:9] = 1
    label[11:14, 4:10] = 3
    return label


def beating(label: NDArray[np.uint8], *frames: int) -> NDArray[np.uint8]:
    """A 4-D label that is empty but at the given frames."""
    movie = np.zeros((*label.shape, FRAMES), np.uint8)
    for frame in frames:
        movie[..., frame] = label
    return movie


@pytest.fixture
def tree(tmp_path: Path, volume: Write) -> Path:
    root = tmp_path / "OpenDataset"
    subjects = {
        "A0S9V9": "Training/Labeled",
        "B1C2D3": "Training/Unlabeled",
        "C4E5F6": "Testing",
        "D7G8H9": "Validation",
    }
    for number, (code, folder) in enumerate(subjects.items()):
        movie = np.stack([np.full((16, 16, 3), 10 * number + t, np.int16) for t in range(FRAMES)], axis=-1)
        affine = OBLIQUE if folder in ("Testing", "Validation") else None
        volume(root / folder / code / f"{code}_sa.nii.gz", movie, affine)
        volume(root / folder / code / f"{code}_sa_gt.nii.gz", beating(heart(), 1, 4), affine)
    (root / "211230_M&Ms_Dataset_information_diagnosis_opendataset.csv").write_text(
        ",External code,VendorName,Vendor,Centre,ED,ES,Age\n"
        "0,A0S9V9,Siemens,A,1,1,4,50\n1,B1C2D3,GE,C,4,,,61\n2,C4E5F6,Canon,D,5,1.0,4.0,30\n3,D7G8H9,Philips,B,2,1,4,\n"
    )
    return root


def test_both_phases_of_a_subject_are_one_cluster(tree: Path) -> None:
    cohort = mnms(tree)
    assert cohort.ids == ("A0S9V9_ED", "A0S9V9_ES", "C4E5F6_ED", "C4E5F6_ES", "D7G8H9_ED", "D7G8H9_ES")
    member = cohort.members["A0S9V9_ES"]
    assert (member.cluster, member.group, member.split, member.labelled) == ("A0S9V9", "A", "training", True)
    assert cohort.members["C4E5F6_ED"].split == "test"


def test_the_frames_of_the_table_are_read_as_they_stand(tree: Path) -> None:
    cohort = mnms(tree)
    case = cohort.case("A0S9V9_ES")
    assert case.image.shape == (1, 3, 16, 16)
    assert np.unique(case.image).tolist() == [4]
    assert case.spacing_mm == (3.0, 0.75, 0.5)
    assert np.array_equal(cohort.label("A0S9V9_ED"), heart().T)


def test_fake_labels_of_the_unlabeled_part_are_not_labels(tree: Path) -> None:
    table = next(tree.glob("*.csv"))
    table.write_text(table.read_text().replace("GE,C,4,,", "GE,C,4,1,4"))
    cohort = mnms(tree)
    assert cohort.members["B1C2D3_ED"].split == "unlabeled"
    assert not cohort.members["B1C2D3_ED"].labelled
    with pytest.raises(BadInput, match="has no label"):
        cohort.label("B1C2D3_ED")


def test_unlabeled_subjects_without_frames_are_counted_not_lost(tree: Path) -> None:
    assert mnms(tree).facts["skipped"].endswith("B1C2D3")


def test_a_labelled_subject_without_a_frame_is_refused(tree: Path) -> None:
    table = next(tree.glob("*.csv"))
    table.write_text(table.read_text().replace("Siemens,A,1,1,4", "Siemens,A,1,,4"))
    with pytest.raises(BadInput, match="A0S9V9 has no frame ED"):
        mnms(tree)


def test_one_frame_is_read_without_the_frames_behind_it(tree: Path) -> None:
    path = tree / "Training/Labeled/A0S9V9/A0S9V9_sa.nii.gz"
    noise = np.random.default_rng(0).integers(0, 4000, (64, 64, 8, 30), dtype=np.int16)
    import nibabel

    nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # the frames behind ED and ES are gone
    assert np.array_equal(mnms(tree).case("A0S9V9_ES").image[0], noise[..., 4].T)


def test_a_frame_behind_the_end_is_named(tree: Path) -> None:
    table = next(tree.glob("*.csv"))
    table.write_text(table.read_text().replace("Siemens,A,1,1,4", "Siemens,A,1,1,5"))
    with pytest.raises(BadInput, match="frames 0 to 4, got frame 5"):
        mnms(tree).case("A0S9V9_ES")


@pytest.mark.parametrize(("order", "who"), [((0, 1, 3, 2), "2 and 3 swapped"), ((0, 3, 2, 1), "as in ACDC-cardiac")])
def test_labels_in_another_order_are_refused(tree: Path, volume: Write, order: tuple[int, ...], who: str) -> None:
    wrong = np.array(order, np.uint8)[heart()]
    volume(tree / "Training/Labeled/A0S9V9/A0S9V9_sa_gt.nii.gz", beating(wrong, 1, 4))
    with pytest.raises(BadInput, match="another order"):
        mnms(tree).label("A0S9V9_ED")


def test_an_empty_frame_is_not_a_label(tree: Path, volume: Write) -> None:
    volume(tree / "Training/Labeled/A0S9V9/A0S9V9_sa_gt.nii.gz", beating(heart(), 2))
    with pytest.raises(BadInput, match="empty at this frame"):
        mnms(tree).label("A0S9V9_ED")


def test_contacts_are_counted_within_slices() -> None:
    picture = np.array([[[1, 2, 2], [1, 1, 3]]])
    assert (contacts(picture, 1, 2), contacts(picture, 1, 3), contacts(picture, 2, 3)) == (2, 1, 1)


def test_sheared_affines_are_read(tree: Path) -> None:
    cohort = mnms(tree)
    expected = np.linalg.norm(OBLIQUE[:3, :3], axis=0)[::-1]
    spacing: Any = cohort.case("C4E5F6_ED").spacing_mm
    assert spacing == pytest.approx(expected)
    assert np.array_equal(cohort.label("C4E5F6_ED"), heart().T)


def test_groups_can_be_centres_or_names(tree: Path) -> None:
    assert mnms(tree, group="vendor-name").members["C4E5F6_ED"].group == "Canon"
    assert mnms(tree, group="centre").members["D7G8H9_ED"].group == "2"
    with pytest.raises(BadInput, match="must be one of vendor"):
        mnms(tree, group="age")


def test_the_older_table_and_the_folder_above_do_too(tree: Path) -> None:
    next(tree.glob("*.csv")).rename(tree / "201014_M&Ms_Dataset_Information_-_opendataset.csv")
    assert recognize(tree.parent) == "mnms"
    assert len(load_dataset(tree.parent)) == 6


def test_a_subject_that_is_not_in_the_table_is_named(tree: Path) -> None:
    (tree / "Testing" / "X0X0X0").mkdir()
    with pytest.raises(BadInput, match="X0X0X0 has no row"):
        mnms(tree)

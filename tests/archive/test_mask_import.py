"""Masks that anybody else produced become an archive; what is missing or unsafe is named."""

from __future__ import annotations

import numpy as np
import pytest

from casewise.archive.mask_import import find_masks, import_masks
from casewise.archive.store import create_archive
from casewise.core.errors import BadInput, NotFinite, UnsafeInput
from casewise.core.records import Binding, State

BINDING = Binding("theirs", "theirs", "masks", "measure")


def written(folder, case_id="c1", steps=(0, 1, 2), shape=(4, 4)):
    (folder / case_id).mkdir(parents=True, exist_ok=True)
    for step in steps:
        mask = np.zeros(shape, np.uint8)
        mask.reshape(-1)[: int(float(str(step).split("~")[0]))] = 1
        np.save(folder / case_id / f"step_{step}.npy", mask)
    return folder


def read(path):
    return np.load(path), (1.0, 1.0)


def compare(source, adapted):
    return {"area": float((source != adapted).sum())}


def imported(tmp_path, masks, labels=None, **more):
    found = find_masks(masks, labels)
    archive = create_archive(tmp_path / "archive", binding=BINDING, steps=found[0].steps)
    list(import_masks(archive, found, read=read, compare=compare, **more))
    return archive


def test_steps_shrunk_states_labels_groups_and_signals_come_in(tmp_path):
    masks = written(written(tmp_path / "masks"), "c2", steps=(0, 1, 2, "2~0.5"))
    (tmp_path / "labels").mkdir()
    for name in ("c1", "c2"):
        np.save(tmp_path / "labels" / f"{name}.npy", np.ones((4, 4), np.uint8))
    (tmp_path / "signals.csv").write_text("case,step,entropy\nc1,0,0.5\nc1,1,0.25\nc1,2,\n")
    (tmp_path / "groups.csv").write_text("case,group,cluster,split\nc1,A,p1,calibration\nc2,,,\n")
    archive = imported(
        tmp_path, masks, tmp_path / "labels", signals=tmp_path / "signals.csv", groups=tmp_path / "groups.csv"
    )
    assert archive.ids == ("c1", "c2")
    assert archive.states == (State(0), State(1), State(2))
    assert archive.mask("c2", State(2, 0.5)).sum() == 2
    assert [signals["entropy"] for signals in archive.trajectory("c1").signals] == [0.5, 0.25, None]
    assert archive.trajectory("c1").signals[2]["area"] == 2
    assert (archive.entries["c1"].group, archive.entries["c1"].split, archive.entries["c2"].group) == (
        "A",
        "calibration",
        None,
    )
    assert archive.label("c1").all()


def test_a_label_of_one_slice_fits_a_mask_without_the_axis_of_slices(tmp_path):
    """SicTTA reads slices of shape (1, rows, columns) and writes masks of shape (rows, columns)."""
    (tmp_path / "labels").mkdir()
    np.save(tmp_path / "labels" / "c1.npy", np.eye(4, dtype=np.uint8)[None])
    archive = imported(tmp_path, written(tmp_path / "masks"), tmp_path / "labels")
    assert np.array_equal(archive.label("c1"), np.eye(4))


def test_an_interrupted_import_continues(tmp_path):
    masks = written(tmp_path / "masks")
    imported(tmp_path, masks)
    assert imported(tmp_path, written(masks, "c2")).ids == ("c1", "c2")


@pytest.mark.parametrize(
    ("steps", "words"),
    [((0, 1, 3), "without a gap, it has 0, 1, 3"), ((0,), "it has 0"), ((1, 2), "it has 1, 2"), ((), "it has none")],
)
def test_a_missing_step_is_named(tmp_path, steps, words):
    with pytest.raises(BadInput, match=words):
        find_masks(written(tmp_path / "masks", steps=steps))


def test_cases_of_different_length_are_refused(tmp_path):
    masks = written(written(tmp_path / "masks"), "c2", steps=(0, 1))
    with pytest.raises(BadInput, match="case c2 ends at step 1"):
        find_masks(masks)


def test_shapes_that_differ_within_a_case_are_named(tmp_path):
    masks = written(tmp_path / "masks")
    np.save(masks / "c1" / "step_1.npy", np.zeros((3, 3), np.uint8))
    with pytest.raises(BadInput, match=r"step 0 has shape \(4, 4\), state 1 has \(3, 3\)"):
        imported(tmp_path, masks)


def test_a_missing_label_or_folder_is_named(tmp_path):
    masks = written(tmp_path / "masks")
    (tmp_path / "labels").mkdir()
    with pytest.raises(BadInput, match="no label of case c1"):
        find_masks(masks, tmp_path / "labels")
    with pytest.raises(BadInput, match="is not a folder"):
        find_masks(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no case"):
        find_masks(tmp_path / "empty")


def test_a_state_that_is_there_twice_is_refused(tmp_path):
    masks = written(tmp_path / "masks")
    (masks / "c1" / "step_1.png").touch()
    with pytest.raises(BadInput, match="state 1 twice"):
        find_masks(masks)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path):
    masks = written(tmp_path / "masks")
    np.save(tmp_path / "secret.npy", np.zeros((4, 4), np.uint8))
    (masks / "c1" / "step_3.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(UnsafeInput, match="points outside"):
        find_masks(masks)


@pytest.mark.parametrize(("text", "error"), [("nan", NotFinite), ("high", BadInput)])
def test_signals_that_are_no_numbers_are_refused(tmp_path, text, error):
    masks = written(tmp_path / "masks")
    (tmp_path / "signals.csv").write_text(f"case,step,entropy\nc1,1,{text}\n")
    with pytest.raises(error, match="entropy"):
        imported(tmp_path, masks, signals=tmp_path / "signals.csv")


def test_a_table_without_its_columns_is_refused(tmp_path):
    masks = written(tmp_path / "masks")
    (tmp_path / "signals.csv").write_text("name,value\nc1,1\n")
    with pytest.raises(BadInput, match="needs a header with case, step"):
        imported(tmp_path, masks, signals=tmp_path / "signals.csv")

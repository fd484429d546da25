"""An archive gives back what was put in, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from worlds.cohorts import SYNTHETIC, synthetic_archive, synthetic_trajectory

from casewise.archive import layout
from casewise.archive.store import create_archive, open_archive
from casewise.core.errors import BadInput, DamagedArchive, Mismatch, NotFinite, UnsafeInput
from casewise.core.records import SOURCE, Binding, Case, State, Trajectory

BINDING = Binding("model", "objective", "loader", "measure")


def a_case(case_id="one", **more):
    return Case(case_id, np.arange(4.0).reshape(1, 2, 2), **more)


def a_trajectory(case_id="one", masks=None, **more):
    masks = masks or (np.zeros((2, 3), np.uint8), np.ones((2, 3), np.uint8))
    signals = tuple({"delta": float(step), "entropy": None} for step in range(len(masks)))
    return Trajectory(case_id, masks, signals, **more)


def test_every_mask_signal_and_label_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    trajectory, label = synthetic_trajectory("one", rng, shape=(4, 32, 32), harm=True)
    archive = create_archive(tmp_path / "a", binding=BINDING, steps=4)
    archive.add(a_case(group="A", cluster="p", split="calibration", spacing_mm=(5.0, 1.0, 1.0)), trajectory, label)
    opened = open_archive(tmp_path / "a")
    again = opened.trajectory("one")
    assert all(np.array_equal(a, b) for a, b in zip(again.masks, trajectory.masks, strict=True))
    assert again.signals == tuple({name: step.get(name) for name in again.signals[0]} for step in trajectory.signals)
    assert np.array_equal(again.mask(State(2, 0.5)), trajectory.mask(State(2, 0.5)))
    assert np.array_equal(opened.label("one"), label)
    entry = opened.entries["one"]
    assert (entry.group, entry.cluster, entry.split, entry.spacing_mm) == ("A", "p", "calibration", (5.0, 1.0, 1.0))
    assert opened.states == (SOURCE, State(1), State(2), State(2, 0.5), State(3), State(4))


def test_a_signal_that_is_not_computable_is_none_in_an_observation(tmp_path):
    archive = create_archive(tmp_path, binding=BINDING, steps=1).add(a_case(), a_trajectory())
    seen = archive.observation("one", 1)
    assert seen.step == 1
    assert seen.signals[1] == {"delta": 1.0, "entropy": None}


def test_an_observation_holds_no_later_step(tmp_path):
    archive = synthetic_archive(tmp_path / "a", cases=1)
    assert len(archive.observation("case-0000", 2).signals) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_signal_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path, value):
    archive = create_archive(tmp_path, binding=BINDING, steps=1)
    masks = (np.zeros((2, 2), int), np.ones((2, 2), int))
    with pytest.raises(NotFinite, match=r"signal delta of case one at state 1"):
        archive.add(a_case(), Trajectory("one", masks, ({}, {"delta": value})))
    assert open_archive(tmp_path).ids == ()


def test_masks_of_probabilities_are_refused(tmp_path):
    archive = create_archive(tmp_path, binding=BINDING, steps=1)
    with pytest.raises(BadInput, match="take the argmax"):
        archive.add(a_case(), a_trajectory(masks=(np.zeros((2, 2)), np.ones((2, 2)))))


def test_a_wrong_number_of_steps_is_refused(tmp_path):
    archive = create_archive(tmp_path, binding=BINDING, steps=3)
    with pytest.raises(BadInput, match="holds 3 steps for each case, case one has 1"):
        archive.add(a_case(), a_trajectory())


def test_labels_above_255_survive(tmp_path):
    masks = (np.zeros((2, 3), np.int32), np.full((2, 3), 300, np.int32))
    archive = create_archive(tmp_path, binding=BINDING, steps=1).add(a_case(), a_trajectory(masks=masks))
    assert np.array_equal(archive.mask("one", State(1)), masks[1])


def test_a_mask_hash_does_not_depend_on_the_integer_type():
    mask = np.arange(6).reshape(2, 3)
    assert layout.mask_sha256(mask.astype(np.uint8)) == layout.mask_sha256(mask.astype(np.int64))
    assert layout.mask_sha256(mask) != layout.mask_sha256(mask.reshape(3, 2))


def test_the_same_configuration_resumes_and_another_is_refused(tmp_path):
    create_archive(tmp_path, binding=BINDING, steps=1, configuration={"seed": 0}).add(a_case(), a_trajectory())
    assert create_archive(tmp_path, binding=BINDING, steps=1, configuration={"seed": 0}).ids == ("one",)
    other = Binding("other", "objective", "loader", "measure")
    with pytest.raises(Mismatch, match=r"another model, steps, configuration \(seed was 0, now 1\)"):
        create_archive(tmp_path, binding=other, steps=2, configuration={"seed": 1})


def test_a_folder_with_cases_of_somebody_else_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "cases" / "patient-1").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"cases/ with patient-1 and no manifest\.json, so it is not an archive"):
        synthetic_archive(tmp_path, cases=2)
    assert not (tmp_path / "manifest.json").exists()


def test_a_case_that_is_there_is_not_written_again(tmp_path):
    archive = create_archive(tmp_path, binding=BINDING, steps=1).add(a_case(), a_trajectory())
    before = (tmp_path / "cases/one/masks.npz").stat().st_mtime_ns
    archive.add(a_case(), a_trajectory())
    assert (tmp_path / "cases/one/masks.npz").stat().st_mtime_ns == before


def test_a_view_shows_some_cases_and_an_unknown_case_is_named(tmp_path):
    archive = synthetic_archive(tmp_path, cases=4)
    assert archive.select(ids=["case-0002"]).ids == ("case-0002",)
    assert archive.select(split="evaluation").ids == ()
    assert set(archive.select(ids=["case-0002"]).signals()["case"]) == {"case-0002"}
    with pytest.raises(BadInput, match="no case nine"):
        archive.select(ids=["nine"])


def test_a_lost_case_of_a_sealed_archive_is_noticed(tmp_path):
    archive = synthetic_archive(tmp_path, cases=2)
    folder = tmp_path / "cases/case-0001"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(DamagedArchive, match="lost 1 of its cases: case-0001"):
        open_archive(archive.path)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}'])
def test_a_broken_manifest_is_named(tmp_path, content):
    synthetic_archive(tmp_path, cases=1)
    (tmp_path / "cases/case-0000/entry.json").write_text(content)
    with pytest.raises(DamagedArchive, match=r"entry\.json"):
        open_archive(tmp_path)


def test_another_schema_is_refused(tmp_path):
    synthetic_archive(tmp_path, cases=1)
    manifest = (tmp_path / "manifest.json").read_text().replace('"schema": 3', '"schema": 9')
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(Mismatch, match="schema 9, this casewise reads 3"):
        open_archive(tmp_path)


def test_the_same_recording_has_the_same_digest_however_long_it_took(tmp_path):
    for name, seconds in (("slow", (1.0, 9.0)), ("fast", (0.1, 0.2))):
        made = a_trajectory(seconds=seconds, spent={"augmentation_disagreement": (1e3 * seconds[0], 12.5)})
        create_archive(tmp_path / name, binding=BINDING, steps=1).add(a_case(), made).seal()
    slow, fast = open_archive(tmp_path / "slow"), open_archive(tmp_path / "fast")
    assert slow.entries["one"].seconds != fast.entries["one"].seconds
    assert slow.entries["one"].spent == {"augmentation_disagreement": (1000.0, 12.5)} == slow.trajectory("one").spent
    assert slow.digest == fast.digest


def test_a_truncated_mask_file_names_the_file(tmp_path):
    archive = synthetic_archive(tmp_path, cases=1)
    file = tmp_path / "cases/case-0000/masks.npz"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DamagedArchive, match=r"masks\.npz is damaged"):
        archive.mask("case-0000", SOURCE)


def test_a_pickle_inside_a_mask_file_is_never_loaded(tmp_path):
    archive = synthetic_archive(tmp_path, cases=1)
    np.savez(tmp_path / "cases/case-0000/masks.npz", source=np.array([print], dtype=object))
    with pytest.raises(DamagedArchive, match="allow_pickle"):
        archive.mask("case-0000", SOURCE)


def test_a_file_that_would_unpack_to_too_much_is_refused(tmp_path):
    from casewise.archive.layout import packed, unpacked

    (tmp_path / "bomb.npz").write_bytes(packed({"zeros": np.zeros(1_000_000, np.uint8)}))
    with pytest.raises(UnsafeInput, match="would unpack to"):
        unpacked(tmp_path / "bomb.npz", largest_bytes=1000)


def test_a_step_that_was_not_recorded_is_named(tmp_path):
    archive = synthetic_archive(tmp_path, cases=1)
    with pytest.raises(BadInput, match=r"state 3~0.5 of case case-0000 was not recorded"):
        archive.mask("case-0000", State(3, 0.5))


def test_a_run_that_is_killed_leaves_whole_cases_and_continues(tmp_path):
    program = textwrap.dedent(f"""
        import itertools, os, signal, sys
        import casewise.core.durable as durable
        from worlds.cohorts import synthetic_archive
        writes = itertools.count()
        plain = durable.sync_folder
        def dies(folder):
            if next(writes) == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(folder)
        durable.sync_folder = dies
        synthetic_archive({str(tmp_path)!r}, cases=6)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = open_archive(tmp_path)
    assert 0 < len(left.ids) < 6
    assert any(name.startswith(layout.HALF_WRITTEN) for name in os.listdir(tmp_path / "cases"))
    whole = synthetic_archive(tmp_path, cases=6, binding=SYNTHETIC)
    fresh = synthetic_archive(tmp_path / "fresh", cases=6)
    assert whole.digest == fresh.digest
    assert not any(name.startswith(layout.HALF_WRITTEN) for name in os.listdir(tmp_path / "cases"))


def test_two_writers_share_an_archive_and_the_first_one_keeps_the_case(tmp_path):
    one = create_archive(tmp_path, binding=BINDING, steps=1)
    two = create_archive(tmp_path, binding=BINDING, steps=1)
    one.add(a_case(group="first"), a_trajectory())
    two.add(a_case(group="second"), a_trajectory())
    two.add(a_case("two"), a_trajectory("two"))
    assert two.entries["one"].group == "first"
    assert one.seal().ids == ("one", "two")
    assert set(open_archive(tmp_path).manifest["cases"]) == {"one", "two"}

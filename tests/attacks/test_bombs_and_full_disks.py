"""Files that ask for too much memory, full disks, and a user who presses Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import pytest

from casewise.archive.layout import decode_masks, encode_masks, packed, unpacked
from casewise.cli import DISK
from casewise.core.errors import BadInput, DamagedArchive, UnsafeInput
from casewise.core.formats import npy_array, read_npy
from casewise.core.json_records import read_json

MODEL = "casewise.adapt.networks:phantom_cardiac"


def claiming(count: int, content: bytes = b"\x00" * 64) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({count}, 1), }}".encode()
    header = text + b" " * (117 - len(text)) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize("count", [10**12, 10**18, 9])
def test_an_npy_that_claims_more_than_it_holds_is_refused_before_memory_is_asked_for(
    count: int, tmp_path: Path
) -> None:
    (tmp_path / "a.npy").write_bytes(claiming(count))
    with pytest.raises(UnsafeInput, match=r"a\.npy claims [\d,]+ bytes of numbers and holds 64; it is truncated"):
        read_npy(tmp_path / "a.npy")
    with pytest.raises(UnsafeInput, match="claims"):
        npy_array(claiming(count), "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("labels.npy", claiming(count))
    with pytest.raises(UnsafeInput, match=r"labels\.npy claims"):
        unpacked(tmp_path / "a.npz")


def test_a_record_of_100_mb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A list of 20,000 cases with ten ladders each has 21 MB."""
    with (tmp_path / "policy.json").open("wb") as file:
        file.truncate(100 * 2**20)  # it takes no space on the disk
    with pytest.raises(BadInput, match="is 100 MB; it may have at most 32 MB"):
        read_json(tmp_path / "policy.json")


def test_an_honest_npy_is_read(tmp_path: Path) -> None:
    for array in (np.arange(6).reshape(2, 3), np.zeros((0, 3)), np.float32(2)):
        np.save(tmp_path / "a.npy", array)
        assert np.array_equal(read_npy(tmp_path / "a.npy"), array)


@pytest.mark.parametrize("shape", [(10, 10), (86_000, 1_000, 1_000)])
def test_a_run_length_bomb_is_refused_before_memory_is_asked_for(shape: tuple[int, ...], tmp_path: Path) -> None:
    lengths = np.full(20, 2**32 - 1, np.uint32)  # 86 billion voxels
    bomb = {"counts": np.array([20]), "lengths": lengths, "labels": np.arange(20, dtype=np.uint8)}
    (tmp_path / "masks.npz").write_bytes(packed(bomb))
    assert (tmp_path / "masks.npz").stat().st_size < 1000
    with pytest.raises((DamagedArchive, UnsafeInput), match="voxels"):
        decode_masks(unpacked(tmp_path / "masks.npz"), shape, (0,))
    honest = encode_masks([np.zeros((10, 10), np.uint8)])
    assert decode_masks(honest, (10, 10), (0,))[0].shape == (10, 10)


# ---- the command line ----


def scans(root: Path, count: int = 2) -> Path:
    (root / "images").mkdir(parents=True)
    for number in range(count):
        voxels = np.random.default_rng(number).normal(size=(32, 32, 2)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), root / "images" / f"{number}.nii.gz")
    return root


def words(root: Path, out: Path, *more: str) -> list[str]:
    predict = ["predict", "-i", str(root / "images"), "-o", str(out), "-m", MODEL, "-device", "cpu", "--policy", "m0"]
    return [*predict, "--set", "contract=off", *more]


def typed(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys\n{before}\nfrom casewise.cli import main\nmain()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_an_output_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    scans(tmp_path)
    (tmp_path / "out").write_text("a file")
    done = typed(*words(tmp_path, tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "this is a file, and a folder is needed: choose another place" in done.stderr
    assert (tmp_path / "out").read_text() == "a file"


FULL = """
import os, errno, casewise.core.durable as durable
replace = os.replace
left = [3]
def full(one, other):
    left[0] -= 1
    if left[0] < 0:
        raise OSError({number}, "no", str(other))
    replace(one, other)
durable.os.replace = full
"""


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, *(pytest.param(one, marks=pytest.mark.slow) for one in (errno.EACCES, errno.EFBIG))]
)
def test_a_full_or_locked_disk_is_one_sentence_and_the_run_continues_from_there(number: int, tmp_path: Path) -> None:
    scans(tmp_path)
    done = typed(*words(tmp_path, tmp_path / "out", "--set", "overlays=false"), before=FULL.format(number=number))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert DISK[number] in last
    assert "with --continue_prediction to continue" in last
    again = typed(*words(tmp_path, tmp_path / "out", "--set", "overlays=false", "--continue_prediction"))
    assert again.returncode == 0
    assert not list((tmp_path / "out").rglob(".writing-*"))


@pytest.mark.parametrize(("name", "jobs"), [("SIGINT", "2"), pytest.param("SIGTERM", "1", marks=pytest.mark.whole)])
def test_a_stop_is_one_sentence_with_a_hint_and_code_130(name: str, jobs: str, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the workers, too, and they say nothing; SIGTERM comes from schedulers."""
    scans(tmp_path, 40)
    program = "from casewise.cli import main\nmain()"
    command = [sys.executable, "-c", program, *words(tmp_path, tmp_path / "out", "--set", "overlays=false", "-j", jobs)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores Ctrl-C
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heard, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("*.nii.gz")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(running.pid, getattr(signal, name)) if jobs == "2" else os.kill(running.pid, getattr(signal, name))
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert "interrupted; finished cases are complete; repeat the command with --continue_prediction" in said

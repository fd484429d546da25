"""A folder in which most files are bad: each fails alone, with a sentence, and the good ones beside them come out."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from miniature_nnunet import write_model
from typer.testing import CliRunner

MODEL = "casewise.adapt.networks:phantom_cardiac"


def volume(shape: tuple[int, ...] = (16, 16, 2), dtype: Any = np.int16) -> bytes:
    voxels = np.random.default_rng(3).integers(0, 200, shape).astype(dtype)
    image = nibabel.Nifti1Image(voxels, np.diag([1.5, 1.5, 8.0, 1.0]))
    image.set_qform(image.affine, code=1)
    image.set_sform(image.affine, code=1)
    return bytes(image.to_bytes())


def with_bytes(*changes: tuple[int, str, float], base: bytes | None = None) -> bytes:
    content = bytearray(base or volume())
    for offset, form, value in changes:
        struct.pack_into(f"<{form}", content, offset, value)
    return bytes(content)


NAN, INF = float("nan"), float("inf")
SFORM, QFORM = (254, "h", 1), (254, "h", 0)  # sform_code on, or off so that the quaternion counts
BAD: dict[str, bytes] = {
    "empty": b"",
    "one_byte": b"\x5c",
    "text": b"this is no image at all\n" * 40,
    "half_a_header": volume()[:200],
    "header_alone": volume()[:352],
    "truncated": volume()[:-100],
    "wrong_magic": with_bytes((344, "i", 0)),
    "sizeof_hdr_0": with_bytes((0, "i", 0)),
    "axes_0": with_bytes((40, "h", 0)),
    "axes_9": with_bytes((40, "h", 9)),
    "axes_negative": with_bytes((40, "h", -3)),
    "side_0": with_bytes((42, "h", 0)),
    "side_negative": with_bytes((44, "h", -16)),
    "side_huge": with_bytes((42, "h", 32767), (44, "h", 32767), (46, "h", 32767)),
    "datatype_0": with_bytes((70, "h", 0)),
    "datatype_7": with_bytes((70, "h", 7)),
    "datatype_9999": with_bytes((70, "h", 9999)),
    "datatype_wider": with_bytes((70, "h", 64)),  # float64 where the file holds int16
    "single_bits": with_bytes((70, "h", 1)),
    "rgb": with_bytes((70, "h", 128)),
    "rgba": with_bytes((70, "h", 2304)),
    "complex": with_bytes((70, "h", 32)),
    "offset_nan": with_bytes((108, "f", NAN)),
    "offset_negative": with_bytes((108, "f", -352.0)),
    "offset_huge": with_bytes((108, "f", 1e12)),
    "sform_nan": with_bytes(SFORM, (280, "f", NAN)),
    "sform_infinite": with_bytes(SFORM, (284, "f", INF)),
    "sform_flat": with_bytes(SFORM, (280, "f", 0.0)),
    "quaternion_long": with_bytes(QFORM, (256, "f", 0.9), (260, "f", 0.9), (264, "f", 0.9)),
    "quaternion_nan": with_bytes(QFORM, (256, "f", NAN)),
    "spacing_nan": with_bytes((80, "f", NAN)),
    "five_axes": volume((16, 16, 2, 1, 3)),
    "in_time": volume((16, 16, 2, 4)),
    "holds_nan": nibabel.Nifti1Image(np.full((16, 16, 2), np.nan, np.float32), np.eye(4)).to_bytes(),
}
PACKED = {
    "gz_empty": b"",
    "gz_torn": gzip.compress(volume())[:-40],
    "gz_damaged": b"\x1f\x8b" + b"\x00" * 300,
    "gz_text": gzip.compress(b"no image"),
    "gz_not_packed": b"plainly not packed",
}
FINE = {
    "good_1": volume(),
    "good_2": volume((16, 24, 3)),
    "bitpix_8": with_bytes((72, "h", 8)),  # contradicts int16, and the datatype is right
    "slope_infinite": with_bytes((112, "f", INF)),  # not finite means not scaled
    "unused_nan": with_bytes(QFORM, (280, "f", NAN)),  # sform is not used, so it may hold anything
}


@pytest.fixture(scope="module")
def nnunet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), steps=0)


def folder(root: Path, *, ending: str, suffix: str = "", packed: bool = False) -> Path:
    """The corpus as ``images/NAME<suffix><ending>``."""
    (root / "images").mkdir(parents=True)
    for name, content in {**BAD, **FINE}.items():
        (root / "images" / f"{name}{suffix}{ending}").write_bytes(gzip.compress(content) if packed else content)
    for name, content in PACKED.items() if packed else ():
        (root / "images" / f"{name}{suffix}{ending}").write_bytes(content)
    return root


def entries(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (out / "casewise").glob("*.json")}


def run(command: str, *words: object) -> Any:
    from casewise.cli import app

    return CliRunner().invoke(app, [command, *map(str, words)], catch_exceptions=False)


@pytest.mark.parametrize("kind", ["module", "nnunet"])
def test_thirty_bad_headers_and_the_good_cases_beside_them_come_out(kind: str, nnunet: Path, tmp_path: Path) -> None:
    module = kind == "module"
    root = folder(tmp_path, ending=".nii" if module else ".nii.gz", suffix="" if module else "_0000", packed=not module)
    words = ["-i", root / "images", "-o", root / "out", "-m", MODEL if module else nnunet, "-device", "cpu"]
    done = run("predict", *words, "--policy", "m0", "--set", "contract=off")
    assert done.exit_code == 3
    found = entries(root / "out")
    assert len(BAD) >= 30
    expected = {*BAD, *FINE, *([] if module else PACKED)}
    assert set(found) == expected
    assert {name for name, entry in found.items() if entry["status"] == "done"} == set(FINE)
    for name in expected - set(FINE):
        assert found[name]["status"] == "failed", name
        assert found[name]["error"].strip(), name
        assert "Traceback" not in found[name]["error"]
        assert not list((root / "out").glob(f"{name}.nii*"))
    for name in FINE:
        assert (root / "out" / f"{name}.nii.gz").is_file()


def test_an_inspection_goes_through_them_too(tmp_path: Path) -> None:
    root = folder(tmp_path, ending=".nii")
    assert run("inspect", root).exit_code in (0, 3)

"""The three real cohorts as plain folders (images, labels, cases.csv), one for calibration and one for development.

Cardiac: M&Ms vendor B by subject, and fundus: Drishti-GS, as their cases.csv split them. Driving: ACDC
fog and night at 1024x512, split by sequence, fixed before anything was measured: the smaller sequences calibrate.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

SPLITS = ("calibration", "development")
DRIVING_SIZE = (1024, 512)
DRIVING_CALIBRATION = {"fog": ("GP010476", "GP020475"), "night": ("GOPR0356",)}


def write_cardiac(data: Path, out: Path) -> None:
    """M&Ms vendor B through ``casewise inspect``, which knows subjects and splits."""
    for split in SPLITS:
        if not (out / split).exists():
            source = data / "mnms_cardiac" / "vendorB"
            command = [sys.executable, "-m", "casewise", "inspect", str(source), "--split", split, "--write"]
            subprocess.run([*command, str(out / split)], check=True, stdout=subprocess.DEVNULL)


def write_fundus(data: Path, out: Path) -> None:
    """Drishti-GS: one image a patient, as far as the file names say."""
    home = data / "fundus_disc_cup" / "drishti_gs"
    with (data / "fundus_disc_cup" / "cases.csv").open() as file:
        listed = [row for row in csv.DictReader(file) if row["domain"] == "drishti_gs"]
    for split in SPLITS:
        names = [row["case"] for row in listed if row["split"] == split]
        pairs = ((home / "images" / f"{name}.png", home / "labels" / f"{name}.png") for name in names)
        _write(out / split, ((image, label, "drishti_gs", split) for image, label in pairs), None)


def write_polyps(data: Path, out: Path) -> None:
    """CVC-ClinicDB: frames of one sequence are one cluster."""
    home = data / "polyps" / "cvc_clinicdb"
    with (data / "polyps" / "cases.csv").open() as file:
        listed = [row for row in csv.DictReader(file) if row["domain"] == "cvc_clinicdb"]
    for split in SPLITS:
        rows = [row for row in listed if row["split"] == split]
        files = ((home / "images" / f"{row['case']}.jpg", home / "labels" / f"{row['case']}.png", row) for row in rows)
        _write(
            out / split, ((image, label, "cvc_clinicdb", split, row["cluster"]) for image, label, row in files), None
        )


def write_driving(data: Path, out: Path) -> None:
    """ACDC fog and night, one cluster per sequence; images are resized bilinearly, labels by nearest neighbour."""
    for split in SPLITS:
        _write(out / split, _driving_rows(data / "driving" / "acdc", split), DRIVING_SIZE)


def _driving_rows(home: Path, split: str) -> Iterator[tuple[Path, Path, str, str, str]]:
    for condition, calibrating in DRIVING_CALIBRATION.items():
        for image in sorted((home / condition / "images").iterdir()):
            sequence = image.name.split("_frame_")[0]
            if (sequence in calibrating) == (split == "calibration"):
                label = next((home / condition / "labels").glob(f"{image.stem}.*"))
                yield image, label, condition, split, sequence


def _write(folder: Path, rows: Iterable[tuple[Any, ...]], size: tuple[int, int] | None) -> None:
    """(image, label, group, split) of each case, or with its cluster as the last word."""
    if (folder / "cases.csv").exists():
        return
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for image, label, group, split, *cluster in rows:
        _resized(image, size, Image.Resampling.BILINEAR).convert("RGB").save(folder / "images" / f"{image.stem}.png")
        _resized(label, size, Image.Resampling.NEAREST).save(folder / "labels" / f"{image.stem}.png")
        lines.append((image.stem, group, split, *cluster))
    with (folder / "cases.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("case", "group", "split", "cluster")[: len(lines[0])], *lines])


def _resized(path: Path, size: tuple[int, int] | None, how: Image.Resampling) -> Image.Image:
    picture = Image.open(path)
    return picture if size is None else picture.resize(size, how)

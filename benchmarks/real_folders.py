"""The four real cohorts as plain folders (images, labels, cases.csv), one for calibration and one for development.

Cardiac: M&Ms vendor B by subject, and fundus: Drishti-GS, as their cases.csv split them. Driving: ACDC
fog and night at 1024x512, split by sequence, fixed before anything was measured: the smaller sequences calibrate.

The cohorts with a hyphen are shifts that nothing was tuned on: the two U-Nets the other way round, other heart
patients, other driving conditions, and Kvasir images that were left out of training and then damaged. Which of their
cases are labelled is drawn by the hash of the patient's name.

A small run (``--cases 5``) keeps a few cases of each split, so that the whole chain can be run in one go: a file in the
output folder says so, and every page that is made from that folder begins with that sentence.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from PIL import Image, ImageFilter

from casewise.archive.store import Archive, open_archive

SPLITS = ("calibration", "development")
DRIVING_SIZE = (1024, 512)
FEWEST = 5  # cases that ``casewise calibrate`` takes
SMALL_TRAINING = (("--epochs", 1), ("--images", 48))  # of the source models in a small run
DRIVING_CALIBRATION = {"fog": ("GP010476", "GP020475"), "night": ("GOPR0356",)}


def write_cardiac(data: Path, out: Path) -> None:
    """M&Ms vendor B through ``casewise inspect``, which knows subjects and splits."""
    for split in SPLITS:
        if not (out / split).exists():
            source = data / "mnms_cardiac" / "vendorB"
            command = [sys.executable, "-m", "casewise", "inspect", str(source), "--set", f"split={split}", "--export"]
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


def write_fundus_reversed(data: Path, out: Path) -> None:
    """RIM-ONE v3: both eyes of a patient are one cluster; 20 or 21 images are labelled, the other 80 are new."""
    home = data / "fundus_disc_cup" / "rimone_v3"
    names = {path.stem: path.stem.rsplit("-", 1)[0] for path in (home / "images").iterdir()}
    _write_drawn(home, names, out, labelled=20, most=100)


def write_polyps_reversed(data: Path, out: Path) -> None:
    """Kvasir-SEG: every image is a patient; 24 labelled images and 80 others."""
    home = data / "polyps" / "kvasir_seg"
    _write_drawn(home, {path.stem: path.stem for path in (home / "images").iterdir()}, out, labelled=24, most=104)


def write_cardiac_swapped(data: Path, out: Path) -> None:
    """M&Ms vendor B: 10 patients of the development split are labelled, all others are new."""
    home = out.parents[1] / "cardiac" / "folders"
    write_cardiac(data, home)
    rows = {split: list(csv.DictReader((home / split / "cases.csv").open())) for split in SPLITS}
    order = _drawn({row["cluster"] for row in rows["development"]})
    moved = {one: split for split, part in rows.items() for one in (row["case"] for row in part)}
    for split in SPLITS:
        if (out / split / "cases.csv").exists():
            continue
        for name in ("images", "labels"):
            (out / split / name).mkdir(parents=True, exist_ok=True)
        mine = [row for part in rows.values() for row in part if (row["cluster"] in order[:10]) == (split == SPLITS[0])]
        for row in mine:
            for name in ("images", "labels"):
                for file in (home / moved[row["case"]] / name).glob(f"{row['case']}*"):
                    shutil.copy(file, out / split / name)
        with (out / split / "cases.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("case", "group", "split", "cluster"), *((row["case"], "B", split, row["cluster"]) for row in mine)]
            )


def write_other_weather(data: Path, out: Path, *, new: str) -> None:
    """ACDC at 568x284: one condition is new, the sequences of the others are labelled."""
    for split in SPLITS:
        rows = []
        for condition in ("fog", "night", "normal"):
            home = data / "driving" / "acdc" / condition
            for image in sorted((home / "images").iterdir()) if (condition == new) == (split == SPLITS[1]) else ():
                label = next((home / "labels").glob(f"{image.stem}.*"))
                rows.append((image, label, condition, split, image.name.split("_frame_")[0]))
        seen = {row[4] for row in rows}
        _write(out / split, rows, None)
        print(f"{out}: {split}: {len(rows)} frames of {len(seen)} sequences", file=sys.stderr)


def write_damaged(data: Path, out: Path, *, damage: Callable[[Image.Image], Image.Image]) -> None:
    """Kvasir-SEG images that the source model was not trained on, damaged: 24 labelled ones, the others are new."""
    home = data / "polyps" / "kvasir_seg"
    held = [path.stem for path in (home / "images").iterdir() if _hash(path.stem) % 5 == 0]
    _write_drawn(home, {name: name for name in held}, out, labelled=24, damage=damage)


def _write_drawn(
    home: Path,
    patients: Mapping[str, str],
    out: Path,
    *,
    labelled: int,
    most: int | None = None,
    damage: Callable[[Image.Image], Image.Image] | None = None,
) -> None:
    """Label the first patients by hash until there are so many cases; ``most`` cases in all."""
    order = {name: place for place, name in enumerate(_drawn(set(patients.values())))}
    names = sorted(patients, key=lambda name: (order[patients[name]], name))[:most]
    last = order[patients[names[labelled - 1]]]
    for split in SPLITS:
        mine = [name for name in names if (order[patients[name]] <= last) == (split == SPLITS[0])]
        if (out / split / "cases.csv").exists():
            continue
        pairs = ((next((home / "images").glob(f"{one}.*")), home / "labels" / f"{one}.png", one) for one in mine)
        _write(out / split, ((image, label, home.name, split, patients[one]) for image, label, one in pairs), None)
        for image in (out / split / "images").iterdir() if damage else ():
            damage(Image.open(image).convert("RGB")).save(image)


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def _drawn(patients: Iterable[str]) -> list[str]:
    """Return the patients in an order that nobody chose."""
    return sorted(patients, key=lambda name: _hash(f"unseen {name}"))


def _blurred(picture: Image.Image) -> Image.Image:
    return picture.filter(ImageFilter.GaussianBlur(3))


def _darkened(picture: Image.Image) -> Image.Image:
    return picture.point([round(255 * (value / 255) ** 2.2) for value in range(256)] * 3)


def _compressed(picture: Image.Image) -> Image.Image:
    held = io.BytesIO()
    picture.save(held, "JPEG", quality=6)
    return Image.open(held).convert("RGB")


def _recolored(picture: Image.Image) -> Image.Image:
    """Turn the hues by a third of the circle: red becomes green."""
    red, green, blue = picture.split()
    return Image.merge("RGB", (blue, red, green))


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


WRITERS: Mapping[str, Callable[[Path, Path], None]] = {
    "cardiac": write_cardiac, "fundus": write_fundus, "polyps": write_polyps, "driving": write_driving,
    "cardiac-swapped": write_cardiac_swapped, "fundus-reversed": write_fundus_reversed,
    "polyps-reversed": write_polyps_reversed,
    "driving-night": partial(write_other_weather, new="night"), "driving-fog": partial(write_other_weather, new="fog"),
    "polyps-blur": partial(write_damaged, damage=_blurred), "polyps-gamma": partial(write_damaged, damage=_darkened),
    "polyps-jpeg": partial(write_damaged, damage=_compressed),
    "polyps-color": partial(write_damaged, damage=_recolored),
}  # fmt: skip


def write_folders(cohort: str, data: Path, out: Path) -> Path:
    """Both splits of a cohort below OUT/COHORT/folders, in a small run a few cases of each; where they lie."""
    home, cases = out / cohort / "folders", small_run(out)
    WRITERS[cohort](data, home)
    for split in SPLITS:
        if cases is not None:
            _shorten(home / split, cases)
    return home


def start_run(out: Path, cases: int | None) -> None:
    """Note that a run into this folder is small, or whole; one folder never holds both."""
    if cases is not None and cases < FEWEST:
        raise SystemExit(f"a small run needs at least {FEWEST} cases of each split, {cases} calibrate nothing")
    before = small_run(out)
    if cases != before and any((out / cohort / "folders").exists() for cohort in WRITERS):
        held, asked = ("a whole run" if many is None else f"a small run of {many} cases" for many in (before, cases))
        raise SystemExit(f"{out} holds {held} and {asked} is asked for: say -o ANOTHER (OUT=ANOTHER with make)")
    out.mkdir(parents=True, exist_ok=True)
    if cases is not None:
        (out / "small.json").write_text(json.dumps({"cases": cases}) + "\n")


def open_arm(arm: str, split: str) -> Archive:
    """One split of a recorded arm, given as FOLDER, or as FOLDER:LADDER where its archives hold several ladders."""
    folder, _, ladder = arm.partition(":")
    return open_archive(Path(folder) / split).only_ladder(ladder or None)


def small_run(out: Path) -> int | None:
    """Cases of each split in a small run; None in a whole one."""
    file = out / "small.json"
    return json.loads(file.read_text())["cases"] if file.exists() else None


def print_small(out: Path) -> None:
    """The sentence that every page of a small run begins with."""
    cases = small_run(out)
    if cases is not None:
        print(
            f"\n**A small run**: {cases} cases of each split, taken in turn from its patients or sequences, two "
            f"slices of each heart, driving frames of a quarter of the size, source models trained for one epoch on 48 "
            f"images. It shows that the chain runs. No figure below is a result."
        )


def _shorten(folder: Path, cases: int) -> None:
    """Keep the first cases, in turn from every cluster."""
    with (folder / "cases.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seen: dict[str, int] = {}
    places = []
    for row in rows:
        cluster = row.get("cluster") or row["case"]
        seen[cluster] = seen.get(cluster, 0) + 1
        places.append(seen[cluster])
    kept = sorted(sorted(range(len(rows)), key=lambda k: places[k])[:cases])
    names = {rows[k]["case"] for k in kept}
    for picture in (*(folder / "images").iterdir(), *(folder / "labels").iterdir()):
        if picture.name.split(".")[0].removesuffix("_0000") not in names:
            picture.unlink()
        else:
            _made_small(picture)
    with (folder / "cases.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows(rows[k] for k in kept)


def _made_small(path: Path) -> None:
    """The middle two slices of a heart, and a quarter of each side of a driving frame, in its place."""
    if path.name.endswith(".nii.gz"):
        volume = nibabel.load(path)
        if volume.shape[2] > 2:
            first = volume.shape[2] // 2 - 1
            middle = volume.slicer[:, :, first : first + 2]
            nibabel.save(nibabel.Nifti1Image(np.asanyarray(middle.dataobj), middle.affine, middle.header), path)
        return
    with Image.open(path) as picture:
        whole = picture.size == DRIVING_SIZE
    if whole:
        how = Image.Resampling.NEAREST if path.parent.name == "labels" else Image.Resampling.BILINEAR
        _resized(path, (DRIVING_SIZE[0] // 4, DRIVING_SIZE[1] // 4), how).save(path)


def _resized(path: Path, size: tuple[int, int] | None, how: Image.Resampling) -> Image.Image:
    picture = Image.open(path)
    return picture if size is None else picture.resize(size, how)

"""``casewise import``: make an archive from masks of other software."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import NnUNetStyle, grouped, setting
from casewise.cli.printing import AS_JSON, answer
from casewise.core.text import pluralize

if TYPE_CHECKING:
    from casewise.archive.mask_import import Found
    from casewise.core.records import Mask

app = typer.Typer()


@app.command("import", cls=NnUNetStyle)
@grouped
def import_(
    masks: Path = typer.Option(None, help="Folder with <case>/step_0.* ... step_K.* (.nii.gz, .nii, .npy, .png)."),
    old: Path = typer.Option(None, help="Instead of --masks: folder with the original mask of each case."),
    new: Path = typer.Option(None, help="With --old: folder with the new mask of each case, under the same names."),
    labels: Path = typer.Option(None, help="Folder with labels, <case>.* of the same file types."),
    images: Path = typer.Option(None, "--images", "-i", help="DICOM series, which contours alone need."),
    out: Path = typer.Option(..., "--out", "-o", help="Archive to create or continue."),
    signals: Path = setting(None, help="signals.csv: case, step, then one column per signal."),
    groups: Path = typer.Option(None, help="CSV with case and any of cluster (patient), group (site), split."),
    method: str = typer.Option(
        "imported", help="Name of the method that produced the masks; a policy is valid for this method only."
    ),
    model: str = typer.Option("imported", help="Name or hash of the source model."),
    metric: str = typer.Option("dice", help="Metric that labels are scored with: {metrics}."),
    min_area: int = typer.Option(16, help="Smallest changed region that counts, in voxels (driving: 200)."),
    foreground: bool = setting(True, help="Compare foreground only, or every label."),
    ignore: int = setting(None, help="Label of voxels that are left out, such as 255."),
    as_json: bool = AS_JSON,
) -> None:
    """Make an archive from masks that other software produced.

    Example:

        casewise import --old old_masks --new new_masks --labels labels -o archive
    """
    from tqdm import tqdm

    from casewise.archive.layout import measure_words
    from casewise.archive.mask_import import find_masks, import_masks
    from casewise.archive.store import create_archive
    from casewise.core.records import Binding, State
    from casewise.data.nifti import check_same_place
    from casewise.measure.metrics import METRICS
    from casewise.measure.signals.fragmentation import edit_signals

    METRICS[metric]
    if masks is not None:
        found, patients = find_masks(masks, labels), None
    else:
        found, patients = _one_candidate(old, new, labels, images, out / "dicom")
    for one in found:
        for file in (*one.states.values(), *([] if one.label is None else [one.label])):
            check_same_place(one.states[State(0)], file)
    archive = create_archive(
        out,
        binding=Binding(model, method, "masks", measure_words(min_area=min_area, foreground=foreground)),
        steps=found[0].steps,
        configuration={
            "objective": method,
            "metric": metric,
            "min_area": min_area,
            "foreground": foreground,
            "ignore": ignore,
            "model": model,
        },
    )

    def compare(source: Mask, adapted: Mask) -> dict[str, float | None]:
        return edit_signals(source, adapted, min_area=min_area, foreground=foreground)

    added = import_masks(
        archive, found, read=_read, compare=compare, signals=signals, groups=groups or patients, made_by=method
    )
    for _ in tqdm(added, total=len(found), unit="case", disable=None):
        pass
    archive.seal()
    labelled = sum(entry.labelled for entry in archive.entries.values())
    answer(
        f"{out}: {pluralize(len(archive.ids), 'case')}, {pluralize(archive.steps, 'step')}, {labelled} labelled",
        {"archive": out, "cases": len(archive.ids), "steps": archive.steps, "labelled": labelled},
        as_json=as_json,
    )


def _one_candidate(
    old: Path | None, new: Path | None, labels: Path | None, images: Path | None, keep: Path
) -> tuple[tuple[Found, ...], Path | None]:
    """Return the masks of every case from two flat folders, with its label if labels are given, and the table of the
    patients of DICOM masks."""
    from casewise.archive.mask_import import Found
    from casewise.core.errors import BadInput
    from casewise.core.records import State
    from casewise.data.dicom_masks import nifti_folders
    from casewise.data.pairs import find_pairs

    if old is None or new is None:
        raise BadInput("give --masks with <case>/step_0.*, step_1.*, or --old and --new with one mask per case each")
    (old, new, labels), patients, refused = nifti_folders([old, new, labels], keep, images=images)
    if refused:
        raise BadInput(f"{'; '.join(refused.values())}; or take the cases out of the folders")
    assert old is not None
    assert new is not None
    found = []
    for pair in find_pairs(old, new, labels=labels):
        if pair.old is None or pair.new is None or (labels is not None and pair.label is None):
            lacks = "old mask" if pair.old is None else "new mask" if pair.new is None else "label"
            raise BadInput(f"case {pair.id} has no {lacks}; add it, or remove the case from the folders")
        found.append(Found(pair.id, {State(0): pair.old, State(1): pair.new}, pair.label))
    return tuple(found), patients


def _read(path: Path) -> tuple[Mask, tuple[float, ...] | None]:
    """(mask, spacing in mm or None) of a NIfTI, NumPy or PNG file."""
    from casewise.data.pairs import read_placed

    placed = read_placed(path)
    return placed.mask, placed.spacing_mm

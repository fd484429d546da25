"""``casewise import``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.archive.imported import Found
    from casewise.core.records import Mask

app = typer.Typer()


@app.command("import")
def import_(
    masks: Path = typer.Option(None, help="Folder with <case>/step_0.* ... step_K.* (.nii.gz, .nii, .npy, .png)."),
    old: Path = typer.Option(None, help="Instead of --masks: folder with one mask per case, the source."),
    new: Path = typer.Option(None, help="With --old: folder with the one candidate per case, under the same names."),
    labels: Path = typer.Option(None, help="Folder with <case>.* of the same kinds."),
    out: Path = typer.Option(..., "--out", "-o", help="The archive to make or go on with."),
    signals: Path = typer.Option(None, help="signals.csv: case, step, then one column per signal."),
    groups: Path = typer.Option(None, "--groups", "--cases", help="CSV: case, group, cluster, split."),
    method: str = typer.Option("imported", help="What produced the masks; another method refuses the policy."),
    model: str = typer.Option("imported", help="Name or hash of the source model."),
    metric: str = typer.Option("dice", help="dice or miou."),
    min_area: int = typer.Option(16, help="Voxels below which a component is no region (driving: 200)."),
    foreground: bool = typer.Option(True, help="Compare foreground only, or every label."),
    ignore: int = typer.Option(None, help="Label that is never wrong, e.g. 255."),
    as_json: bool = AS_JSON,
) -> None:
    """Make an archive from masks that anybody else produced."""
    from tqdm import tqdm

    from casewise.archive.imported import find_masks, import_masks
    from casewise.archive.layout import measure_words
    from casewise.archive.store import create_archive
    from casewise.core.records import Binding
    from casewise.measure.metrics import METRICS
    from casewise.measure.signals.fragmentation import edit_signals

    METRICS[metric]
    found = find_masks(masks, labels) if masks is not None else _one_candidate(old, new, labels)
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

    added = import_masks(archive, found, read=_read, compare=compare, signals=signals, groups=groups, made_by=method)
    for _ in tqdm(added, total=len(found), unit="case", disable=None):
        pass
    archive.seal()
    labelled = sum(entry.labelled for entry in archive.entries.values())
    answer(
        f"{out}: {counted(len(archive.ids), 'case')}, {counted(archive.steps, 'step')}, {labelled} labelled",
        {"archive": out, "cases": len(archive.ids), "steps": archive.steps, "labelled": labelled},
        as_json=as_json,
    )


def _one_candidate(old: Path | None, new: Path | None, labels: Path | None) -> tuple[Found, ...]:
    """Archives with one candidate, from two flat folders; every case needs both masks and, where asked, its label."""
    from casewise.archive.imported import Found
    from casewise.core.errors import BadInput
    from casewise.core.records import State
    from casewise.data.pairs import find_pairs

    if old is None or new is None:
        raise BadInput("give --masks with <case>/step_0.*, step_1.*, or --old and --new with one mask per case each")
    found = []
    for pair in find_pairs(old, new, labels=labels):
        if pair.old is None or pair.new is None or (labels is not None and pair.label is None):
            lacks = "old mask" if pair.old is None else "new mask" if pair.new is None else "label"
            raise BadInput(f"case {pair.id} has no {lacks}; add it, or take the case out of the folders")
        found.append(Found(pair.id, {State(0): pair.old, State(1): pair.new}, pair.label))
    return tuple(found)


def _read(path: Path) -> tuple[Mask, tuple[float, ...] | None]:
    """(mask, spacing in mm or None) of a NIfTI, NumPy or PNG file."""
    from casewise.core.errors import BadInput
    from casewise.core.formats import read_npy
    from casewise.data.nifti import read_label, read_volume
    from casewise.data.pictures import read_label_picture

    if path.suffix == ".npy":
        try:
            return read_npy(path), None
        except (ValueError, EOFError, OSError) as error:
            raise BadInput(f"{path} is not a plain NumPy array ({error}); save integers with numpy.save") from error
    if path.suffix == ".png":
        return read_label_picture(path), None
    return read_label(path), read_volume(path).spacing_mm

"""``casewise source-statistics``."""

from __future__ import annotations

from pathlib import Path

import typer

from casewise.cli.options import ModelOptions, NnUNetStyle, grouped

app = typer.Typer()


@app.command(cls=NnUNetStyle)
@grouped
def source_statistics(
    source: ModelOptions,
    images: Path = typer.Argument(..., help="Folder with images that the model was trained on; labels are not read."),
    out: Path = typer.Option(..., "-o", "--out", help="File to write, for --source-statistics."),
) -> None:
    """What source images look like to a model: the mean quantiles and low-frequency amplitudes of its inputs.

    The views histogram and fourier make a case look like them. The file is bound to the model and to the way in which
    it prepares images; another model refuses it. A hundred images are plenty.
    """
    from casewise.adapt.proposers import pipeline_of
    from casewise.adapt.views.source import source_statistics as measured
    from casewise.core.durable import write_durably
    from casewise.data.folders import list_cases

    backbone = source.chosen().load()
    cases = list_cases(images, ending=backbone.ending)
    inputs = (pipeline_of(backbone.prepare(backbone.read(files).case), backbone).whole for files in cases)
    found = measured(inputs, model=backbone.fingerprint, loader=backbone.loader)
    write_durably(out, found.as_json().encode())
    typer.echo(f"wrote {out}: {found.images} images of {backbone.name}, {len(found.quantiles)} channels")

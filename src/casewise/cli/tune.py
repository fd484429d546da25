"""Before the first run, without labels: ``casewise tune`` a learning rate, ``casewise source-statistics`` for views."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from casewise.cli.options import AdaptationOptions, CaseOptions, ModelOptions, NnUNetStyle, PrintingOptions, grouped
from casewise.cli.printing import AS_JSON, answer
from casewise.core.brief import counted

if TYPE_CHECKING:
    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.rates import RateChoice, RateRow


app = typer.Typer()

NOTHING_FITS = 1
DRAWN = "casewise tune: how much each step changes, by rate"  # the title inside a picture, by which it is known again
PICTURES = (".svg", ".png", ".pdf")  # what holds a title


@app.command(cls=NnUNetStyle)
@grouped
def tune(
    source: ModelOptions,
    which: CaseOptions,
    how: AdaptationOptions,
    telling: PrintingOptions,
    rates: str = typer.Option("", help="Rates to try, with commas; default: 1e-5 to 1e-2 in half decades."),
    cases: int = typer.Option(6, "-n", "--cases", min=1, help="How many images to try, spread over the folder."),
    coverage: float = typer.Option(7e-4, help="Share of voxels that the first step should change."),
    picture: Path = typer.Option(None, "-o", "--picture", help="Draw the sweep, as .svg, .png or .pdf."),
    as_json: bool = AS_JSON,
) -> None:
    """Try learning rates on a few images, without labels, and recommend one.

    A rate is too small where the first step changes nothing and too large where later steps change more than the
    first. Every image is adapted at every rate, so fewer images (-n 2), fewer rates (--rates 3e-4,1e-3,3e-3) or
    --disable_tta take less time. Views need no rate: record --propose views:mri. Exit code 1: no rate of the grid
    fits; the last line says which way to look.
    """
    from tempfile import TemporaryDirectory

    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.rates import RATES, sweep_rates

    if picture is not None:
        _check_place(picture)
    model = source.chosen()
    adaptation = Adaptation(**how.asked(model))
    how.check_views([adaptation])
    with TemporaryDirectory() as keep:
        files = which.gathered(model, keep=Path(keep))
        few = files[:: max(1, len(files) // cases)][:cases]
        read = [model.load().read(one).case for one in few]
    grid = _numbers(rates) or RATES
    typer.echo(_announced(adaptation, len(read), len(grid), len(files)), err=True)
    with telling.progress(len(grid) * len(read), unit="episode") as progress:
        choice = sweep_rates(
            model.load(),
            read,
            adaptation.built(),
            rates=grid,
            steps=adaptation.steps,
            coverage=coverage,
            seen=None if as_json else _say_row,
            done=lambda: progress.step("one image at one rate"),
            parameters=adaptation.parameters,
            seed=adaptation.seed,
            max_slices=adaptation.max_slices,
        )
    if picture is not None:
        _draw(choice, coverage, picture)
    answer(_words(choice, adaptation.objective), asdict(choice), as_json=as_json)
    if choice.rate is None:
        raise typer.Exit(NOTHING_FITS)


def _check_place(picture: Path) -> None:
    """Refuse, before any work, a kind of picture that is not drawn and a file that no earlier sweep drew."""
    from casewise.core.errors import BadInput

    if picture.suffix.lower() not in PICTURES:
        raise BadInput(f"the sweep is drawn as {', '.join(PICTURES)}, got {picture.name}")
    if picture.exists() and DRAWN.encode() not in picture.read_bytes():
        raise BadInput(f"{picture} is there and no casewise tune drew it; choose another file with -o")


def _numbers(text: str) -> tuple[float, ...]:
    from casewise.core.errors import BadInput

    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise BadInput(f"--rates takes numbers with commas, such as 1e-4,1e-3, got {text!r}") from None


def _announced(adaptation: Adaptation, images: int, rates: int, found: int) -> str:
    """What is about to be done, so that a person can stop it in time."""
    each = f"{counted(adaptation.steps, 'update')} of {adaptation.objective}"
    where = f"on {images} of {found} images at up to {rates} rates"
    return f"casewise: {each} {where}; -n, --rates and --steps make it shorter"


def _say_row(row: RateRow) -> None:
    if row.failed:
        typer.echo(f"  {row.rate:8.0e}  {row.failed} of {row.cases} cases ended in NaN")
        return
    changed = "  ".join(f"{share:.1e}" for share in row.coverage)
    rest = "comes to rest" if row.settles else "does not come to rest"
    typer.echo(f"  {row.rate:8.0e}  changed after each step: {changed}  ({row.moved:.0%} of cases moved, {rest})")


def _words(choice: RateChoice, objective: str) -> str:
    if choice.rate is None:
        return f"No rate to recommend: {choice.reason}."
    return f"Recommended for {objective}: --lr {choice.rate:g}; {choice.reason}."


def _draw(choice: RateChoice, coverage: float, path: Path) -> None:
    """Change after each step against the rate; the wanted first step as a band."""
    from casewise.core.durable import replacing
    from casewise.render.ink import HARM, MUTED, OURS, SOFT, canvas, inked

    with inked():
        figure, axes = canvas(6.4, 3.6)
        axis = axes[0, 0]
        axis.axhspan(coverage / 2, coverage * 2, color=SOFT, linewidth=0)
        whole = [row for row in choice.rows if row.coverage]
        for step in range(len(whole[0].coverage) if whole else 0):
            shares = [max(row.coverage[step], 1e-7) for row in whole]
            style = {"color": OURS if step == 0 else MUTED, "linewidth": 2.0 if step == 0 else 0.9}
            axis.plot([row.rate for row in whole], shares, marker="o", markersize=3, label=f"step {step + 1}", **style)
        for row in whole:
            if not row.settles:
                axis.plot([row.rate], [max(row.coverage[0], 1e-7)], marker="x", color=HARM, markersize=9)
        if choice.rate is not None:
            axis.axvline(choice.rate, color=OURS, linestyle=(0, (4, 3)), linewidth=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel("share of voxels that changed")
        axis.set_title("How much each step changes, by rate")
        axis.set_xlabel("learning rate; band: wanted at step 1; dashed: recommended; cross: does not come to rest")
        axis.legend(frameon=False, fontsize=8)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=150, facecolor="white", metadata={"Title": DRAWN})


@app.command(cls=NnUNetStyle)
@grouped
def source_statistics(
    source: ModelOptions,
    images: Path = typer.Argument(..., help="Folder with images that the model was trained on; labels are not read."),
    out: Path = typer.Option(..., "-o", "--out", help="File to write, for --source-statistics."),
    as_json: bool = AS_JSON,
) -> None:
    """What source images look like to a model: the mean quantiles and low-frequency amplitudes of its inputs.

    The views histogram and fourier make a case look like them. The file is bound to the model and to the way in which
    it prepares images; another model refuses it. A hundred images are plenty.
    """
    from casewise.adapt.proposers import pipeline_of
    from casewise.adapt.views.source import read_source_statistics
    from casewise.adapt.views.source import source_statistics as measured
    from casewise.core.durable import write_durably
    from casewise.data.folders import list_cases

    if out.exists():
        read_source_statistics(out)  # a file that is something else is refused
    backbone = source.chosen().load()
    cases = list_cases(images, ending=backbone.ending)
    inputs = (pipeline_of(backbone.prepare(backbone.read(files).case), backbone).whole for files in cases)
    found = measured(inputs, model=backbone.fingerprint, loader=backbone.loader)
    write_durably(out, found.as_json().encode())
    content = {"file": out, "model": backbone.name, "images": found.images, "channels": len(found.quantiles)}
    words = (
        f"wrote {out}: {counted(found.images, 'image')} of {backbone.name}, {counted(len(found.quantiles), 'channel')}"
    )
    answer(words, content, as_json=as_json)

"""Options that several commands share, each spelled once, and nnU-Net's way of writing a command.

A group is a dataclass whose fields are options. A command names a group as the type of a parameter and is wrapped in
:func:`grouped`; on the command line the group's options stand there one by one. An option of :class:`AdaptationOptions`
reaches the episode by its name alone: the field of that name of :class:`casewise.adapt.adaptation.Adaptation`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from casewise.cli.config import apply_preset
from casewise.cli.printing import Progress

if TYPE_CHECKING:
    from casewise.adapt.adaptation import Adaptation
    from casewise.data.folders import CaseFiles
    from casewise.deployment import Deployment, Model


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Model folder, hub id or package.module:factory.")
    ] = None
    dataset: Annotated[str | None, typer.Option("-d", help="nnU-Net dataset, instead of -m.")] = None
    configuration: Annotated[str, typer.Option("-c", help="nnU-Net configuration, with -d.")] = "3d_fullres"
    plans: Annotated[str, typer.Option("-p", help="nnU-Net plans, with -d.")] = "nnUNetPlans"
    trainer: Annotated[str, typer.Option("-tr", help="nnU-Net trainer, with -d.")] = "nnUNetTrainer"
    folds: Annotated[str | None, typer.Option("-f", help="Folds of an nnU-Net; default: all that are there.")] = None
    checkpoint: Annotated[str, typer.Option("-chk", help="Checkpoint of an nnU-Net.")] = "checkpoint_final.pth"
    weights: Annotated[Path | None, typer.Option(help="Weights for package.module:factory or network.json.")] = None
    device: Annotated[
        str | None, typer.Option("-device", help="cuda, cpu or mps; default: cuda where there is one.")
    ] = None
    step_size: Annotated[float, typer.Option("-step_size", help="Step of nnU-Net's sliding window.")] = 0.5
    unmirrored: Annotated[
        bool, typer.Option("--disable_tta", "--disable_mirroring", help="Do not average mirrored images.")
    ] = False
    merge: Annotated[
        list[str] | None,
        typer.Option("--merge", help="Merge or rename classes, such as disc=rim+cup; repeat for more."),
    ] = None
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Let a pickled checkpoint run its code.")
    ] = False
    trust_bundle: Annotated[bool, typer.Option("--trust-bundle", help="Let a MONAI bundle run its code.")] = False
    trust_architecture: Annotated[
        list[str] | None,
        typer.Option("--trust-architecture", help="Class that a model folder may name, such as mypackage.nets.Net."),
    ] = None

    def chosen(self) -> Model:
        """The model, not loaded yet."""
        from casewise.core.errors import BadInput
        from casewise.deployment import Model, device_of
        from casewise.run.assemble import model_folder

        if self.model is None and self.dataset is None:
            raise BadInput("name the model with -m FOLDER, or nnU-Net's -d DATASET -c CONFIGURATION")
        found = self.model or model_folder(str(self.dataset), self.configuration, self.plans, self.trainer, os.environ)
        return Model(
            spec=str(found),
            weights=self.weights,
            folds=folds_of(self.folds),
            checkpoint=self.checkpoint,
            device=device_of(self.device),
            step_size=self.step_size,
            mirroring=not self.unmirrored,
            trust=self.trust_checkpoint,
            trust_bundle=self.trust_bundle,
            trust_architectures=tuple(self.trust_architecture or ()),
            merge=tuple(self.merge or ()),
        )


@dataclass(frozen=True)
class AdaptationOptions:
    """How cases are adapted; what is not given is the policy's, else the default of an Adaptation."""

    preset: Annotated[
        str | None,
        typer.Option("--preset", callback=apply_preset, is_eager=True, help="Options that belong together: driving."),
    ] = None
    objective: Annotated[
        str | None, typer.Option(help="tent, eata, memo, ... or package.module:Name; default: the policy's, else eata.")
    ] = None
    learning_rate: Annotated[
        float | None, typer.Option("--lr", help="Learning rate; default: the policy's, else the objective's.")
    ] = None
    parameters: Annotated[
        str | None,
        typer.Option(
            help="all-norm, decoder-norm, encoder-norm, all, or patterns; default: the policy's, else all-norm."
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(help="Updates for each case; default: the policy's, else 4.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the run; default: the policy's, else 0.")] = None
    min_area: Annotated[
        int | None, typer.Option(help="Voxels of the smallest region that counts; default: the policy's, else 16.")
    ] = None
    foreground: Annotated[
        bool | None,
        typer.Option(
            "--foreground/--classes", help="Compare foreground, or every class; default: the policy's, else foreground."
        ),
    ] = None
    max_slices: Annotated[int | None, typer.Option(help="Slices or patches at once: less memory, same result.")] = None
    consensus: Annotated[
        str | None, typer.Option(help="Of views: mean, vote, medoid or intent; default: the policy's, else mean.")
    ] = None
    mirrored_views: Annotated[
        bool | None,
        typer.Option(
            "--mirrored-views/--unmirrored-views",
            help="Read each view with the model's own mirroring too (several times slower); M0 always has it. "
            "Default: the policy's, else without.",
        ),
    ] = None
    source_statistics: Annotated[
        Path | None,
        typer.Option("--source-statistics", help="File of casewise source-statistics, for histogram and fourier."),
    ] = None
    keep_ballots: Annotated[
        bool | None, typer.Option("--keep-ballots", help="Keep the probabilities of all views where they differ.")
    ] = None
    modulation: Annotated[
        str | None,
        typer.Option(
            help="Careful updates after risky edits: param-subset (FragSubset), entropy-weight, anchor-weight, ..."
        ),
    ] = None
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Archive of calibration cases without modulation, to measure that risk with; needs no labels."
        ),
    ] = None

    def asked(self, model: Model) -> dict[str, Any]:
        """Fields of an Adaptation that were given; an archive of statistics as the statistics themselves."""
        from casewise.adapt.adaptation import Adaptation
        from casewise.core.errors import BadInput
        from casewise.run.record_folder import risk_statistics

        given = {name: value for name, value in vars(self).items() if value is not None and name != "preset"}
        if self.statistics is not None:
            if self.modulation is None:
                raise BadInput("--statistics belongs to a modulation; add --modulation param-subset, or leave it out")
            plain = {name: value for name, value in given.items() if name not in ("modulation", "statistics")}
            given["statistics"] = risk_statistics(self.statistics, model, Adaptation(**plain))
        return given

    @staticmethod
    def check_used(deployment: Deployment) -> None:
        """Refuse typed options that no proposer reads; what a preset or casewise.toml says is passed over."""
        from casewise.archive.manifest import OF_UPDATES

        AdaptationOptions.check_views(deployment.proposers)
        readings = [how.forward_only for how in deployment.proposers]
        if any(one is None for one in readings):
            return
        typed = [option for name, option in _TYPED.get().items() if name in OF_UPDATES]
        if "--steps" in typed and _reads_steps(deployment):
            typed.remove("--steps")
        kinds = " and ".join(sorted({type(one).__name__.lower() for one in readings}, reverse=True))
        _refuse_unread(typed, f"{kinds} make no updates")

    @staticmethod
    def check_views(proposers: Iterable[Adaptation]) -> None:
        """Refuse typed options of views, and those that members share with them, where nothing is read so."""
        from casewise.adapt.proposers import Views

        readings = [one for one in (how.forward_only for how in proposers) if one is not None]
        unread = set() if readings else _OF_READINGS
        unread = unread if any(isinstance(one, Views) for one in readings) else unread | _OF_VIEWS
        typed = [option for name, option in _TYPED.get().items() if name in unread]
        _refuse_unread(typed, "no views are proposed")


_OF_READINGS = {"consensus", "keep_ballots"}  # what views and members read, and updates never do
_OF_VIEWS = {"mirrored_views", "source_statistics"}


def _refuse_unread(options: Sequence[str], why: str) -> None:
    from casewise.core.errors import BadInput

    if options:
        verb, them = ("has", "it") if len(options) == 1 else ("have", "them")
        raise BadInput(f"{why}, so {' and '.join(options)} {verb} no effect; leave {them} out")


_TYPED: ContextVar[Mapping[str, str]] = ContextVar("typed", default=MappingProxyType({}))
"""The options that were typed with a value for the command that runs: their spelling by the parameter's name."""


def _reads_steps(deployment: Deployment) -> bool:
    """Whether ``--steps`` says something of readings: the rung that a policy takes, or what a fitted one must have."""
    from casewise.judge.controllers import takes
    from casewise.judge.policy import controller_kind

    policy = deployment.policy
    return policy.binding is not None or takes(controller_kind(policy), "step")


@dataclass(frozen=True)
class CaseOptions:
    """Which cases this process takes."""

    images: Annotated[
        Path,
        typer.Option("-i", help="Folder with images (nnU-Net's names, or a file per case) or DICOM series."),
    ]
    labels: Annotated[
        Path | None,
        typer.Option("-l", "--labels", help="Folder with labels, where there are any; no decision sees them."),
    ] = None
    groups: Annotated[
        Path | None,
        typer.Option(
            help="CSV with case and any of group, cluster (patient, sequence), split; default: cases.csv beside images."
        ),
    ] = None
    num_parts: Annotated[
        int | None, typer.Option("-num_parts", help="Number of parts; default: the SLURM array, else 1.")
    ] = None
    part_id: Annotated[int | None, typer.Option("-part_id", help="This part, from 0.")] = None
    channels: Annotated[
        str,
        typer.Option(help="DICOM: which series is which channel, by description in the model's order: 'T1*,FLAIR*'."),
    ] = ""

    @property
    def channel_patterns(self) -> tuple[str, ...]:
        """The series descriptions of ``--channels``, one for each channel."""
        from casewise.data.dicom import channel_patterns

        return channel_patterns(self.channels)

    def whole(self, model: Model) -> tuple[CaseFiles, ...]:
        """The cases of all parts, for what is said of the whole folder."""
        from casewise.run.assemble import gathered_cases

        return gathered_cases(model, self.images, labels=self.labels, groups=self.groups, parts=(1, 0))

    def gathered(self, model: Model, keep: Path | None = None) -> tuple[CaseFiles, ...]:
        """The cases of the folder that this process takes; DICOM series are written as NIfTI below ``keep``."""
        from casewise.run.assemble import gathered_cases

        refused: dict[str, str] = {}
        notes: list[str] = []
        cases = gathered_cases(
            model, self.images, labels=self.labels, groups=self.groups, parts=(self.num_parts, self.part_id),
            environment=os.environ, keep=keep, refused=refused, channels=self.channel_patterns, notes=notes,
        )  # fmt: skip
        for note in notes:
            typer.echo(f"casewise: {note}", err=True)
        for reason in refused.values():
            typer.echo(f"casewise: {reason}", err=True)
        return cases


@dataclass(frozen=True)
class EngineOptions:
    """Where cases run, and for how long."""

    engine: Annotated[str, typer.Option(help="local or ray.")] = "local"
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to join, with --engine ray; default: one of our own here.")
    ] = None
    jobs: Annotated[int, typer.Option("-j", help="Processes; 1 runs everything in this one.")] = 1
    timeout: Annotated[float | None, typer.Option(help="Seconds for one case; in predict M0 is deployed then.")] = None

    def chosen(self) -> Any:
        """The engine."""
        from casewise.run.assemble import chosen_engine

        return chosen_engine(self.engine, jobs=self.jobs, timeout_s=self.timeout, address=self.address)


@dataclass(frozen=True)
class PrintingOptions:
    """How much a run says while it runs."""

    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", "--disable_progress_bar", help="No progress; only what went wrong.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for each case.")] = False
    log_file: Annotated[
        Path | None, typer.Option("--log-file", help="Also write a dated line for each case to this file.")
    ] = None

    def progress(self, total: int, *, done: int = 0, unit: str = "case") -> Progress:
        """The progress of a run over so many cases."""
        return Progress(total, done=done, unit=unit, quiet=self.quiet, verbose=self.verbose, log_file=self.log_file)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of a group's type are that group's options, one by one."""
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    flat: dict[str, inspect.Parameter] = {}
    for name, one in own.items():
        for option in _options(groups[name]) if name in groups else [one]:
            if option.name in flat:
                raise TypeError(f"{command.__name__} has two options {option.name}")
            flat[option.name] = option.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(command)
    def called(**given: Any) -> None:
        built = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**built, **given)

    called.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {name: option.annotation for name, option in flat.items()}
    return called


def _options(group: Any) -> list[inspect.Parameter]:
    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(
            field.name,
            kind,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


MANY = ("-f",)


SECTIONS = {
    "Images": CaseOptions,
    "Model": ModelOptions,
    "Candidates (views or updates)": AdaptationOptions,
    "Where it runs": EngineOptions,
    "What it says": PrintingOptions,
}
"""Under which heading of ``--help`` the options of a group stand; a command's own options come first."""


class NnUNetStyle(TyperCommand):
    """A command whose ``-f`` takes all the values that follow it, and whose help has a section for each group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The command's own options, what is required first; then those of each group under its heading."""
        headings = {field.name: title for title, group in SECTIONS.items() for field in fields(group)}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", "Options", *SECTIONS)}
        for one in sorted(self.get_params(ctx), key=lambda one: not one.required):
            row = one.get_help_record(ctx)
            own = "Arguments" if one.param_type_name == "argument" else "Options"
            if row is not None:
                rows[headings.get(str(one.name), own)].append(row)
        for title, found in rows.items():
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the values of ``-f`` into one before the options are parsed."""
        return super().parse_args(ctx, joined(args))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; it can ask which options were typed, and did not come from a preset or casewise.toml."""
        typed = {
            str(one.name): max(_words(one, ctx.params.get(one.name)), key=len)
            for one in self.params
            if getattr(ctx.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
            and ctx.params.get(one.name) not in (None, "")
        }
        before = _TYPED.set(typed)
        try:
            return super().invoke(ctx)
        finally:
            _TYPED.reset(before)


def _words(option: Any, value: Any) -> list[str]:
    """How an option is spelled; of a pair of flags the word that says this value."""
    words: list[str] = option.secondary_opts if value is False and option.secondary_opts else option.opts
    return words


def joined(args: list[str]) -> list[str]:
    """``-f 0 1 2 -o OUT`` as ``-f "0 1 2" -o OUT``.

    >>> joined(["-f", "0", "1", "-o", "OUT"])
    ['-f', '0 1', '-o', 'OUT']
    """
    result: list[str] = []
    values: list[str] | None = None
    for arg in args:
        if values is not None and not arg.startswith("-"):
            values.append(arg)
            continue
        if values is not None:
            result.append(" ".join(values))
            values = None
        result.append(arg)
        if arg in MANY:
            values = []
    return result if values is None else [*result, " ".join(values)]


def folds_of(text: str | None) -> tuple[int | str, ...] | None:
    """Folds from "0 1 2" or "all"; None for every fold that is there."""
    if text is None:
        return None
    return tuple(int(word) if word.isdigit() else word for word in text.split())

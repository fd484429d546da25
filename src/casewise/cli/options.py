"""Options and settings that several commands share, each spelled once, and nnU-Net's way of writing a command.

A group is a dataclass whose fields are options, declared as a command declares its own. A command names a group as the
type of a parameter and is wrapped in :func:`grouped`; on the command line its options appear one by one.
An option of :class:`AdaptationOptions` reaches the episode by its name alone: the field of that name of
:class:`casewise.adapt.adaptation.Adaptation`.

A rarely needed option is a *setting*: declared with :func:`setting` instead of ``typer.Option``, it has no option of
its own and is given in casewise.toml or as ``--set NAME=VALUE``. ``Annotated[Group, SETTINGS]`` makes settings of a
group.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from casewise.cli.config import setting_values
from casewise.cli.printing import Progress, StepProgress, colored

if TYPE_CHECKING:
    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.backbones import Backbone
    from casewise.adapt.model import Model
    from casewise.data.folders import CaseFiles
    from casewise.deployment import Deployment

SETTINGS = "settings"
"""Marks a setting: given in casewise.toml or after --set, not as an option."""


def setting(*arguments: Any, **options: Any) -> Any:
    """Declare a setting: a key of casewise.toml that is not an option of the command (see typer.Option)."""
    return typer.Option(*arguments, **options, hidden=True, rich_help_panel=SETTINGS)


def is_setting(parameter: Any) -> bool:
    """True if a parameter of a command is a setting."""
    return getattr(parameter, "rich_help_panel", None) == SETTINGS


@dataclass(frozen=True)
class ModelOptions:
    """Options of the model and of loading it."""

    model: str | None = typer.Option(
        None,
        "-m",
        "--model",
        help="Model folder, hub id or package.module:factory; predict and serve also take a deployment of fit.",
    )
    folds: str | None = typer.Option(None, "-f", help="Trained nnU-Net folds (0 1 2), not those of fit; default: all.")
    checkpoint: str = setting("checkpoint_final.pth", help="Checkpoint of an nnU-Net.")
    weights: Path | None = typer.Option(None, help="File with the weights, for package.module:factory or network.json.")
    device: str | None = typer.Option(None, "-device", help="cuda, cpu or mps; default: cuda if available.")
    unmirrored: bool = typer.Option(False, "--disable_tta", help="Do not average mirrored images.")
    trust: list[str] | None = typer.Option(
        None,
        "--trust",
        help="Allow code of the model to run: checkpoint (a pickle), bundle (MONAI), or a class that the model "
        "folder names, such as mypackage.nets.Net; repeat for several.",
    )
    dataset: str | None = setting(None, help="nnU-Net dataset, instead of -m.")
    configuration: str = setting("3d_fullres", help="nnU-Net configuration, with the setting dataset.")
    plans: str = setting("nnUNetPlans", help="nnU-Net plans, with the setting dataset.")
    trainer: str = setting("nnUNetTrainer", help="nnU-Net trainer, with the setting dataset.")
    step_size: float = setting(0.5, help="Step of nnU-Net's sliding window, as a share of the window.")
    merge: list[str] | None = setting(None, help="Merge or rename classes, such as disc=rim+cup; repeat for several.")

    def as_model(self) -> Model:
        """Return the model, not loaded yet."""
        from casewise.adapt.model import Model, device_of, nnunet_folder
        from casewise.core.errors import BadInput

        if self.model is None and self.dataset is None:
            raise BadInput("name the model with -m FOLDER, or nnU-Net's -d DATASET -c CONFIGURATION")
        found = self.model or nnunet_folder(str(self.dataset), self.configuration, self.plans, self.trainer, os.environ)
        trusted = set(self.trust or ())
        return Model(
            spec=str(found),
            weights=self.weights,
            folds=folds_of(self.folds),
            checkpoint=self.checkpoint,
            device=device_of(self.device),
            step_size=self.step_size,
            mirroring=not self.unmirrored,
            trust="checkpoint" in trusted,
            trust_bundle="bundle" in trusted,
            trust_architectures=tuple(sorted(trusted - {"checkpoint", "bundle"})),
            merge=tuple(self.merge or ()),
        )


@dataclass(frozen=True)
class NnUNetModelOptions(ModelOptions):
    """Model options, with those of nnUNetv2_predict."""

    dataset: str | None = typer.Option(None, "-d", help="nnU-Net dataset, instead of -m.")
    configuration: str = typer.Option("3d_fullres", "-c", help="nnU-Net configuration, with -d.")
    plans: str = typer.Option("nnUNetPlans", "-p", help="nnU-Net plans, with -d.")
    trainer: str = typer.Option("nnUNetTrainer", "-tr", help="nnU-Net trainer, with -d.")
    checkpoint: str = typer.Option("checkpoint_final.pth", "-chk", help="Checkpoint of an nnU-Net.")
    step_size: float = typer.Option(
        0.5, "-step_size", hidden=True, help="Step of nnU-Net's sliding window, as a share of the window."
    )


@dataclass(frozen=True)
class DeploymentOptions:
    """Options of the policy that decides, for a deployment or a plain model."""

    policy: str | None = typer.Option(None, help="Only if -m is a model: policy.json, its archive, or m0 (no change).")
    model_at: str | None = typer.Option(
        None,
        "--model-at",
        help="Model of a deployment: its folder, if it was moved, or your own package.module:factory.",
    )
    objective: str | None = setting(
        None, help="If the policy names your own method or members: that package.module:Name or members:FOLDER."
    )
    controller: str | None = setting(None, help="Your own controller (package.module:Name), if the policy names one.")
    certificate: Path | None = setting(None, help="Certificate of this policy; another certificate is refused.")
    watch: Path | None = setting(None, help="watch.json to add decisions to; after an alarm, every case keeps M0.")
    force: bool = setting(False, help="Deploy a policy that calibration advised against.")
    contract: str | None = setting(None, help="Reaction to images unlike the training data: refuse, warn or off.")
    max_ram: str | None = setting(None, help="Refuse larger cases (16G); default of serve: 80 % of the free memory.")

    def open_deployment(self, model: Model, **more: Any) -> Deployment:
        """Open and check the deployment; ``more`` are further options of ``open_deployment``."""
        from casewise.adapt.contract import parse_size
        from casewise.deployment.saved import open_deployment
        from casewise.judge.monitors.watch import Watching

        given = {name: value for name, value in vars(self).items() if value and name != "policy"}
        given |= {"watch": Watching(self.watch)} if self.watch else {}
        given |= {"max_ram": parse_size(self.max_ram)} if self.max_ram else {}
        return open_deployment(model, self.policy, **{**more, **given})


@dataclass(frozen=True)
class AdaptationOptions:
    """Options of candidates; a missing option has the value of the policy, else the default of an Adaptation."""

    learning_rate: float | None = typer.Option(None, "--lr", help="Learning rate; default: that of the method.")
    steps: int | None = typer.Option(None, help="Number of updates per case; default: 4.")
    objective: str | None = setting(None, help="Method to use if --propose is not given.")
    parameters: str | None = setting(
        None, help="Parameters that updates change: all-norm, decoder-norm, encoder-norm, all, or patterns of names."
    )
    seed: int | None = setting(None, help="Random seed; default: 0.")
    min_area: int | None = setting(None, help="Smallest changed region that counts, in voxels; default: 16.")
    foreground: bool | None = setting(
        None,
        "--foreground/--classes",
        help="Measure changes of the foreground only; false (or classes=true): of every class; default: true.",
    )
    max_slices: int | None = setting(None, help="Slices or patches per batch; fewer need less memory.")
    consensus: str | None = setting(None, help="How views are combined: mean, vote or medoid; default: mean.")
    mirrored_views: bool | None = setting(
        None, help="Predict each view with the model's mirroring too (several times slower); default: false."
    )
    modulation: str | None = setting(
        None, help="Weaken updates after risky edits: param-subset (FragSubset), entropy-weight, anchor-weight, ..."
    )
    statistics: Path | None = setting(
        None, help="With modulation: archive recorded without modulation, to scale the risk; needs no labels."
    )

    def as_fields(self, model: Model) -> dict[str, Any]:
        """Return the given fields of an Adaptation; an archive of statistics is read."""
        from casewise.adapt.adaptation import Adaptation
        from casewise.core.errors import BadInput
        from casewise.run.record_folder import risk_statistics

        given = {name: value for name, value in vars(self).items() if value is not None}
        if self.statistics is not None:
            if self.modulation is None:
                raise BadInput(
                    "--set statistics works only with a modulation; add --set modulation=param-subset, "
                    "or leave them out"
                )
            plain = {name: value for name, value in given.items() if name not in ("modulation", "statistics")}
            given["statistics"] = risk_statistics(self.statistics, model, Adaptation(**plain))
        return given

    @staticmethod
    def check_used(proposers: Mapping[str, Adaptation]) -> None:
        """Refuse typed options that no proposer reads; options from casewise.toml are ignored."""
        from casewise.archive.manifest import OF_UPDATES

        kinds = {str(how.objective).partition(":")[0] for how in proposers.values() if not how.is_gradient}
        unread = (set() if kinds else _OF_READINGS) | (set() if kinds & {"views", "running"} else _OF_VIEWS)
        _refuse_unread(unread, "no views are proposed")
        if not any(how.is_gradient for how in proposers.values()):
            _refuse_unread(OF_UPDATES, "nothing that is proposed makes updates")


_OF_READINGS = {"consensus"}  # options that views and members read, and updates do not
_OF_VIEWS = {"mirrored_views"}


def _refuse_unread(unread: Collection[str], why: str) -> None:
    from casewise.core.errors import BadInput

    options = [option for name, option in _TYPED.get().items() if name in unread]
    if options:
        verb, them = ("has", "it") if len(options) == 1 else ("have", "them")
        raise BadInput(f"{why}, so {' and '.join(options)} {verb} no effect; leave {them} out")


_TYPED: ContextVar[Mapping[str, str]] = ContextVar("typed", default=MappingProxyType({}))
"""The options that were typed with a value for the command that runs: their spelling by the parameter's name."""


@dataclass(frozen=True)
class CaseOptions:
    """Cases that this process handles."""

    images: Path = typer.Option(..., "-i", help="Folder with images (nnU-Net names or one file each) or DICOM series.")
    labels: Path | None = typer.Option(None, "-l", "--labels", help="Folder with labels; decisions never use them.")
    groups: Path | None = typer.Option(
        None, help="CSV with case and any of cluster (patient), group (site), split; default: cases.csv beside images."
    )
    num_parts: int | None = typer.Option(
        None, "-num_parts", help="Jobs that share the folder; default: the SLURM array, else 1."
    )
    part_id: int | None = typer.Option(None, "-part_id", help="Number of this job, from 0.")
    channels: str = setting("", help="DICOM: series descriptions in the order of the channels, such as 'T1*,FLAIR*'.")

    @property
    def channel_patterns(self) -> tuple[str, ...]:
        """The series descriptions of ``channels``, one for each channel."""
        from casewise.data.dicom_series import channel_patterns

        return channel_patterns(self.channels)

    def all_cases(self, backbone: Backbone) -> tuple[CaseFiles, ...]:
        """The cases of all parts, for statements about the whole folder."""
        from casewise.run.gather import gathered_cases

        return gathered_cases(backbone, self.images, labels=self.labels, groups=self.groups, parts=(1, 0))

    def list_cases(self, backbone: Backbone, keep: Path, refused: dict[str, str]) -> tuple[CaseFiles, ...]:
        """The cases of the folder that this process takes; DICOM series are written as NIfTI below ``keep``.

        ``refused`` gets the series that cannot be read, and why.
        """
        from casewise.run.gather import gathered_cases

        notes: list[str] = []
        cases = gathered_cases(
            backbone, self.images, labels=self.labels, groups=self.groups, parts=(self.num_parts, self.part_id),
            environment=os.environ, keep=keep, refused=refused, channels=self.channel_patterns, notes=notes,
        )  # fmt: skip
        for sentence in notes:
            typer.echo(f"casewise: {sentence}", err=True)
        return cases


@dataclass(frozen=True)
class EngineOptions:
    """Engine, number of processes and time limit."""

    jobs: int = typer.Option(1, "-j", help="Number of processes.")
    engine: str = setting("local", help="Where cases run: local or ray.")
    address: str | None = setting(None, help="Address of a Ray cluster; default: start Ray on this machine.")
    timeout: float | None = setting(
        None, help="Seconds per case; a case that takes longer fails (predict: it gets the original mask)."
    )

    def as_engine(self) -> Any:
        """Return the engine."""
        from casewise.run.local import chosen_engine

        return chosen_engine(self.engine, jobs=self.jobs, timeout_s=self.timeout, address=self.address)


@dataclass(frozen=True)
class PrintingOptions:
    """Progress output."""

    quiet: bool = typer.Option(False, "--quiet", "-q", "--disable_progress_bar", help="Print only problems.")
    verbose: bool = setting(False, help="Print a line for each case.")

    def progress(self, total: int, *, done: int = 0) -> Progress:
        """The progress of a run over so many cases."""
        return Progress(total, done=done, quiet=self.quiet, verbose=self.verbose)

    def steps(self) -> StepProgress:
        """Return the progress of a command that has several steps."""
        return StepProgress(quiet=self.quiet, verbose=self.verbose)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command in which a parameter of a group's type becomes the options of the group; ``--set`` gives
    settings."""
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: group for name, one in own.items() if is_dataclass(group := _unmarked(one.annotation))
    }
    flat: dict[str, inspect.Parameter] = {}
    for name, one in own.items():
        hidden = SETTINGS in get_args(one.annotation)
        for option in _options(groups[name], hidden=hidden) if name in groups else [one]:
            if option.name in flat:
                raise TypeError(f"{command.__name__} has two options {option.name}")
            flat[option.name] = option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    if any(is_setting(option.default) for option in flat.values()):
        kind = inspect.Parameter.KEYWORD_ONLY
        flat["set_"] = inspect.Parameter("set_", kind, default=_SET, annotation=list[str])

    @functools.wraps(command)
    def called(**given: Any) -> None:
        given.pop("set_", None)
        built = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**built, **given)

    called.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {name: option.annotation for name, option in flat.items()}
    return called


def _unmarked(annotation: Any) -> Any:
    """The group of ``Annotated[Group, SETTINGS]``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _options(group: Any, *, hidden: bool) -> list[inspect.Parameter]:
    hints, made = get_type_hints(group), []
    for field in fields(group):
        info: Any = copy.copy(field.default)
        if hidden:
            info.hidden, info.rich_help_panel = True, SETTINGS
        kind = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(field.name, kind, default=info, annotation=hints[field.name]))
    return made


def _take_settings(ctx: typer.Context, pairs: list[str]) -> list[str]:
    """Values after --set become defaults of the command's parameters; they win over casewise.toml."""
    if pairs and not ctx.resilient_parsing:
        values = setting_values(str(ctx.info_name), ctx.command.params, pairs)
        ctx.default_map = {**(ctx.default_map or {}), **{name: value for name, (_, value) in values.items()}}
        ctx.meta[SETTINGS] = {name: f"--set {key}" for name, (key, _) in values.items()}
    return pairs


_SET: Any = typer.Option(
    [], "--set", metavar="NAME=VALUE", callback=_take_settings, is_eager=True,
    help="Change a setting (listed below); repeat for several.",
)  # fmt: skip


MANY = "-f"
SET = "Settings (--set NAME=VALUE, or a key in casewise.toml)"  # the last heading in ``--help``


SECTIONS = {
    "Images": CaseOptions,
    "Model": ModelOptions,
    "Candidates": AdaptationOptions,
    "Processes": EngineOptions,
    "Output": PrintingOptions,
}
"""Headings of the option groups in ``--help``; the options of the command itself come first."""


LISTS = {
    "datasets": "casewise.data.datasets:DATASETS",
    "objectives": "casewise.adapt.objectives:OBJECTIVES",
    "views": "casewise.adapt.views:SETS",
    "policies": "casewise.judge.policy:READY",
    "controllers": "casewise.judge.controllers:CONTROLLERS",
    "metrics": "casewise.measure.metrics:METRICS",
    "losses": "casewise.judge.certificates.evidence:LOSSES",
    "monitors": "casewise.judge.monitors.watch:MONITORS",
    "analyses": "casewise.study.analyses:ANALYSES",
}
"""Registries whose names a help text lists: ``{views}`` is replaced by them when the help is shown."""


def listed(text: str) -> str:
    """A help text with the names of the registries that it mentions; importing them may take a moment."""

    def names(found: re.Match[str]) -> str:
        module, _, name = LISTS[found[1]].partition(":")
        try:
            return ", ".join(getattr(importlib.import_module(module), name))
        except ModuleNotFoundError:  # no torch here
            return "..."

    return re.sub(rf"\{{({'|'.join(LISTS)})\}}", names, text)


_UNBROKEN = "\N{NON-BREAKING HYPHEN}"  # keeps a name such as frag-stop on one line when text is wrapped
TYPE_NAMES = {"list[str]": "str", "list[Path]": "path", "list[float]": "float", "int range": "int"}
"""What ``--help`` calls the type of an option, where typer has the name of a Python type."""


class NnUNetStyle(TyperCommand):
    """A command whose ``-f`` takes all the values that follow it, and whose help has a section for each group."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parameters: list[Any] = [one for one in self.params if is_setting(one)]
        for one in parameters:
            one.add_to_parser = _not_parsed
            one.get_error_hint = functools.partial(_setting_hint, one)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line: arguments in capitals, those that may be left out in brackets."""
        return [one.replace("{", "").replace("}", "").upper() for one in super().collect_usage_pieces(ctx)]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The docstring; a command that does not fit on a line is broken so that it can still be copied."""
        formatter.write_paragraph()
        with formatter.indentation():
            for number, paragraph in enumerate(inspect.cleandoc(self.help or "").split("\n\n")):
                if number:
                    formatter.write_paragraph()
                if paragraph.startswith("    "):
                    formatter.write(f"{_copyable(paragraph, formatter.width)}\n")
                else:
                    formatter.write_text(paragraph)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options of the command, required ones first; then those of each group; then the settings."""
        headings = {field.name: title for title, group in SECTIONS.items() for field in fields(group)}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", "Options", *SECTIONS, SET)}
        for one in sorted(self.get_params(ctx), key=lambda one: not one.required):
            row = one.get_help_record(ctx)
            own = "Arguments" if one.param_type_name == "argument" else "Options"
            if is_setting(one):
                rows[SET].append((_words(one, None)[0].lstrip("-"), listed(getattr(one, "help", ""))))
            elif row is not None:
                spelled = re.sub(r"<([^>]+)>", lambda kind: f"<{TYPE_NAMES.get(kind[1], kind[1])}>", row[0])
                rows[headings.get(str(one.name), own)].append((spelled, listed(row[1])))
        rows[SET].sort()
        for title, found in rows.items():
            if found:
                with formatter.section(colored(title, "cyan")):
                    formatter.write_dl([(spelled, said.replace("-", _UNBROKEN)) for spelled, said in found])
        formatter.buffer[:] = [line.replace(_UNBROKEN, "-") for line in formatter.buffer]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the values of ``-f`` into one before the options are parsed."""
        return super().parse_args(ctx, joined(args))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; it can ask which options were typed, and did not come from casewise.toml."""
        typed = {
            str(one.name): max(_words(one, ctx.params.get(one.name)), key=len)
            for one in self.params
            if getattr(ctx.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
            and ctx.params.get(one.name) not in (None, "")
        } | ctx.meta.get(SETTINGS, {})
        before = _TYPED.set(typed)
        try:
            return super().invoke(ctx)
        finally:
            _TYPED.reset(before)


def _copyable(command: str, width: int) -> str:
    """Indent an example; break lines that are too long after a backslash, as a shell reads them."""
    lines = [""]
    for word in command.split():
        if len(lines[-1]) + len(word) > width - 12:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(f"      {line}" for line in lines)


def _setting_hint(option: Any, *_: Any) -> str:
    """Return the name of a setting in error messages."""
    return f"'--set {_words(option, None)[0].lstrip('-')}'"


def _not_parsed(parser: Any, ctx: Any) -> None:
    """A setting adds nothing to the parser of the command line."""


def _words(option: Any, value: Any) -> list[str]:
    """Return the spelling of an option; of a pair of flags the one for this value."""
    words: list[str] = option.secondary_opts if value is False and option.secondary_opts else option.opts
    return words


def joined(args: list[str]) -> list[str]:
    """``-f 0 1 2 -o OUT`` as ``-f "0 1 2" -o OUT``.

    >>> joined(["-f", "0", "1", "-o", "OUT"])
    ['-f', '0 1', '-o', 'OUT']
    """
    result: list[str] = []
    for arg in args:
        belongs = len(result) > 1 and result[-2] == MANY and not result[-1].startswith("-")
        if belongs and not arg.startswith("-"):
            result[-1] += f" {arg}"
        else:
            result.append(arg)
    return result


def folds_of(text: str | None) -> tuple[int | str, ...] | None:
    """Return folds from "0 1 2" or "all"; None for all existing folds."""
    if text is None:
        return None
    return tuple(int(word) if word.isdigit() else word for word in text.split())


def named_values(options: list[str]) -> dict[str, Any]:
    """Return the values of ``--option NAME=VALUE`` by name: JSON where the text is JSON, else the text.

    >>> named_values(["step=2", "group=centre"])
    {'step': 2, 'group': 'centre'}
    """
    from casewise.core.errors import BadInput

    values: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"--option takes name=value, got {text!r}")
        try:
            values[name] = json.loads({"True": "true", "False": "false"}.get(value, value))
        except ValueError:
            values[name] = value
    return values

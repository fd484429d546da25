"""Compare test-time methods and policies on labelled cases, from Python and from the command line."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone
from casewise.adapt.model import Model, as_model, loaded
from casewise.adapt.proposers import named_proposal
from casewise.archive.store import Archive, open_archive
from casewise.core.durable import write_durably, write_json
from casewise.core.errors import BadInput
from casewise.core.processes import needs_script
from casewise.core.records import CALIBRATION, EVALUATION, Policy
from casewise.core.text import UNIT, pluralize
from casewise.data.splits import Member, cluster_of
from casewise.fit import Labelled, OnProgress, labelled_cases
from casewise.judge.certificates.certify_router import Promise
from casewise.judge.outcomes import LITTLE
from casewise.judge.policy import design_of, write_policy
from casewise.learn.folds import cores
from casewise.render.tables import Table, csv_text, markdown, tex
from casewise.report.bench_page import bench_page
from casewise.run.local import Engine, LocalEngine
from casewise.run.record_folder import RecordCase, record_all
from casewise.study.benchmark import (
    RESULT,
    check_cases,
    decide_all,
    result_table,
    score,
    seal,
    seen_before,
    sides_of,
    split_archive,
    split_cohort,
)
from casewise.study.statistics.resample import FEWEST

PAGE, TABLE_CSV, TABLE_TEX, POLICIES = "bench.html", "tables/bench.csv", "tables/bench.tex", "policies"
METHODS, DESIGNS = ("views:light",), ("default",)  # methods that are compared by default
MANIFEST = "manifest.json"


@dataclass(frozen=True, eq=False)
class BenchResult:
    """Scores of every method on the evaluation cases.

    Attributes:
        result: Everything as plain data, as ``result.json`` has it.
        policies: The fitted policies by the name of their row.
        folder: Folder of the recordings.

    Example:
        >>> found = casewise.bench(network, images, labels, methods=["tent"], policies=["frag-stop"])  # doctest: +SKIP
        >>> found.table[["method", "gain", "hurt"]]  # doctest: +SKIP
    """

    result: Mapping[str, Any]
    policies: Mapping[str, Policy]
    folder: Path

    def __repr__(self) -> str:
        return self.summary()

    @property
    def table(self) -> pd.DataFrame:
        """One row for each method, with its name, scores and promise."""
        return pd.DataFrame(
            {
                "method": one["name"],
                "policy": one["took"],
                **one["scores"],
                "promised": (one["promise"] or {}).get("alpha"),
                **{name: (one["promise"] or {}).get(name) for name in ("realized", "missed")},
            }
            for one in self.result["methods"]
        )

    @property
    def cases(self) -> pd.DataFrame:
        """One row for each method and evaluation case."""
        return pd.DataFrame({"method": one["name"], **row} for one in self.result["methods"] for row in one["cases"])

    @property
    def _table(self) -> Table:
        return result_table(self.result)

    def latex(self) -> str:
        """Return the table as a LaTeX ``tabular`` (booktabs)."""
        return tex(self._table)

    def csv(self) -> str:
        """Return the table as CSV at full precision."""
        return csv_text(self._table)

    def summary(self) -> str:
        """Return the table as Markdown, followed by the notes."""
        return "\n".join([markdown(self._table), "", *self.notes()])

    def notes(self) -> list[str]:
        """Return notes for the reader of the table, one sentence each."""
        result = self.result
        lines = [f"Policies were fitted on {len(result['calibration'])} calibration cases."]
        if result["methods"][0]["scores"]["clusters"] < FEWEST:
            lines.append(f"There are fewer than five {UNIT[1]}, so no interval is given.")
        if result["oracle"] is not None:
            lines.append(f"Best recorded candidate of each case (needs labels): {result['oracle']:+.4f}.")
        lines += [f"! {reason}" for reason in result["refused"]]
        lines += [
            f"! {note}" for method in result["methods"] for note in method["notes"]
            if not (method["promise"] and "NO-GO" in note)  # its row without a promise says the same
        ]  # fmt: skip
        judged = (one["scores"]["judged"] for one in result["methods"])
        if little := sum(share is not None and share < LITTLE for share in judged):
            rows = f"In {pluralize(little, 'row')} HA judges less than half of the changed area (Judged, %)"
            lines.append(f"! {rows}; the rest are small scattered changes, so read the worse voxels there.")
        if result["labels_seen_before_decisions"]:
            lines.append("! Evaluation labels were read in this folder before these decisions were made.")
        for one in result["methods"]:
            if (made := one["promise"]) and made["missed"]:
                lines.append(
                    f"! {one['name']}: the promise was missed on the evaluation cases ({made['loss']} is "
                    f"{made['realized']:.3f}, promised was {made['alpha']:g})."
                )
        return lines

    def save(self, folder: str | Path) -> Path:
        """Write the page, the tables, ``result.json`` and the fitted policies.

        Args:
            folder: Folder to write to; it is made if needed.

        Returns:
            Path of the page, ``bench.html``.
        """
        place = Path(folder)
        for part in ("tables", POLICIES):
            (place / part).mkdir(parents=True, exist_ok=True)
        write_json(place / RESULT, self.result)
        write_durably(place / TABLE_CSV, self.csv().encode())
        write_durably(place / TABLE_TEX, self.latex().encode())
        for name, policy in self.policies.items():
            write_policy(place / POLICIES / policy_file(name), policy)
        write_durably(place / PAGE, bench_page(self.result, self._table, self.notes()).encode())
        return place / PAGE


def policy_file(name: str) -> str:
    """Name the file of a policy after its row.

    >>> policy_file("two + tent: default")
    'two+tent-default.json'
    """
    return re.sub(r"[^\w+.-]+", "-", name.replace(" + ", "+")).strip("-") + ".json"


def bench(
    network: Any,
    cases: str | Path | Archive | Sequence[Any],
    labels: str | Path | Sequence[Any] | None = None,
    *,
    methods: Sequence[Any] | Mapping[str, Any] = METHODS,
    policies: Sequence[str] = DESIGNS,
    patients: Mapping[str, str] | Sequence[str] | str | Path | None = None,
    calibration: str | Path | Archive | Collection[str] | None = None,
    share: float = 0.3,
    metric: str = "dice",
    loss: str | None = "ha",
    alpha: float = 0.2,
    delta: float | None = None,
    margin: float = 0.0,
    adaptation: Adaptation | None = None,
    out: str | Path | None = None,
    jobs: int | Engine | None = None,
    on_progress: OnProgress | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> BenchResult:
    """Compare test-time methods and policies on labelled cases.

    Every method makes candidate masks for every case. Each policy is fitted on the calibration patients and decides
    the evaluation cases; their labels are read only after all decisions were written down.

    Args:
        network: The frozen model: an ``nn.Module`` that returns logits, a model folder, a hub id or a ``Model``.
            None if ``cases`` is an archive.
        cases: Images as arrays ``(channel, *space)``, files or ``Case`` objects; a folder of images; a dataset folder
            (``images/``, ``labels/``, ``cases.csv``); or an archive that was recorded before.
        labels: Labels in the order of the images, or a folder. None for a dataset folder and for an archive.
        methods: Methods that make candidates, as a list or by name: ``"tent"``, ``"views:photo"``, an objective, an
            ``Adaptation`` with options of its own, or a function ``(network, image) -> list of masks``, where
            ``image`` is the prepared batch ``(n, channel, *space)`` and the masks have the shape of the label. Of an
            archive: names of ladders; default: all.
        policies: Policies to fit, as ``casewise.calibrate`` takes them.
        patients: Patient of each case, as in ``casewise.fit``.
        calibration: Calibration cases: names of patients for images that are given as lists or as a folder, a folder
            for a dataset folder, an archive for an archive. Default: the column ``split`` of the cases, else a draw.
        share: Share of the patients drawn for calibration.
        metric: ``"dice"`` or ``"miou"``.
        loss: Loss of the promises: ``"ha"``, ``"harmed"``, ``"dice"``, ``"worse-voxels"``, or None for no promise.
        alpha: Promised risk.
        delta: Chance that a promise may fail; None for a promise about the mean.
        margin: With ``loss="harmed"``: a case is harmed if its metric falls by more than this.
        adaptation: Options of the methods without their own, such as ``Adaptation(steps=2)``; ``min_area`` and
            ``foreground`` of all.
        out: Folder for recordings, tables and the page. The same call resumes an interrupted run. Default: a temporary
            folder for the recordings; call ``save`` for the rest.
        jobs: Processes, or an engine such as Ray. Default: one for each core; this process for a network in memory and
            for a stream. A method that the script itself defines always runs in this process.
        on_progress: Called with the name of a step, the parts that are done, and all parts.
        on_warning: Called with sentences about single cases.

    Returns:
        Tables of all methods.

    Raises:
        BadInput: If cases and labels do not fit together, or a case cannot be recorded.
        Mismatch: If ``out`` holds recordings of other cases or options.
        UnknownName: If a method or policy does not exist.

    Example:
        >>> found = casewise.bench(
        ...     network, images, labels, methods=[my_method, "tent"], patients=patients, out="bench"
        ... )  # doctest: +SKIP
        >>> print(found.latex())  # doctest: +SKIP
    """
    methods, policies = _listed(methods), _listed(policies)
    for design in policies:
        design_of(design)  # a wrong name is an error before anything is recorded
    promise = None if loss is None else Promise((loss,), (alpha,), delta, margin=margin)
    folder = Path(tempfile.mkdtemp(prefix="casewise-bench-")) if out is None else Path(out)
    if folder.is_file():
        raise BadInput(f"out must be a folder, {folder} is a file; name another one")
    if _is_archive(cases):
        known, judged, how = _of_archive(cases, calibration, share, methods)
    else:
        if network is None:
            raise BadInput("images need a network; without a network, give an archive of casewise record")
        model = as_model(network)
        sides, how, facts = _sides(loaded(model), cases, labels, patients, calibration, share, folder)
        proposers = _proposers(methods, adaptation)
        known, judged = (
            _recorded(model, proposers, sides[side], folder / side, metric, facts, jobs, on_progress, on_warning)
            for side in (CALIBRATION, EVALUATION)
        )
    folder.mkdir(parents=True, exist_ok=True)
    decided, refused = decide_all(known, judged, policies, promise=promise)
    sha256 = seal(folder, decided, judged)
    result = {
        "name": str(judged.ladder(judged.ladders[0]).configuration.get("model", "")),
        "metric": str(judged.ladder(judged.ladders[0]).configuration.get("metric", metric)),
        "split": how,
        "calibration": list(known.ids),
        "evaluation": list(judged.ids),
        "decisions_sha256": sha256,
        "labels_seen_before_decisions": seen_before(judged, sha256),
        **score(decided, judged, sha256),
        "refused": list(refused),
    }
    found = BenchResult(result, {one.name: one.policy for one in decided if one.design}, folder)
    if out is not None:
        found.save(folder)
    return found


def _is_archive(cases: Any) -> bool:
    return isinstance(cases, Archive) or (isinstance(cases, (str, Path)) and (Path(cases) / MANIFEST).is_file())


def _of_archive(cases: Any, calibration: Any, share: float, methods: Any) -> tuple[Archive, Archive, dict[str, Any]]:
    """Split an archive, or take two, with the ladders that ``methods`` names."""
    archive = cases if isinstance(cases, Archive) else open_archive(cases)
    other = calibration if calibration is None or isinstance(calibration, Archive) else open_archive(calibration)
    wanted = archive.ladders if methods is METHODS or not methods else tuple(map(str, methods))
    known, judged, how = split_archive(archive, other, share=share)
    return check_cases(known, known.ids, wanted), check_cases(judged, judged.ids, wanted), how


def _sides(
    backbone: Backbone, cases: Any, labels: Any, patients: Any, calibration: Any, share: float, folder: Path
) -> tuple[dict[str, list[Labelled]], dict[str, Any], dict[str, str]]:
    """Return calibration and evaluation cases, how they were split, and facts about the data for the recordings."""
    if labels is None:
        if not isinstance(cases, (str, Path)):
            raise BadInput("labels are needed for images that are given as a list")
        split = split_cohort(Path(cases), None if calibration is None else Path(calibration), share=share)
        files = {side: split.files(side, folder / "data") for side in (CALIBRATION, EVALUATION)}
        sides = {
            side: [Labelled(one.id, cluster_of(one), one, one.label) for one in found if one.label is not None]
            for side, found in files.items()
        }
        facts = {"dataset": split.evaluation.name, "notice": split.evaluation.notice}
        return sides, dict(split.how), facts
    found, _ = labelled_cases(backbone, cases, labels, patients, keep=folder / "images")
    if calibration is not None:
        chosen, how = {*map(str, _listed(calibration))}, {"by": "patients that were named"}
        if lost := chosen - {one.patient for one in found}:
            raise BadInput(f"calibration names {min(lost)}, which is not a patient of these cases; give patients=")
        named = {one.id for one in found if one.patient in chosen}
    else:
        drawn, how = sides_of({one.id: Member(one.id, one.case.group, one.patient) for one in found}, share)
        named = drawn[CALIBRATION]
    sides = {CALIBRATION: [], EVALUATION: []}
    for one in found:
        side = CALIBRATION if one.id in named else EVALUATION
        sides[side].append(replace(one, case=replace(one.case, cluster=one.patient, split=side)))
    if empty := [side for side, part in sides.items() if not part]:
        raise BadInput(f"no {empty[0]} case is left; name {UNIT[1]} for both sides, or choose another share")
    return sides, how, {}


def _listed(given: Any) -> Any:
    """Return a list unchanged, and a single method or policy as a list of one."""
    return given if isinstance(given, (Mapping, list, tuple)) else [given]


def _proposers(methods: Any, given: Adaptation | None) -> dict[str, Adaptation]:
    """Return every method as a proposer, by the name of its ladder."""
    named = list(methods.items()) if isinstance(methods, Mapping) else [_named(one) for one in methods]
    plain, found = given or Adaptation(), dict[str, Adaptation]()
    measure = {"min_area": plain.min_area, "foreground": plain.foreground} if given else {}
    for name, method in named:
        if name in found:
            raise BadInput(
                f"two methods are called {name}; give them different names: methods={{'first': ..., 'second': ...}}"
            )
        own = isinstance(method, Adaptation)  # all methods are measured in the same way
        found[name] = replace(method, **measure) if own else replace(plain, objective=method)
        if found[name].is_gradient and not isinstance(found[name].objective, str):
            found[name].built()  # a wrong object is an error before anything is recorded
    if not found:
        raise BadInput("methods is empty; name at least one method, such as 'tent'")
    return found


def _named(method: Any) -> tuple[str, Any]:
    if isinstance(method, str):
        return named_proposal(method)
    if isinstance(method, Adaptation):
        return _named(method.objective)[0], method
    return named_proposal(getattr(method, "__name__", type(method).__name__))[0], method


def _recorded(
    model: Model | Backbone, proposers: Mapping[str, Adaptation], cases: Sequence[Labelled], path: Path, metric: str,
    facts: Mapping[str, str], jobs: int | Engine | None, on_progress: OnProgress | None,
    on_warning: Callable[[str], None] | None,
) -> Archive:  # fmt: skip
    """Record one side of the split, or resume it."""
    labels = {one.id: one.label for one in cases if not isinstance(one.label, Path)}
    told: OnProgress = on_progress or (lambda step, done, total: None)
    streams = [name for name, how in proposers.items() if how.reset == "stream"]
    for part in ([name for name in proposers if name not in streams], *([name] for name in streams)):
        if not part:
            continue
        work = RecordCase(
            model, {name: proposers[name] for name in part}, {one.id: one.case for one in cases}, labels=labels
        )
        count = jobs or (1 if part[0] in streams or not isinstance(model, Model) else cores())
        engine = LocalEngine(1 if count > 1 and needs_script(work) else count) if isinstance(count, int) else count
        archive = record_all(
            work, engine, path, metric=metric, on_warning=on_warning,
            on_case=lambda done: told(f"record {path.name}", done, len(cases)), **facts,
        )  # fmt: skip
    return check_cases(archive, [one.id for one in cases], tuple(proposers))

"""Predict a whole folder: masks, one record per case, an audit log, scores where labels are given, and a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casewise.core.durable import write_durably
from casewise.core.prediction_record import OUTSIDE, PredictedCase
from casewise.core.text import pluralize
from casewise.data.dicom_series import is_dicom_folder
from casewise.data.folders import CaseFiles
from casewise.judge.appearance import Appearance, KnownAppearance, folder_differs
from casewise.render.mask_pictures import overlay_png
from casewise.report.prediction_page import prediction_page
from casewise.run import summary
from casewise.run.dicom import write_objects
from casewise.run.gather import gathered_cases
from casewise.run.local import Engine, LocalEngine
from casewise.run.predict_case import PredictCase
from casewise.run.predict_folder import check_scorable, predict_folder, prediction_work
from casewise.run.prediction_folder import unfinished, versions

if TYPE_CHECKING:
    from casewise.deployment import Deployment

PAGE = "report.html"


@dataclass(frozen=True)
class PredictedFolder:
    """Result of a prediction run.

    Attributes:
        entries: One record per case, in the order of the cases, failed ones included.
        page: The page for a person.
        report: The run for a machine.
        scores: Mean scores of the deployed masks and of M0, where labels were given.
        promise: What is promised about these cases; None where nothing is.
        warnings: What a reader must know.
    """

    entries: tuple[PredictedCase, ...]
    page: Path
    report: Mapping[str, Any]
    scores: Mapping[str, Any]
    scored_cases: int
    promise: str | None
    warnings: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        """True if every case has its mask, its score and its DICOM objects as asked."""
        return not self.failures and all(entry.is_done for entry in self.entries)

    @property
    def failures(self) -> tuple[str, ...]:
        """Sentences about labels and DICOM objects that could not be used or written."""
        return tuple(self.report["unscored"]) + tuple(self.report["unwritten"])

    @property
    def flagged(self) -> tuple[PredictedCase, ...]:
        """Cases that a person should check."""
        return tuple(one for one in self.entries if one.decision is not None and one.decision.flagged)


def predict_all(
    deployment: Deployment,
    images: Path,
    out: Path,
    *,
    cases: Sequence[CaseFiles] | None = None,
    labels: Path | None = None,
    groups: Path | None = None,
    whole: Callable[[], Sequence[CaseFiles]] | None = None,
    engine: Engine | None = None,
    jobs: int = 1,
    timeout_s: float | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_candidates: bool = False,
    keep_header: bool = False,
    overlays: bool = True,
    codes: Path | None = None,
    segmentation: str = "binary",
    channels: Sequence[str] = (),
    each: Callable[[Iterable[PredictedCase], int], Iterator[PredictedCase]] | None = None,
) -> PredictedFolder:
    """Predict every case of a folder.

    Args:
        deployment: Decides; it is checked first.
        images: Folder of images or of DICOM series.
        out: Folder for the masks.
        cases: The cases, where they were gathered already.
        labels: Folder of labels; they are opened after the last decision, to score the masks.
        groups: Table with group, patient and split of the cases; default: ``cases.csv`` beside the images.
        whole: Gives the cases of all parts, where this process has a part of them.
        engine: Runs the cases; default: ``jobs`` processes on this machine.
        jobs: Number of processes.
        timeout_s: Seconds for one case; M0 is deployed then.
        resume: Keep cases of an earlier run whose hashes match.
        overwrite: Replace masks in ``out`` that casewise did not write.
        save_candidates: Keep the mask of every candidate.
        keep_header: Copy the geometry of the NIfTI header from the image.
        overlays: Draw a picture of each case.
        codes: JSON file with codes of the classes, for DICOM SEG.
        segmentation: Kind of DICOM SEG: binary or labelmap.
        channels: DICOM series by description, in the order of the model's channels.
        each: Wraps the stream of records, to show progress.

    Returns:
        The records, the page, the scores and the warnings.
    """
    began = time.monotonic()
    refused: dict[str, str] = {}
    if cases is None:
        cases = gathered_cases(
            deployment.backbone, images, labels=labels, groups=groups, keep=out / "casewise" / "images",
            refused=refused, channels=channels,
        )  # fmt: skip
    if labels is not None:
        check_scorable(deployment, cases)
    work = prediction_work(
        deployment, cases, out, timeout_s=timeout_s, save_candidates=save_candidates, keep_header=keep_header,
        draw=overlay_png if overlays else None,
    )  # fmt: skip
    stream: Iterator[PredictedCase] = predict_folder(
        work, engine or LocalEngine(jobs=jobs, timeout_s=timeout_s), resume=resume, overwrite=overwrite
    )
    entries = tuple(stream if each is None else each(stream, len(work.cases)))
    summary.copy_model_files(work)
    scored: Mapping[str, Any] = {}
    with summary.everyone(work) as all_parts:
        if labels is not None:
            labelled = cases if len(all_parts) == len(cases) or whole is None else whole()
            scored = summary.write_summary(work, labelled, all_parts)["adapt"]
        scores = scored["mean"] if scored.get("cases") else {}
        unscored = [f"{case_id} is not scored: {why}" for case_id, why in scored.get("problems", {}).items()]
        promise, warnings = summary.promised(deployment, all_parts)
        warnings = [*_unlike(deployment, all_parts), *warnings]
        promise = None if warnings and warnings[0].startswith(UNLIKE) else promise
        all_parts = summary.with_patient_measures(work, all_parts)
        by_case = {one.case: one for one in all_parts}
        entries = tuple(by_case.get(one.case, one) for one in entries)
        _write_page(work, all_parts, scores, promise, [*warnings, *unscored])
    report = summary.run_report(work, images, entries, time.monotonic() - began, scores, all_parts)
    unwritten = _write_dicom(
        work, images, entries, codes, segmentation, summary.in_short(deployment, all_parts), channels
    )
    found = {**report, "unscored": unscored, "unwritten": unwritten, "refused": refused}
    return PredictedFolder(
        entries, out / PAGE, found, scores, len(scored.get("cases", ())), promise, (*refused.values(), *warnings)
    )


UNLIKE = "This folder is unlike the labelled cases"
EVIDENT = 0.01


def _unlike(deployment: Deployment, entries: Sequence[PredictedCase]) -> list[str]:
    """Say where a folder as a whole, or most of its images, look unlike the labelled cases."""
    known, seen = deployment.policy.appearance, [one for one in entries if one.appearance]
    if not known or not seen:
        return []
    looks = [Appearance(one.case, one.appearance, one.decision.cluster if one.decision else None) for one in seen]
    p, sentence = folder_differs(looks, KnownAppearance.from_plain(known))
    beyond = sum(bool(one.noted(OUTSIDE)) for one in seen)
    if p > EVIDENT and 2 * beyond <= len(seen):
        return []
    most = f"; {beyond} of {len(seen)} images were flagged for it" if beyond else ""
    return [f"{UNLIKE}, so no estimate and no promise covers it: {sentence}{most}"]


def _write_page(
    work: PredictCase,
    entries: Sequence[PredictedCase],
    scores: Mapping[str, Any],
    promise: str | None,
    warnings: Sequence[str],
) -> None:
    policy, warnings = work.deployment.policy, list(warnings)
    if left := unfinished(work.layout.out):
        warnings.append(
            f"{pluralize(len(left), 'more case')} of this folder had no result when this page was written (such as "
            f"{left[0]}): another part was at work, or was killed"
        )
    facts = {
        "model": work.deployment.backbone.name, "policy": policy.name, "calibration_id": policy.calibration_id,
        "scores": scores, "versions": versions(), "warnings": warnings, "promise": promise,
        "classes": work.deployment.backbone.labels, "background": work.deployment.adaptation.foreground,
    }  # fmt: skip
    write_durably(work.layout.out / PAGE, prediction_page(entries, facts).encode())


def _write_dicom(
    work: PredictCase,
    images: Path,
    entries: Sequence[PredictedCase],
    codes: Path | None,
    segmentation: str,
    promise: Mapping[str, Any] | None,
    channels: Sequence[str],
) -> list[str]:
    """Write SEG and structured report of every case whose image came as DICOM; return what could not be written."""
    if not is_dicom_folder(images):
        return []
    masks = {case_id: work.layout.mask(case_id) for case_id in work.cases}
    failed = write_objects(
        images, work.layout.out, masks, entries, classes=work.deployment.backbone.labels, codes=codes,
        certificate=_in_words(promise), channels=tuple(channels), kind=segmentation,
    )  # fmt: skip
    return [f"{case_id}: no DICOM output, {reason}" for case_id, reason in failed.items()]


def _in_words(promise: Mapping[str, Any] | None) -> str:
    """Say what is promised, or why nothing is; empty without a certificate."""
    if promise is None:
        return ""
    lead, why = "the certificate does not hold here: ", promise["why_void"]
    return str(promise["statement"]) if why is None else f"{lead}{str(why).removeprefix(lead)}"

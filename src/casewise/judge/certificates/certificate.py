"""The certificate: the promise, its patients, the number of cases, and the conditions that make it void.

Also here: the policy that a certificate holds for, which is never looser than the certified one, and the sentences of a
certificate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from casewise import __version__
from casewise.archive.store import Archive
from casewise.core.durable import json_sha256, write_json
from casewise.core.errors import BadInput, CasewiseError, Mismatch, Refused
from casewise.core.formats import json_text
from casewise.core.json_records import from_plain, read_json
from casewise.core.prediction_record import OUTSIDE
from casewise.core.records import Binding, Decision, Policy
from casewise.core.registry import check_names_no_code
from casewise.core.text import UNIT, pluralize
from casewise.judge.controllers.region_gate import UNSCORED

CERTIFICATE, CERTIFICATE_PAGE, CERTIFIED_POLICY = "certificate.json", "certificate.html", "policy-certified.json"
SCHEMA = 3

INVALID_IF = (
    "the model, its weights, the adaptation objective, the preprocessing or the region measure change",
    "the policy is refitted, or its actions are chosen, with the labels of these calibration cases",
    f"a calibration case, or another of the same {UNIT[0]}, is among the new cases",
    "cases come from another site, scanner, protocol or patient group than the calibration cases",
    "an exchangeability or audit alarm has been raised (casewise monitor)",
    "it is used for a single case: it bounds an average over cases",
)
NO_GO = "the certificate is void: its policy is a NO-GO; calibrate and certify another design"
DRIFTED = "the certificate is void: the buckets have other shares than in calibration; recalibrate and certify again"


@dataclass(frozen=True)
class Certificate:
    """One promise about one policy. ``cut`` None means that nothing could be certified and M0 is always deployed."""

    kind: str  # T1 ... T8 of the table in docs/explanation/certificates.md
    statement: str  # the promise in words
    loss: str
    method: str  # "crc", "ltt", "envelope" or "selection"
    alpha: float  # promised risk
    delta: float | None  # chance that the promise fails, over draws of the calibration set; None for expectations
    population: str
    units: int  # n: independent units
    cases: int
    floor: float  # the smallest alpha that n units can certify
    needed: int  # units that are enough for this alpha
    cut: float | None  # certified rollback cut or gate threshold
    bound: float | None  # achieved bound (CRC) or p-value (LTT) at the cut
    kept: float  # share of calibration cases (or region area) that the certified policy keeps
    deployed: Mapping[str, Mapping[str, float]]  # by policy ("before", "certified"): its means on the cases
    advice: str = ""  # advice for the user: how many patients would be enough, or which cut was tightened
    binding: Binding | None = None
    policy: str = ""  # digest of the certified policy
    policy_before: str = ""  # digest of the policy that was certified
    policy_name: str = ""
    calibration_id: str = ""  # digest of the archive whose labels were used
    curve: tuple[Mapping[str, float], ...] = ()  # setting, kept, bound: every jump point
    reliability: tuple[Mapping[str, float], ...] = ()  # alpha, risk, deployed (L10)
    reliability_from: str = ""  # "leave-one-out" or the evaluation archive
    exposures: tuple[Mapping[str, Any], ...] = ()
    invalid_if: tuple[str, ...] = INVALID_IF
    details: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # warnings to print beside the promise: a forced no-go, a repeated attempt
    attempt: int = 1  # number of different certificates requested with these labels, with this one
    issued: str = ""  # date, YYYY-MM-DD
    version: str = ""  # version of casewise
    cohort: str = ""  # the archive whose labels were used
    groups: tuple[str, ...] = ()  # sites, vendors or conditions of its cases; a case of another one is outside
    schema: int = SCHEMA

    @property
    def feasible(self) -> bool:
        """True if anything was certified."""
        return self.cut is not None


def policy_digest(policy: Policy) -> str:
    """Return the sha256 of everything that a policy's decisions depend on; where tuned weights lie is left out."""
    plain = asdict(policy)
    plain["ladders"] = {name: {**how, "tuned": None} for name, how in policy.ladders.items()}  # bound by their hash
    parts = {key: plain[key] for key in ("controller", "options", "groups", "steps", "binding", "calibration_id")}
    return json_sha256(parts | {key: plain[key] for key in ("ladder", "ladders", "cleanup") if plain[key]})


def check_certificate(certificate: Certificate, policy: Policy, binding: Binding | None = None) -> None:
    """Refuse a certificate that was issued for another policy, model, objective, loader or measure."""
    if certificate.policy != policy_digest(policy):
        raise Mismatch(
            f"the certificate is for policy {certificate.policy[:12]} ({certificate.policy_name!r}), got "
            f"{policy_digest(policy)[:12]} ({policy.name!r}); use the policy written with it, or certify again"
        )
    differing = certificate.binding.differences(binding) if certificate.binding and binding else []
    if differing:
        raise Mismatch(f"the certificate is for another {', '.join(differing)}; record, calibrate, certify again")


def new_certificate(
    archive: Archive, policy: Policy, certified: Policy, ids: Sequence[str], units: int, *, which: str = "", **own: Any
) -> Certificate:
    """Return a certificate with the fields that all kinds share: policy, calibration cases, conditions.

    Args:
        archive: The calibration cases.
        policy: The policy that was to be certified.
        certified: The policy that the certificate holds for.
        ids: The labelled cases that were used.
        units: Number of their patients.
        which: Description of these cases, if not all labelled ones were used.
        own: The fields that depend on the kind of certificate.
    """
    patients = f" of {pluralize(units, *UNIT)}; the promise is per patient" if units < len(ids) else ""
    return Certificate(
        population=f"{pluralize(len(ids), 'labelled calibration case')}{which}{patients}",
        units=units,
        cases=len(ids),
        binding=archive.binding,
        policy=policy_digest(certified),
        policy_before=policy_digest(policy),
        policy_name=certified.name,
        calibration_id=archive.digest,
        exposures=(*policy.exposures, {"what": "labels used to certify", "cases": list(ids)}),
        issued=datetime.now(timezone.utc).date().isoformat(),
        version=__version__,
        cohort=archive.path.name,
        groups=tuple(sorted({entry.group for entry in archive.entries.values() if entry.group})),
        **own,
    )


def outside_promise(certificate: Certificate, decision: Decision, input_sha256: str | None = None) -> str | None:
    """Return why a certificate does not cover a case, as far as that is known without a label; else None.

    A certificate for one batch knows its cases by their images, or by name where no image was kept.
    """
    batch = certificate.details.get("batch_inputs")
    if batch is not None:
        recognised = input_sha256 in batch.values() if input_sha256 else False
        unknown_image = not (input_sha256 and batch.get(decision.case_id))
        if not recognised and not (unknown_image and decision.case_id in batch):
            return (
                f"{OUTSIDE}: the certificate was issued for one batch of {len(batch)} cases, and this image is not "
                "among them"
            )
    if certificate.groups and decision.group is not None and decision.group not in certificate.groups:
        known = ", ".join(certificate.groups)
        return f"{OUTSIDE}: group {decision.group} is not among those of the certificate ({known})"
    if certificate.details.get("population") == "scored" and decision.bucket == UNSCORED:
        return f"{OUTSIDE}: the certificate is for cases with at least one scored region, and this one has none"
    return None


def check_feasible(certificate: Certificate) -> None:
    """Refuse to present a failed attempt as a promise."""
    if not certificate.feasible:
        raise Refused(f"nothing is certified: {certificate.advice}")


def write_certificate(path: str | Path, certificate: Certificate) -> Path:
    """Write certificate.json atomically, with a hash of its content; a folder gets the file of that name."""
    file = _file(path)
    plain = json.loads(json_text({**asdict(certificate), "schema": SCHEMA}, default=dict))  # as read from the file
    write_json(file, {**plain, "seal": json_sha256(plain)})
    return file


def read_certificate(path: str | Path) -> Certificate:
    """Read a certificate from its file or folder; refuse one that was changed after it was issued.

    The hash shows accidental changes. It is not a signature: anybody could compute it again.
    """
    file = _file(path)
    try:
        plain = read_json(file, "run casewise certify again")
        if plain.get("schema") != SCHEMA:
            raise Mismatch(f"{file} has schema {plain.get('schema')}, this casewise reads {SCHEMA}; certify again")
        seal = plain.pop("seal", None)
        if seal != json_sha256(plain):
            raise Refused(f"{file} was changed after it was issued, so it promises nothing; run casewise certify again")
        check_names_no_code(plain, where=str(file))
        return from_plain(Certificate, plain, str(file), "run casewise certify again")
    except FileNotFoundError:
        raise BadInput(f"there is no certificate at {file}; run casewise certify first") from None


def certificate_problems(folder: Path) -> list[str]:
    """Return the problems of the certificate of a folder: it was changed, or its policy or page is missing.

    Args:
        folder: An archive, or the folder that ``casewise certify --out`` wrote.

    Returns:
        Sentences; none if there is no certificate or it is complete.
    """
    if not (folder / CERTIFICATE).is_file():
        return []
    try:
        certificate = read_certificate(folder)
    except CasewiseError as error:
        return [str(error)]
    lost = [name for name in (CERTIFIED_POLICY, CERTIFICATE_PAGE) if not (folder / name).is_file()]
    if lost and certificate.feasible:
        return [f"{folder} is incomplete: {' and '.join(lost)} of its certificate is missing; run certify again"]
    return []


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path / CERTIFICATE if path.is_dir() else path


def certified_policy(policy: Policy, cut: float | None) -> Policy:
    """Return the policy with cut_high = min(own, certified), for each group too; M0 where nothing was certified."""
    name = f"{policy.name}-certified"
    if cut is None:
        return replace(policy, name=name, controller="m0", options={}, groups={}, cleanup="", flag={})
    groups = {group: _tightened(more, cut) for group, more in policy.groups.items()}
    return replace(policy, name=name, options=_tightened(policy.options, cut), groups=groups)


def _tightened(options: Mapping[str, Any], cut: float) -> dict[str, Any]:
    if "cut_high" not in options:
        return dict(options)
    high = min(float(options["cut_high"]), cut)
    low = {"cut_low": min(float(options["cut_low"]), high)} if "cut_low" in options else {}
    return {**options, "cut_high": high, **low}


WHAT = {
    "ha": "the share of the changed area that made the segmentation worse (HA; a case that is rolled back counts 0)",
    "harmed": "the share of cases whose {metric} falls{margin} against the original mask{without}",
    "dice": "the loss of {metric} against the original mask (gains count 0){without}",
    "worse-voxels": "the share of the changed voxels that became wrong (small pieces and swaps of classes count)",
    "surrogate": "the harmful accepted area as a share of the un-gated edit (a surrogate: not the deployed HA)",
    "envelope": "the share of the accepted area that made the segmentation worse (deployed HA of the gate)",
}


def promise(
    losses: Sequence[str], alphas: Sequence[float], delta: float | None, policy: str, metric: str, units: int,
    unit: str, margin: float = 0.0,
) -> str:  # fmt: skip
    """Return the statement of a certificate: a mean over new units, in expectation or with probability 1 - delta."""
    pairs = zip(losses, alphas, strict=True)
    words = {
        "metric": metric,
        "margin": f" by more than {margin:g}" if margin else "",
        "without": ""
        if metric == "mIoU"
        else " (without foreground in the label: if more voxels became wrong than right)",
    }
    what = ", and ".join(f"{WHAT[name].format(**words)} is at most {alpha:g}" for name, alpha in pairs)
    like = f"like the {units} that were used, if policy '{policy}' decides"
    if delta is None:
        luck = f"The bound is also an average over draws of the {units} {unit}: a single certificate may be too low."
        return f"On average over new {unit} {like}: {what}. {luck}"
    return (
        f"With probability at least {1 - delta:g} over the calibration {unit}, on average over new ones {like}: {what}."
    )


def refusal(alpha: float, units: int, floor: float, needed: int, unit: str, in_all: int = 0) -> str:
    """Return why nothing is certified: there are too few units, or their harm is too large.

    ``in_all``: number of units that are needed together with those that fitted the policies.
    """
    enough = f"{units} labelled {unit} are enough for alpha >= {math.ceil(1000 * floor - 1e-9) / 1000:.3f}"
    if units >= needed:
        return (
            f"Nothing is certified: {enough}, but they show too much harm for alpha = {alpha:g}. Every case is rolled "
            f"back to M0. Choose a gentler adaptation, a larger alpha, or label more than {units}."
        )
    least = f"{in_all}, half of them to fit the designs" if in_all else needed
    return (
        f"Nothing is certified: {enough}, and {alpha:g} was asked for, which needs at least {least}. Every case is "
        "rolled back to M0."
    )


def tightening(own: float, cut: float) -> str:
    """Say how certification changed the rollback cut of a router."""
    if cut < own:
        return f"The rollback cut was tightened from {own:.4g} to {cut:.4g}."
    return f"The calibrated rollback cut {own:.4g} is certified as it is."


def unit_of(cases: int, units: int) -> str:
    """Return the unit of n, in the plural."""
    return "cases" if units == cases else UNIT[1]

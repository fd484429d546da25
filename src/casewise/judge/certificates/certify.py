"""``casewise.certify``: one function for every kind of certificate; the command ``certify`` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from casewise.archive.store import Archive, as_archive
from casewise.core.errors import BadInput
from casewise.core.records import CALIBRATION, Policy
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.certificates.certify_designs import certify_default, certify_designs
from casewise.judge.certificates.certify_gate import certify_gate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.selective_risk import certify_kept
from casewise.judge.controllers.metadata import metadata_of
from casewise.judge.decide import has_consensus
from casewise.judge.policy import READY, controller_kind, read_policy

METHODS = ("crc", "ltt", "envelope")
AnyPolicy = str | Path | Policy


class Certified(NamedTuple):
    """A certificate, and the policy that it is about."""

    certificate: Certificate
    policy: Policy


def certify(
    archive: str | Path | Archive,
    policy: AnyPolicy | Sequence[AnyPolicy] | None = None,
    *,
    loss: str | Sequence[str] = "ha",
    alpha: float | Sequence[float] = 0.1,
    delta: float = 0.1,
    method: str = "crc",
    margin: float = 0.0,
    low_mid: str = "envelope",
    within: str = "mean",
    population: str = "all",
    evaluation: str | Path | Archive | None = None,
    split: str | None = None,
    among_kept: str | Path | Archive | None = None,
    consensus: str | None = None,
    force: bool = False,
    ladders: Sequence[str] = (),
) -> Certified:
    """Bound the harm of the masks that a policy deploys, on labelled calibration cases; no file is written.

    Args:
        archive: Labelled calibration archive, or its folder.
        policy: Policy, its file or folder, or the name of a ready one; several are certified together. ``"default"``
            fits all designs on half of the patients and certifies the best on the others. Default: the archive's own.
        loss: Loss that is bounded: ``ha``, ``harmed``, ``dice``, ``worse-voxels`` or ``surrogate``; several with
            ``ltt``.
        alpha: Promised risk, one for all losses or one for each.
        delta: Chance that the promise may fail, with method ``ltt``.
        method: ``crc`` (in expectation), ``ltt`` (with probability 1 - delta) or, for a region gate, ``envelope``.
        margin: Loss ``harmed``: a case is harmed where it loses more of the metric than this.
        low_mid: ``envelope``, or ``fixed`` if the low/mid cut comes from other cases.
        within: Cases of one patient or sequence count by their ``mean`` or their ``max``.
        population: Region gate: ``all`` cases, or only ``scored`` ones.
        evaluation: Labelled archive of other cases, for the reliability diagram.
        split: Use the archive's cases of this split; default: calibration.
        among_kept: Archive of the batch to deploy (no labels): bound the risk among the cases that it keeps.
        consensus: Policy ``default``: which candidate is the consensus of the others.
        force: Certify a policy that calibration called NO-GO.
        ladders: Ladders of the archive; default: the policy's.

    Returns:
        The certificate (``.feasible``, ``.statement``, ``.advice``) and the certified policy.

    Raises:
        BadInput: The losses, levels or methods do not go together.
        Refused: The policy is a NO-GO, or the promise cannot be made for it.

    Example:
        >>> certificate, policy = certify("archive/", loss="ha", alpha=0.1)  # doctest: +SKIP
    """
    losses = (loss,) if isinstance(loss, str) else tuple(loss)
    levels = (alpha,) if isinstance(alpha, (int, float)) else tuple(alpha)
    if method not in METHODS:
        raise BadInput(f"a method must be one of {', '.join(METHODS)}, got {method!r}")
    named: list[AnyPolicy | None]
    named = [policy] if policy is None or isinstance(policy, (str, Path, Policy)) else list(policy) or [None]
    gate = method == "envelope" or losses == ("surrogate",)
    designs = [_policy_of(one, archive, gate=gate) for one in named]
    chosen = designs[0]
    read = tuple(ladders) or tuple(chosen.ladders) or ((chosen.ladder,) if chosen.ladder else ())
    opened = as_archive(archive, read)
    calibration = opened.marked(CALIBRATION) if split is None else opened.select(split=split)
    judged = None if evaluation is None else as_archive(evaluation, read)
    if metadata_of(controller_kind(chosen)).gates:
        if len(levels) != 1:
            raise BadInput(f"a region gate can be certified for one alpha only, got {', '.join(map(str, levels))}")
        found = certify_gate(
            calibration, chosen, loss=_gate_loss(losses, method), alpha=levels[0], population=population,
            within=within, evaluation=judged, force=force,
        )  # fmt: skip
        return Certified(*found)
    if method == "envelope" or population != "all":
        given = "--method envelope" if method == "envelope" else "--set population"
        raise BadInput(f"{given} works only with policy region-gate, got {chosen.name!r}; leave it out")
    each = levels if len(levels) == len(losses) else levels * len(losses)
    asked = Promise(losses, each, delta if method == "ltt" else None, within, low_mid, margin)
    if among_kept is not None:
        return Certified(*certify_kept(calibration, chosen, asked, as_archive(among_kept, read), force=force))
    if named == ["default"] and chosen.binding is None:
        if not has_consensus(calibration, consensus):
            raise BadInput(f"no candidate is a consensus in {calibration.path}; run casewise calibrate first")
        return Certified(*certify_default(calibration, asked, force=force, consensus=consensus))
    if len(designs) > 1:
        return Certified(*certify_designs(calibration, designs, asked, force=force))
    return Certified(*certify_router(calibration, chosen, asked, evaluation=judged, force=force))


def _policy_of(given: AnyPolicy | None, archive: str | Path | Archive, *, gate: bool) -> Policy:
    if isinstance(given, Policy):
        return given
    if given is None:
        folder = archive.path if isinstance(archive, Archive) else archive
        return READY["region-gate"] if gate else read_policy(folder)
    return READY[str(given)] if str(given) in READY and not Path(given).exists() else read_policy(given)


def _gate_loss(losses: tuple[str, ...], method: str) -> str:
    if losses == ("surrogate",) and method == "crc":
        return "surrogate"
    if losses == ("ha",) and method == "envelope":
        return "envelope"
    raise BadInput(
        f"a region gate needs --loss surrogate (method crc) or --loss ha with --method envelope, got "
        f"loss {', '.join(losses)} and method {method}"
    )

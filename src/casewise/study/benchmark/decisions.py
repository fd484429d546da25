"""Every decision of a benchmark, taken where there are no evaluation labels, and sealed by its hash in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from casewise.archive.layout import Entry
from casewise.archive.store import Archive
from casewise.core.brief import UNIT
from casewise.core.durable import json_sha256, text_sha256, write_json
from casewise.core.errors import CasewiseError, Locked, Overlap
from casewise.core.formats import json_text
from casewise.core.records import Decision, Policy
from casewise.judge.calibration.fit import calibrate
from casewise.judge.certificates.certificate import Certificate, policy_digest
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.grid import halves_of
from casewise.judge.deciding import has_consensus
from casewise.judge.ledger import expose, read_ledger
from casewise.judge.policy import READY, among_candidates, check_held_out, design_of, no_go
from casewise.replay import replay

SCHEMA = "casewise-bench/2"
DECISIONS = "decisions.json"
SEALED = "bench: decisions sealed"
HALVED = f"labels fit this design, so half of the calibration {UNIT[1]} fitted it and the others certify it"


@dataclass(frozen=True)
class Method:
    """A policy and what it decided on every evaluation case."""

    name: str
    policy: Policy
    decisions: tuple[Decision, ...]
    design: str = ""  # what was calibrated; "" for methods that need no calibration
    certificate: Certificate | None = None  # that the policy stands under
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """What is sealed: plain JSON types, clusters by hash."""
        made = {
            "name": self.name,
            "design": self.design,
            "ladders": ladders_of(self.policy),
            "controller": self.policy.controller,
            "policy_sha256": policy_digest(self.policy),
            "certificate": _promised(self.certificate),
            "notes": list(self.notes),
            "decisions": [{**one.as_dict(), "cluster": cluster_name(one)} for one in self.decisions],
        }
        return dict(json.loads(json_text(made)))


def ladders_of(policy: Policy) -> list[str]:
    """The ladders that a policy reads."""
    return list(policy.ladders) or [policy.ladder]


def _promised(certificate: Certificate | None) -> dict[str, Any] | None:
    if certificate is None:
        return None
    names = ("statement", "loss", "alpha", "delta", "bound", "units", "kept")
    margin = certificate.details.get("margin", 0.0)
    return {**{name: getattr(certificate, name) for name in names}, "margin": margin}


def cluster_name(decision: Decision | Entry) -> str:
    """The patient or sequence of a case, by hash: a result may be published."""
    case = decision.case_id if isinstance(decision, Decision) else decision.id
    return text_sha256(decision.cluster or case)[:16]


def decide_all(
    calibration: Archive, evaluation: Archive, designs: Sequence[str], *, promise: Promise | None = None
) -> tuple[tuple[Method, ...], tuple[str, ...]]:
    """(methods with their decisions, what was refused and why): M0, the last candidate for everyone, each design.

    Designs are fitted on the calibration archive, ladder by ladder; those that choose among candidates also over all
    ladders together. The evaluation archive must hold no label: then nothing here can have seen one. With ``promise`` a
    design that can be certified is there twice, the second time under its certificate.
    """
    if any(entry.labelled for entry in evaluation.entries.values()):
        raise Locked(f"{evaluation.path} holds labels; decisions of a benchmark are taken where there are none")
    refused: list[str] = []
    first = evaluation.ladders[0]
    made = [_decided("M0", replace(READY["m0"], ladder=first), evaluation)]
    sides = {ladder: calibration.on(ladder) for ladder in evaluation.ladders}
    if len(sides) > 1:
        sides[" + ".join(sides)] = calibration.together(tuple(sides))
    for ladder, known in sides.items():
        if not known.joined:
            made.append(_everyone(evaluation.on(ladder), ladder))
        for design in designs:
            if known.joined and not chooses(design, known):
                continue
            name = method_name(ladder, design)
            try:
                policy = fitted(known, design)
                check_held_out(policy, evaluation.entries.values())
                made.append(_decided(name, policy, evaluation, design))
            except CasewiseError as error:
                refused.append(f"{name}: {error}")
                continue
            if promise is not None:
                try:
                    certificate, certified, note = _certified(known, policy, design, promise, name)
                except CasewiseError as error:
                    refused.append(f"{name}, certificate: {error}")
                    continue
                if certificate.feasible:
                    under = _decided(f"{name}, certified", certified, evaluation, design, certificate)
                    made.append(replace(under, notes=(*under.notes, *note)))
                else:
                    refused.append(f"{name}, certificate: {certificate.advice}")
    return tuple(made), tuple(refused)


def _certified(
    known: Archive, policy: Policy, design: str, promise: Promise, name: str
) -> tuple[Certificate, Policy, tuple[str, ...]]:
    """A certificate with its policy; one that labels fitted is fitted again on half of the patients first."""
    try:
        return *certify_router(known, policy, promise, force=True), ()
    except Overlap:
        fit, test = halves_of(known)
        certificate, certified = certify_router(test, fitted(fit, design), promise, force=True)
        return certificate, certified, (f"{name}, certified: {HALVED}",)


def chooses(design: str, known: Archive) -> bool:
    """Whether a design chooses among all candidates of a case, and so can read several ladders together."""
    return among_candidates(design_of(design)) or (design == "default" and has_consensus(known, None))


def method_name(ladder: str, what: str) -> str:
    """How a table calls a method of a ladder."""
    return f"{ladder}: {what}" if ladder else what


def fitted(calibration: Archive, design: str) -> Policy:
    """A design calibrated on one ladder; where no shrunk states were recorded, without them."""
    return calibrate(calibration, design, unshrunk=not any(state.shrink for state in calibration.states))


def _everyone(archive: Archive, ladder: str) -> Method:
    """The last candidate for every case: the consensus of a ladder of readings, or the last update."""
    rungs = next(iter(archive.entries.values())).rungs
    last = rungs[-1] if rungs else f"step {archive.steps}"
    policy = Policy("fixed-k", "fixed-k", {"step": archive.steps}, archive.steps, ladder=ladder)
    return _decided(method_name(ladder, f"{last} for everyone"), policy, archive)


def _decided(
    name: str, policy: Policy, evaluation: Archive, design: str = "", certificate: Certificate | None = None
) -> Method:
    said = no_go(policy)
    view = evaluation if policy.ladders else evaluation.on(policy.ladder or evaluation.ladders[0])
    return Method(name, policy, tuple(replay(view, policy)), design, certificate, () if said is None else (said,))


@dataclass(frozen=True)
class Sealed:
    """Decisions that are written and hashed, and where the ledger says so."""

    methods: tuple[dict[str, Any], ...]
    sha256: str
    ledger: Path
    labels_seen_before: bool  # whether evaluation labels had been opened when these decisions were sealed


def seal(folder: Path, methods: Iterable[Method], evaluation: Archive) -> Sealed:
    """Write all decisions, and their hash into the ledger of the evaluation archive; the same decisions once."""
    plain = [method.plain() for method in methods]
    sha256 = json_sha256(plain)
    write_json(folder / DECISIONS, {"schema": SCHEMA, "sha256": sha256, "methods": plain})
    line = f"{SEALED} {sha256}"
    if not any(one["choice"] == line for one in read_ledger(evaluation.path)):
        expose(evaluation.path, choice=line, labels_visible=False)
    return Sealed(tuple(plain), sha256, evaluation.path, seen_before(read_ledger(evaluation.path), sha256))


def seen_before(ledger: Sequence[Mapping[str, Any]], sha256: str) -> bool:
    """Whether labels were visible on any line of a ledger before the one that seals these decisions."""
    for line in ledger:
        if line.get("choice") == f"{SEALED} {sha256}":
            return False
        if line.get("labels_visible"):
            return True
    return True  # never sealed

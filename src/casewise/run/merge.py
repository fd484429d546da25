"""Take over new masks case by case: a policy decides without a label, and the chosen file is copied as it is.

The old mask stays where the policy says so, where it asks a person, and where old and new cannot be compared; the last
two are flagged. OUT/decisions.jsonl holds every decision with its reason, OUT/audit.jsonl the same as a hash-chained
log.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from casewise.archive.layout import mask_sha256, measure_options
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, replacing, write_durably
from casewise.core.errors import BadInput, BadPair, CasewiseError, Refused, in_one_line
from casewise.core.formats import json_text
from casewise.core.records import Binding, Controller, Decision, Observation, Policy
from casewise.data.pairs import Pair, read_pair
from casewise.judge.certificates.certificate import check_certificate, check_feasible, read_certificate
from casewise.judge.policy import check_binding, check_go, controller_of, no_go
from casewise.measure.signals.fragmentation import edit_signals

AUDIT, DECISIONS = "audit.jsonl", "decisions.jsonl"
STARTED, FINISHED = "merge-started", "merge-finished"
_NOTHING = (np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.uint8))
NEW, OLD, ASK, FAILED = "new", "old", "ask", "failed"
"""What became of a case: the new mask, the old one, the old one until a person was asked, no mask at all."""


@dataclass(frozen=True)
class Merged:
    """What became of one case."""

    case_id: str
    taken: str  # NEW, OLD, ASK or FAILED
    reason: str
    decision: Decision | None = None  # None where old and new could not be compared
    file: str | None = None  # name in OUT
    sha256: str | None = None

    @property
    def compared(self) -> bool:
        """Whether the policy could decide."""
        return self.decision is not None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain = {name: getattr(self, name) for name in ("taken", "reason", "file", "sha256")}
        return {"case": self.case_id, **plain, "decision": None if self.decision is None else self.decision.as_dict()}


def merge_folders(
    pairs: Sequence[Pair],
    policy: Policy,
    out: Path,
    *,
    model: str,
    method: str,
    certificate: Path | None = None,
    force: bool = False,
) -> Iterator[Merged]:
    """Decide on every pair and copy the chosen mask to OUT under the old file's name; stream what became of each.

    ``model`` and ``method`` name what made old and new, as they were named when the policy's archive was imported. A
    policy that calibration called NO-GO is refused, unless ``force``. Masks in OUT that no merge wrote are refused.
    """
    check_go(policy, force=force)
    controller, options = _checked(policy, model, method, certificate)
    if any(
        file is not None and file.parent.resolve() == out.resolve() for pair in pairs for file in (pair.old, pair.new)
    ):
        raise BadInput(f"{out} holds the old or new masks themselves; choose another folder with -o")
    files = [_name(pair) for pair in pairs]
    _check_replaceable(out, files)
    out.mkdir(parents=True, exist_ok=True)
    started = {"policy": policy.name, "calibration_id": policy.calibration_id, "no_go": no_go(policy)}
    log = Chain(out / AUDIT)
    log.append(STARTED, {**started, "pairs": len(pairs), "files": files})
    for pair in pairs:  # nothing old may be taken for the result of this run
        (out / _name(pair)).unlink(missing_ok=True)
    done = []
    for pair in pairs:
        merged = _merged(pair, controller, options, policy, out)
        log.append("merged", merged.as_dict())
        done.append(merged.as_dict())
        yield merged
    write_durably(out / DECISIONS, "".join(f"{json_text(line)}\n" for line in done).encode())
    log.append(FINISHED, {"pairs": len(pairs)})


def _check_replaceable(out: Path, files: Sequence[str]) -> None:
    """Refuse to remove masks that no merge wrote as they are: a folder of labels, or masks that a person has edited."""
    own: dict[str, Any] = {}
    begun: set[str] = set()  # by a merge that was killed: what lies there now is its own
    for line in Chain(out / AUDIT).lines():
        if line.get("event") in (STARTED, FINISHED):
            begun = set(map(str, line.get("files", ())))
        elif line.get("event") == "merged":
            own[str(line.get("file"))] = line.get("sha256")
    there = [name for name in files if (out / name).is_file() and name not in begun]
    foreign = [name for name in there if file_sha256(out / name) != own.get(name)]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise Refused(
            f"{out} holds {', '.join(foreign[:3])}{more}, which no casewise merge wrote or which changed since; this "
            "run would remove and replace them. Choose another folder with -o"
        )


def _checked(policy: Policy, model: str, method: str, certificate: Path | None) -> tuple[Controller, dict[str, Any]]:
    """The controller and how it measures, after the policy was compared with what it is used on."""
    if policy.binding is None:
        raise BadInput(f"policy {policy.name!r} is not calibrated; run casewise calibrate on an archive of old and new")
    binding = Binding(model, method, "masks", policy.binding.measure)
    check_binding(policy, binding)
    if certificate is not None:
        promised = read_certificate(certificate)
        check_certificate(promised, policy, binding)
        check_feasible(promised)
    controller = controller_of(policy)
    options = measure_options(policy.binding.measure)
    known = frozenset(edit_signals(*_NOTHING))
    lacking = sorted(controller.needs - known)
    if lacking:
        raise Refused(f"policy {policy.name!r} reads {', '.join(lacking)}, which two masks alone do not say")
    return controller, options


def _merged(pair: Pair, controller: Controller, options: Mapping[str, Any], policy: Policy, out: Path) -> Merged:
    try:
        decision = decide_pair(pair, controller, options, calibration_id=policy.calibration_id)
    except (CasewiseError, OSError) as error:
        return _kept_old(pair, out, in_one_line(error))
    if decision.state.step > 1 or decision.state.shrink or decision.accepted is not None:
        return _kept_old(pair, out, f"policy {policy.name!r} asks for state {decision.state}, which is neither mask")
    taken = NEW if decision.state.step else ASK if decision.flagged else OLD
    return _copied(Merged(pair.id, taken, decision.reason, decision), pair, out)


def decide_pair(
    pair: Pair, controller: Controller, options: Mapping[str, Any], *, calibration_id: str = ""
) -> Decision:
    """The decision on one pair, step by step as live; labels are never opened."""
    old, new, _ = read_pair(replace(pair, label=None))
    signals = [edit_signals(old.mask, mask, **options) for mask in (old.mask, new.mask)]
    for step in (0, 1):
        seen = Observation(pair.id, pair.group, tuple(signals[: step + 1]), cluster=pair.cluster)
        verdict = controller.decide(seen)
        if verdict is not None:
            chosen = (old, new)[min(verdict.state.step, 1)]
            return Decision.of(
                seen, verdict, controller.name, calibration_id=calibration_id, state_hash=mask_sha256(chosen.mask)
            )
    raise BadPair("missing", f"{pair.id}: {controller.name} asked for a second candidate; there is only the new mask")


def _kept_old(pair: Pair, out: Path, why: str) -> Merged:
    """The old mask where there is one, for a person to look at."""
    if pair.old is None:
        return Merged(pair.id, FAILED, why)
    return _copied(Merged(pair.id, ASK, f"{why}; the old mask stays"), pair, out)


def _copied(merged: Merged, pair: Pair, out: Path) -> Merged:
    chosen = pair.new if merged.taken == NEW else pair.old
    assert chosen is not None
    name = _name(pair)
    try:
        with replacing(out / name) as temporary:
            shutil.copyfile(chosen, temporary)
    except FileNotFoundError:  # it was there when the folder was listed
        return Merged(pair.id, FAILED, f"the {'new' if merged.taken == NEW else 'old'} mask is gone; {merged.reason}")
    return replace(merged, file=name, sha256=file_sha256(out / name))


def _name(pair: Pair) -> str:
    file = pair.old or pair.new
    assert file is not None
    return file.name

"""Take over new masks case by case: a policy decides without a label, and the chosen file is copied as it is.

The old mask stays where the policy says so, where it asks a person, and where old and new cannot be compared; the last
two are flagged. OUT/decisions.jsonl holds every decision with its reason, OUT/audit.jsonl the same as a hash-chained
log.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from casewise.archive.layout import mask_sha256, measure_options
from casewise.core.chain import Chain
from casewise.core.durable import file_sha256, replacing, sweep, write_durably
from casewise.core.errors import BadInput, CasewiseError, Refused, in_one_line
from casewise.core.formats import json_text
from casewise.core.records import Binding, Decision, Mask, Observation, Policy, State
from casewise.core.text import pluralize
from casewise.data.pairs import Pair, read_pair
from casewise.judge.certificates.certificate import check_certificate, check_feasible, read_certificate
from casewise.judge.decide import Judge, decide
from casewise.judge.policy import check_binding, check_go, judge_of, no_go
from casewise.measure.signals.fragmentation import edit_signals
from casewise.run.prediction_folder import refuse_foreign

AUDIT, DECISIONS = "audit.jsonl", "decisions.jsonl"
STARTED, FINISHED = "take-over-started", "take-over-finished"
_NOTHING = (np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.uint8))
NEW, OLD, ASK, FAILED = "new", "old", "ask", "failed"
"""Result of a case: the new mask, the old mask, the old mask until a person has looked, no mask."""


@dataclass(frozen=True)
class Taken:
    """Result of one case."""

    case_id: str
    taken: str  # NEW, OLD, ASK or FAILED
    reason: str
    decision: Decision | None = None  # None where old and new could not be compared
    file: str | None = None  # name in OUT
    sha256: str | None = None

    @property
    def compared(self) -> bool:
        """True if the policy could decide."""
        return self.decision is not None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain = {name: getattr(self, name) for name in ("taken", "reason", "file", "sha256")}
        return {"case": self.case_id, **plain, "decision": None if self.decision is None else self.decision.as_dict()}


def take_over_folders(
    pairs: Sequence[Pair], policy: Policy, out: Path, *, model: str, method: str, certificate: Path | None = None,
    force: bool = False,
) -> Iterator[Taken]:  # fmt: skip
    """Decide on every pair and copy the chosen mask to OUT under the old file's name; yield one result per pair.

    ``model`` and ``method`` name the model and method of old and new, as in the import of the policy's archive. A
    policy that calibration called NO-GO is refused, unless ``force``. Masks in OUT of anybody else are refused.
    """
    check_go(policy, force=force)
    judge, options = _checked(policy, model, method, certificate)
    if any(
        file is not None and file.parent.resolve() == out.resolve() for pair in pairs for file in (pair.old, pair.new)
    ):
        raise BadInput(f"{out} holds the old or new masks themselves; choose another folder with -o")
    files = [_name(pair) for pair in pairs]
    _check_replaceable(out, files)
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)
    started = {"policy": policy.name, "calibration_id": policy.calibration_id, "no_go": no_go(policy)}
    log = Chain(out / AUDIT)
    log.append(STARTED, {**started, "pairs": len(pairs), "files": files})
    for pair in pairs:  # nothing old may be taken for the result of this run
        (out / _name(pair)).unlink(missing_ok=True)
    done = []
    for pair in pairs:
        taken = _decided(pair, judge, options, policy, out)
        log.append("taken-over", taken.as_dict())
        done.append(taken.as_dict())
        yield taken
    write_durably(out / DECISIONS, "".join(f"{json_text(line)}\n" for line in done).encode())
    log.append(FINISHED, {"pairs": len(pairs)})


def take_over_lines(taken: Sequence[Taken], policy: Policy, out: Path) -> list[str]:
    """Summarize the results in sentences."""
    counts = Counter(one.taken for one in taken)
    said = {NEW: "new", OLD: "old", ASK: "the old mask until a person decides", FAILED: "without a mask"}
    kinds = ", ".join(f"{counts[kind]} {words}" for kind, words in said.items() if counts[kind])
    lines = [f"{pluralize(len(taken), 'case')} decided: {kinds}"]
    lines += [f"{one.case_id}: {one.reason}" for one in taken if one.taken in (ASK, FAILED)]
    advised = no_go(policy)
    if advised is not None:
        lines.append(f"! {advised}. It was used nevertheless (force).")
    return [*lines, f"masks, decisions.jsonl and audit.jsonl are in {out}; M0 in a reason is the old mask"]


def _check_replaceable(out: Path, files: Sequence[str]) -> None:
    """Refuse to remove masks that no earlier run wrote: a folder of labels, or masks that a person has edited."""
    own: dict[str, Any] = {}
    begun: set[str] = set()  # cases of a killed run, whose files may be replaced
    for line in Chain(out / AUDIT).lines():
        if line.get("event") in (STARTED, FINISHED):
            begun = set(map(str, line.get("files", ())))
        elif line.get("event") == "taken-over":
            own[str(line.get("file"))] = line.get("sha256")
    there = [name for name in files if (out / name).is_file() and name not in begun]
    refuse_foreign(out, [name for name in there if file_sha256(out / name) != own.get(name)])


def _checked(policy: Policy, model: str, method: str, certificate: Path | None) -> tuple[Judge, dict[str, Any]]:
    """Return the judge and its options, after the binding of the policy was checked."""
    if policy.binding is None:
        raise BadInput(f"policy {policy.name!r} is not calibrated; run casewise calibrate on an archive of old and new")
    binding = Binding(model, method, "masks", policy.binding.measure)
    check_binding(policy, binding)
    if certificate is not None:
        promised = read_certificate(certificate)
        check_certificate(promised, policy, binding)
        check_feasible(promised)
    judge = judge_of(policy)
    options = measure_options(policy.binding.measure)
    known = frozenset(edit_signals(*_NOTHING))
    lacking = sorted(judge.controller.needs - known)
    if lacking:
        raise Refused(f"policy {policy.name!r} reads {', '.join(lacking)}, which two masks do not give")
    return judge, options


def _decided(pair: Pair, judge: Judge, options: Mapping[str, Any], policy: Policy, out: Path) -> Taken:
    try:
        old, new, _ = read_pair(replace(pair, label=None))  # labels are never opened
        decision = decide(judge, _PairLadder(pair, (old.mask, new.mask), options))
    except (CasewiseError, OSError) as error:
        return _kept_old(pair, out, in_one_line(error))
    if decision.state.step > 1 or decision.state.shrink or decision.accepted is not None:
        return _kept_old(pair, out, f"policy {policy.name!r} chose state {decision.state}, which is neither mask")
    taken = NEW if decision.state.step else ASK if decision.flagged else OLD
    return _copied(Taken(pair.id, taken, decision.reason, decision), pair, out)


class _PairLadder:
    """The old mask as M0 and the new one as the only candidate."""

    name = ""

    def __init__(self, pair: Pair, masks: tuple[Mask, Mask], options: Mapping[str, Any]) -> None:
        self.pair, self.pictures, self.executed = pair, masks, 0
        self.signals = [edit_signals(masks[0], mask, **options) for mask in masks]

    @property
    def complete(self) -> bool:
        """True when both masks were shown."""
        return self.executed == 1

    def advance(self) -> None:
        """Show the new mask."""
        self.executed = 1

    def observation(self) -> Observation:
        """Signals of the masks shown so far."""
        shown = tuple(self.signals[: self.executed + 1])
        return Observation(self.pair.id, self.pair.group, shown, cluster=self.pair.cluster)

    def masks(self) -> Mapping[State, Mask]:
        """The masks shown so far."""
        return {State(step): mask for step, mask in enumerate(self.pictures[: self.executed + 1])}

    def mask(self, state: State) -> Mask:
        """The old or the new mask."""
        return self.pictures[min(state.step, 1)]

    def sha256(self, state: State) -> str:
        """Hash of the old or the new mask."""
        return mask_sha256(self.mask(state))


def _kept_old(pair: Pair, out: Path, why: str) -> Taken:
    """Keep the old mask, if there is one, for a person to check."""
    if pair.old is None:
        return Taken(pair.id, FAILED, why)
    return _copied(Taken(pair.id, ASK, f"{why}; the old mask stays"), pair, out)


def _copied(taken: Taken, pair: Pair, out: Path) -> Taken:
    chosen = pair.new if taken.taken == NEW else pair.old
    assert chosen is not None
    name = _name(pair)
    try:
        with replacing(out / name) as temporary:
            shutil.copyfile(chosen, temporary)
    except FileNotFoundError:  # it was removed after the folder was listed
        return Taken(pair.id, FAILED, f"the {'new' if taken.taken == NEW else 'old'} mask is gone; {taken.reason}")
    return replace(taken, file=name, sha256=file_sha256(out / name))


def _name(pair: Pair) -> str:
    file = pair.old or pair.new
    assert file is not None
    return file.name

"""The exposure ledger: which choices were made while evaluation labels could be seen (F12).

``exposures.jsonl`` is in the evaluation archive. It is a hash chain (:mod:`casewise.core.chain`), so a line that was
taken out or edited is noticed. Reports print it. Labels of the split "evaluation", and all labels of an archive that a
study or benchmark evaluates, are locked: :func:`unlock` writes its line first and gives a view that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from casewise.archive.store import Archive
from casewise.core.chain import Chain
from casewise.core.durable import json_sha256
from casewise.core.errors import BadInput, DamagedArchive, Refused
from casewise.core.formats import json_text
from casewise.core.records import Policy
from casewise.core.text import UNIT
from casewise.judge.policy import READY, among_candidates, check_binding, check_held_out, is_learned

LEDGER = "exposures.jsonl"
EVENT, CERTIFICATION, CALIBRATE = "exposure", "certification", "calibrate"


def _choices(design: str, seen: str, *choices: str) -> tuple[Mapping[str, Any], ...]:
    return tuple({"choice": choice, "seen": seen, "design": design} for choice in choices)


PAPER = (
    *_choices(
        "cardiac",
        "cardiac evaluation labels",
        "coordinate delta instead of the two-term risk",
        "mid bucket shrinks, rather than halts or waits",
        "depth 3 of the low bucket",
    ),
    *_choices("driving", "driving evaluation labels", "upper percentile 66 rather than 75"),
    *_choices("cardiac", "never varied", "shrink 0.5"),
    *_choices("driving", "never varied", "cap 4 of the mid bucket", "cap 8 of the low bucket"),
)
"""What the paper discloses of its own designs: four exposures and three unconsidered constants (F12)."""

OURS = _choices(
    "default", "development labels of M&Ms vendor B, Drishti-GS, ACDC fog and night", "coordinate largest, of twelve",
    "depths 2 and 1, of ten pairs", "the guard, and delta as fallback",
)  # fmt: skip
"""What was seen when the design ``default`` was searched (docs/decisions/0012)."""


def unlock(evaluation: Archive, *, purpose: str, policy: Policy | None = None, compared: Iterable[str] = ()) -> Archive:
    """Write down why evaluation labels are read and for which policy; return the archive with readable labels.

    Refused when the policy was fitted on any of its cases or their patients, or on another model. An archive that is
    already unlocked is returned as it is. ``compared`` names other policies whose results are shown.
    """
    if not purpose.strip():
        raise BadInput("give the purpose of reading evaluation labels, such as purpose='study'; the ledger records it")
    if policy is not None:
        check_binding(policy, evaluation.binding)
        check_held_out(policy, evaluation.entries.values())
    if evaluation.unlocked_by:
        return evaluation
    shown = {*compared, *([] if policy is None else [compared_as(policy)])}
    facts = {"labels": labels_of(evaluation), "compared": sorted(shown)}
    return replace(evaluation, unlocked_by=expose(evaluation.path, choice=purpose, policy=policy, more=facts)["hash"])


def expose(
    folder: Path,
    *,
    choice: str,
    policy: Policy | None = None,
    labels_visible: bool = True,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Append one line to the ledger of an archive folder; an edited ledger is an error."""
    read_ledger(folder)
    name, calibrated = ("", "") if policy is None else (policy.name, policy.calibration_id)
    facts = {"choice": choice, "policy": name, "calibration_id": calibrated, "labels_visible": labels_visible}
    return Chain(folder / LEDGER).append(EVENT, {**facts, **more})


def compared_as(policy: Policy) -> str:
    """Return the name of a policy in the ledger.

    A router with another coordinate or action, or on another ladder, is another policy, and so is a rule that takes
    another candidate for the consensus. Cut-points do not matter, because a bound at a cut holds for every cut below
    it. Of policies that labels fitted, each is another one.
    """
    name, options = policy.name.removesuffix("-certified"), policy.options
    if among_candidates(policy) and is_learned(policy):
        fitted = {key: value for key, value in options.items() if key != "cut_high"}  # the cut of a certificate
        return f"{name} (fit {json_sha256([policy.controller, fitted, policy.cleanup, policy.calibration_id])[:8]})"
    ready = READY[name].options if name in READY else {}
    actions, usual = ({key: one[key] for key in ACTIONS if key in one} for one in (options, ready))
    own = f" by {options['coordinate']}" if options.get("coordinate") else ""
    own += f" with other actions ({json_sha256(actions)[:8]})" if actions != usual else ""
    own += of_candidate(policy.preflight.get("consensus"))
    return on_ladders(f"{name}{own}", policy.ladders or (policy.ladder,))


ACTIONS = ("low", "mid", "hard", "low_cap", "mid_cap", "mid_shrink")  # options of a router that are no cut-points


def of_candidate(consensus: str | None) -> str:
    """Return what to add to the name of a design where the user said which candidate is the consensus."""
    return f" of candidate {consensus}" if consensus else ""


def on_ladders(design: str, ladders: Iterable[str]) -> str:
    """Return the name of a design that reads these ladders; "" is the unnamed one."""
    named = "+".join(filter(None, ladders))
    return f"{design} on {named}" if named else design


def note_comparison(archive: Archive, designs: Sequence[str]) -> None:
    """Write down which designs were compared with the labels of an archive, because these labels cannot certify them.

    Args:
        archive: The calibration cases.
        designs: The names of all designs that took part (:func:`compared_as`).
    """
    labels = labels_of(archive)
    known = (line.get("compared", ()) for line in read_ledger(archive.path) if line.get("labels") == labels)
    if any(set(designs) <= set(compared) for compared in known):
        return
    choice = f"{CALIBRATE} {'compared' if len(designs) > 1 else 'fitted'} {', '.join(designs)}"
    expose(archive.path, choice=choice, more={"compared": list(designs), "labels": labels})


def compared_designs(archive: Archive) -> frozenset[str]:
    """Return the names of all designs, M0 left out, that were compared, calibrated or studied with these labels."""
    return frozenset(name for line in _looks(archive) for name in line["compared"])


def check_not_chosen(archive: Archive, policy: Policy, together: Collection[str] | None) -> None:
    """Refuse a policy that was compared with others on these labels, unless all of them are certified together.

    ``together`` names the policies that are certified with it (:func:`compared_as`); None: it was fixed in advance.
    """
    own, compared = compared_as(policy), compared_designs(archive)
    others = sorted(compared - {own, *(together or ())})
    if together is None or own not in compared or not others:
        return
    both = "certify all of them together: --policy A --policy B"
    both = "let certify choose: --policy default" if among_candidates(policy) else both
    raise Refused(
        f"{own!r} was compared with {', '.join(others)} on these labels (the archive's ledger says so), so they chose "
        f"it and cannot certify it. Certify on {UNIT[1]} that were not used for the comparison, or {both} --method ltt"
    )


def earlier_looks(archive: Archive, tested: Collection[str] | None) -> list[str]:
    """Return a warning if a study or benchmark showed results of these labels, or other policies were compared.

    ``tested`` names all policies that are certified together (:func:`compared_as`); None stands for every policy.
    """
    looks = {
        f"{line['choice']} of {line['policy']}".removesuffix(" of ")
        for line in _looks(archive)
        if not line["choice"].startswith(CALIBRATE) or not (tested is None or set(line["compared"]) <= set(tested))
    }
    if not looks:
        return []
    return [
        f"These labels were used before ({'; '.join(sorted(looks))}; {LEDGER}). The promise holds "
        "only if the policy was chosen without those results."
    ]


def _looks(archive: Archive) -> list[dict[str, Any]]:
    """Return the lines of the ledger that are about labels of these cases; M0 is not among the compared."""
    labels = set(labels_of(archive))
    found = (line for line in read_ledger(archive.path) if not labels.isdisjoint(line.get("labels", ())))
    return [{**line, "compared": [name for name in line["compared"] if name.split(" ")[0] != "m0"]} for line in found]


def labels_of(archive: Archive) -> list[str]:
    """Return short hashes of the labels of an archive."""
    return sorted({str(entry.label_sha256)[:12] for entry in archive.entries.values() if entry.labelled})


def certification_attempt(archive: Archive, asked: Mapping[str, Any]) -> int:
    """Write down a request for a certificate; return how many different ones these labels have seen, with this one.

    ``asked`` names the policy (its digest), the losses, the alphas and the method. The same question again is no new
    attempt. Attempts count where they share a labelled case.
    """
    read_ledger(archive.path)
    log = Chain(archive.path / LEDGER)
    labels = labels_of(archive)
    questions = [
        line.get("asked")
        for line in log.lines()
        if line["event"] == CERTIFICATION and not set(labels).isdisjoint(line.get("labels", ()))
    ]
    plain = json.loads(json_text(asked))
    if plain not in questions:
        log.append(CERTIFICATION, {"asked": plain, "labels": labels})
    different = {json_text(one, sort_keys=True) for one in (*questions, plain)}
    return len(different)


def attempt_sentence(attempt: int) -> str:
    """Return the warning of a certificate that was not the first one requested with its labels."""
    return (
        f"This is certification attempt {attempt} on these labels. A promise holds only for a design that was "
        f"chosen before; it does not cover the best of several attempts. To choose among designs, "
        f"certify them together (casewise certify "
        f"--policy A --policy B --method ltt), or choose on some {UNIT[1]} and certify on others (--set split=NAME)."
    )


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Return every exposure of an archive, oldest first; an edited ledger is an error."""
    log = Chain(Path(folder) / LEDGER)
    problems = log.problems
    if problems:
        raise DamagedArchive(f"{log.path} was edited or cut ({'; '.join(problems)}); the ledger cannot be trusted")
    unnamed = {"choice": "an unnamed reading", "policy": "", "compared": ()}
    return [{**unnamed, **line} for line in log.lines() if line["event"] == EVENT]


def ledger_problems(folder: str | Path) -> list[str]:
    """Return the problems of the ledger of a folder."""
    try:
        read_ledger(Path(folder))
    except DamagedArchive as error:
        return [str(error)]
    return []

"""The region gate: deploy M0 plus those regions of the step-1 edit in which adaptation became more confident (L1-L3).

Region scores are signals of step 1: ``drop.0``, ``drop.1``, ... are the mean entropy drops of the regions of the raw
(multi-class) step-1 edit, in the order in which :func:`casewise.measure.regions.regions_of` numbers the kept ones.
:func:`casewise.measure.signals.risk.region_drops` makes them; the gate itself reads numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from casewise.core.errors import BadInput, NotFinite
from casewise.core.records import SOURCE, Action, Decision, Mask, Observation, State, Verdict
from casewise.judge.controllers.metadata import Metadata
from casewise.measure.regions import regions_of
from casewise.measure.signals.risk import DROP

UNSCORED = "unscored"
"""The bucket of a case without any scored region: a certificate of scored cases does not cover it."""

OFF_GRID = (
    "'drop' could not be computed, because the model's logits are on another grid than its mask (patches that do "
    "not cover the image one to one)"
)


@dataclass(frozen=True)
class RegionGate:
    """Accept a region iff its mean entropy drop is greater than the threshold; the rest goes back to M0 (L3)."""

    threshold: float
    min_area: int = 16
    keep_small: bool = False  # voxels of D in no region: back to M0 unless kept

    name = "region-gate"
    metadata = Metadata("region gate", is_ours=True, gates=True)
    needs = frozenset({"regions", "drop"})
    states = frozenset[State]()

    def __post_init__(self) -> None:
        if np.isnan(self.threshold):
            raise BadInput("the threshold of a gate must be a number, or infinite to reject everything; got NaN")

    def decide(self, seen: Observation) -> Verdict | None:
        """Return the accepted regions, or a rollback if there are none; None before step 1."""
        if seen.step < 1:
            return None
        scores = region_scores(seen)
        accepted = tuple(number for number, score in enumerate(scores or ()) if score > self.threshold)
        keeps = bool(accepted) or (self.keep_small and scores is not None)
        reason = f"{len(accepted)} of {len(scores or ())} regions have an entropy drop > {self.threshold:.4g}"
        return Verdict(
            State(1) if keeps else SOURCE, Action.GATE if keeps else Action.ROLLBACK,
            bucket=None if scores else UNSCORED, coordinate="drop", cut_low=self.threshold, accepted=accepted,
            reason=f"no region has a score: {OFF_GRID}" if scores is None else reason,
        )  # fmt: skip

    def output(self, mask: Callable[[State], Mask], decision: Decision) -> Mask:
        """Return M0 with the regions of the step-1 edit that a decision accepted; M0 itself after a rollback."""
        source = mask(SOURCE)
        if decision.rolled_back:
            return source
        accepted = decision.accepted or ()
        return gated(source, mask(decision.state), accepted, min_area=self.min_area, keep_small=self.keep_small)


def region_scores(seen: Observation) -> list[float] | None:
    """Return the region scores of step 1 by number; None if the logits are on another grid than the mask."""
    found = {int(name[len(DROP) :]): value for name, value in seen.signals[1].items() if name.startswith(DROP)}
    known = {number: value for number, value in found.items() if value is not None}
    if sorted(known) != list(range(len(known))):
        raise BadInput(f"case {seen.case_id} has region scores {sorted(known)}; record all of them from 0 on")
    if any(not np.isfinite(value) for value in known.values()):
        raise NotFinite(f"a region score of case {seen.case_id} is not finite; record the case again")
    if seen.signals[1].get("drop") is None:
        if "drop" in seen.signals[1] and not seen.rungs.get(""):
            return None
        why = (
            "has views or other candidates without updates, and only updates have region scores; record with "
            "--propose tent --set signals=drop, or calibrate another policy"
            if seen.rungs.get("")
            else "was recorded without region scores; record with the signal 'drop'"
        )
        raise BadInput(f"case {seen.case_id} {why}")
    return [float(known[number]) for number in range(len(known))]


def gated(
    source: Mask, adapted: Mask, accepted: tuple[int, ...], *, min_area: int = 16, keep_small: bool = False
) -> Mask:
    """Return M0 with the accepted regions of the edit (L3)."""
    found = regions_of(source, adapted, min_area=min_area, foreground=False)  # labels are compared as they are (L1)
    passes = ~found.kept & keep_small
    passes[np.flatnonzero(found.kept)[list(accepted)]] = True
    voxels = found.voxels[passes[found.number]]
    made = source.copy()
    made.reshape(-1)[voxels] = adapted.reshape(-1)[voxels]
    return made

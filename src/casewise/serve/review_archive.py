"""An archive, for the reviewer: every recorded state can be looked at; deployed is what policy.json decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from casewise.archive import layout
from casewise.archive.layout import Entry
from casewise.archive.store import Archive
from casewise.core.errors import CasewiseError
from casewise.core.records import SOURCE, Controller, Decision, Mask, State
from casewise.judge.deciding import decision_of, deployed_mask
from casewise.judge.policy import POLICY, controller_of, read_policy
from casewise.serve.review_cases import Masks, ReviewCase, deepest, state_order
from casewise.serve.review_predictions import drops_of


@dataclass(frozen=True)
class Recorded:
    """An archive with the decisions of its own policy, where it has one."""

    archive: Archive
    kind: str = "archive"

    @property
    def path(self) -> Path:
        """The archive's folder."""
        return self.archive.path

    @property
    def audit(self) -> Path | None:
        """An archive has no audit log of runs; reviews.jsonl is a chain of its own."""
        return None

    @property
    def min_area(self) -> int:
        """As it was recorded."""
        return int(self.archive.configuration.get("min_area", 16))

    @cached_property
    def controller(self) -> Controller | None:
        """That of policy.json; None where there is none that decides alone."""
        if not (self.path / POLICY).is_file():
            return None
        try:
            return controller_of(read_policy(self.path))
        except CasewiseError:
            return None

    @cached_property
    def decisions(self) -> Mapping[str, Decision]:
        """What the policy decides on every case that it can decide on."""
        found: dict[str, Decision] = {}
        for case_id in self.archive.ids if self.controller is not None else ():
            assert self.controller is not None
            try:
                found[case_id] = decision_of(self.archive, self.controller, case_id)
            except CasewiseError:
                continue
        return found

    @cached_property
    def cases(self) -> Mapping[str, ReviewCase]:
        """Every recorded case."""
        return {case_id: self._case(case_id) for case_id in self.archive.ids}

    def about(self, case_id: str) -> str:
        """sha256 of the entry on disk, and through it of every mask."""
        return Entry.from_dict(layout.read_json(self.path / layout.CASES / case_id / layout.ENTRY)).digest

    def masks(self, case_id: str, state: str | None) -> Masks:
        """M0, the state that was asked for, and what the policy deploys."""
        wanted = None if state is None else self._states(case_id)[state]
        found = self.archive.masks(case_id, () if wanted is None else (wanted,))
        decision = self.decisions.get(case_id)
        deployed = None
        if decision is not None and self.controller is not None:
            deployed = deployed_mask(self.archive, self.controller, decision)
        adapted = None if wanted is None else found[wanted]
        return Masks(found[SOURCE], adapted, deployed, self.archive.entry(case_id).spacing_mm)

    def drops(self, case_id: str, state: str) -> Mapping[int, float] | Mask | None:
        """From recorded entropies, else from the region scores of the gate."""
        extras = self.archive.entropies(case_id) or {}
        before, after = extras.get("entropy_0"), extras.get(f"entropy_{state}")
        if before is not None and after is not None and before.shape == after.shape:
            return np.asarray(before, np.float32) - np.asarray(after, np.float32)
        return drops_of(self.archive.ladder(case_id)[self._states(case_id)[state]])

    def overlay(self, case_id: str) -> Path | None:
        """An archive holds no pictures."""
        return None

    def _states(self, case_id: str) -> dict[str, State]:
        return {str(state): state for state in self.archive.entry(case_id).states if state != SOURCE}

    def _case(self, case_id: str) -> ReviewCase:
        entry, decision = self.archive.entry(case_id), self.decisions.get(case_id)
        states = tuple(sorted(self._states(case_id), key=state_order))
        adapted = deepest(states)
        known = self._states(case_id)
        return ReviewCase(
            id=case_id,
            about=entry.digest,
            group=entry.group,
            action=None if decision is None else decision.action.value,
            reason="" if decision is None else decision.reason,
            coordinate=None if decision is None else decision.coordinate,
            value=None if decision is None else decision.value,
            cut_low=None if decision is None else decision.cut_low,
            cut_high=None if decision is None else decision.cut_high,
            states=states,
            adapted=adapted,
            signals={} if adapted is None else dict(self.archive.ladder(case_id)[known[adapted]]),
            has_deployed=decision is not None,
            flagged=decision is not None and decision.flagged,
            quality=None if decision is None else decision.quality,
            quality_low=None if decision is None else decision.quality_low,
        )

"""A controller of your own, named on the command line by its address:

casewise replay    archive own_controller:SmallEdits
casewise calibrate archive --policy own_controller:SmallEdits     # binds it to the model, and examines it
casewise predict   ... --policy archive --controller own_controller:SmallEdits
"""

from __future__ import annotations

from dataclasses import dataclass

from casewise.core.records import SOURCE, Action, Observation, State, Verdict


@dataclass(frozen=True)
class SmallEdits:
    """Keep the first update where it changed little; otherwise M0. It sees signals only, never a label or an image."""

    largest_share: float = 0.01
    name: str = "small-edits"
    needs: frozenset[str] = frozenset({"delta"})
    states: frozenset[State] = frozenset()

    def decide(self, seen: Observation) -> Verdict | None:
        """After M0 ask for one update, then decide."""
        if seen.step == 0:
            return None
        delta = float(seen.signals[1]["delta"] or 0.0)
        if delta <= self.largest_share:
            return Verdict(State(1), Action.KEEP, coordinate="delta", value=delta, reason=f"{delta:.2%} changed")
        return Verdict(SOURCE, Action.ROLLBACK, coordinate="delta", value=delta, reason=f"{delta:.2%} is too much")

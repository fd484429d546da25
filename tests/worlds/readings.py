"""All candidates of one proposer, with M0 predicted elsewhere where it was."""

from __future__ import annotations

from typing import Any

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Prepared
from casewise.adapt.proposers import PreparedCase, proposer_of
from casewise.adapt.proposers.live import all_states
from casewise.core.records import Case, Trajectory


def readings_of(network: Backbone, prepared: Prepared, case: Case, how: Adaptation, source: Any = None) -> Trajectory:
    """Make every candidate of a case with one proposer."""
    with proposer_of(how).propose(PreparedCase(case, prepared, source), network) as states:
        return all_states(states)

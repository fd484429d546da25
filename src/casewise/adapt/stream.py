"""A stream of cases: weights and the state of an objective are carried from case to case, as in continual adaptation.

M0 of every case is predicted with the source weights, so that each case can be judged alone and rolled back. The
stream itself continues as in its paper; a rollback changes the mask that is deployed, not the stream.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone, Prepared
from casewise.adapt.episode import Episode
from casewise.adapt.proposers import PreparedCase
from casewise.adapt.proposers.gradient import episode_of
from casewise.core.errors import BadInput
from casewise.core.records import Case


class CaseStream:
    """Gradient episodes over cases in a fixed order; a context manager that restores the network bit by bit.

    Args:
        network: The model.
        how: Options of a gradient objective; ``how.steps`` updates are made on every case.

    Raises:
        BadInput: If the objective makes no gradient updates.
    """

    def __init__(self, network: Backbone | nn.Module, how: Adaptation) -> None:
        if not how.is_gradient:
            raise BadInput(
                f"{how.objective} makes no updates, so there are no weights to carry from case to case; use reset=case"
            )
        self.network, self.how = network, how
        self._episode: Episode | None = None

    def next(self, case: Case, prepared: Prepared) -> Episode:
        """Return the episode of the next case, with M0 predicted."""
        try:
            if self._episode is None:
                self._episode = episode_of(PreparedCase(case, prepared), self.network, self.how).__enter__()
            else:
                self._episode.next_case(prepared.inputs, case.id, forward=prepared.forward, predict=prepared.predict)
        except BaseException:
            self.restart()
            raise
        return self._episode

    def restart(self) -> None:
        """Restore the network, so that the next case starts from the source, for example after a case that failed."""
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.__exit__(None, None, None)

    def __enter__(self) -> CaseStream:
        return self

    def __exit__(self, *error: Any) -> None:
        self.restart()

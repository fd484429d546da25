"""The gradient proposer: states after one update of an objective, two updates, and so on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from casewise.adapt.adaptation import Adaptation
from casewise.adapt.backbones import Backbone
from casewise.adapt.episode import Episode
from casewise.adapt.objectives import objective_of
from casewise.adapt.proposers import PreparedCase, bind
from casewise.adapt.snapshot import evaluating
from casewise.core.errors import BadInput
from casewise.core.records import Binding


@dataclass(frozen=True)
class Gradient:
    """Updates of a gradient objective, such as TENT; state k is the mask after update k."""

    how: Adaptation

    @property
    def name(self) -> str:
        """Class of the objective; a function or an object without fields by its address."""
        objective = objective_of(self.how.objective)
        return type(objective).__name__ if _has_plain_fields(objective) else repr(objective)

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of updates."""
        return self.how.steps

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Bind a policy to the model, the objective with its options, the loader and the measure."""
        how, objective = self.how, objective_of(self.how.objective)
        parameters = how.parameters if isinstance(how.parameters, str) else list(how.parameters)
        options: dict[str, Any] = {
            **(asdict(objective) if _has_plain_fields(objective) else {}),  # type: ignore[call-overload]
            "learning_rate": how.rate(how.built()),
            "parameters": parameters,
            "modulation": how.modulation,
            "risk": None if how.modulation is None or how.statistics is None else asdict(how.statistics),
            "batch_statistics": "" if how.batch_statistics == "source" else how.batch_statistics,
            "reset": "" if how.reset == "case" else how.reset,
        }
        return bind(self, how, network, options)

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> Episode:
        """Return the episode of one case."""
        if self.how.reset == "stream":
            raise BadInput(
                "candidates of a stream depend on earlier cases, so they cannot be made for a single case; use "
                "reset='case'"
            )
        return episode_of(case, network, self.how)


def episode_of(case: PreparedCase, network: Backbone | nn.Module, how: Adaptation) -> Episode:
    """Return the episode of one case; M0 is not predicted again where it is known."""
    predict = case.prepared.predict
    own = network if isinstance(network, nn.Module) else network.network
    if predict is not None and case.source is not None:
        with evaluating(own):
            predict = case.source.first(predict)
    return Episode(
        own, case.prepared.inputs, how, case_id=case.case.id, forward=case.prepared.forward, predict=predict,
        head=None if isinstance(network, nn.Module) else network.head, before_forward=case.before_forward,
    )  # fmt: skip


def _has_plain_fields(objective: Any) -> bool:
    """True for a dataclass whose fields JSON can hold."""
    plain = (str, int, float, bool, type(None))
    return is_dataclass(objective) and all(isinstance(getattr(objective, one.name), plain) for one in fields(objective))

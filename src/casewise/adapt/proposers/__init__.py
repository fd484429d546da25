"""Proposers: each makes an ordered list of candidate masks for a case, all against the same M0.

A proposer is named by a text. ``proposer_of`` finds its class by the first word; each kind is one file with the same
interface, :class:`Proposer`:

    tent                    gradient.py   updates of an objective
    views:mri               views.py      forward passes of the frozen network under transformed inputs
    members:FOLDER          members.py    other models
    tuned                   tuned.py      weights that were learned from labels
    imported:FOLDER         imported.py   masks that lie in files
    package.module:method   imported.py   masks that a function (network, image) -> list of masks returns
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from casewise.archive.layout import measure_words
from casewise.core.errors import BadInput, UnknownName
from casewise.core.records import Binding, Case, check_ladder
from casewise.core.registry import from_address

if TYPE_CHECKING:
    from torch import Tensor, nn

    from casewise.adapt.adaptation import Adaptation
    from casewise.adapt.backbones import Backbone, Prepared
    from casewise.adapt.episode import Episode
    from casewise.adapt.forward_episode import ForwardEpisode, SharedSource

ARRAYS = "array"  # loader of a bare network: its caller makes the arrays


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """One case, ready for a proposer.

    Args:
        case: The case.
        prepared: The case after the preprocessing of the model.
        source: M0, where it is shared with other proposers.
        before_forward: Called before every forward pass; may raise to stop the case.
    """

    case: Case
    prepared: Prepared
    source: SharedSource | None = None
    before_forward: Callable[[], None] | None = None


States: TypeAlias = "Episode | ForwardEpisode"
"""The states of one case, as a context manager that restores the network at the end."""

AnyMethod = Callable[["nn.Module", "Tensor"], Sequence[Any]]
"""A function of the user's own: (network, image) -> list of masks."""


class Proposer(Protocol):
    """Makes candidates for a case. Frozen; its options are an :class:`~casewise.adapt.adaptation.Adaptation`."""

    @property
    def name(self) -> str:
        """Name of the proposer, such as "Tent" or "views"."""

    def states(self, network: Backbone | nn.Module) -> int:
        """Return the number of states after M0."""

    def binding(self, network: Backbone | nn.Module) -> Binding:
        """Return the binding of a policy that was fitted on these candidates."""

    def propose(self, case: PreparedCase, network: Backbone | nn.Module) -> States:
        """Return the states of one case, as a context manager that restores the network."""


def bind(proposer: Proposer, how: Adaptation, network: Backbone | nn.Module, options: dict[str, Any]) -> Binding:
    """Return the binding of a proposer to a model; options without a value (None, "", empty) are left out."""
    from torch import nn

    from casewise.adapt.snapshot import fingerprint

    measure = measure_words(min_area=how.min_area, foreground=how.foreground)
    said = {name: value for name, value in options.items() if value not in (None, "", [], {}, False)}
    if isinstance(network, nn.Module):
        return Binding(fingerprint(network), proposer.name, ARRAYS, measure, said)
    return Binding(network.fingerprint, proposer.name, network.loader, measure, said)


FORWARD_ONLY = ("views", "running", "members", "tuned", "tuned+views", "imported")
"""First words of proposers that make no gradient updates."""


def proposer_of(how: Adaptation) -> Proposer:
    """Return the proposer that the objective of an adaptation names."""
    from casewise.adapt.proposers.gradient import Gradient
    from casewise.adapt.proposers.imported import Imported, MethodMasks
    from casewise.adapt.proposers.members import Members
    from casewise.adapt.proposers.tuned import Tuned, TunedViews
    from casewise.adapt.proposers.views import Views

    kind, _, rest = (how.objective if isinstance(how.objective, str) else "").partition(":")
    if kind in ("views", "running"):
        return Views(how, rest, running=kind == "running")
    if kind in FORWARD_ONLY:
        classes = {"members": Members, "tuned": Tuned, "tuned+views": TunedViews, "imported": Imported}
        found: Proposer = classes[kind](how, rest)
        return found
    method = method_of(how.objective)
    return Gradient(how) if method is None else MethodMasks(how, method)


def is_gradient(objective: Any) -> bool:
    """True if an objective makes gradient updates; False for forward passes and for functions that return masks."""
    if isinstance(objective, str) and objective.partition(":")[0] in FORWARD_ONLY:
        return False
    return method_of(objective) is None


def method_of(objective: Any) -> AnyMethod | None:
    """Return the objective if it is a function (network, image); None for every other objective."""
    found = objective
    if isinstance(objective, str):
        kind, colon, rest = objective.partition(":")
        if not colon or kind in FORWARD_ONLY:
            return None
        try:
            found = from_address(objective, "objective")
        except BadInput as error:
            close = difflib.get_close_matches(kind.lower(), FORWARD_ONLY, n=1, cutoff=0.7)
            if close and isinstance(error.__cause__, ImportError) and error.__cause__.name in (kind, None):
                raise UnknownName(f"no method is called '{objective}'. Did you mean '{close[0]}:{rest}'?") from error
            raise
    from casewise.adapt.objective import Objective, required_arguments

    if inspect.isclass(found) or not callable(found) or isinstance(found, Objective):
        return None
    try:
        return found if len(required_arguments(found)) == 2 else None
    except (TypeError, ValueError):  # callables without a signature
        return None


def named_proposal(text: str) -> tuple[str, str]:
    """Split a proposal into the name of its ladder and the proposal itself.

    >>> named_proposal("views:mri"), named_proposal("best=views:gamma(1.4)")
    (('views-mri', 'views:mri'), ('best', 'views:gamma(1.4)'))
    """
    name, found, proposal = text.partition("=")
    if found and re.fullmatch(r"[\w.+-]+", name):
        return check_ladder(name), proposal
    made = re.sub(r"[^a-z0-9_+.-]+", "-", text.lower()).strip("-.+_")[:64]
    if not made:
        raise BadInput(f"{text!r} is not a proposer; write tent, views:mri, members:FOLDER or NAME=PROPOSER")
    return check_ladder(made), text

"""GraTa's alignment as a signal: do entropy and consistency pull the same way? (C9)"""

from __future__ import annotations

from casewise.adapt.displacement import cosine
from casewise.adapt.objective import Adaptable
from casewise.adapt.objectives.grata import Grata


def grata_cosine(subject: Adaptable) -> float:
    r"""Cosine of the entropy gradient at theta and the consistency gradient at theta - (entropy gradient).

    For comparison only: two backwards and eight forwards (six without a graph; one because it uses up the forward that
    the next update would have used again), and gradients, which a deployed controller never sees. Weights and gradients
    are left as they were found.
    """
    found = {name: parameter.grad for name, parameter in subject.parameters.items()}
    ahead, along, _ = Grata().gradient_pair(subject)
    for name, parameter in subject.parameters.items():
        parameter.grad = found[name]
    return cosine(ahead, along)

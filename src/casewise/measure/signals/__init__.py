"""Label-free signals of one step: names, meaning, direction of risk, and cost.

``SIGNALS`` is the list. A signal of your own is one file and one line in it: ``of=`` a function of M0's mask and the
step's mask, or ``probe=`` a function of the running episode in ``adapt/probes/``. Names are the same everywhere: in a
trajectory, in an archive's columns, on the command line. A signal that cannot be computed is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from casewise.core.errors import UnknownName
from casewise.core.records import Mask
from casewise.core.registry import Registry


@dataclass(frozen=True)
class SignalInfo:
    """A registered signal: meaning, direction of risk (C12) and cost in passes (C13)."""

    name: str
    meaning: str
    higher_is_riskier: bool
    forwards: int = 0  # forward passes beyond the prediction M_k, a plain one for comparison among them
    backwards: int = 0  # backward passes; gradient_norm shares the one that takes the step
    of: Callable[[Mask, Mask], float | None] | None = None  # read from M0's mask and the step's mask alone
    probe: str = ""  # module below casewise.adapt with a function of this name, which reads the signal when asked for


_PERTURBATIONS = "probes.perturbations"
_SIGNALS = (
    SignalInfo("regions", "components of D of at least min_area voxels, n_reg", True),
    SignalInfo("delta", "share of all voxels that changed, |D|/|Omega|", True),
    SignalInfo("area", "voxels that changed, |D|", True),
    SignalInfo("effective_regions", "(sum |R|)^2 / sum |R|^2 over all components", True),
    SignalInfo("largest_share", "share of D in its largest component", False),
    SignalInfo("singleton_share", "share of D in components of one voxel", True),
    SignalInfo("delta_foreground", "|D| divided by the foreground of M0", True),
    SignalInfo("largest", "voxels of the largest component of D", True),
    SignalInfo("entropy", "mean entropy of M_k over all voxels, in nats", True),
    SignalInfo("msp", "mean largest softmax probability of M_k over all voxels", False),
    SignalInfo("entropy_on_d", "mean entropy of M_k over D, in nats", True),
    SignalInfo("gradient_norm", "L2 norm of the gradient that took the step", True, 0, 1),
    SignalInfo("grata_cosine", "cosine of entropy and consistency gradient", False, 8, 2, probe="objectives.grata"),
    SignalInfo("augmentation_disagreement", "1 - agreement under 8 augmentations", True, 9, probe=_PERTURBATIONS),
    SignalInfo("dropout_disagreement", "1 - agreement under dropout", True, 9, probe=_PERTURBATIONS),
    SignalInfo("agreement", "mean class Dice with the other candidates, without pairs of empty masks", False),
    SignalInfo("likeness", "mean class Dice with the other candidates; two empty masks count 1", False),
    SignalInfo("agreement_source", "mean class Dice with M0", False),
    SignalInfo("agreement_all", "mean over all pairs of candidates of their mean class Dice", False),
    SignalInfo("weighted_agreement", "agreement_all times the certainty of the votes on foreground", False),
    SignalInfo("support", "share of the other candidates that hold the new label, mean over D", False),
)
SIGNALS: Registry[SignalInfo] = Registry("signal", {info.name: info for info in _SIGNALS})
"""Every signal by name, in the order in which tables print them."""

FROM_MASKS = "fragmentation"
"""Name of the common cost of all signals that are computed from masks and entropies, without a further pass."""

REGION_SCORES = "drop"
"""The region gate's scores of step 1: ``drop``, then ``drop.0``, ``drop.1``, ... of each region; no table column."""


def of_masks(source: Mask, adapted: Mask) -> dict[str, float | None]:
    """Return every signal that is a function of the two masks; fragmentation is measured together elsewhere."""
    return {name: info.of(source, adapted) for name, info in SIGNALS.items() if info.of is not None}


def check_registered(names: Iterable[str]) -> None:
    """Refuse a signal that is not registered, because tables and analyses could not describe it."""
    for name in names:
        if name not in SIGNALS and name.partition(".")[0] != REGION_SCORES:
            raise UnknownName(
                f"signal {name!r} was recorded but is not registered; add a line to SIGNALS "
                f"(measure/signals/__init__.py), or pass it as your own function"
            )

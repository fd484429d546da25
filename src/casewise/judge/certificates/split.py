r"""A promise where weights were learned from labels: learn and choose on some patients, certify on the others.

Out-of-fold candidates are good enough for choices and estimates. No theorem holds for them, because the weights of one
fold were trained on the patients of the others. A promise therefore comes from patients B that took no part in
training, fitting or choosing. Everything is frozen after learning on the patients A, and the cut is

.. math:: \hat c = \max\Big\{c : \frac{1 + \sum_{p \in B} L_p(c)}{n_B + 1} \le \alpha\Big\}, \qquad
          L_p(c) = \mathrm{mean\ or\ max}_{i \in p}\ \ell_i\, 1[u_i < c],

which is conformal risk control with patients as units, so the expected loss of a new patient is at most alpha. A case
is rolled back to M0 where its coordinate u (the size of the edit) reaches the cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from casewise.archive.store import Archive
from casewise.core.errors import TooFewCases
from casewise.core.records import Policy
from casewise.core.seeds import RESAMPLING_SEED
from casewise.core.text import UNIT
from casewise.data.splits import cluster_of
from casewise.judge.calibration.adoption import patients_for_chance
from casewise.judge.certificates.certificate import Certificate
from casewise.judge.certificates.certify_router import Promise, certify_router
from casewise.judge.certificates.risk_control import patients_needed

FEWEST_LEARNING = patients_for_chance()  # with fewer patients no design passes the tests, so M0 stays


@dataclass(frozen=True)
class PromiseSplit:
    """Patients that learn and choose, and patients that certify."""

    learning: tuple[str, ...]
    certifying: tuple[str, ...]
    alpha: float

    @property
    def tolerated(self) -> float:
        """The summed loss of the certifying patients that still certifies: alpha (n + 1) - 1."""
        return max(0.0, self.alpha * (len(self.certifying) + 1) - 1)

    def sentence(self) -> str:
        """Return the cost of the promise, as a sentence."""
        return (
            f"{len(self.learning)} {UNIT[1]} are for learning and choosing, {len(self.certifying)} only for the test "
            f"of the promise (a risk of at most {self.alpha:g}). If their risks add up to more than "
            f"{self.tolerated:.2g}, large changes will not be used. Without --promise all {UNIT[1]} would be for "
            "learning, and the gain would be an estimate"
        )


def smallest_promise(patients: int) -> float | None:
    """Return the smallest alpha, to two digits, that leaves enough patients to learn from; None if none does."""
    certifying = patients - FEWEST_LEARNING
    return math.ceil(100 / (certifying + 1)) / 100 if certifying > 0 else None


def split_for_promise(patients: Iterable[str], alpha: float) -> PromiseSplit:
    """Set aside the patients that a promise needs; the others learn and choose.

    1/alpha - 1 patients certify with no harm among them, and 1/alpha more for each whole patient that may be harmed.
    As many are set aside as that takes, up to half of all. They are drawn at random, without any label.

    Args:
        patients: Names of the labelled patients; repeated names count once.
        alpha: The risk that is to be promised.

    Returns:
        The patients for learning and those for certifying.

    Raises:
        TooFewCases: Fewer than :data:`FEWEST_LEARNING` patients would remain for learning.

    Example:
        >>> split = split_for_promise([f"p{k}" for k in range(20)], 0.1)
        >>> len(split.learning), len(split.certifying)
        (11, 9)
    """
    names = sorted({str(name) for name in patients})
    needed = patients_needed(alpha)
    if len(names) - needed < FEWEST_LEARNING:
        least = smallest_promise(len(names))
        less = "" if least is None else f"promise {least:g}, the smallest with {len(names)}, "
        raise TooFewCases(
            f"a promise of at most {alpha:g} needs {needed + FEWEST_LEARNING} labelled {UNIT[1]} ({needed} to certify "
            f"it and {FEWEST_LEARNING} to learn and choose), got {len(names)}. Label more, {less}or leave "
            "the promise out: then all of them learn and the gain is an estimate"
        )
    more = round(1 / alpha)
    while needed + more <= min(len(names) // 2, len(names) - FEWEST_LEARNING):
        needed += more
    aside = np.random.default_rng(RESAMPLING_SEED).permutation(len(names))[:needed]
    return PromiseSplit(
        tuple(name for k, name in enumerate(names) if k not in aside), tuple(names[k] for k in sorted(aside)), alpha
    )


def certify_held_out(
    archive: Archive, policy: Policy, split: PromiseSplit, *, loss: str = "harmed", margin: float = 0.01
) -> tuple[Certificate, Policy]:
    """Certify a policy that was learned on ``split.learning`` with the patients of ``split.certifying``.

    Args:
        archive: The recorded cases of both; only those of the certifying patients are read.
        policy: The frozen policy after learning and choosing.
        split: The patients for learning and those for certifying.
        loss: ``"harmed"``, ``"ha"``, ``"dice"`` or ``"worse-voxels"``.
        margin: For ``"harmed"``: the loss of the metric from which a case counts as harmed.

    Returns:
        The certificate and the policy that it holds for. The loss of a patient is the mean over the patient's cases.

    Raises:
        Overlap: A certifying patient took part in learning.
    """
    asked = Promise((loss,), (split.alpha,), margin=margin if loss == "harmed" else 0.0)
    ids = [name for name, entry in archive.entries.items() if cluster_of(entry) in set(split.certifying)]
    return certify_router(archive.select(ids=ids), policy, asked)

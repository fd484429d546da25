"""The region gate (T1, T5): the paper's surrogate, the harm that is really deployed, and the envelope between them.

A region is accepted iff its score > threshold (right-continuous); a higher threshold accepts less. The surrogate
divides by the un-gated edit and falls with the threshold; the deployed HA divides by what was accepted and does not,
so a certificate on the surrogate says nothing about it (L9). The envelope of the deployed HA, per case, does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from casewise.core.errors import BadInput
from casewise.judge.certificates.loss_table import Floats, LossTable, cluster_rows


@dataclass(frozen=True, eq=False)
class Gated:
    """One case's scored regions, and what deploying each prefix of them would cost."""

    scores: Floats  # distinct scores of the case's regions, descending
    surrogate: Floats  # (1 + scores): L4 with nothing accepted, then with all regions of score >= scores[j - 1]
    deployed: Floats  # (1 + scores): HA of the gated mask, same positions
    kept: Floats  # (1 + scores): share of the case's region area that is accepted

    def __post_init__(self) -> None:
        rungs = len(self.scores) + 1
        if not len(self.surrogate) == len(self.deployed) == len(self.kept) == rungs:
            raise BadInput(f"a gated case with {rungs - 1} scores needs {rungs} losses, got {len(self.surrogate)}")
        if (np.diff(self.scores) >= 0).any() or self.surrogate[0] or self.deployed[0]:
            raise BadInput("scores must fall strictly and accepting nothing must cost nothing")


def gated(scores: Floats, sizes: Floats, harmful: Floats, area: int) -> Gated:
    r"""A case from its regions.

    .. math:: L(\lambda) = \sum_{harmful, s > \lambda} |R| / |D_{max}| \quad (L4), \qquad
              HA(\lambda) = \sum_{harmful, s > \lambda} |R| / |D(\lambda)| \quad (L9)

    ``deployed`` is exact when regions are compared as labels and sub-threshold voxels revert (the default of L3);
    for binarized HA the archive layer measures the gated mask itself.
    """
    order = np.argsort(-np.asarray(scores, dtype=float), kind="stable")
    falling, area_by_score = np.asarray(scores, dtype=float)[order], np.cumsum(sizes[order])
    last = np.flatnonzero(np.append(falling[1:] < falling[:-1], True)) if len(falling) else np.empty(0, int)
    accepted = np.concatenate([[0.0], area_by_score[last]])
    harm = np.concatenate([[0.0], np.cumsum((sizes * harmful)[order])[last]])
    deployed = np.divide(harm, accepted, out=np.zeros_like(harm), where=accepted > 0)
    return Gated(falling[last], harm / max(area, 1), deployed, accepted / max(accepted[-1], 1.0))


def thresholds(cases: Sequence[Gated]) -> Floats:
    """Exact jump points: the distinct calibration scores descending, then minus infinity (L5)."""
    scores = [case.scores for case in cases if len(case.scores)]
    return np.append(np.unique(np.concatenate(scores))[::-1], -np.inf) if scores else np.array([-np.inf])


def rungs(case: Gated, at: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """How many of the case's distinct scores lie strictly above each threshold."""
    return np.searchsorted(-case.scores, -at, side="left")


def gate_table(
    cases: Sequence[Gated],
    loss: str,
    *,
    at: Floats | None = None,
    clusters: Sequence[Hashable] | None = None,
    within: str = "mean",
) -> LossTable:
    """Losses per threshold, most cautious first: 'surrogate' (T1), 'deployed' (not monotone) or 'envelope' (T5).

    ``at`` replaces the exact jump points by thresholds that were fixed in advance.
    """
    if loss not in ("surrogate", "deployed", "envelope"):
        raise BadInput(f"a gate's loss is 'surrogate', 'deployed' or 'envelope', got {loss!r}")
    at = thresholds(cases) if at is None else np.sort(np.asarray(at, dtype=float))[::-1]
    steps = [rungs(case, at) for case in cases]
    rows = np.stack([_curve(case, loss)[step] for case, step in zip(cases, steps, strict=True)])
    kept = np.stack([case.kept[step] for case, step in zip(cases, steps, strict=True)])
    return LossTable(cluster_rows(rows, clusters, within), at, kept.mean(axis=0))


def envelope(curve: Floats) -> Floats:
    r""":math:`\tilde L(\lambda) = \max_{\lambda' \ge \lambda} HA(\lambda')` of one case: monotone, at least HA (T5)."""
    return np.maximum.accumulate(curve)


def _curve(case: Gated, loss: str) -> Floats:
    if loss == "surrogate":
        return case.surrogate
    return case.deployed if loss == "deployed" else envelope(case.deployed)

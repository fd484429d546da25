"""The case-level rollback cut (C2-C4): here the deployed harm is monotone in the cut, so CRC certifies it directly."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from casewise.core.errors import BadInput
from casewise.judge.certificates.loss_table import Floats, LossTable, check_losses, cluster_rows


def rollback_table(
    values: ArrayLike, losses: ArrayLike, *, clusters: Sequence[Hashable] | None = None, within: str = "mean"
) -> LossTable:
    r"""Losses :math:`L_i(c) = h_i 1[u_i < c]` at every jump point c: the distinct values ascending, then infinity.

    ``values`` are the calibration coordinates u, ``losses`` the loss h of the action that is deployed if the case is
    kept. A case is rolled back iff u >= c, so the first cut keeps nothing and the last keeps everything.

    >>> rollback_table([1.0, 2.0], [0.5, 1.0]).losses
    array([[0. , 0.5, 0.5],
           [0. , 0. , 1. ]])
    """
    u, h = np.asarray(values, dtype=float), check_losses(losses)
    if u.ndim != 1 or u.shape != h.shape or not np.isfinite(u).all():
        raise BadInput(f"need one finite coordinate and one loss a case, got shapes {u.shape} and {h.shape}")
    cuts = np.append(np.unique(u), np.inf)
    kept = u[:, None] < cuts[None, :]
    return LossTable(cluster_rows(h[:, None] * kept, clusters, within), cuts, kept.mean(axis=0))


def policy_envelope(*losses: ArrayLike) -> Floats:
    """The worst of the actions that a kept case may get (2.3 b): valid wherever the low/mid cut falls."""
    return np.asarray(np.max(np.stack([check_losses(loss) for loss in losses]), axis=0))

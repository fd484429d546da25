"""What every certificate reads: the loss of each independent unit under each setting, from the safest setting on.

For a rollback cut the deployed harm is monotone in the cut, so conformal risk control certifies it directly.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from casewise.core.errors import BadInput

Floats = NDArray[np.float64]
ACCEPT = 1e-12  # a bound equal to alpha is valid; rounding must not reject it


@dataclass(frozen=True, eq=False)
class LossTable:
    """Losses in [0, 1] of n units (rows) under m settings (columns), the most conservative setting first."""

    losses: Floats  # (unit, setting)
    settings: Floats  # (setting,): rollback cuts ascending, or gate thresholds descending
    kept: Floats  # (setting,): share of cases (or regions) that each setting keeps, label-free

    def __post_init__(self) -> None:
        units, settings = np.shape(self.losses) if np.ndim(self.losses) == 2 else (0, 0)
        if not units or settings != len(self.settings) or settings != len(self.kept):
            raise BadInput(
                f"a loss table needs n >= 1 rows and one column a setting, got shape {np.shape(self.losses)} "
                f"for {len(self.settings)} settings and {len(self.kept)} kept shares"
            )
        check_losses(self.losses)

    @property
    def units(self) -> int:
        """The n of every bound: independent units, that is clusters (patients), not volumes."""
        return len(self.losses)

    @property
    def risks(self) -> Floats:
        """Empirical risk of each setting."""
        return np.asarray(self.losses.mean(axis=0))

    @property
    def is_monotone(self) -> bool:
        """Whether no unit's loss falls as settings get more permissive: what CRC needs."""
        return bool((np.diff(self.losses, axis=1) >= 0).all())


def check_losses(losses: ArrayLike) -> Floats:
    """Refuse losses outside [0, 1] or not finite: every bound here assumes the range."""
    array = np.asarray(losses, dtype=float)
    if array.size and not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
        raise BadInput("losses must be finite and in [0, 1]; drop undefined cases or rescale before certifying")
    return array


def check_level(name: str, level: float) -> float:
    """Refuse a promised risk or failure chance outside (0, 1)."""
    if not 0 < level < 1:
        raise BadInput(f"{name} must lie strictly between 0 and 1, got {level}")
    return float(level)


def cluster_rows(losses: Floats, clusters: Sequence[Hashable] | None, within: str = "mean") -> Floats:
    """One row per cluster: the mean (or the worst) of its cases, so that rows are exchangeable.

    Two volumes of one patient are not exchangeable with two volumes of two patients; patients are. A mean or a
    maximum of monotone losses in [0, 1] is again one, so the same certificate holds per patient with n = patients.
    """
    if within not in ("mean", "max"):
        raise BadInput(f"within a cluster losses are joined by 'mean' or 'max', got {within!r}")
    if clusters is None:
        return losses
    if len(clusters) != len(losses):
        raise BadInput(f"need one cluster per case, got {len(clusters)} clusters for {len(losses)} cases")
    names, number = np.unique(np.asarray([str(name) for name in clusters]), return_inverse=True)
    join = np.mean if within == "mean" else np.max
    return np.stack([join(losses[number == k], axis=0) for k in range(len(names))])


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
        raise BadInput(f"need one finite coordinate and one loss per case, got shapes {u.shape} and {h.shape}")
    cuts = np.append(np.unique(u), np.inf)
    kept = u[:, None] < cuts[None, :]
    return LossTable(cluster_rows(h[:, None] * kept, clusters, within), cuts, kept.mean(axis=0))


def policy_envelope(*losses: ArrayLike) -> Floats:
    """The worst of the actions that a kept case may get (2.3 b): valid wherever the low/mid cut falls."""
    return np.asarray(np.max(np.stack([check_losses(loss) for loss in losses]), axis=0))

"""Cut-points from the step-1 coordinate of calibration cases, by a convention that is named and never inferred (F1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from casewise.core.errors import BadInput, DegenerateStatistic, DegenerateTertiles, NotFinite, TooFewCases
from casewise.core.registry import Registry

Floats = NDArray[np.float64]
FEWEST = 5
"""Calibration cases below which nothing is fitted: the smallest set that the paper examined (K1)."""


@dataclass(frozen=True)
class Percentiles:
    """Two percentiles with linear interpolation."""

    low: float
    high: float

    def cuts(self, values: Floats) -> Floats:
        """(cut_low, cut_high) along the last axis of the values; shape (2, ...)."""
        return np.asarray(np.percentile(values, [self.low, self.high], axis=-1), dtype=np.float64)


@dataclass(frozen=True)
class Rank:
    """Roll back iff the rank among calibration cases and the case itself exceeds ceil(2 (n + 1) / 3) (S12).

    Under exchangeability a case is then rolled back with probability at most 1/3, exactly, at every n.
    """

    def cuts(self, values: Floats) -> Floats:
        """(cut_low, cut_high) along the last axis; the same kind of rank at 1/3 for cut_low."""
        ordered = np.sort(values, axis=-1)
        cases = ordered.shape[-1]
        low = ordered[..., math.ceil((cases + 1) / 3) - 1]
        rank = math.ceil(2 * (cases + 1) / 3)
        high = np.nextafter(ordered[..., rank - 1], np.inf) if rank <= cases else np.full(low.shape, np.inf)
        return np.stack([low, high])


CONVENTIONS: Registry[Percentiles | Rank] = Registry(
    "percentile convention",
    {"medical": Percentiles(33.33, 66.67), "driving": Percentiles(33, 66), "rank": Rank()},
)


def cut_points(values: Sequence[float] | Floats, convention: str = "medical") -> tuple[float, float]:
    """(cut_low, cut_high) of the calibration values.

    >>> cut_points([0] * 10 + [1] * 6 + [2] * 4)
    (0.0, 1.0)
    """
    low, high = CONVENTIONS[convention].cuts(checked(values))
    return float(low), float(high)


def checked(values: Any, *, fewest: int = FEWEST, what: str = "cut-points") -> Floats:
    """Finite values of enough cases."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise BadInput(f"{what} are fitted on one value a case, got shape {array.shape}")
    if len(array) < fewest:
        raise TooFewCases(f"{what} need at least {fewest} calibration cases, got {len(array)}; record {fewest} or more")
    if not np.isfinite(array).all():
        raise NotFinite(f"{int((~np.isfinite(array)).sum())} of {len(array)} calibration values are not finite")
    return array


def buckets(values: Floats, cut_low: Any, cut_high: Any) -> NDArray[np.int8]:
    """0 low, 1 mid, 2 hard: value >= cut_high is hard, otherwise value > cut_low is mid (E6)."""
    return np.where(values >= cut_high, 2, np.where(values > cut_low, 1, 0)).astype(np.int8)


def bucket_counts(values: Floats, cut_low: float, cut_high: float) -> dict[str, int]:
    """Cases in each bucket."""
    counts = np.bincount(buckets(values, cut_low, cut_high), minlength=3)
    return {name: int(count) for name, count in zip(("low", "mid", "hard"), counts, strict=True)}


def warn_if_degenerate(coordinate: str, values: Floats, cut_low: float, cut_high: float, instead: str | None) -> None:
    """Refuse a coordinate without any spread; warn when a bucket of the calibration cases is empty (E9, S11)."""
    hint = f"; {instead!r} does not degenerate here" if instead else ""
    if np.ptp(values) == 0:
        raise DegenerateStatistic(
            f"{coordinate} is {values[0]:g} on all {len(values)} calibration cases, so one action would be taken "
            f"for every case; choose another coordinate{hint}"
        )
    counts = bucket_counts(values, cut_low, cut_high)
    if counts["hard"] == len(values):
        raise DegenerateStatistic(
            f"the tertiles of {coordinate} collapse to {cut_low:g} and {cut_high:g}, so all {len(values)} calibration "
            f"cases would roll back and adaptation would never be used; choose another coordinate{hint}"
        )
    empty = [name for name, count in counts.items() if not count]
    if empty or cut_low == cut_high:
        warnings.warn(
            f"the tertiles of {coordinate} degenerate: cut-points {cut_low:g} and {cut_high:g} leave "
            f"{' and '.join(empty) or 'mid'} empty on {len(values)} calibration cases{hint}",
            DegenerateTertiles,
            stacklevel=3,
        )

"""Small models that explain a decision: trees and a logistic regression.

Shallow decision trees over full-information losses: with every action known, fitting is a search (S5).

Logistic regression with a small ridge, by Newton's method: enough for a handful of standardized signals (S3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_THRESHOLDS = 15  # quantiles of each feature that are tried


@dataclass(frozen=True)
class Leaf:
    """Everybody here gets one action."""

    action: int

    def choose(self, features: Floats) -> Integers:
        """The action of every row."""
        return np.full(len(features), self.action)


@dataclass(frozen=True)
class Split:
    """Rows with feature <= threshold go left."""

    feature: int
    threshold: float
    left: Leaf | Split
    right: Leaf | Split

    def choose(self, features: Floats) -> Integers:
        """The action of every row."""
        goes_left = features[:, self.feature] <= self.threshold
        return np.where(goes_left, self.left.choose(features), self.right.choose(features))


Tree = Leaf | Split


def fit_tree(features: Floats, losses: Floats, *, depth: int, least: int = 5) -> Tree:
    """The tree of at most ``depth`` splits deep with the smallest total loss; leaves hold at least ``least`` cases.

    ``losses`` is (case, action). The search is exhaustive over 15 quantiles of each feature; ties go to the smaller
    action, feature and threshold.
    """
    candidates = _candidates(features)
    return _fitted(candidates, np.ones(len(losses)), losses, depth, least)[1]


def _candidates(features: Floats) -> list[tuple[int, float, Floats]]:
    """(feature, threshold, 1 where the row goes left)."""
    found = []
    for number, column in enumerate(features.T):
        for threshold in np.unique(np.quantile(column, np.linspace(0, 1, _THRESHOLDS + 2)[1:-1])):
            found.append((number, float(threshold), (column <= threshold).astype(np.float64)))
    return found


def _fitted(
    candidates: list[tuple[int, float, Floats]], member: Floats, losses: Floats, depth: int, least: int
) -> tuple[float, Tree]:
    totals = member @ losses
    best: tuple[float, Tree] = (float(totals.min()), Leaf(int(totals.argmin())))
    if depth == 0:
        return best
    if depth == 1:
        return _best_stump(candidates, member, losses, least, best)
    for feature, threshold, goes_left in candidates:
        left, right = member * goes_left, member * (1 - goes_left)
        if left.sum() < least or right.sum() < least:
            continue
        halves = [_fitted(candidates, half, losses, depth - 1, least) for half in (left, right)]
        total = halves[0][0] + halves[1][0]
        if total < best[0] - 1e-12:
            best = (total, Split(feature, threshold, halves[0][1], halves[1][1]))
    return best


def _best_stump(
    candidates: list[tuple[int, float, Floats]], member: Floats, losses: Floats, least: int, best: tuple[float, Tree]
) -> tuple[float, Tree]:
    """All splits at once: sums of losses left and right are two matrix products."""
    if not candidates:
        return best
    sides = np.stack([goes_left for _, _, goes_left in candidates]) * member
    left = sides @ losses
    right = member @ losses - left
    counts = sides.sum(axis=1)
    allowed = (counts >= least) & (member.sum() - counts >= least)
    total = np.where(allowed, left.min(axis=1) + right.min(axis=1), np.inf)
    number = int(total.argmin())
    if total[number] >= best[0] - 1e-12:
        return best
    feature, threshold, _ = candidates[number]
    leaves = Leaf(int(left[number].argmin())), Leaf(int(right[number].argmin()))
    return float(total[number]), Split(feature, threshold, *leaves)


@dataclass(frozen=True, eq=False)
class Logistic:
    """A fitted model: P(y = 1 | x) = 1 / (1 + exp(-(bias + w . (x - mean) / scale)))."""

    mean: Floats
    scale: Floats
    weights: Floats  # bias first

    def predict(self, features: Floats) -> Floats:
        """Probabilities of rows of features."""
        return _sigmoid(_design(features, self.mean, self.scale) @ self.weights)


def fit_logistic(features: Floats, target: Floats, *, ridge: float = 1.0, rounds: int = 50) -> Logistic:
    r"""Minimize :math:`-\sum \log p + \tfrac{\lambda}{2} \lVert w \rVert^2`, the bias unpenalized."""
    scale = features.std(axis=0)
    mean, scale = features.mean(axis=0), np.where(scale > 0, scale, 1.0)
    design = _design(features, mean, scale)
    penalty = np.diag([1e-6] + [ridge] * features.shape[1])
    weights = np.zeros(design.shape[1])
    for _ in range(rounds):
        p = _sigmoid(design @ weights)
        slope = design.T @ (p - target) + penalty @ weights
        curve = (design * (p * (1 - p))[:, None]).T @ design + penalty
        step = np.linalg.solve(curve, slope)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    return Logistic(mean, scale, weights)


def _design(features: Floats, mean: Floats, scale: Floats) -> Floats:
    return np.column_stack([np.ones(len(features)), (features - mean) / scale])


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -35, 35))))

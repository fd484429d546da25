"""Logistic regression with a small ridge, by Newton's method: enough for a handful of standardized signals (S3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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

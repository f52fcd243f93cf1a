"""A model of the objective: which of many proposed candidates are worth scoring.

A Gaussian process over the logarithms of the factors. A candidate costs a forward over 128k tokens for each document,
the model of all scored so far costs nothing beside that.
"""

import math
import sys
from collections.abc import Sequence

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.spatial.distance import cdist

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]

LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Length scales to choose from, in median distances between candidates."""
NOISES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 0.3)
"""Variances of what the model does not explain to choose from, in those of what it does."""
MOST = 300
"""Candidates it is fitted to, the best ones: more would slow it down and say little about where the best one lies."""


class Surrogate:
    """The fit to scored candidates; length scale and noise are those of the highest likelihood."""

    def __init__(self, features: Sequence[Sequence[float]], values: Sequence[float], documents: Sequence[int]) -> None:
        """`documents` are those each value was measured on: with fewer it is less certain.

        The worse half of the values counts as no worse than the median: how bad the bad ones are says nothing about
        the good ones.
        """
        known = np.array(values)
        best = np.argsort(known, kind="stable")[:MOST]
        self._features: Matrix = np.array(features)[best]
        known = known[best]
        finite = known[np.isfinite(known)]
        # What overflows is worse than all that does not.
        known = np.where(np.isfinite(known), known, finite.max() + 1 if len(finite) else 0.0)
        known = np.minimum(known, np.median(known))
        self._mean, self._spread = float(known.mean()), float(known.std()) or 1.0
        known = (known - self._mean) / self._spread
        uncertainty = max(documents) / np.array(documents)[best]
        distances = cdist(self._features, self._features)
        apart = distances[distances > 0]
        self._unit = float(np.median(apart)) if len(apart) else 1.0
        likeliest = -math.inf
        for length in LENGTHS:
            similarity = _similarity(distances, length * self._unit)
            for noise in NOISES:
                factor = cholesky(similarity + np.diag(noise * uncertainty), lower=True)
                weights = cho_solve((factor, True), known)
                variance = max(float(known @ weights) / len(known), sys.float_info.min)  # all may be alike
                likelihood = -0.5 * len(known) * math.log(variance) - float(np.log(np.diag(factor)).sum())
                if likelihood > likeliest:
                    likeliest = likelihood
                    self._length, self._factor, self._weights = length * self._unit, factor, weights
                    self._scale = math.sqrt(variance)

    def predict(self, features: Sequence[Sequence[float]]) -> tuple[Vector, Vector]:
        """Expected values of candidates, and their standard deviations."""
        similarity = _similarity(cdist(np.array(features), self._features), self._length)
        explained = solve_triangular(self._factor, similarity.T, lower=True)
        deviation = np.sqrt(np.maximum(1 - (explained**2).sum(axis=0), 0.0))
        return self._mean + self._spread * (similarity @ self._weights), self._spread * self._scale * deviation


def _similarity(distances: Matrix, length: float) -> Matrix:
    return np.exp(-0.5 * (distances / length) ** 2)

"""Positions of a long window for rows of a short one: a model meets far distances without long rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from longrope2.training.config import Positions

CURRICULUM = (0.0, 0.25, 0.5, 1.0, 1.0)
"""Randomized YaRN: the share of what lies beyond a row that each fifth of a run draws from (8k → 10, 12, 16, 16k)."""


@dataclass(frozen=True, kw_only=True)
class DrawnPositions:
    """Draws the positions of each document of a row; nothing but the row's number decides them."""

    how: Positions
    row_length: int
    target_length: int
    rows: int
    """Of the whole run."""
    seed: int

    def __call__(self, number: int, borders: Sequence[int]) -> NDArray[np.int64]:
        """For row `number` of the run, whose documents lie between `borders`."""
        rng = np.random.default_rng([self.seed, number, 1])  # the last keeps it apart from the order of rows
        part = CURRICULUM[min(len(CURRICULUM) * number // self.rows, len(CURRICULUM) - 1)]
        limit = self.row_length + round(part * (self.target_length - self.row_length))
        lengths = [stop - start for start, stop in pairwise(borders)]
        if self.how == "pose":
            return np.concatenate([skipping(length, self.target_length, rng) for length in lengths])
        return np.concatenate([scattered(length, limit, rng) for length in lengths])


def skipping(length: int, limit: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """PoSE with two chunks: the first from 0, at most a half; the second skips ahead, within `limit`."""
    positions = np.arange(length)
    first = rng.integers(1, (length + 1) // 2, endpoint=True)
    positions[first:] += rng.integers(0, limit - length, endpoint=True)
    return positions


def scattered(length: int, limit: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Randomized positions: any `length` of the first `limit`, in order."""
    return np.sort(rng.choice(limit, length, replace=False))

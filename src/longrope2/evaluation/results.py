"""Numbers with their sample counts and 95% intervals."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from longrope2.intervals import LARGEST_NLL, mean_of_means, student, wilson
from longrope2.shapes import misfit

if TYPE_CHECKING:
    from longrope2.perplexity import Score

RESULTS = "results.json"
AVERAGE = "average"
SCORE = {
    "suite": str, "task": str, "length": int | None, "metric": str, "score": float | None, "samples": int,
    "low": float | None, "high": float | None,
}  # fmt: skip
"""The shape of a number in results.json: see `Measured`."""
GRID = {"lengths": [int], "depths": [float], "cells": [[{"score": float, "samples": int}]]}
"""The shape of a grid there: a row of cells for each depth, a cell for each length."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """The samples behind a number, one by one: what two models made of the same questions can be paired."""

    asked: str
    """A hash of the questions."""
    values: tuple[float | None, ...]
    """Scores from 0 to 1, or documents' mean negative log-likelihoods; None where the perplexity overflows."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of a table."""

    suite: str
    task: str
    length: int | None
    """None where the suite has one length of its own."""
    metric: str
    score: float | None
    """In percent, except a perplexity; None where that overflows."""
    samples: int
    low: float | None
    high: float | None
    """The ends of the 95% interval; None for a single document."""
    each: Values | None = field(default=None, repr=False)
    """None for an average, and for a cell of a grid."""

    @property
    def place(self) -> str:
        """Where it belongs, in one word."""
        return f"{self.suite}/{self.task}/{self.length}"

    def to_json(self) -> dict[str, Any]:
        """As `scores` in results.json has it."""
        return {name: value for name, value in asdict(self).items() if name != "each"}


def digest(*parts: Any) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def grid_misfit(grid: Any) -> str | None:
    """What is wrong with a grid that was read from a file; None if nothing is."""
    if problem := misfit(grid, GRID):
        return problem
    if not grid["lengths"] or not grid["depths"]:
        return "a grid without lengths or depths"
    whole = [len(row) for row in grid["cells"]] == [len(grid["lengths"])] * len(grid["depths"])
    return None if whole else "cells are not as many as lengths and depths"


def accuracy(
    scores: Sequence[float], *, suite: str, task: str, length: int | None, metric: str, asked: str | None = None
) -> Measured:
    """The mean of scores between 0 and 1, in percent; `asked` is a hash of the questions."""
    each = None if asked is None else Values(asked=asked, values=tuple(scores))
    fields: Any = {"suite": suite, "task": task, "length": length, "metric": metric, "each": each}
    return _in_percent(sum(scores) / len(scores), len(scores), samples=len(scores), **fields)


def average(parts: Sequence[Measured]) -> Measured:
    """The plain mean over tasks, each of which counts the same."""
    scores = [part.score / 100 for part in parts if part.score is not None]
    assert len(scores) == len(parts)
    mean, count = mean_of_means(scores, [part.samples for part in parts])
    fields: Any = {"suite": parts[0].suite, "task": AVERAGE, "length": parts[0].length}
    samples = sum(part.samples for part in parts)
    return _in_percent(mean, count, samples=samples, metric=f"mean over {len(parts)} tasks", **fields)


def _in_percent(mean: float, count: float, **fields: Any) -> Measured:
    """A mean that is as sure as that of `count` scores."""
    low, high = wilson(mean, count)
    return Measured(score=100 * mean, low=100 * low, high=100 * high, **fields)


def perplexity(scores: "Sequence[Score]", *, suite: str, task: str, length: int, asked: str) -> Measured:
    """Each token counts the same; the interval is Student's, of the documents' mean log-likelihoods."""
    means = [score.nll / score.num_tokens for score in scores]
    ends = student(means)
    low, high = (None, None) if ends is None else (_finite_exp(end) for end in ends)
    return Measured(
        suite=suite,
        task=task,
        length=length,
        metric="perplexity",
        score=_finite_exp(sum(score.nll for score in scores) / sum(score.num_tokens for score in scores)),
        samples=len(scores),
        low=low,
        high=high,
        each=Values(asked=asked, values=tuple(mean if mean < LARGEST_NLL else None for mean in means)),
    )


def _finite_exp(value: float) -> float | None:
    return math.exp(value) if value < LARGEST_NLL else None


def with_averages(measured: Iterable[Measured]) -> list[Measured]:
    """The same, and for each length of a suite the mean over its tasks where there are several."""
    measured = list(measured)
    found: list[Measured] = []
    for _, group in groupby(measured, key=lambda part: (part.suite, part.length)):
        parts = list(group)
        found += parts
        if len(parts) > 1 and parts[0].metric != "perplexity":
            found.append(average(parts))
    return found

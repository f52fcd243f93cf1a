"""Numbers with their sample counts and 95% intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from longrope2.evaluation.samples import Sample, digest
from longrope2.intervals import LARGEST_NLL, mean_of_means, student, wilson
from longrope2.shapes import misfit

if TYPE_CHECKING:
    from longrope2.evaluation.engine import Engine
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
VALUES = {...: {"asked": str, "values": [float | None]}}
"""The shape of `values` there, by suite/task/length: see `Values`."""


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
    """The ends of the 95% interval; None where a single document cannot tell."""
    each: Values | None = field(default=None, repr=False)
    """None for an average, and for a cell of a grid."""

    @property
    def place(self) -> str:
        """Where it belongs, in one word."""
        return f"{self.suite}/{self.task}/{self.length}"

    def to_json(self) -> dict[str, Any]:
        """As `scores` in results.json has it."""
        return {name: value for name, value in asdict(self).items() if name != "each"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a suite found."""

    measured: list[Measured]
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers must know."""
    grid: dict[str, Any] | None = None
    """Scores by length and depth, for the heatmap."""


def grid_misfit(grid: Any) -> str | None:
    """What is wrong with a grid that was read from a file; None if nothing is."""
    if problem := misfit(grid, GRID):
        return problem
    if not grid["lengths"] or not grid["depths"]:
        return "a grid without lengths or depths"
    whole = [len(row) for row in grid["cells"]] == [len(grid["lengths"])] * len(grid["depths"])
    return None if whole else "cells are not as many as lengths and depths"


def values_misfit(values: Any) -> str | None:
    """What is wrong with `values` that were read from a file; None if nothing is."""
    if problem := misfit(values, VALUES, "values"):
        return problem
    for place, found in values.items():
        most = LARGEST_NLL if place.startswith("perplexity/") else 1
        if any(value is not None and not 0 <= value <= most for value in found["values"]):
            return f"values.{place} must lie from 0 to {most}"
    return None


def accuracy(
    scores: Sequence[float], *, suite: str, task: str, length: int | None, metric: str, asked: str | None = None
) -> Measured:
    """The mean of scores between 0 and 1, in percent; `asked` is a hash of the questions."""
    mean = sum(scores) / len(scores)
    low, high = wilson(mean, len(scores))
    return Measured(
        suite=suite,
        task=task,
        length=length,
        metric=metric,
        score=100 * mean,
        samples=len(scores),
        low=100 * low,
        high=100 * high,
        each=None if asked is None else Values(asked=asked, values=tuple(scores)),
    )


def average(parts: Sequence[Measured]) -> Measured:
    """The plain mean over tasks, each of which counts the same."""
    scores = [part.score / 100 for part in parts if part.score is not None]
    assert len(scores) == len(parts)
    mean, count = mean_of_means(scores, [part.samples for part in parts])
    low, high = wilson(mean, count)
    return Measured(
        suite=parts[0].suite,
        task=AVERAGE,
        length=parts[0].length,
        metric=f"mean over {len(parts)} tasks",
        score=100 * mean,
        samples=sum(part.samples for part in parts),
        low=100 * low,
        high=100 * high,
    )


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


def answered(samples: Sequence[Sample], engine: "Engine", label: str) -> list[float]:
    """Run samples and score the answers."""
    scores = []
    for sample, answer in zip(samples, engine.answers(samples, label), strict=True):
        assert sample.score is not None
        scores.append(sample.score(answer, sample.references))
    return scores


def by_task(samples: Sequence[Sample], scores: Sequence[float], metrics: dict[str, str] | str) -> list[Measured]:
    """One number for each task and length, in the order of the samples."""
    found: list[Measured] = []
    pairs = list(zip(samples, scores, strict=True))
    for (suite, task, length), group in groupby(pairs, key=lambda pair: (pair[0].suite, pair[0].task, pair[0].length)):
        metric = metrics if isinstance(metrics, str) else metrics[task]
        own, answers = zip(*group, strict=True)
        asked = digest([sample.digest() for sample in own])
        found.append(accuracy(answers, suite=suite, task=task, length=length, metric=metric, asked=asked))
    return found


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

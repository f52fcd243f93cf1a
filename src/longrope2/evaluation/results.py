"""Numbers with their sample counts and 95% intervals."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from longrope2.intervals import LARGEST_NLL, mean_of_means, student, wilson
from longrope2.records import Cell, Measured, Values

if TYPE_CHECKING:
    from longrope2.perplexity import Score

RESULTS = "results.json"
AVERAGE = "average"


def digest(*parts: Any) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def cell(scores: Sequence[float]) -> Cell:
    """The mean of scores between 0 and 1, in percent."""
    return _in_percent(sum(scores) / len(scores), len(scores), samples=len(scores))


def accuracy(
    scores: Sequence[float], *, suite: str, task: str, length: int | None, metric: str, asked: str
) -> Measured:
    """The mean of scores between 0 and 1 as a number of a table; `asked` is a hash of the questions."""
    each = Values(asked=asked, values=tuple(scores))
    return Measured(suite=suite, task=task, length=length, metric=metric, each=each, **vars(cell(scores)))


def average(parts: Sequence[Measured]) -> Measured:
    """The plain mean over tasks, each of which counts the same."""
    mean, count = mean_of_means([part.percent.score / 100 for part in parts], [part.samples for part in parts])
    found = _in_percent(mean, count, samples=sum(part.samples for part in parts))
    metric, first = f"mean over {len(parts)} tasks", parts[0]
    return Measured(suite=first.suite, task=AVERAGE, length=first.length, metric=metric, **vars(found))


def _in_percent(mean: float, count: float, *, samples: int) -> Cell:
    """A mean that is as sure as that of `count` scores."""
    low, high = wilson(mean, count)
    return Cell(score=100 * mean, samples=samples, low=100 * low, high=100 * high)


def perplexity(scores: "Sequence[Score]", *, suite: str, task: str, length: int, asked: str) -> Measured:
    """Each token counts the same; the interval is Student's, of the documents' mean log-likelihoods."""
    means = [score.nll / score.num_tokens for score in scores]
    ends = student(means)
    low, high = (None, None) if ends is None else (_finite_exp(end) for end in ends)
    whole = _finite_exp(sum(score.nll for score in scores) / sum(score.num_tokens for score in scores))
    each = Values(asked=asked, values=tuple(mean if mean < LARGEST_NLL else None for mean in means))
    numbers: Any = {"score": whole, "samples": len(scores), "low": low, "high": high}
    return Measured(suite=suite, task=task, length=length, metric="perplexity", each=each, **numbers)


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

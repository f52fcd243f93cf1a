"""How sure a number is: 95% intervals of scores, of perplexities, and of differences between two models.

Quantiles are scipy's. Its Wilson interval (`binomtest`) takes whole numbers alone, and scores may be fractions; it has
none for paired scores.
"""

import math
from collections.abc import Sequence
from functools import cache

LEVEL = 0.975
"""Of the upper end; as much lies beyond the lower one."""
LARGEST_NLL = 700
"""Of a token, whose perplexity is still a number."""


def wilson(mean: float, count: float) -> tuple[float, float]:
    """The Wilson score interval of `count` scores between 0 and 1 with this mean.

    Exact in its kind for right and wrong. No score between 0 and 1 varies more than right and wrong do, so for others
    it is rather too wide; and unlike an interval from the spread, it is not empty where all scores are the same.
    """
    z, z2 = _normal_quantile(), _normal_quantile() ** 2
    centre = _centre(mean, count)
    reach = z / (1 + z2 / count) * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count**2))
    # Rounding must not leave the mean itself outside.
    return max(0.0, min(mean, centre - reach)), min(1.0, max(mean, centre + reach))


def mean_of_means(means: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """The plain mean over tasks, and the number of scores whose mean would be as sure, or less."""
    tasks = len(means)
    scores = tasks**2 / sum(1 / count for count in counts)
    # Fewer, where a task of few scores is the one that varies.
    centres = [_centre(mean, count) for mean, count in zip(means, counts, strict=True)]
    variance = sum(centre * (1 - centre) / count for centre, count in zip(centres, counts, strict=True)) / tasks**2
    middle = sum(centres) / tasks
    return sum(means) / tasks, min(scores, middle * (1 - middle) / variance)


def paired(tasks: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The plain mean over tasks of differences between two scores of the same sample, and its interval.

    Bonett and Price's for right and wrong (2012): as if one more sample had been won and one lost, which keeps it from
    being empty where two models answer alike. Here also for scores in between, and each task counts the same.
    """
    count = len(tasks) ** 2 / sum(1 / len(task) for task in tasks)  # of samples as unsure as all of these
    weighted = [(count / (count + 2) / len(tasks) / len(task), value) for task in tasks for value in task]
    weighted += [(1 / (count + 2), 1.0), (1 / (count + 2), -1.0)]
    middle = sum(weight * value for weight, value in weighted)
    reach = _normal_quantile() * math.sqrt(sum(weight**2 * (value - middle) ** 2 for weight, value in weighted))
    mean = sum(sum(task) / len(task) for task in tasks) / len(tasks)
    return mean, max(-1.0, middle - reach), min(1.0, middle + reach)


def _centre(mean: float, count: float) -> float:
    """Of Wilson's interval: the mean, drawn to a half by as much as it is unsure."""
    z2 = _normal_quantile() ** 2
    return (mean + z2 / (2 * count)) / (1 + z2 / count)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of the mean of independent values; None for fewer than two."""
    from scipy.special import stdtrit  # here, since reading results needs no quantile, and must start at once

    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    reach = float(stdtrit(count - 1, LEVEL)) * math.sqrt(variance / count)
    return mean - reach, mean + reach


@cache
def _normal_quantile() -> float:
    from scipy.special import ndtri

    return float(ndtri(LEVEL))

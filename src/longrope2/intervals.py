"""How sure a number is: 95% intervals of scores, of perplexities, and of differences between two models.

Quantiles are scipy's. Its Wilson interval (`binomtest`) takes whole numbers alone, and scores may be fractions; it has
none for paired scores. A p-value belongs to the interval beside it: below 0.05 where the interval excludes 0.
"""

import math
from collections.abc import Sequence
from functools import cache

LEVEL = 0.975
"""Of the upper end; as much lies beyond the lower one."""
LARGEST_NLL = 700
"""Of a token, whose perplexity is still a number."""
LEAST_RANKED, RESAMPLES = 5, 1000
"""Of a rank correlation: the least pairs, and how often they are drawn again for its interval."""


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
    middle, error = _middle(tasks)
    reach = _normal_quantile() * error
    mean = sum(sum(task) / len(task) for task in tasks) / len(tasks)
    return mean, max(-1.0, middle - reach), min(1.0, middle + reach)


def paired_p(tasks: Sequence[Sequence[float]]) -> float:
    """The two-sided p-value of no difference, for the interval of `paired`."""
    from scipy.special import ndtr

    middle, error = _middle(tasks)
    return 2 * float(ndtr(-abs(middle) / error))


def _middle(tasks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Of the interval of `paired`: its centre, and the standard error."""
    count = len(tasks) ** 2 / sum(1 / len(task) for task in tasks)  # of samples as unsure as all of these
    weighted = [(count / (count + 2) / len(tasks) / len(task), value) for task in tasks for value in task]
    weighted += [(1 / (count + 2), 1.0), (1 / (count + 2), -1.0)]
    middle = sum(weight * value for weight, value in weighted)
    return middle, math.sqrt(sum(weight**2 * (value - middle) ** 2 for weight, value in weighted))


def _centre(mean: float, count: float) -> float:
    """Of Wilson's interval: the mean, drawn to a half by as much as it is unsure."""
    z2 = _normal_quantile() ** 2
    return (mean + z2 / (2 * count)) / (1 + z2 / count)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of the mean of independent values; None for fewer than two."""
    from scipy.special import stdtrit  # here, since reading results needs no quantile, and must start at once

    if len(values) < 2:
        return None
    mean, error = _mean_and_error(values)
    reach = float(stdtrit(len(values) - 1, LEVEL)) * error
    return mean - reach, mean + reach


def student_p(values: Sequence[float]) -> float | None:
    """The two-sided p-value of a mean of 0, for the interval of `student`; None for fewer than two values."""
    from scipy.special import stdtr

    if len(values) < 2:
        return None
    mean, error = _mean_and_error(values)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(stdtr(len(values) - 1, -abs(mean) / error))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of a family of p-values: rejecting those below 0.05 is wrong about any in 5% of families."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return corrected


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float, float] | None:
    """Spearman's correlation, its p-value, and a bootstrap interval over pairs; None where nothing can be ranked."""
    import numpy as np
    from scipy.stats import rankdata, spearmanr

    if len(x) < LEAST_RANKED or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    found = spearmanr(x, y)
    picked = np.random.default_rng(0).integers(len(x), size=(RESAMPLES, len(x)))
    one, other = (rankdata(np.array(values)[picked], axis=1) for values in (x, y))
    one, other = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (one, other))
    norms = np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))
    drawn = ((one * other).sum(axis=1)[norms > 0]) / norms[norms > 0]  # others drew one row only, or equal ones
    low, high = np.quantile(drawn, [1 - LEVEL, LEVEL])
    return float(found.statistic), float(found.pvalue), float(low), float(high)


@cache
def _normal_quantile() -> float:
    from scipy.special import ndtri

    return float(ndtri(LEVEL))

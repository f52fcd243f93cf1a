"""Two models on the same questions: how far one is ahead, which is far surer than either of their scores."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from longrope2.evaluation.results import AVERAGE, Measured
from longrope2.intervals import LARGEST_NLL, paired, student

POINTS, PERCENT = "points more", "percent more"
"""The metrics of a difference: of two scores, and of two perplexities."""

AllValues = Mapping[str, Mapping[str, Any]]
"""`values` of results.json."""
PLACE = re.compile(r"(?P<suite>[^/]+)/(?P<task>.+)/(?P<length>\d+|None)")


def differences(ours: AllValues, theirs: AllValues) -> list[Measured]:
    """How much more we have than they, wherever both were asked the same."""
    by_window: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(dict)
    for place, found in ours.items():
        named, pairs = PLACE.fullmatch(place), _pairs(found, theirs.get(place))
        if named and pairs:
            by_window[named["suite"], named["length"]][named["task"]] = pairs
    apart: list[Measured] = []
    for (suite, length), tasks in by_window.items():
        window = None if length == "None" else int(length)
        if suite == "perplexity":
            apart += [_percent(task, window, pairs) for task, pairs in tasks.items()]
            continue
        apart += [_points(suite, task, window, [pairs]) for task, pairs in tasks.items()]
        if len(tasks) > 1:
            apart.append(_points(suite, AVERAGE, window, list(tasks.values())))
    return apart


def _pairs(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> list[float]:
    """The difference for each sample; none where the questions were others, or a value is missing."""
    if theirs is None or theirs["asked"] != ours["asked"] or len(theirs["values"]) != len(ours["values"]):
        return []
    pairs = list(zip(ours["values"], theirs["values"], strict=True))
    return [] if any(None in pair for pair in pairs) else [one - other for one, other in pairs]


def _points(suite: str, task: str, length: int | None, tasks: Sequence[Sequence[float]]) -> Measured:
    mean, low, high = (100 * value for value in paired(tasks))
    samples = sum(map(len, tasks))
    return Measured(
        suite=suite, task=task, length=length, metric=POINTS, score=mean, samples=samples, low=low, high=high
    )


def _percent(task: str, length: int | None, logarithms: Sequence[float]) -> Measured:
    """Of a ratio of perplexities: the mean over documents of the difference of their logarithms."""
    ends = student(logarithms)
    low, high = (None, None) if ends is None else map(_in_percent, ends)
    return Measured(
        suite="perplexity",
        task=task,
        length=length,
        metric=PERCENT,
        score=_in_percent(sum(logarithms) / len(logarithms)),
        samples=len(logarithms),
        low=low,
        high=high,
    )


def _in_percent(logarithm: float) -> float | None:
    return 100 * math.expm1(logarithm) if logarithm < LARGEST_NLL else None

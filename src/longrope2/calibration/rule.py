"""The rule that turns measurements into a switch length: numbers alone, no model."""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile

from longrope2.console import warn
from longrope2.records import MeasuredLength, Recommendation

CONFIDENCE, TOLERANCE = 2.0, 0.01
"""Results count as the same within this many standard errors and nats per token: a model that is sure of its answers
has errors so small that the former alone would separate 0.00002 from 0.00004."""
RETRIEVES = 0.5
"""The share of exact answers, at the depth where it is least, from which on a RoPE retrieves."""


def is_more(difference: float, error: float) -> bool:
    """Whether a difference in NLL is beyond its error, and large enough to matter."""
    return difference > CONFIDENCE * error + TOLERANCE


def choose(gains: Mapping[int, tuple[float, float]], original_length: int) -> tuple[int, int, int]:
    """The rule: a switch length, and the lowest and highest of those around it that are as good.

    `gains`: by length, the answer's NLL under the original RoPE less that under the long one, with its standard
    error. A switch length S pays the original RoPE's NLL at the measured lengths up to S and the long one's beyond.
    Of all measured lengths that are as good as the best one, within the errors, the one nearest to the original
    window is taken: the paper's choice stands unless the numbers speak against it.
    """
    lengths = sorted(gains)

    def excess(worse: int, better: int) -> tuple[float, float]:
        """How much more NLL one switch length pays than another, and the error of that."""
        low, high = sorted((worse, better))
        between = [gains[length] for length in lengths if low < length <= high]
        sign = 1 if worse > better else -1
        return sign * sum(gain for gain, _ in between), math.hypot(*(error for _, error in between))

    best = min(lengths, key=lambda length: excess(length, lengths[0])[0])
    as_good = []
    for length in lengths:
        more, error = excess(length, best)
        if not is_more(more, error):
            as_good.append(length)
    nearest = min(as_good, key=lambda length: abs(length - original_length))
    place = lengths.index(nearest)
    lowest, highest = ([*takewhile(as_good.__contains__, side)][-1] for side in (lengths[place::-1], lengths[place:]))
    return nearest, lowest, highest


def recommend(points: Sequence[MeasuredLength], original_length: int) -> Recommendation:
    """The switch length, and from where on which RoPE is good; `points` are the measured lengths, rising."""
    gains = {point.length: (point.gain, point.gain_error) for point in points}
    switch_length, lowest, highest = choose(gains, original_length)
    failing = [point.length for point in points if point.original.worst < RETRIEVES]
    better_from = None
    for length in sorted(gains, reverse=True):
        gain, error = gains[length]
        if not is_more(gain, error):
            break
        better_from = length
    if failing and failing[0] == points[0].length:
        warn(
            f"under its original RoPE the model does not retrieve at {failing[0]:,} tokens, the shortest length "
            "measured: take the recommendation as a guess"
        )
    return Recommendation(
        switch_length=switch_length,
        as_good_from=lowest,
        as_good_to=highest,
        original_stops=failing[0] if failing else None,
        long_better_from=better_from,
    )

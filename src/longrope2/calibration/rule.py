"""The rule that turns measurements into a switch length: numbers alone, no model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from longrope2.console import warn

CONFIDENCE, TOLERANCE = 2.0, 0.01
"""Results count as the same within so many standard errors and nats per token: a model that is sure of its answers
has errors so small that the former alone would tell 0.00002 from 0.00004."""
RETRIEVES = 0.5
"""The share of exact answers, at the depth where it is least, from which on a RoPE retrieves."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A switch length, and how far the measurement can tell it from others."""

    switch_length: int
    lowest: int
    highest: int
    """From the lowest to the highest, every measured length is as good, within the error."""


def is_more(difference: float, error: float) -> bool:
    """Whether a difference in NLL is beyond its error, and large enough to matter."""
    return difference > CONFIDENCE * error + TOLERANCE


def recommend(gains: Mapping[int, tuple[float, float]], original_length: int) -> Recommendation:
    """The rule. `gains`: by length, the answer's NLL under the original RoPE less that under the long one.

    Each gain comes with its standard error. A switch length S pays the original RoPE's NLL at the measured
    lengths up to S and the long one's beyond. Of all measured lengths that are as good as the best one, within
    the errors, the one nearest to the original window is taken: the paper's choice stands unless the numbers
    speak against it.
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
    return Recommendation(switch_length=nearest, lowest=lowest, highest=highest)


def conclude(points: Sequence[Mapping[str, Any]], original_length: int) -> dict[str, Any]:
    """The switch length, and from where on which RoPE is good; `points` are the measured lengths, rising."""
    gains = {point["length"]: (point["gain"], point["gain_error"]) for point in points}
    found = recommend(gains, original_length)
    failing = [point["length"] for point in points if point["original"]["worst"] < RETRIEVES]
    better_from = None
    for length in sorted(gains, reverse=True):
        gain, error = gains[length]
        if not is_more(gain, error):
            break
        better_from = length
    if failing and failing[0] == points[0]["length"]:
        warn(
            f"under its original RoPE the model does not retrieve at {failing[0]:,} tokens, the shortest length "
            "measured: take the recommendation as a guess"
        )
    return {
        "switch_length": found.switch_length,
        "as_good_from": found.lowest,
        "as_good_to": found.highest,
        "original_stops": failing[0] if failing else None,
        "long_better_from": better_from,
    }


def in_words(result: Mapping[str, Any]) -> str:
    """The recommendation in words."""
    stops, better = result["original_stops"], result["long_better_from"]
    lines = [
        "the original RoPE retrieves at every measured length"
        if stops is None
        else f"the original RoPE stops retrieving at {stops:,} tokens",
        "the long RoPE is not better at the longest measured length"
        if better is None
        else f"the long RoPE is better from {better:,} tokens on",
        f"recommended switch length: {result['switch_length']:,}",
    ]
    low, high = result["as_good_from"], result["as_good_to"]
    if low != high:
        lines[-1] += f" (of the measured lengths, those from {low:,} to {high:,} are as good within the error)"
    return "\n".join(lines)

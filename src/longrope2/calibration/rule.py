"""The rule that turns measurements into a switch length: numbers alone, no model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from longrope2.console import warn

CONFIDENCE, TOLERANCE = 2.0, 0.01
"""Results count as the same within this many standard errors and nats per token: a model that is sure of its answers
has errors so small that the former alone would separate 0.00002 from 0.00004."""
RETRIEVES = 0.5
"""The share of exact answers, at the depth where it is least, from which on a RoPE retrieves."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDocument:
    """The answer of one needle document."""

    depth: float
    nll: float
    """Nats per answer token."""
    exact: bool
    """Whether every token of the answer was right."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSide:
    """One RoPE at one length."""

    nll: float
    nll_error: float
    """One standard error over the documents."""
    exact: float
    """The share of exact answers."""
    worst: float
    """The same, at the depth where it is least."""
    by_document: tuple[MeasuredDocument, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredLength:
    """Both RoPEs at one length, on the same documents."""

    length: int
    gain: float
    """The answer's NLL under the original RoPE less that under the long one."""
    gain_error: float
    original: MeasuredSide
    long: MeasuredSide


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A switch length, the measured lengths that are as good, and the lengths at which each RoPE is good."""

    switch_length: int
    as_good_from: int
    as_good_to: int
    """Every measured length between these is as good, within the error."""
    original_stops: int | None
    """Where the original RoPE stops retrieving."""
    long_better_from: int | None

    def in_words(self) -> str:
        """The recommendation and what it rests on."""
        lines = [
            "the original RoPE retrieves at every measured length"
            if self.original_stops is None
            else f"the original RoPE stops retrieving at {self.original_stops:,} tokens",
            "the long RoPE is not better at the longest measured length"
            if self.long_better_from is None
            else f"the long RoPE is better from {self.long_better_from:,} tokens on",
            f"recommended switch length: {self.switch_length:,}",
        ]
        low, high = self.as_good_from, self.as_good_to
        if low != high:
            lines[-1] += f" (of the measured lengths, those from {low:,} to {high:,} are as good within the error)"
        return "\n".join(lines)


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

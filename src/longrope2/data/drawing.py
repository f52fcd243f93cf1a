"""Documents cut to usable pieces, sorted into buckets, and drawn by source weight and length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrope2.data.buckets import PlanConfig
from longrope2.data.marks import Marks
from longrope2.data.sources import Source

DropReason = Literal["empty", "too short", "too long", "between buckets", "bucket not served"]


class Piece(NamedTuple):
    """What a plan places: a document, or a part of one that was cut."""

    source: int
    document: int
    start: int
    stop: int
    size: int
    """Tokens it takes in a row, BOS and EOS included."""
    ends: bool
    """Whether the document ends with it, so that EOS follows."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """All pieces of one source, as arrays of equal length."""

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    size: NDArray[np.int64]
    ends: NDArray[np.bool_]
    bucket: NDArray[np.int64]
    """Number of the bucket; -1 where it is dropped."""
    dropped: dict[DropReason, tuple[int, int]]
    """Pieces and tokens that no bucket takes, by reason."""

    def chosen(self, source: int, indices: NDArray[np.int64]) -> Iterator[Piece]:
        """Those of them, in that order."""
        # By the thousand: as plain lists they come ten times faster than one by one, and all at once are too many.
        for begin in range(0, len(indices), 1024):
            some = indices[begin : begin + 1024]
            columns = (self.document, self.start, self.stop, self.size, self.ends)
            for values in zip(*(column[some].tolist() for column in columns), strict=True):
                yield Piece(source, *values)


def make_pieces(source: Source, lengths: NDArray[np.int64], marks: Marks, config: PlanConfig) -> Pieces:
    """Cut what is to be cut, and find the bucket of each piece."""
    document, start, stop = _cut(source, lengths, marks, config)
    ends = stop == lengths[document]
    size = stop - start + marks.size(0, ends=False) + ends * (marks.eos is not None)
    tops = np.array([bucket.up_to for bucket in config.buckets])
    bottoms = np.array([bucket.above for bucket in config.buckets])
    bucket = np.searchsorted(tops, size, side="left")
    within = np.minimum(bucket, len(tops) - 1)
    wanted = [not source.buckets or entry.label in source.buckets for entry in config.buckets]
    reasons: list[tuple[DropReason, NDArray[np.bool_]]] = [
        ("empty", stop == start),
        ("too short", size <= bottoms[0]),
        ("too long", bucket == len(tops)),
        ("between buckets", size <= bottoms[within]),
        ("bucket not served", ~np.array(wanted)[within]),
    ]
    dropped: dict[DropReason, tuple[int, int]] = {}
    kept = np.ones(len(size), dtype=bool)
    for reason, applies in reasons:
        hit = kept & applies  # each piece is dropped for one reason only
        if hit.any():
            dropped[reason] = (int(hit.sum()), int((stop - start)[hit].sum()))
        kept &= ~applies
    return Pieces(
        document=document,
        start=start,
        stop=stop,
        size=size,
        ends=ends,
        bucket=np.where(kept, bucket, -1),
        dropped=dropped,
    )


def _cut(
    source: Source, lengths: NDArray[np.int64], marks: Marks, config: PlanConfig
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Documents as (document, start, stop): whole, but for those the source or the top bucket has cut."""
    around = marks.size(0, ends=True)
    longest = config.buckets[-1].up_to - around
    to_cut = lengths > 0 if source.cut else (lengths > longest) & (config.over_long == "cut")
    whole = np.flatnonzero(~to_cut)
    parts = [np.stack([whole, np.zeros_like(whole), lengths[whole]])]
    for document in np.flatnonzero(to_cut):
        length = int(lengths[document])
        if source.cut:
            cycle = np.array(source.cut) - around
            rounds = -(-length // int(cycle.sum()))
            edges = np.cumsum(np.tile(cycle, rounds))
            edges = np.concatenate([[0], edges[edges < length], [length]])
        else:
            # Equal pieces, so that none is a short rest: each is more than half of what the bucket takes.
            count = -(-length // longest)
            edges = np.arange(count + 1) * length // count
        parts.append(np.stack([np.full(len(edges) - 1, document), edges[:-1], edges[1:]]))
    document, start, stop = np.concatenate(parts, axis=1).astype(np.int64)
    return document, start, stop


class Draw:
    """The pieces of one bucket, one after another: sources in proportion to weight, long ones upsampled.

    Each piece comes once; with `repeat`, a source that has run out begins anew in another order.
    """

    def __init__(self, bucket: int, sources: Sequence[Source], pieces: Sequence[Pieces], config: PlanConfig) -> None:
        self._bucket, self._seed, self._repeat = bucket, config.seed, config.repeat
        self._sources, self._pieces = sources, pieces
        members = [np.flatnonzero(entry.bucket == bucket) for entry in pieces]
        self._members = {source: found for source, found in enumerate(members) if len(found)}
        self.available = {source: int(pieces[source].size[found].sum()) for source, found in self._members.items()}
        """Tokens of each source that serves the bucket, BOS and EOS included."""

    def __iter__(self) -> Iterator[Piece]:
        weight = {source: self._sources[source].weight for source in self._members}
        drawn = dict.fromkeys(self._members, 0)  # tokens
        queues = {source: self._order(source, 0) for source in self._members}
        rounds = dict.fromkeys(self._members, 0)
        while queues:
            # Whoever is furthest behind its weight comes next; equals in the order they were given.
            source = min(queues, key=lambda source: (drawn[source] / weight[source], source))
            piece = next(queues[source], None)
            if piece is None:
                if self._repeat:
                    rounds[source] += 1
                    queues[source] = self._order(source, rounds[source])
                else:
                    del queues[source]
                continue
            drawn[source] += piece.size
            yield piece

    def _order(self, source: int, round_number: int) -> Iterator[Piece]:
        """A weighted shuffle: exponential clocks with rate length ** upsample, in the order they ring."""
        members = self._members[source]
        rng = np.random.default_rng([self._seed, self._bucket, source, round_number])
        rate = self._pieces[source].size[members].astype(np.float64) ** self._sources[source].upsample
        clocks = rng.exponential(size=len(members)) / rate
        return self._pieces[source].chosen(source, members[np.argsort(clocks, kind="stable")])

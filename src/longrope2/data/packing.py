"""Documents cut to usable pieces, drawn by source weight and length, and packed into rows of the target length."""

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longrope2.console import ProgressLine
from longrope2.data.config import PlanConfig, Source
from longrope2.records import Marks, RowKind

DropReason = Literal["empty", "too short", "too long", "between buckets", "bucket not served"]
POOL = 512
"""Short documents to choose from when a row is to be filled up: more fit better, fewer keep the order drawn."""

QUIET_ROWS = 20_000
"""Plans of fewer rows are made in seconds, without progress."""


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
    to_cut = lengths > 0 if source.cut_lengths else (lengths > longest) & (config.over_long == "cut")
    whole = np.flatnonzero(~to_cut)
    parts = [np.stack([whole, np.zeros_like(whole), lengths[whole]])]
    for document in np.flatnonzero(to_cut):
        length = int(lengths[document])
        if source.cut_lengths:
            cycle = np.array(source.cut_lengths) - around
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

    Each piece comes once; with `repeat`, a source that has run out begins again in another order.
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
            # The source that is furthest behind its weight comes next; equals in the order they were given.
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


class DocumentSpan(NamedTuple):
    """Tokens `start` to `stop` of a document; BOS comes before them, EOS after them if the document ends."""

    source: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One row of a plan."""

    kind: RowKind
    bucket: int
    """Its number among the plan's buckets."""
    padding: int
    """Tokens at the end that belong to no document."""
    spans: tuple[DocumentSpan, ...]


class Part(NamedTuple):
    """What stands in a row of the piece drawn as number `serial`."""

    serial: int
    piece: Piece
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The rows of one bucket, and how much of each piece stands in them; as arrays, since there may be millions."""

    padding: NDArray[np.int32]
    """Of each row."""
    spans: list[NDArray[np.int32]]
    """Of each row, a `DocumentSpan` per line."""
    pieces: NDArray[np.int64]
    """Source, document, start, stop, size and tokens placed, of each piece drawn of which anything was placed."""

    def __len__(self) -> int:
        return len(self.spans)


def pack(draw: Draw, bucket: int, limit: int, marks: Marks, config: PlanConfig) -> Packed:
    """Fill up to `limit` rows of a bucket; what does not fill a row at the end of the documents is left out."""
    paddings, spans, numbers = array("i"), list[NDArray[np.int32]](), array("q")
    last = -1
    progress = ProgressLine(limit, f"planning bucket {config.buckets[bucket].label}, rows")
    for parts, padding in islice(fill(draw, bucket, marks, config), limit):
        if limit > QUIET_ROWS and len(spans) % 1024 == 0:
            progress.update(len(spans))
        spans.append(np.array([(p.piece.source, p.piece.document, p.start, p.stop) for p in parts], dtype=np.int32))
        paddings.append(padding)
        for part in parts:
            if part.serial == last:  # a piece that is carried on comes first in the next row
                numbers[-1] += part.stop - part.start
            else:
                numbers.extend((*part.piece[:5], part.stop - part.start))
            last = part.serial
    if limit > QUIET_ROWS:
        progress.update(limit, f"{len(spans):,} filled")
    return Packed(
        padding=np.array(paddings, dtype=np.int32), spans=spans, pieces=np.array(numbers, dtype=np.int64).reshape(-1, 6)
    )


def fill(draw: Draw, bucket: int, marks: Marks, config: PlanConfig) -> Iterator[tuple[list[Part], int]]:
    """The rows of a bucket as far as its documents reach, each with its padding."""
    return (fill_short if config.kind(bucket) == "short" else fill_long)(draw, marks, config)


def fill_short(pieces: Iterable[Piece], marks: Marks, config: PlanConfig) -> Iterator[tuple[list[Part], int]]:
    """Rows of whole documents, as drawn and then by best fit, each with its padding.

    Where whole documents leave more than `max_padding`, one is cut off at the end of the row; its rest is lost.
    """
    allowed = int(config.max_padding * config.target_length)
    opening = marks.size(0, ends=False)
    pool = _Pool(pieces)
    while True:
        parts: list[Part] = []
        gap = config.target_length
        while (found := pool.take(gap)) is not None:
            serial, piece = found
            parts.append(Part(serial, piece, piece.start, piece.stop))
            gap -= piece.size
        if gap > allowed:
            # From two tokens on, so that a cut always leaves one.
            if gap > opening + 1 and (found := pool.take_above(gap)) is not None:
                serial, piece = found
                stop = _cut_at(piece, piece.start, gap - opening)
                parts.append(Part(serial, piece, piece.start, stop))
                gap -= opening + stop - piece.start
            elif pool.is_empty:
                return  # nothing is left to fill this row with
        yield parts, gap


def fill_long(pieces: Iterable[Piece], marks: Marks, config: PlanConfig) -> Iterator[tuple[list[Part], int]]:
    """Rows of documents one after another, cut where a row is full and carried on in the next.

    A row is padded, and a rest is lost, only where a piece would hardly be worth its BOS.
    """
    opening, least = marks.size(0, ends=False), config.least_piece
    parts: list[Part] = []
    gap = config.target_length
    for serial, piece in enumerate(pieces):
        start = piece.start
        while start < piece.stop:
            size = marks.size(piece.stop - start, ends=piece.ends)
            stop = piece.stop if size <= gap else _cut_at(piece, start, gap - opening)
            if stop == piece.stop or stop - start >= least:
                parts.append(Part(serial, piece, start, stop))
                gap -= marks.size(stop - start, ends=piece.ends and stop == piece.stop)
                start = stop
            if start < piece.stop or gap < opening + least:
                yield parts, gap
                parts, gap = [], config.target_length
            if start > piece.start and piece.stop - start < least:
                break


def _cut_at(piece: Piece, start: int, room: int) -> int:
    """Where to cut a piece that does not fit: never at its very end, which only its EOS may have missed."""
    return min(start + room, piece.stop - 1)


class _Pool:
    """The next few pieces drawn, by age and by size."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._stream = enumerate(pieces)
        self._by_age: OrderedDict[int, Piece] = OrderedDict()
        self._by_size: list[tuple[int, int]] = []
        self._refill()

    @property
    def is_empty(self) -> bool:
        return not self._by_age

    def take(self, room: int) -> tuple[int, Piece] | None:
        """The oldest piece if it fits, otherwise the largest that does."""
        if not self._by_age:
            return None
        age, piece = next(iter(self._by_age.items()))
        if piece.size <= room:
            return self._remove(bisect_left(self._by_size, (piece.size, age)))
        place = bisect_right(self._by_size, (room + 1, -1))
        return self._remove(place - 1) if place else None

    def take_above(self, room: int) -> tuple[int, Piece] | None:
        """The smallest piece that does not fit, of which the least is lost."""
        place = bisect_right(self._by_size, (room + 1, -1))
        return self._remove(place) if place < len(self._by_size) else None

    def _remove(self, place: int) -> tuple[int, Piece]:
        _, age = self._by_size.pop(place)
        piece = self._by_age.pop(age)
        self._refill()
        return age, piece

    def _refill(self) -> None:
        for age, piece in islice(self._stream, POOL - len(self._by_age)):
            self._by_age[age] = piece
            insort(self._by_size, (piece.size, age))


def apportion(rows: int, quotas: Sequence[float]) -> list[int]:
    """Split a number of rows by quotas; no share is off by a whole row, and the sum is exact."""
    ideal = [rows * quota / math.fsum(quotas) for quota in quotas]
    shares = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (shares[index] - ideal[index], index))
    for index in by_remainder[: rows - sum(shares)]:
        shares[index] += 1
    return shares


def rows_within(available: Sequence[int], quotas: Sequence[float]) -> int:
    """The most rows whose split by quotas every bucket can serve."""
    total = math.fsum(quotas)
    rows = math.floor(min((have + 1) * total / quota for have, quota in zip(available, quotas, strict=True)))
    while rows and any(n > have for n, have in zip(apportion(rows, quotas), available, strict=True)):
        rows -= 1
    return rows

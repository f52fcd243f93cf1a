"""Pieces of documents packed into rows of exactly the target length."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from longrope2.console import ProgressLine
from longrope2.data.buckets import PlanConfig
from longrope2.data.drawing import Draw, Piece
from longrope2.data.marks import Marks
from longrope2.data.plan import PlanRow, Span

POOL = 512
"""Short documents to choose from when a row is to be filled up: more fit better, fewer keep the order drawn."""

QUIET_ROWS = 20_000
"""Plans of fewer rows are made in seconds, without progress."""


class Part(NamedTuple):
    """What stands in a row of the piece drawn as number `serial`."""

    serial: int
    piece: Piece
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The rows of one bucket, and how much of each piece stands in them."""

    rows: list[PlanRow]
    pieces: list[tuple[Piece, int]]
    """Each piece drawn of which anything was placed, with the tokens of it that were."""


def pack(draw: Draw, bucket: int, limit: int, marks: Marks, config: PlanConfig) -> Packed:
    """Fill up to `limit` rows of a bucket; what does not fill a row at the end of the documents is left out."""
    rows: list[PlanRow] = []
    placed: dict[int, int] = {}
    pieces: dict[int, Piece] = {}
    progress = ProgressLine(limit, f"planning bucket {config.buckets[bucket].label}, rows")
    for parts, padding in islice(fill(draw, bucket, marks, config), limit):
        if limit > QUIET_ROWS and len(rows) % 1024 == 0:
            progress.update(len(rows))
        spans = tuple(Span(part.piece.source, part.piece.document, part.start, part.stop) for part in parts)
        rows.append(PlanRow(kind=config.kind(bucket), bucket=bucket, padding=padding, spans=spans))
        for part in parts:
            pieces[part.serial] = part.piece
            placed[part.serial] = placed.get(part.serial, 0) + part.stop - part.start
    if limit > QUIET_ROWS:
        progress.update(limit, f"{len(rows):,} filled")
    return Packed(rows=rows, pieces=[(piece, placed[serial]) for serial, piece in pieces.items()])


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

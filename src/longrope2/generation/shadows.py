"""When the long cache of a row that is about to cross gets built: in chunks, as late as possible, never late."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Shadow:
    """A long cache under construction, for rows that cross together."""

    rows: list[int]
    crossing: int
    """The width of the batch at which they cross; the cache must then hold one column less."""
    done: int = 0
    """Columns in it so far: counted here, since a static cache keeps its count on the device."""
    cache: Any = None
    """None until its first chunk."""

    def chunks_left(self, chunk: int) -> int:
        """Forwards it still takes."""
        return math.ceil((self.crossing - 1 - self.done) / chunk)


class Schedule:
    """Which columns to run again with which step, so that a step runs one chunk of one cache.

    Earliest crossing first, and nothing before it must be: a row may end before it crosses. What a prompt
    leaves too few steps for is run with the prompt, where a reader waits anyway. Several chunks meet in a step
    only if rows cross within a few tokens of each other, since their last tokens are not known before.
    """

    def __init__(self, crossings: Mapping[int, list[int]], chunk: int) -> None:
        """`crossings`: rows by the width of the batch at which they cross."""
        self._chunk = chunk
        self._coming = [Shadow(rows=rows, crossing=crossing) for crossing, rows in sorted(crossings.items())]
        self._wake_up()

    def due(self, columns: int) -> Iterator[tuple[Shadow, int]]:
        """For a batch this wide: caches to grow now, and the column to grow each to; those that cross, finished.

        The caller sets `done`, and drops those whose rows have ended.
        """
        if columns < self._wake:
            return
        chunks = columns - self._wake + 1
        for shadow in tuple(self._coming):
            stop = self._stop(shadow, columns, chunks)
            chunks -= math.ceil((stop - shadow.done) / self._chunk)
            if shadow.crossing == columns:
                self._coming.remove(shadow)
                yield shadow, stop
            elif stop > shadow.done:
                yield shadow, stop
        self._wake_up()

    def _stop(self, shadow: Shadow, columns: int, chunks: int) -> int:
        """How far a cache can be grown by so many chunks, of tokens that are known; whole chunks but the last."""
        end = shadow.crossing - 1
        if shadow.crossing == columns:
            return end
        stop = min(shadow.done + max(chunks, 0) * self._chunk, end, columns)
        return stop if stop == end else stop - (stop - shadow.done) % self._chunk

    def drop(self, shadow: Shadow) -> None:
        """Forget a cache that nobody needs any more."""
        shadow.cache = None
        if shadow in self._coming:
            self._coming.remove(shadow)

    def _wake_up(self) -> None:
        """Find the width from which on a chunk a step only just suffices."""
        self._wake = sys.maxsize
        chunks = 0
        for shadow in self._coming:
            chunks += shadow.chunks_left(self._chunk)
            # A chunk with each step from here to the crossing, that one included. A finished cache waits for it.
            self._wake = min(self._wake, shadow.crossing - max(chunks, 1) + 1)

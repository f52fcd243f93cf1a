"""Word lists of the package wonderwords, in the order RULER has them."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from random import Random
from typing import overload

from longrope2.errors import require


@cache
def word_list(name: str) -> tuple[str, ...]:
    """One of wonderwords' lists: noun, adjective or verb."""
    package = require("wonderwords", extra="eval", purpose="making RULER samples")
    text = (resources.files(package) / "assets" / f"{name}list.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


def common_words(seed: int) -> list[str]:
    """All nouns, adjectives and verbs, shuffled."""
    words = sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")})
    Random(seed).shuffle(words)  # noqa: S311
    return words


@cache
def adjective_nouns() -> "Compounds":
    """Every `adjective-noun`, from which keys are drawn."""
    return Compounds(word_list("adjective"), word_list("noun"))


class Compounds(Sequence[str]):
    """The sorted set of all `first-second`, found by index instead of kept: it has millions of members."""

    def __init__(self, firsts: Sequence[str], seconds: Sequence[str]) -> None:
        self._seconds = sorted(set(seconds))
        self._blocks: list[tuple[str, list[str] | None]] = []
        for prefixes in _families(sorted({f"{first}-" for first in firsts})):
            # `old-` and `old-fashioned-` mix with each other when sorted; such few families are written out.
            mixed = sorted({p + s for p in prefixes for s in self._seconds}) if len(prefixes) > 1 else None
            self._blocks.append((prefixes[0], mixed))
        sizes = (len(self._seconds if mixed is None else mixed) for _, mixed in self._blocks)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        block = bisect_right(self._ends, range(len(self))[index])
        prefix, mixed = self._blocks[block]
        within = range(len(self))[index] - (self._ends[block - 1] if block else 0)
        return prefix + self._seconds[within] if mixed is None else mixed[within]


def _families(prefixes: Sequence[str]) -> list[list[str]]:
    """Sorted prefixes, those together of which the first is a prefix of the others."""
    families: list[list[str]] = []
    for prefix in prefixes:
        if families and prefix.startswith(families[-1][0]):
            families[-1].append(prefix)
        else:
            families.append([prefix])
    return families

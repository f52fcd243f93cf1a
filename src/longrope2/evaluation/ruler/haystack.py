"""What haystacks are made of: running text with its sentences, and the word lists of wonderwords in RULER's order."""

import gzip
import hashlib
import json
import lzma
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any, overload

from longrope2.books import package_manifest, read_books
from longrope2.errors import DataError, require
from longrope2.files import MOST_BYTES, parse_json

# Words of the next round that are looked at to know how sentences break where a haystack starts again.
LOOKAHEAD = 64
MARKS = (".", "?", "!")  # at which a sentence may end
PACKAGE_SENTENCES = "package_sentences.json.xz"


@dataclass(frozen=True)
class Breaks:
    """Where the sentences of a text begin."""

    starts: list[int]  # offsets in the text of `looped(words)`
    endings: dict[str, list[int]]  # offsets of sentences inside a word (“What?!”) that differ where a text ends with it


class Haystack:
    """Words that start again when they run out, and the sentences of any number of the first of them.

    A sentence break depends on nothing but the words on both sides of it. So the breaks of the whole text, found
    once, are also those of its beginnings, and no beginning has to be split again.
    """

    def __init__(self, words: Sequence[str], breaks: Breaks) -> None:
        self._words, self._endings = words, breaks.endings
        self._text = " ".join(words)
        self._period = len(self._text) + 1
        self._word_ends = [end - 1 for end in accumulate(len(word) + 1 for word in words)]
        overlap = len(" ".join(words[:LOOKAHEAD]))
        self._first = [start for start in breaks.starts if start < self._period]
        again = (start - self._period for start in breaks.starts if start >= self._period)
        self._again = [start for start in again if start <= overlap]
        self._again += [start for start in self._first if start > overlap]

    def sentences(self, num_words: int) -> list[str]:
        """The sentences of the first `num_words` words."""
        while num_words and not self._words[(num_words - 1) % len(self._words)]:
            num_words -= 1  # a space at the end
        rounds, last = divmod(num_words - 1, len(self._words))
        end = rounds * self._period + self._word_ends[last]
        text = " ".join([self._text] * (rounds + 1))
        starts = list(self._first)
        for number in range(1, rounds + 1):
            starts += [number * self._period + start for start in self._again]
        word = self._words[last]
        if word in self._endings:
            starts = starts[: bisect_right(starts, end - len(word))]
            starts += [end - len(word) + offset for offset in self._endings[word]]
        starts = [*starts[: bisect_left(starts, end)], end]
        # Some sentences are parted by a space, some (“end.”Next) by nothing.
        found = (text[start:stop].rstrip() for start, stop in pairwise(starts))
        return [sentence for sentence in found if sentence]


def words_of(text: str) -> list[str]:
    """The words of a text as RULER counts them."""
    return re.sub(r"\s+", " ", text).split(" ")


def looped(words: Sequence[str]) -> str:
    """The text in which sentences are found: the words, the first of them again, and one that ends nothing."""
    return " ".join([*words, *words[:LOOKAHEAD], "a"])


def find_breaks(words: Sequence[str], splitter: Any) -> Breaks:
    """The sentence breaks of a text by one of nltk's sentence tokenizers."""
    text = looped(words)
    offset = len(text) - len(text.lstrip())
    starts = [offset + start for start, _ in splitter.span_tokenize(text.strip())]
    # Of several marks in a word, the last is none for nltk unless something follows.
    doubtful = {word for word in words if word.endswith(MARKS) and any(mark in word[:-1] for mark in MARKS)}
    endings = {word: [start for start, _ in splitter.span_tokenize(word)][1:] for word in sorted(doubtful)}
    inside = {
        word: [start for start, _ in splitter.span_tokenize(f"{word} a") if 0 < start < len(word)] for word in endings
    }
    return Breaks(starts, {word: found for word, found in endings.items() if found != inside[word]})


@lru_cache(maxsize=2)
def load_haystack(source: str | Path | None) -> Haystack:
    """The haystack of a file of essays or of books; None means the package's books."""
    words = words_of(haystack_text(source))
    return Haystack(words, package_breaks() if source is None else find_breaks(words, _punkt()))


def haystack_text(source: str | Path | None) -> str:
    """The text of `PaulGrahamEssays.json` (an object with a `text`), or of anything that holds books."""
    if source is None:
        # Books that the tiny model of this package was not trained on.
        return "\n".join(book.text for book in read_books(held_out=True))
    if not str(source).lower().endswith((".json", ".json.gz")):
        return "\n".join(book.text for book in read_books(source))
    content = read_json(Path(source))
    if not isinstance(content, dict) or not isinstance(content.get("text"), str) or not content["text"].strip():
        raise DataError(f"{source}: an object with a string 'text' expected", hint="as RULER's PaulGrahamEssays.json")
    return content["text"]


def haystack_fingerprint(source: str | Path | None) -> str:
    """What distinguishes one haystack from another."""
    if source is None:
        return " ".join(book.sha256 for book in package_manifest() if book.held_out)
    return hashlib.sha256(haystack_text(source).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """A JSON file, compressed or not."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
        return parse_json(content, lenient=True)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path}: not a readable JSON file ({error})", hint="check the path and the file") from error


def package_breaks() -> Breaks:
    """Where the sentences of the package's held-out books begin.

    They were found with nltk and its punkt_tab data, which has no clear licence and so is not in the package.
    """
    table = json.loads(lzma.decompress(package_file().read_bytes()))
    return Breaks(list(accumulate(table["gaps"])), table["endings"])


def package_file() -> Traversable:
    """The table of those sentences."""
    return resources.files("longrope2.evaluation.ruler") / PACKAGE_SENTENCES


def _punkt() -> Any:
    nltk = require("nltk.tokenize.punkt", extra="eval", purpose="a haystack of your own")
    try:
        return nltk.PunktTokenizer("english")
    except (LookupError, OSError) as error:
        raise DataError(
            "nltk's data 'punkt_tab', with which RULER finds sentences in a haystack, is not on this machine",
            hint="python -m nltk.downloader punkt_tab, or omit the haystack to use the package's books",
        ) from error


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

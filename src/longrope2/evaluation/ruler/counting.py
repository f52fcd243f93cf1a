"""The two word-counting tasks: common words of a numbered list, and frequent words of a coded text."""

import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from random import Random
from string import ascii_lowercase

from longrope2.books import read_books
from longrope2.errors import DataError
from longrope2.evaluation.ruler.haystack import common_words, read_json
from longrope2.evaluation.ruler.sizing import Draft, Maker
from longrope2.evaluation.ruler.tasks import COMMON_WORDS, FREQUENT_WORDS
from longrope2.evaluation.suite import Frame

COMMON = 10  # words to be found
PROBE = 4096
CODED_LETTERS = 6
ZETA_2 = math.pi**2 / 6  # of the exponent 2
SMALLEST_VOCABULARY = 4  # the noise and three words to be found


class CommonWordsMaker(Maker):
    """Prompts of `cwe`, after one worked example; sizes are different words."""

    def __init__(self, *, length: int, seed: int, frame: Frame, english_words: Path | None) -> None:
        self._frame, self._seed, self._file = frame, seed, english_words
        self._random = Random(seed)  # noqa: S311
        self._words = common_words(seed)
        long = length >= 4096
        self._example_size, self._example_repeats = (40, (10, 3)) if long else (20, (3, 1))
        self._repeats = (30, 3) if long else (6, 1)
        self.step = 10

    def upper_bound(self, length: int, count_tokens: Callable[[str], int]) -> int:
        """Twice the estimate from a large prompt: a small one misleads, since its common words repeat so often."""
        return int(length // (count_tokens(self.trial(PROBE).prompt) / PROBE)) * 2

    def possible(self, size: int) -> bool:
        """Whether some list has this many words."""
        return size <= len(self._words) or size <= len(self._more_words)

    def least(self, index: int) -> int:
        """The words to be found alone; RULER has no fewer."""
        return COMMON

    def draw(self, size: int, index: int) -> Draft:
        """A prompt after a solved one."""
        example, found = self._list(self._example_size, self._example_repeats)
        words, common = self._list(size, self._repeats)
        # The example has a frame of its own, as if it were an earlier turn of the chat.
        solved = f"{self._framed(example)}{COMMON_WORDS.answer_prefix} {_numbered(found)}"
        return Draft(f"{solved}\n{self._framed(words)}", COMMON_WORDS.answer_prefix, common)

    def _framed(self, words: list[str]) -> str:
        return self._frame(COMMON_WORDS.template.format(context=_numbered(words)))

    def _list(self, size: int, repeats: tuple[int, int]) -> tuple[list[str], list[str]]:
        """A shuffled list of words, and the common ones among them."""
        vocabulary = self._words if size <= len(self._words) else self._more_words
        chosen = self._random.sample(vocabulary, size)
        common, uncommon = chosen[:COMMON], chosen[COMMON:]
        words = common * repeats[0] + uncommon * repeats[1]
        Random(self._seed).shuffle(words)  # noqa: S311
        return words, common

    @cached_property
    def _more_words(self) -> list[str]:
        """Where wonderwords has too few, near 128k: RULER's english_words.json, or words of the package's books."""
        if self._file is None:
            return sorted({word for book in read_books() for word in re.findall(r"\b[a-z]{3,}\b", book.text)})
        content = read_json(self._file)
        values = list(content.values()) if isinstance(content, dict) else content
        if not isinstance(values, list) or not all(isinstance(word, str) for word in values):
            raise DataError(
                f"{self._file}: a list or an object of words expected", hint="as RULER's english_words.json"
            )
        return values


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def frequent_words(
    count_tokens: Callable[[str], int], *, length: int, seed: int, frame: Frame, count: int
) -> Iterator[tuple[Draft, int]]:
    """Prompts of `fwe` and their lengths."""
    room = length - FREQUENT_WORDS.tokens_to_generate  # for the prompt
    num_different, step = room // 50, room // 32
    if num_different < SMALLEST_VOCABULARY:
        raise _too_short(length)
    random = Random(seed)  # noqa: S311

    def draft(vocabulary: list[str], num_words: int) -> Draft:
        import numpy as np

        counts = (num_words * (np.arange(1, num_different + 1) ** -2.0) / ZETA_2).astype(int)
        words = [word for word, times in zip(vocabulary, counts.tolist(), strict=True) for _ in range(times)]
        Random(seed).shuffle(words)  # noqa: S311
        text = FREQUENT_WORDS.template.format(context=" ".join(words))
        return Draft(frame(text), FREQUENT_WORDS.answer_prefix, vocabulary[1:4])

    vocabulary = _coded_words(random, num_different, seed)
    size = room // CODED_LETTERS
    while count_tokens(draft(vocabulary, size).prompt) < room:
        size += step
    size -= step
    for _ in range(count):
        vocabulary = _coded_words(random, num_different, seed)
        used = size
        sample = draft(vocabulary, used)
        while (tokens := count_tokens(sample.prompt)) > room and used > 0:
            used -= step
            sample = draft(vocabulary, used)
        if not all(word in sample.input for word in sample.outputs):
            raise _too_short(length)
        yield sample, tokens + FREQUENT_WORDS.tokens_to_generate


def _too_short(length: int) -> DataError:
    return DataError(f"no sample fits into {length:,}", hint="ask for a greater length or omit the task")


def _coded_words(random: Random, size: int, seed: int) -> list[str]:
    """Invented words, from the most frequent on; the first of them is noise."""
    words: set[str] = set()
    drawn = 0
    while drawn < size or len(words) < size:
        words.add("".join(random.choices(ascii_lowercase, k=CODED_LETTERS)))
        drawn += 1
    vocabulary = sorted(words)
    Random(seed).shuffle(vocabulary)  # noqa: S311
    return ["...", *vocabulary[1:]]

"""Recall documents: books with sentences hidden in them, and questions that only those sentences answer.

Natural text rarely asks for what stood far away, so a model that is trained on nothing else may lose retrieval at
lengths it has just reached. Each document has exactly the length asked for, so that one of the target length fills a
row and needles and questions stay together.

Most questions stand alone in the text, every fourth in a row at the end. After the first question of a row the model
only goes on with what it has begun to do; one that nothing announces is what it is asked when it is in use.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longrope2.books import Book, read_books
from longrope2.console import ProgressLine
from longrope2.data.config import RecallConfig, Source
from longrope2.data.corpus import document_marks, plain_encoder
from longrope2.errors import DataError, counted
from longrope2.files import atomic_path
from longrope2.needles import key_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTIONS = ("", "Numbers are hidden in the text below. Keep them in mind; they will be asked for.")
WORDINGS = (
    ("{key} is {value}.", "What is {key}? {key} is"),
    ("The number of {key} is {value}.", "What is the number of {key}? The number of {key} is"),
    ("Remember that the code of {key} is {value}.", "Which code does {key} have? The code of {key} is"),
    ("The value {value} was noted for {key}.", "Which value was noted for {key}? The value noted for {key} is"),
    ("Secretly, {key} stands for {value}.", "Tell me the secret of {key}. According to the text, {key} stands for"),
    ("(Key to {key}: {value}.)", "The text gives a key to {key}. Give it back. The key to {key} is"),
    ("Whoever wants {key} has to dial {value}.", "What has to be dialled for {key}? For {key} one has to dial"),
    ("Above the door of {key} stood {value}.", "What stood above the door of {key}? Above the door of {key} stood"),
)
"""How a number is hidden and how it is asked for. Many, so that finding is learned, not one sentence; and not the
paper's, which needles are measured with: a model that finds those has learned to find what it is asked for."""
SHARE = 4
"""Needles and questions take at most one token in this many; a short document has fewer of them."""
ATTEMPTS = 50
REACH = 24
"""Words to look ahead for the end of a sentence."""
WORD = re.compile(r"\s*\S+")
SENTENCE_END = re.compile(r"[.!?][\"'”’)]*$")

Count = Callable[[str], int]


def write_recall(tokenizer: "PreTrainedTokenizerBase", config: RecallConfig, path: Path) -> Source:
    """Write the documents as JSON lines; returns them as a source of a mix. The same every time."""
    books = list(read_books(config.books, held_out=False if config.books is None else None))
    total = config.documents * len(config.lengths)
    progress = ProgressLine(total, "recall documents")
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number, (title, text) in enumerate(recall_documents(tokenizer, books, config), start=1):
            file.write(json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n")
            progress.update(number)
    return Source(path=str(path))


def recall_documents(
    tokenizer: "PreTrainedTokenizerBase", books: Iterable[Book], config: RecallConfig
) -> Iterator[tuple[str, str]]:
    """Titles and texts; document k of a length is the same however many there are."""
    shelf = list(books)
    if not shelf:
        raise DataError("no books to hide needles in", hint="name some with books = …")
    encode = plain_encoder(tokenizer)
    around = document_marks(tokenizer).size(0, ends=True)

    def count(text: str) -> int:
        return len(encode([text])[0])

    longest = max(len(book.text.encode()) for book in shelf)
    for length in config.lengths:
        # At least half is book text, and no token is less than a byte: refused at once, not after many attempts.
        if 2 * longest < length:
            raise DataError(
                f"no book is long enough for a document of {length:,} tokens; the longest has {longest:,} bytes",
                hint="give longer books, or ask for a shorter length",
            )
    for length in config.lengths:
        maker = _Maker(books=shelf, count=count, length=length, tokens=length - around, needles=config.needles)
        randoms = (np.random.default_rng([config.seed, length, number]) for number in range(config.documents))
        # Nearly all the time goes into counting tokens, which does not hold Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            yield from threads.map(maker.make, randoms)


@dataclass(frozen=True, kw_only=True)
class _Maker:
    books: Sequence[Book]
    count: Count
    length: int
    """Of a document, in tokens."""
    tokens: int
    """The same without BOS and EOS."""
    needles: int

    def make(self, rng: np.random.Generator) -> tuple[str, str]:
        has_room = False
        for _ in range(ATTEMPTS):
            book = self.books[int(rng.integers(len(self.books)))]
            start = int(rng.integers(max(1, len(book.text) - 8 * self.tokens)))
            text = book.text[start : start + 12 * self.tokens]
            words = WORD.findall(text)[1:] or list(text)  # the first one may be cut; some scripts have no spaces
            instruction = INSTRUCTIONS[int(rng.integers(len(INSTRUCTIONS)))]
            hidden = self._hidden(rng)
            if hidden is None:
                continue
            has_room = True
            document = self._fit(words, instruction, hidden, rng)
            if document is not None:
                return f"recall, {book.title}", document
        raise DataError(
            f"no recall document of {self.length:,} tokens could be made from {counted(len(self.books), 'book')}"
            + ("" if has_room else ": it has no room for a number and its question"),
            hint="give longer books, or ask for a shorter length" if has_room else "ask for a longer length",
        )

    def _fit(
        self, words: list[str], instruction: str, hidden: dict[str, tuple[str, str]], rng: np.random.Generator
    ) -> str | None:
        """A document of exactly the wanted length from the first of these words, if they can give one."""
        book = "".join(words)
        if any(key in book for key in hidden):
            return None
        inserted, last = [], []
        for number, (needle, question) in enumerate(hidden.values()):
            depth = rng.uniform()
            inserted.append((depth, f" {needle}"))
            if number % 4:  # far from its needle: in the second half
                inserted.append((rng.uniform(max(depth, 0.5), 1), f"\n{question}\n"))
            else:
                last.append(question)
        last = [last[index] for index in rng.permutation(len(last))]

        def text(used: int, rest: str = "") -> str:
            """The document with this many words of the book, and a part of one more."""
            body = _insert(inserted, words[:used])
            parts = [instruction, "".join(body).strip() + rest, *last]
            return "\n".join(part for part in parts if part)

        used = _most_words(lambda n: self.count(text(n)), len(words), self.tokens)
        if used is None or used >= len(words):
            return None
        # A word more is too much: its first letters, until the length is met.
        for end in range(len(words[used])):
            document = text(used, words[used][:end])
            if (found := self.count(document)) >= self.tokens:
                return document if found == self.tokens else None
        return None

    def _hidden(self, rng: np.random.Generator) -> dict[str, tuple[str, str]] | None:
        """Needles and their questions by key, as many as there is room for."""
        most = max(self.tokens // SHARE, 1)  # each takes more than a token
        hidden = {}
        for _ in range(min(self.needles, most)):
            key, value = key_value(rng)
            needle, question = WORDINGS[int(rng.integers(len(WORDINGS)))]
            hidden[key] = _filled(needle, key, value), _filled(question + " {value}", key, value)
        some = list(hidden.values())[: len(WORDINGS)]
        each = self.count("\n".join("\n".join(texts) for texts in some)) / len(some)
        room = int(self.tokens / (SHARE * each))
        if not room and self.tokens < 2 * each:
            return None
        return dict(islice(hidden.items(), max(room, 1)))


def _filled(sentence: str, key: str, value: str) -> str:
    return sentence.replace("{key}", key).replace("{value}", value)


def _insert(inserted: Sequence[tuple[float, str]], words: Sequence[str]) -> list[str]:
    """The words with each text at its depth, after a sentence where one ends nearby.

    Texts keep their order where they meet, and none moves past a deeper one.
    """
    places: dict[int, list[str]] = {}
    for depth, text in inserted:
        wanted = min(int(depth * (len(words) + 1)), len(words))
        ends = (i for i in range(wanted, min(wanted + REACH, len(words))) if i and SENTENCE_END.search(words[i - 1]))
        places.setdefault(next(ends, wanted), []).append(text)
    body: list[str] = []
    for index, word in enumerate([*words, ""]):
        body += [*places.get(index, []), word]
    return body


def _most_words(count: Callable[[int], int], most: int, tokens: int) -> int | None:
    """The most words with at most this many tokens; None if even no words are too many."""
    low, high = 0, most + 1  # the first fits, the second does not
    low_count = count(0)
    if low_count > tokens:
        return None
    each = 1.5  # tokens of a word, until more is known
    while high - low > 1:
        # Words take nearly the same number of tokens each, so a few steps suffice.
        middle = min(max(low + round((tokens - low_count) / each), low + 1), high - 1)
        found = count(middle)
        each = max((found - low_count) / (middle - low), 0.5)
        if found <= tokens:
            low, low_count = middle, found
        else:
            high = middle
    return low

"""The data of the tiny base: slices of books, and recall documents that hide a number and ask for it again.

A recall document is `<s>` [instruction] book text with one to three needles, question, answer prefix, seven
digits, `</s>`. Everything is tokenised once, before training: a document is then put together from ready
token lists, so a batch costs milliseconds and depends on nothing but the seed and its number.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from longrope2.books import Book
from longrope2.errors import DataError
from longrope2.needles import key_value

TEMPLATES = Path(__file__).with_name("templates.json")
BOS, EOS = "<s>", "</s>"
VALUE_DIGITS = 7
SEPARATORS = (" ", "\n")  # between instruction, text, needles and question; both occur in evaluations
LAWS = ("skewed", "uniform", "short")
PARETO_MINIMUM, PARETO_EXPONENT = 12, 1.5
SPARE = 32  # tokens that a document may move on in its book to the start of a word
LONGEST_KEY = 8  # tokens; with longer keys not even the shortest wording fits into 64 tokens


@dataclass(frozen=True)
class Key:
    """What a number belongs to: its tokens after a space, and after anything else."""

    text: str
    spaced: list[int]
    plain: list[int]


@dataclass(frozen=True)
class Pattern:
    """One sentence of a wording as tokens, with gaps for the key and the value."""

    parts: tuple[list[int] | str, ...]

    @classmethod
    def compile(cls, tokenizer: Tokenizer, text: str) -> "Pattern":
        """Tokenise the text between the gaps.

        Joining the pieces gives the same tokens as tokenising the whole: the pre-tokenizer always cuts
        before a space and around digits, and the space before a key goes with the key.
        """
        parts: list[list[int] | str] = []
        for piece in re.split(r"( ?\{key\}|\{value\})", text):
            if piece in (" {key}", "{key}", "{value}"):
                parts.append(piece)
            elif piece:
                parts.append(encode(tokenizer, piece))
        return cls(tuple(parts))

    def fill(self, key: Key, value: Sequence[int] = ()) -> list[int]:
        """The sentence for one key and value."""
        gaps = {" {key}": key.spaced, "{key}": key.plain, "{value}": value}
        tokens: list[int] = []
        for part in self.parts:
            tokens += gaps[part] if isinstance(part, str) else part
        return tokens

    def after_value(self, key: Key) -> int:
        """How many tokens follow the value."""
        after = self.parts[self.parts.index("{value}") + 1 :]
        return sum(len(key.plain) if isinstance(part, str) else len(part) for part in after)


@dataclass(frozen=True)
class Wording:
    """One template, each sentence compiled once for every way it may be joined to the text before it."""

    instruction: dict[str, list[int]]
    needle: dict[str, Pattern]  # by separator
    question: dict[str, Pattern]  # with the answer prefix and the space before the answer

    @classmethod
    def compile(cls, tokenizer: Tokenizer, template: dict[str, str]) -> "Wording":
        """Tokenise a template of `templates.json`."""
        # What comes after the value must not hold a key with a space of its own: see `Pattern.after_value`.
        assert "{key}" not in template["needle"].split("{value}")[1], template["needle"]
        instruction = template["instruction"]
        question = f"{template['question']} {template['answer_prefix']} "
        return cls(
            {sep: encode(tokenizer, instruction + sep.strip(" ")) if instruction else [] for sep in SEPARATORS},
            {sep: Pattern.compile(tokenizer, sep + template["needle"]) for sep in SEPARATORS},
            {sep: Pattern.compile(tokenizer, sep + question) for sep in SEPARATORS},
        )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a piece of text, without BOS."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def read_templates(which: str) -> list[dict[str, str]]:
    """The wordings for "train" or "held_out"."""
    return json.loads(TEMPLATES.read_text(encoding="utf-8"))[which]


@dataclass(frozen=True)
class TokenStream:
    """All books as one array of tokens."""

    tokens: np.ndarray  # uint16
    book_starts: np.ndarray  # int64, with the end of the last book appended
    word_starts: np.ndarray  # bool: a needle may stand before this token without cutting a word

    @classmethod
    def from_books(cls, tokenizer: Tokenizer, books: Iterable[Book], *, window: int) -> "TokenStream":
        """Tokenise each book; those shorter than a few windows are left out."""
        arrays = []
        for book in books:
            # Pieces of some hundred lines keep all cores busy.
            lines = book.text.splitlines(keepends=True)
            pieces = ["".join(lines[i : i + 500]) for i in range(0, len(lines), 500)]
            encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
            parts = [np.array(encoding.ids, np.uint16) for encoding in encodings]
            if sum(map(len, parts)) >= 4 * window:
                arrays.append(np.concatenate(parts))
        if not arrays:
            raise DataError(
                f"no book of at least {4 * window:,} tokens to train on",
                hint="give longer books with --books",
            )
        tokens = np.concatenate(arrays)
        starts = np.cumsum([0, *map(len, arrays)])
        first = [tokenizer.id_to_token(i)[:1] in ("Ġ", "Ċ") for i in range(tokenizer.get_vocab_size())]
        return cls(tokens, starts, np.array(first)[tokens])

    def draw(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """Where `count` random slices of `length` tokens start; none crosses the end of a book."""
        positions = rng.integers(len(self.tokens), size=count)
        ends = self.book_starts[np.searchsorted(self.book_starts, positions, side="right")]
        return np.minimum(positions, ends - length)


def draw_distance(law: str, rng: random.Random, shortest: int, longest: int) -> int:
    """A distance from needle to answer, in tokens, within what the document allows.

    The Pareto law has density ∝ x^−(1 + exponent) from its minimum on: most needles are near, few are far,
    as dependencies in natural text are. It is cut off at both ends, not clamped: no distance is favoured.
    """
    if law == "uniform" or longest <= shortest:
        return rng.randint(shortest, max(longest, shortest))
    low, high = max(shortest, PARETO_MINIMUM), longest + 1
    below_high = 1 - (low / high) ** PARETO_EXPONENT
    return int(low * (1 - rng.random() * below_high) ** (-1 / PARETO_EXPONENT))


def longest_distance(law: str, window: int) -> int:
    """The farthest a law may put a needle: the window, or a quarter of it for the `short` law."""
    return window // 4 if law == "short" else window


def make_keys(tokenizer: Tokenizer, books: Sequence[Book], *, count: int, seed: int) -> list[Key]:
    """A pool of keys: half of them adjective-noun, the others words and names of the books, and numbers."""
    rng = random.Random(f"keys {seed}")
    numpy_rng = np.random.default_rng(seed)
    texts = [key_value(numpy_rng)[0] for _ in range(count // 2)]
    words = _frequent(books, r"\b[a-z]{4,8}\b", 2000)
    texts += [f"{rng.choice(words)}-{rng.choice(words)}" for _ in range(count // 5)]
    names = _frequent(books, r"(?<=[a-z] )[A-Z][a-z]{3,}", 1000)
    texts += [" ".join(rng.sample(names, rng.choice((1, 2)))) for _ in range(count // 6)]
    texts += [str(rng.randrange(10, 10000)) for _ in range(count - len(texts))]
    spaced = tokenizer.encode_batch([f" {text}" for text in texts], add_special_tokens=False)
    plain = tokenizer.encode_batch(texts, add_special_tokens=False)
    keys = [Key(text, a.ids, b.ids) for text, a, b in zip(texts, spaced, plain, strict=True)]
    return [key for key in keys if len(key.spaced) <= LONGEST_KEY and len(key.plain) <= LONGEST_KEY]


def _frequent(books: Sequence[Book], pattern: str, count: int) -> list[str]:
    """The words most often matched by `pattern`; ties in the order of the books."""
    counter = Counter(word for book in books for word in re.findall(pattern, book.text))
    return [word for word, _ in counter.most_common(count)]


@dataclass(frozen=True, kw_only=True)
class RecallMaker:
    """Puts recall documents together; all chance comes from the generator it is handed."""

    stream: TokenStream
    wordings: Sequence[Wording]
    keys: Sequence[Key]
    digits: Sequence[int]  # the tokens of "0" … "9"
    bos: int
    eos: int
    window: int
    law: str
    instruction_rate: float = 0.3
    mixed_wording_rate: float = 0.25
    """How often the question is worded by another template, so that the key is what has to match."""

    def make(self, rng: random.Random, *, length: int, start: int, needles: int) -> tuple[list[int], int, int]:
        """A document of exactly `length` tokens around book text from about `start` on.

        Returns its tokens, the place of the answer's first digit, and how far before it the value stood.
        """
        keys = rng.sample(self.keys, needles)
        while len({key.text for key in keys}) < needles:
            keys = rng.sample(self.keys, needles)
        values = [self._value(rng) for _ in keys]
        limit = longest_distance(self.law, self.window)
        head, needle, question = self._sentences(rng, keys[0], length, limit)
        asked = needle.fill(keys[0], values[0])
        after_value = needle.after_value(keys[0])
        room = length - len(head) - len(asked) - len(question) - VALUE_DIGITS - 1  # the last one is EOS

        # The asked needle gets its distance first, exactly as the law has it. A distractor goes to the side
        # where a draw from the same law would put it, in place of book text, so distances stay what they are
        # and being the last needle says nothing about being asked for.
        nearest = VALUE_DIGITS + after_value + len(question)
        farthest = min(nearest + room, limit)
        distance = draw_distance(self.law, rng, nearest, farthest)
        after = distance - nearest
        before = room - after
        left, right = [], []
        for key, value in zip(keys[1:], values[1:], strict=True):
            distractor = needle.fill(key, value)
            nearer = draw_distance(self.law, rng, nearest, farthest) < distance
            if nearer and len(distractor) <= after:
                right.append(distractor)
                after -= len(distractor)
            elif len(distractor) <= before:
                left.append(distractor)
                before -= len(distractor)

        start = next((place for place in range(start, start + SPARE) if self.stream.word_starts[place]), start)
        text = self.stream.tokens[start : start + before + after].tolist()
        # Needles move back to the start of a word; the asked one only if the law still allows that distance,
        # and the others not past it.
        cut = self._word_start(start, before, most=farthest - distance)
        body: list[int] = []
        done = 0
        for place, tokens in sorted((self._word_start(start, rng.randint(0, cut)), t) for t in left):
            body += text[done:place] + tokens
            done = place
        body += text[done:cut] + asked
        value_start = len(head) + len(body) - after_value - VALUE_DIGITS
        done = cut
        for place, tokens in sorted((self._word_start(start, rng.randint(cut, len(text))), t) for t in right):
            body += text[done : max(place, cut)] + tokens
            done = max(place, cut)
        row = [*head, *body, *text[done:], *question, *values[0], self.eos]
        assert len(row) == length
        answer = length - 1 - VALUE_DIGITS
        return row, answer, answer - value_start

    def _sentences(self, rng: random.Random, key: Key, length: int, limit: int) -> tuple[list[int], Pattern, list[int]]:
        """Draw wordings until one fits: what opens the document, the needle and the question."""
        text_sep, question_sep = rng.choice(SEPARATORS), rng.choice(SEPARATORS)
        for _ in range(1000):
            wording = rng.choice(self.wordings)
            asking = rng.choice(self.wordings) if rng.random() < self.mixed_wording_rate else wording
            needle = wording.needle[text_sep]
            question = asking.question[question_sep].fill(key)
            nearest = VALUE_DIGITS + needle.after_value(key) + len(question)
            # Beside needle and question there are BOS, the answer, EOS, and at least one token of text.
            room = length - len(needle.fill(key)) - len(question) - 2 * VALUE_DIGITS - 2
            if room >= 1 and nearest <= limit:
                break
        else:
            raise DataError(f"no wording fits into {length} tokens", hint="add shorter ones to templates.json")
        instruction = wording.instruction[question_sep]
        if len(instruction) < room // 2 and rng.random() < self.instruction_rate:
            return [self.bos, *instruction], needle, question
        return [self.bos], needle, question

    def _value(self, rng: random.Random) -> list[int]:
        number = rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS)
        return [self.digits[int(digit)] for digit in str(number)]

    def _word_start(self, start: int, offset: int, most: int = 16) -> int:
        """The nearest word start at or before `offset`, unless it is more than `most` tokens back."""
        place = offset
        while place > 0 and not self.stream.word_starts[start + place]:
            place -= 1
        return place if offset - place <= most else offset


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one batch is made of."""

    length: int
    rows: int
    needle_counts: tuple[int, ...]  # one is drawn for each recall document


class Batches(Dataset):
    """Batch number → tokens, answer mask, distances: the same for any number of worker processes.

    The first half of the rows is plain book text, the second half recall documents.
    """

    def __init__(self, maker: RecallMaker, steps: Sequence[Step], *, seed: str, text: bool = True) -> None:
        self.maker, self.steps, self.seed, self.text = maker, steps, seed, text

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        step, maker = self.steps[number], self.maker
        rng = random.Random(f"{self.seed} {number}")
        num_text = step.rows // 2 if self.text else 0
        # int16 keeps what the workers pass on through shared memory small.
        ids = np.empty((step.rows, step.length), np.int16)
        answers = np.zeros((step.rows, step.length), bool)
        distances = np.zeros(step.rows - num_text, np.int16)
        starts = maker.stream.draw(np.random.default_rng(rng.getrandbits(64)), step.rows, step.length + SPARE)
        ids[:num_text, 0] = maker.bos
        ids[:num_text, 1:] = maker.stream.tokens[starts[:num_text, None] + np.arange(step.length - 1)]
        for row in range(num_text, step.rows):
            tokens, answer, distance = maker.make(
                rng, length=step.length, start=int(starts[row]), needles=rng.choice(step.needle_counts)
            )
            ids[row] = tokens
            answers[row, answer : answer + VALUE_DIGITS] = True
            distances[row - num_text] = distance
        return torch.from_numpy(ids), torch.from_numpy(answers), torch.from_numpy(distances)

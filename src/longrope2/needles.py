"""Books → seeded documents of exactly the wanted length: with a needle and its answer marked, or plain."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from longrope2.books import Book, long_enough
from longrope2.codec import Codec
from longrope2.errors import DataError, all_problems, counted

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

_ADJECTIVES = """
    amber ample brisk broad calm careful cheerful clever coastal curious daring distant dusty eager early
    earnest faithful famous fierce gentle gifted golden graceful hollow honest humble icy idle jolly keen
    kindly lively lonely loyal mellow misty modest narrow nimble noble numerous patient placid plain polite
    proud quaint quiet rapid restless rugged rustic silent silver sleepy slender solemn steady stormy sturdy
    tender thrifty vivid wistful"""
_NOUNS = """
    acorn anchor anvil apple badger banner barrel beacon bonnet bridge bucket candle canoe carpet castle
    chimney clover compass copper cradle cricket donkey falcon feather fiddle forest garden goblet hammer
    harbor helmet heron island kettle kite ladder lantern lemon lobster magnet meadow mirror otter paddle
    parrot pebble pepper pigeon pillow pocket pumpkin rabbit ribbon saddle sandal shovel spider thimble
    tunnel turnip velvet violin walnut willow"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
MOST_NEEDLES = len(ADJECTIVES) * len(NOUNS)
"""Each needle of a set has its own key."""
ATTEMPTS = 12
# After this many failed draws a document leaves its own book for the next one.
ATTEMPTS_IN_OWN_BOOK = 4
WORD_START = re.compile(r"(?<=\s)\S")


@dataclass(frozen=True, kw_only=True)
class NeedleTemplate:
    """The fixed sentences of a needle document; the defaults are those of the paper's appendix.

    `{key}` and `{value}` stand for what is hidden; any other brace is plain text.
    """

    instruction: str = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    """Opens the document; may be empty."""
    needle: str = "One of the special magic numbers for {key} is: {value}."
    question: str = "What is the special magic number for {key} mentioned in the provided text?"
    answer_prefix: str = "The special magic number for {key} mentioned in the provided text is"
    """Stands after the question; the value follows it and ends the document."""

    def __post_init__(self) -> None:
        problems = []
        for field, key, value in (
            ("instruction", "no", "no"),
            ("needle", "at least one", "exactly one"),
            ("question", "at least one", "no"),
            ("answer_prefix", "at least one", "no"),
        ):
            text = getattr(self, field)
            if not isinstance(text, str):
                problems.append(f"{field} must be a string, got {text!r}")
                continue
            for placeholder, wanted in (("{key}", key), ("{value}", value)):
                seen = text.count(placeholder)
                if (wanted == "no") != (seen == 0) or (wanted == "exactly one" and seen > 1):
                    problems.append(f"{field} must hold {wanted} {placeholder}, got {text!r}")
        if problems:
            raise DataError(
                all_problems("needle template", problems),
                hint="the value stands once in the needle and nowhere else; "
                "the key stands in needle, question and answer_prefix",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NeedleTemplate":
        """A template from a config table; what it leaves out keeps its default."""
        known = [field.name for field in fields(cls)]
        unknown = [f"unknown key {name!r}" for name in values if name not in known]
        if unknown:
            raise DataError(all_problems("needle template", unknown), hint=f"the keys are {', '.join(known)}")
        return cls(**values)


PAPER_TEMPLATE = NeedleTemplate()


@dataclass(frozen=True, kw_only=True)
class Needle:
    """What is hidden in a document, and where its answer stands."""

    key: str
    value: str
    depth: float
    """Where it really stands: 0 before the first token of the book text, 1 after its last."""
    wanted_depth: float
    """Where it was to stand, of which the end of a sentence nearby was taken."""
    start: int
    """Index of the first token of its sentence."""
    answer: tuple[int, int]
    """The tokens of its answer: the first one, and the one after the last."""


@dataclass(frozen=True, kw_only=True)
class NeedleDocument:
    """One document: instruction, book with needles in it, then for each a question, answer prefix and answer."""

    token_ids: tuple[int, ...]
    """The whole document, answers included; it opens as the tokenizer opens a text (one BOS or none)."""
    needles: tuple[Needle, ...]
    """In the order in which they are asked for; the last answer ends the document."""
    book: str
    """Title of the book."""
    book_start: int
    """Index of the first character used of the book."""
    asked_from: int
    """Index of the first token of the first question."""
    more_values: tuple[str, ...] = ()
    """Of further sentences with the key of the only needle."""

    @property
    def needle(self) -> Needle:
        """The only one."""
        (needle,) = self.needles
        return needle

    def prompt_ids(self, number: int = 0) -> tuple[int, ...]:
        """Everything before the first question, then the question of one needle alone."""
        begin = self.needles[number - 1].answer[1] if number else self.asked_from
        return self.token_ids[: self.asked_from] + self.token_ids[begin : self.needles[number].answer[0]]

    @property
    def answer_tokens(self) -> int:
        """How many tokens all answers have together."""
        return sum(end - start for start, end in (needle.answer for needle in self.needles))


@dataclass(frozen=True, kw_only=True)
class PlainDocument:
    """A piece of a book, nothing hidden in it."""

    token_ids: tuple[int, ...]
    """It opens as the tokenizer opens a text (one BOS or none)."""
    book: str
    book_start: int


def key_value(rng: "np.random.Generator", value_digits: int = 7) -> tuple[str, str]:
    """Draw a key like "numerous-kite" and a number of `value_digits` digits that does not start with 0."""
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    digits = [rng.integers(1, 10), *rng.integers(0, 10, size=value_digits - 1)]
    return key, "".join(str(digit) for digit in digits)


def make_needles(
    tokenizer: "PreTrainedTokenizerBase",
    books: Iterable[Book],
    *,
    length: int,
    count: int,
    seed: int,
    depth: float | Sequence[float] | Literal["uniform"] = 0.0,
    template: NeedleTemplate | Sequence[NeedleTemplate] = PAPER_TEMPLATE,
    value_digits: int = 7,
    note: Callable[[str], None] | None = None,
    around: int = 0,
    from_start: bool = False,
    keys: int = 1,
    together: bool = True,
    more_values: int = 0,
) -> list[NeedleDocument]:
    """Make `count` documents of exactly `length` tokens, each with its own place in a book, keys and values.

    Each hides `keys` needles and asks for all of them at its end, one after another in random order. Where they are not
    asked for `together` but each in a prompt of its own, the longest question alone counts in the length. Document k is
    the same however many there are. Several depths are taken in turn, needle by needle; "uniform" draws one for each.
    Several templates are taken in turn, too, each for as many documents as there are depths. A needle may have
    `more_values`, in sentences like its own that stand anywhere. With fewer long books than documents, books serve
    again from another start. With `from_start` a book is read from its beginning when it first serves, as in the paper;
    otherwise from anywhere. A message about the length counts the `around` tokens that the caller puts around a
    document.
    """
    depths = (depth,) if isinstance(depth, int | float) else depth
    templates = (template,) if isinstance(template, NeedleTemplate) else template
    _check_arguments(count, seed, depths, value_digits, keys)
    note = note or (lambda message: None)
    codec = Codec(tokenizer)
    shelf = _Shelf(codec, books, length=length, seed=seed, note=note)
    makers = [
        _Maker(
            codec=codec,
            shelf=shelf,
            template=each,
            length=length,
            value_digits=value_digits,
            around=around,
            from_start=from_start,
            together=together,
            more_values=more_values,
        )
        for each in templates
    ]
    documents: list[NeedleDocument] = []
    for index in range(count):
        # The middle number keeps these streams apart from the one that shuffles the books.
        rng = _generator(seed, 1, index)
        if isinstance(depths, str):
            wanted, turn = [float(rng.uniform()) for _ in range(keys)], index
        else:
            wanted = [depths[(index * keys + number) % len(depths)] for number in range(keys)]
            turn = index * keys // len(depths)
        documents.append(makers[turn % len(makers)].make(documents, wanted, rng))
    shelf.note_reuse(count, note)
    return documents


def make_plain(
    tokenizer: "PreTrainedTokenizerBase",
    books: Iterable[Book],
    *,
    length: int,
    count: int,
    seed: int,
    note: Callable[[str], None] | None = None,
) -> list[PlainDocument]:
    """Make `count` documents of exactly `length` tokens of book text.

    A book is read from its beginning when it first serves. Document k is the same however many are asked for.
    """
    _check_arguments(count, seed, (0.0,), value_digits=7, keys=1)
    note = note or (lambda message: None)
    codec = Codec(tokenizer)
    shelf = _Shelf(codec, books, length=length, seed=seed, note=note)
    documents = []
    for index in range(count):
        rng, book = _generator(seed, 1, index), shelf.book(index)
        fraction = shelf.fraction(book, rng, from_start=True)
        start, text = shelf.cut(book, length - len(codec.opening), fraction, after="", lead="")
        shelf.used.add((book, start))
        documents.append(PlainDocument(token_ids=(*codec.opening, *text), book=book.title, book_start=start))
    shelf.note_reuse(count, note)
    return documents


def documents_digest(documents: "Iterable[NeedleDocument | PlainDocument]") -> str:
    """A hash that identifies documents, wherever their books came from."""
    content = json.dumps([document.token_ids for document in documents])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def check_length(
    tokenizer: "PreTrainedTokenizerBase",
    length: int,
    *,
    around: int = 0,
    templates: Sequence[NeedleTemplate] = (PAPER_TEMPLATE,),
    keys: int = 1,
    more_values: int = 0,
) -> None:
    """Raise the error of `make_needles` about too small a length, as far as a sample shows; reads no book.

    Of several needles each is asked for by itself.
    """
    codec = Codec(tokenizer)
    largest = max(_largest_size(codec, template, 7, keys, False, more_values) for template in templates)
    if length <= largest:
        raise _too_short(length, largest, around)


def most_keys(tokenizer: "PreTrainedTokenizerBase", length: int) -> int:
    """How many needles a document of this length may have: their sentences take at most half of it; at least one."""
    codec = Codec(tokenizer)
    head = len(_head(codec, PAPER_TEMPLATE))
    each = _largest_size(codec, PAPER_TEMPLATE, 7) - head
    return max((length // 2 - head) // each, 1)


def depth_problems(depths: Sequence[float], *, keys: int = 1, **documents: int) -> list[str]:
    """Problems with depths that the needles of `documents`, `keys` in each, take in turn, one message each.

    With fewer needles than depths, some depths would silently never be tried.
    """
    found = [f"depth must lie between 0 and 1, got {depth}" for depth in depths if not 0 <= depth <= 1]
    if not depths:
        found.append("depth must name one place or more, got none")
    few = {name: count for name, count in documents.items() if 0 < count * keys < len(depths)}
    return found + [
        f"{name} must have at least as many needles as there are depths ({len(depths)}), got {count * keys}"
        for name, count in few.items()
    ]


def _generator(*seed: int) -> "np.random.Generator":
    import numpy as np  # not at the top: `--help` reads this module

    return np.random.default_rng(seed)


def _check_arguments(count: int, seed: int, depths: Sequence[float] | str, value_digits: int, keys: int) -> None:
    """Raise DataError naming every bad argument."""
    limits = (("count", count, 1), ("seed", seed, 0), ("value_digits", value_digits, 1), ("keys", keys, 1))
    problems = [f"{name} must be at least {least}, got {seen}" for name, seen, least in limits if seen < least]
    # No two needles of a call share a key or a value.
    most = min(MOST_NEEDLES, 9 * 10 ** (max(value_digits, 1) - 1)) // max(keys, 1)
    if count > most:
        each = f" and {keys} keys" if keys > 1 else ""
        problems.append(f"count must be at most {most} with {value_digits} value_digits{each}, got {count}")
    if not isinstance(depths, str):
        problems += depth_problems(depths)
    elif depths != "uniform":
        problems.append(f'depth must be numbers from 0 to 1, or "uniform", got {depths!r}')
    if problems:
        raise DataError(all_problems("needle documents", problems), hint="see help(longrope2.needles.make_needles)")


class _Shelf:
    """The books of at least `length` tokens in seeded order, looked at only when their turn comes."""

    def __init__(
        self, codec: Codec, books: Iterable[Book], *, length: int, seed: int, note: Callable[[str], None]
    ) -> None:
        given = list(dict.fromkeys(books))
        order = _generator(seed, 0).permutation(len(given))
        self.books: list[Book] = []
        self.used: set[tuple[Book, int]] = set()
        self._codec, self._length = codec, length
        self._unseen = long_enough((given[index] for index in order), length, self._count_tokens, note=note)

    def book(self, number: int) -> Book:
        """The book whose turn it is: a new one while there is one, then all over again."""
        while len(self.books) <= number and (book := next(self._unseen, None)) is not None:
            self.books.append(book)
        return self.books[number % len(self.books)]

    def fraction(self, book: Book, rng: "np.random.Generator", *, from_start: bool) -> float:
        """Where to begin in a book, as a fraction of the possible starts."""
        drawn = float(rng.uniform())
        return 0.0 if from_start and all(used is not book for used, _ in self.used) else drawn

    def note_reuse(self, count: int, note: Callable[[str], None]) -> None:
        """Say so where `count` documents were made of fewer books."""
        if count > len(self.books):
            note(
                f"{counted(count, 'document')} from {counted(len(self.books), 'book')} long enough for "
                f"{self._length:,} tokens: books serve more than once, each time from another start"
            )

    def cut(self, book: Book, budget: int, fraction: float, *, after: str, lead: str) -> tuple[int, list[int]]:
        """`budget` ids from about `fraction` of the possible starts on, and the character they start at."""
        need = math.ceil(budget * self._characters_per_token(book.text))
        if 1.2 * need < len(book.text):
            # A book with room to spare affords a margin that mostly saves the second try.
            need = math.ceil(1.05 * need)
        while True:
            start = _word_start(book.text, int(fraction * max(0, len(book.text) - need)))
            ids = self._codec.ids(lead + book.text[start : start + need], after=after)
            if len(ids) >= budget or need >= len(book.text):
                return start, ids[:budget]
            need = math.ceil(1.02 * need * budget / max(1, len(ids)))

    def _count_tokens(self, text: str) -> int:
        """The tokens of `text`: exact where it may be just too short, elsewhere a quick estimate from samples.

        The estimate has two digits, since it stands in messages and claims no more than it knows.
        """
        about = len(text) / self._characters_per_token(text)
        if 0.7 * self._length < about < 1.3 * self._length:
            return len(self._codec.ids(text))
        return int(float(f"{about:.2g}"))

    def _characters_per_token(self, text: str) -> float:
        starts = (len(text) * tenths // 10 for tenths in (1, 5, 9))
        sample = "".join(text[start : start + min(2000, self._length)] for start in starts)
        return max(1, len(sample)) / max(1, len(self._codec.ids(sample)))


def _word_start(text: str, position: int) -> int:
    """The first start of a word soon after `position`; that itself at 0 and in text without spaces."""
    match = WORD_START.search(text, position, position + 200) if position else None
    return match.start() if match else position


@dataclass(frozen=True, kw_only=True)
class _Sentences:
    """The ids of one needle's sentences."""

    key: str
    value: str
    needle: list[int]
    prompt: list[int]
    answer: list[int]
    key_count: int
    """How often the key stands in them."""


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes one document at a time."""

    codec: Codec
    shelf: _Shelf
    template: NeedleTemplate
    length: int
    value_digits: int
    around: int
    from_start: bool
    together: bool
    more_values: int

    def make(
        self, earlier: Sequence[NeedleDocument], depths: Sequence[float], rng: "np.random.Generator"
    ) -> NeedleDocument:
        """Draw keys, values and a place in a book until the document reads back as it should."""
        used = [needle for document in earlier for needle in document.needles]
        head = _head(self.codec, self.template)
        reason = ""
        for attempt in range(ATTEMPTS):
            hidden = self._draw(depths, {needle.key for needle in used}, {needle.value for needle in used}, rng)
            order = range(1) if len(hidden) == 1 else rng.permutation(len(hidden))
            more = self._draw_more(hidden, rng)
            asking = [len(sentences.prompt) + len(sentences.answer) for sentences in hidden]
            questions = sum(asking) if self.together else max(asking)
            budget = self.length - len(head) - sum(len(sentences.needle) for sentences in (*hidden, *more)) - questions
            if budget < 1:
                sizes = self.value_digits, len(hidden), self.together, self.more_values
                largest = _largest_size(self.codec, self.template, *sizes)
                raise _too_short(self.length, max(self.length - budget, largest), self.around)
            # What the book follows: the needle, the line of the instruction, or nothing.
            after, lead = ("a", " ") if 0.0 in depths else ("\n" if self.template.instruction else "", "")
            book = self.shelf.book(len(earlier) + max(0, attempt - ATTEMPTS_IN_OWN_BOOK + 1))
            fraction = self.shelf.fraction(book, rng, from_start=self.from_start)
            start, text = self.shelf.cut(book, budget, fraction, after=after, lead=lead)
            if len(text) < budget or (book, start) in self.shelf.used:
                reason = f"'{book.title}' has no room for another start"
                continue
            anywhere = [float(rng.uniform()) for _ in more]
            places = [self.codec.place(text, depth) for depth in (*depths, *anywhere)]
            ids, starts = _insert(head, text, places, [sentences.needle for sentences in (*hidden, *more)])
            needles, asked_from = [], len(ids)
            for number in order:
                asked = hidden[number]
                ids += asked.prompt + asked.answer
                needles.append(
                    Needle(
                        key=asked.key,
                        value=asked.value,
                        depth=places[number] / budget,
                        wanted_depth=depths[number],
                        start=starts[number],
                        answer=(len(ids) - len(asked.answer), len(ids)),
                    )
                )
            assert len(ids) - sum(asking) + questions == self.length
            read = self.codec.text(ids)
            times: Counter[str] = Counter()
            for sentences in hidden:
                times += Counter({sentences.value: 2, sentences.key: sentences.key_count})
            for sentences in more:
                times += Counter({sentences.value: 1, sentences.key: self.template.needle.count("{key}")})
            spoilt = [name for name, expected in times.items() if read.count(name) != expected]
            if spoilt:
                reason = f"the key or value {spoilt[0]} already stands in '{book.title}'"
                continue
            if self.codec.bos is not None and ids.count(self.codec.bos) != len(self.codec.opening):
                reason = f"'{book.title}' holds the beginning-of-sequence token"
                continue
            self.shelf.used.add((book, start))
            return NeedleDocument(
                token_ids=tuple(ids),
                needles=tuple(needles),
                book=book.title,
                book_start=start,
                asked_from=asked_from,
                more_values=tuple(sentences.value for sentences in more),
            )
        raise DataError(
            f"document {len(earlier)}: none of {ATTEMPTS} draws can be used; the last one: {reason}",
            hint="give more or longer books, a smaller length, or more value_digits",
        )

    def _draw(
        self, depths: Sequence[float], keys: set[str], values: set[str], rng: "np.random.Generator"
    ) -> list[_Sentences]:
        """Needles with keys and values of their own; the first at depth 0 opens the text."""
        hidden: list[_Sentences] = []
        for depth in depths:
            key, value = key_value(rng, self.value_digits)
            while key in keys or value in values:
                key, value = key_value(rng, self.value_digits)
            keys.add(key)
            values.add(value)
            opens = depth == 0.0 and 0.0 not in depths[: len(hidden)]
            hidden.append(_sentences(self.codec, self.template, key, value, opens=opens))
        return hidden

    def _draw_more(self, hidden: Sequence[_Sentences], rng: "np.random.Generator") -> list[_Sentences]:
        """Further sentences with the first needle's key, and with values of their own."""
        more: list[_Sentences] = []
        for _ in range(self.more_values):
            taken = {sentences.value for sentences in (*hidden, *more)}
            _, value = key_value(rng, self.value_digits)
            while value in taken:
                _, value = key_value(rng, self.value_digits)
            more.append(_sentences(self.codec, self.template, hidden[0].key, value, opens=False))
        return more


def _insert(
    head: Sequence[int], text: Sequence[int], places: Sequence[int], needles: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The text after its head with each needle at its place, and the index at which each begins."""
    ids, starts, done = list(head), [0] * len(needles), 0
    for number in sorted(range(len(needles)), key=lambda number: places[number]):  # stable: equal places in turn
        ids += text[done : places[number]]
        done = places[number]
        starts[number] = len(ids)
        ids += needles[number]
    return [*ids, *text[done:]], starts


def _head(codec: Codec, template: NeedleTemplate) -> list[int]:
    """What stands before book and needles."""
    return codec.opening + (codec.ids(template.instruction + "\n") if template.instruction else [])


def _sentences(codec: Codec, template: NeedleTemplate, key: str, value: str, *, opens: bool) -> _Sentences:
    """Tokenise the sentences of a needle and see that they read back with key and value whole."""
    line = "\n" if template.instruction else ""
    sentence = template.needle.replace("{key}", key).replace("{value}", value)
    tail = f"\n{template.question} {template.answer_prefix}".replace("{key}", key)
    needle = codec.ids(sentence, after=line) if opens else codec.ids(" " + sentence, after="a")
    prompt, answer = codec.split_answer(tail, value)
    for text, ids, names in ((sentence, needle, (key, value)), (tail, prompt, (key,))):
        read = codec.text(ids)
        if any(read.count(name) != text.count(name) for name in names):
            raise DataError(
                f"the tokenizer does not reproduce its input: {read!r} for {text!r}",
                hint="needle documents need a tokenizer that can write lower-case words and hyphens",
            )
    return _Sentences(
        key=key,
        value=value,
        needle=needle,
        prompt=prompt,
        answer=answer,
        key_count=sentence.count(key) + tail.count(key),
    )


def _largest_size(
    codec: Codec,
    template: NeedleTemplate,
    value_digits: int,
    keys: int = 1,
    together: bool = True,
    more_values: int = 0,
) -> int:
    """The most tokens that all sentences take, over keys of the longest words and a sample of values."""

    def tokens(key: str) -> int:
        return len(codec.ids(template.needle.replace("{key}", key), after="a"))

    rng = _generator(7)
    adjectives = sorted(ADJECTIVES, key=lambda word: tokens(f"{word}-{NOUNS[0]}"))[-8:]
    nouns = sorted(NOUNS, key=lambda word: tokens(f"{ADJECTIVES[0]}-{word}"))[-8:]
    draws = [(f"{adjective}-{noun}", key_value(rng, value_digits)[1]) for adjective in adjectives for noun in nouns]
    made = [_sentences(codec, template, *draw, opens=opens) for draw in draws for opens in (True, False)]
    needle = max(len(sentences.needle) for sentences in made)
    asking = max(len(sentences.prompt) + len(sentences.answer) for sentences in made)
    return len(_head(codec, template)) + (keys + more_values) * needle + (keys if together else 1) * asking


def _too_short(length: int, largest: int, around: int) -> DataError:
    return DataError(
        f"a needle document of {length + around} tokens has no room for its sentences and any book text",
        hint=f"the smallest length for this template and tokenizer is {largest + 1 + around}",
    )

import re
import subprocess
import sys
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from longrope2 import needles
from longrope2.books import Book, read_books
from longrope2.errors import DataError
from longrope2.needles import (
    ADJECTIVES,
    ATTEMPTS,
    NOUNS,
    PAPER_TEMPLATE,
    NeedleDocument,
    NeedleTemplate,
    check_length,
    key_value,
    make_needles,
    make_plain,
)

BYTE_LEVEL = ("split-digits", "digit-runs", "space-with-digits")
# Every way in which today's models write numbers, spaces and the start of a text.
TOKENIZERS = (*BYTE_LEVEL, "metaspace-bpe", "llama-2", "unigram")


@cache
def package_text() -> str:
    return next(read_books()).text


@cache
def books(count: int = 10, characters: int = 20_000) -> tuple[Book, ...]:
    """Pieces of a real book, each a book of its own."""
    text = package_text()
    starts = range(20_000, len(text), characters)[:count]
    assert len(starts) == count
    return tuple(
        Book(title=f"part {number}", text=text[start : start + characters], source="test")
        for number, start in enumerate(starts)
    )


def one_book(text: str, title: str = "one") -> Book:
    return Book(title=title, text=text, source="test")


@cache
def tokenizer(kind: str, bos: bool = False) -> PreTrainedTokenizerFast:
    """A small tokenizer, trained on a book, the needle's sentences and many numbers."""
    special = ["<unk>", "<s>", "</s>"]
    alphabet = [*map(chr, range(32, 127)), "\n"]
    options: dict[str, Any] = {"vocab_size": 1200, "special_tokens": special, "show_progress": False}
    bpe_options = {**options, "initial_alphabet": alphabet}
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer: Any = trainers.BpeTrainer(**bpe_options)
    if kind in BYTE_LEVEL:
        trainer = trainers.BpeTrainer(**options, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        splits: dict[str, list[Any]] = {
            "split-digits": [pre_tokenizers.Digits(individual_digits=True)],
            "digit-runs": [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")],
            "space-with-digits": [],
        }
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([*splits[kind], byte_level])
        model.decoder = decoders.ByteLevel()
    elif kind == "llama-2":
        # No pre-tokenizer at all: the space before every text comes from the normalizer.
        model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(**{**options, "special_tokens": special + bytes_tokens})
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        if kind == "unigram":
            model = Tokenizer(models.Unigram())
            trainer = trainers.UnigramTrainer(**bpe_options, unk_token="<unk>")
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        model.decoder = decoders.Metaspace(prepend_scheme="always")
    rng = np.random.default_rng(0)
    numbers = [f"for {key} is: {value}. is {value}" for key, value in (key_value(rng) for _ in range(400))]
    text = package_text()
    lines = [line + "\n" for line in text[100_000:140_000].split("\n")]
    if kind == "llama-2":
        lines = [line.rstrip("\n") for line in lines]
    model.train_from_iterator([*lines, *numbers, *numbers], trainer)
    if kind == "llama-2":
        model.pre_tokenizer = None
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    if bos:
        model.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
        )
    return wrap(model)


def wrap(model: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=256
    )


def spelled(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, and of what the merges make of them across any boundary."""
    characters = [*map(chr, range(32, 127)), "\n"]
    words = ["<unk>", "<s>", "</s>", *characters, *dict.fromkeys(left + right for left, right in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    model.decoder = decoders.Fuse()
    return wrap(model)


def read(tokenizer: PreTrainedTokenizerFast, ids: Any) -> str:
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def check(
    tokenizer: PreTrainedTokenizerFast,
    document: NeedleDocument,
    length: int,
    template: NeedleTemplate = PAPER_TEMPLATE,
) -> str:
    """Check everything a document promises, from its ids alone; returns its text."""
    ids = document.token_ids
    assert len(ids) == length
    # The answers: whole, each after its question, one after another up to the end.
    asked, end = ids[: document.asked_from], document.asked_from
    for number, needle in enumerate(document.needles):
        alone, before = document.prompt_ids(number), end
        start, end = needle.answer
        assert alone == asked + ids[before:start]
        assert read(tokenizer, ids[start:end]).strip() == needle.value
        question = f"{template.question} {template.answer_prefix}".replace("{key}", needle.key)
        assert read(tokenizer, ids[before:start]).strip() == question.strip()
    assert end == length
    assert document.answer_tokens == sum(needle.answer[1] - needle.answer[0] for needle in document.needles)
    # The start: as the tokenizer starts any text.
    own_rule = tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    assert (ids[0] == tokenizer.bos_token_id) == own_rule
    assert ids.count(tokenizer.bos_token_id) == own_rule
    text = read(tokenizer, ids).removeprefix("<s>").lstrip()
    assert text.startswith(template.instruction)
    # The needles: where the document says, and nothing else like them.
    for needle in document.needles:
        sentence = template.needle.replace("{key}", needle.key).replace("{value}", needle.value)
        question = f"{template.question} {template.answer_prefix}".replace("{key}", needle.key)
        assert read(tokenizer, ids[needle.start :]).lstrip().startswith(sentence)
        assert text.count(needle.value) == 2
        assert text.count(needle.key) == sentence.count(needle.key) + question.count(needle.key)
        assert 0.0 <= needle.depth <= 1.0
    return text


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_documents_hold_what_they_promise(kind: str, bos: bool) -> None:
    for document, depth in zip(
        make_needles(tokenizer(kind, bos), books(), length=1500, count=6, seed=1, depth=[0.0, 0.4, 1.0]),
        [0.0, 0.4, 1.0] * 2,
        strict=True,
    ):
        check(tokenizer(kind, bos), document, 1500)
        assert document.needle.depth == pytest.approx(depth, abs=0.02 if 0 < depth < 1 else 0)


@settings(max_examples=80)
@given(
    kind=st.sampled_from(TOKENIZERS),
    bos=st.booleans(),
    length=st.integers(450, 3000),
    depth=st.floats(0, 1) | st.just("uniform"),
    seed=st.integers(0, 2**40),
)
def test_any_length_depth_and_seed(kind: str, bos: bool, length: int, depth: Any, seed: int) -> None:
    document = make_needles(tokenizer(kind, bos), books(), length=length, count=1, seed=seed, depth=depth)[0]
    check(tokenizer(kind, bos), document, length)
    if depth != "uniform":
        assert abs(document.needle.depth - depth) <= 17 / (length - 400)


@settings(max_examples=25)
@given(depth=st.floats(0, 1), seed=st.integers(0, 1000), kind=st.sampled_from(TOKENIZERS))
def test_depth_within_one_percent(depth: float, seed: int, kind: str) -> None:
    for length in (4096, 6000):
        document = make_needles(tokenizer(kind), books(3, 60_000), length=length, count=1, seed=seed, depth=depth)[0]
        assert abs(document.needle.depth - depth) <= 0.01


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_text_is_the_papers_layout(kind: str, depth: float) -> None:
    """What is left without the fixed sentences is one piece of the book, read from a word's start."""
    for document in make_needles(tokenizer(kind), books(), length=1200, count=5, seed=3, depth=depth):
        text = check(tokenizer(kind), document, 1200)
        key, value = document.needle.key, document.needle.value
        needle = f"One of the special magic numbers for {key} is: {value}."
        question = (
            f"\nWhat is the special magic number for {key} mentioned in the provided text? "
            f"The special magic number for {key} mentioned in the provided text is {value}"
        )
        assert text.startswith(PAPER_TEMPLATE.instruction + "\n")
        assert text.endswith(question)
        body = text.removeprefix(PAPER_TEMPLATE.instruction + "\n").removesuffix(question)
        assert body.startswith(needle) == (depth == 0.0)
        assert body.endswith(needle) == (depth == 1.0)
        before, after = (part.strip(" \ufffd") for part in body.split(needle))
        book = next(book for book in books() if book.title == document.book)
        piece = f"{before} {after}".strip() if body.count(f" {needle} ") else before + after
        assert book.text[document.book_start :].startswith(piece)
        assert document.book_start == 0 or book.text[document.book_start - 1].isspace()


def test_needle_goes_between_sentences() -> None:
    for document in make_needles(
        tokenizer("split-digits"), books(3, 60_000), length=6000, count=3, seed=5, depth=[0.2, 0.5, 0.8]
    ):
        before = read(tokenizer("split-digits"), document.token_ids[: document.needle.start])
        assert re.search(r"[.!?][\"'”’)]*\s*$", before)


def test_needle_goes_between_words_where_no_sentence_ends() -> None:
    book = one_book("word after word " * 2000)
    document = make_needles(tokenizer("unigram"), [book], length=900, count=1, seed=0, depth=0.5)[0]
    before = read(tokenizer("unigram"), document.token_ids[: document.needle.start])
    assert before.endswith((" word", " after"))


def test_text_without_spaces_or_in_many_bytes() -> None:
    book = one_book("".join(chr(0x4E00 + number * 7 % 900) for number in range(9000)))
    for seed in range(5):
        document = make_needles(tokenizer("split-digits"), [book], length=900, count=1, seed=seed, depth=0.5)[0]
        check(tokenizer("split-digits"), document, 900)


# How the released code went wrong.


def test_answer_is_never_cut_and_alone_is_scored() -> None:
    """The released code cut the last tokens off and scored every other one."""
    for length in range(500, 520):
        document = make_needles(tokenizer("digit-runs", True), books(), length=length, count=1, seed=0)[0]
        answer = document.token_ids[slice(*document.needle.answer)]
        assert read(tokenizer("digit-runs", True), answer).strip() == document.needle.value
        assert len(document.token_ids) == length
        assert 0 < document.answer_tokens == len(answer) <= len(document.needle.value)


def test_bos_stands_once_even_if_the_book_speaks_of_it() -> None:
    book = one_book("They wrote <s> and </s> all day. " * 400)
    for kind in TOKENIZERS[:-1]:
        fast = tokenizer(kind, True)
        document = make_needles(fast, [book], length=700, count=1, seed=0)[0]
        assert document.token_ids.count(fast.bos_token_id) == 1
        # The caller's tokenizer still knows its special tokens.
        assert fast("<s>", add_special_tokens=False).input_ids == [fast.bos_token_id]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("depth", [(0.0, 0.5, 0.25, 0.75), 0.0, (0.3, 1.0), "uniform"])
def test_several_needles_in_a_document(kind: str, depth: Any) -> None:
    documents = make_needles(tokenizer(kind, True), books(), length=1800, count=3, seed=5, depth=depth, keys=4)
    for document in documents:
        check(tokenizer(kind, True), document, 1800)
        assert len(document.needles) == 4
        if not isinstance(depth, str):
            wanted = (depth,) * 4 if depth == 0.0 else tuple(depth) * (4 // len(depth))
            found = sorted(needle.depth for needle in document.needles)
            assert found == pytest.approx(sorted(wanted), abs=0.02)
    hidden = [needle for document in documents for needle in document.needles]
    assert len({needle.key for needle in hidden}) == len({needle.value for needle in hidden}) == 12


def test_needles_take_depths_in_turn_and_are_asked_for_in_any_order() -> None:
    depths = (0.0, 0.2, 0.4, 0.6, 0.8)
    made = make_needles(tokenizer("split-digits"), books(), length=3000, count=5, seed=0, depth=depths, keys=2)
    for index, document in enumerate(made):
        wanted = [depths[2 * index % 5], depths[(2 * index + 1) % 5]]
        assert sorted(needle.wanted_depth for needle in document.needles) == sorted(wanted)
        for needle in document.needles:
            assert needle.depth == pytest.approx(needle.wanted_depth, abs=0.02)
    asked_first = [document.needles[0].start < document.needles[1].start for document in made]
    assert len(set(asked_first)) == 2


def test_further_values_stand_anywhere_and_have_no_question():
    fast, options = tokenizer("metaspace-bpe"), {"length": 2000, "seed": 5, "depth": [0.0, 0.5], "more_values": 3}
    made = make_needles(fast, books(), count=40, **options)
    depths = []
    for document in made:
        text, needle = fast.decode(document.token_ids), document.needle
        assert len(document.token_ids) == 2000
        assert text.count("What is the special magic number") == 1
        assert text.count(needle.value) == 2
        assert len({needle.value, *document.more_values}) == 4
        places = [text.index(f"numbers for {needle.key} is: {value}.") for value in document.more_values]
        depths += [place / len(text) for place in places]
    assert [len([depth for depth in depths if low <= depth < low + 0.25]) for low in (0, 0.25, 0.5, 0.75)] == [
        pytest.approx(30, abs=14)
    ] * 4
    assert make_needles(fast, books(), count=3, **options) == made[:3]


def test_templates_are_taken_in_turn():
    other = NeedleTemplate(needle="{key} got {value}.", question="What did {key} get?", answer_prefix="{key} got")
    options = {"length": 900, "count": 8, "seed": 1, "depth": [0.0, 1.0]}
    made = make_needles(tokenizer("split-digits"), books(), template=[PAPER_TEMPLATE, other], **options)
    texts = [tokenizer("split-digits").decode(document.token_ids) for document in made]
    assert ["What did" in text for text in texts] == [False, False, True, True] * 2


def test_ten_documents_are_ten_books_keys_and_values() -> None:
    documents = make_needles(tokenizer("split-digits"), books(10), length=800, count=10, seed=0)
    assert len({document.book for document in documents}) == 10
    assert len({document.needle.key for document in documents}) == 10
    assert len({document.needle.value for document in documents}) == 10
    assert len({document.book_start for document in documents}) > 5


def test_question_is_there_and_names_the_key() -> None:
    for document in make_needles(tokenizer("metaspace-bpe"), books(), length=800, count=3, seed=0):
        question = f"What is the special magic number for {document.needle.key} mentioned in the provided text?"
        assert question in read(tokenizer("metaspace-bpe"), document.prompt_ids())


# The tokens of the answer.


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_answer_tokens_are_those_of_the_whole_text(kind: str) -> None:
    fast = tokenizer(kind)
    for document in make_needles(fast, books(), length=800, count=8, seed=2):
        tail = read(fast, document.token_ids[-60:])
        tail = tail[tail.index("The special magic number") :]
        own = fast("And so. " + tail, add_special_tokens=False).input_ids
        answer = list(document.token_ids[document.needle.answer[0] :])
        assert own[-len(answer) :] == answer


def test_answer_splits_as_the_tokenizer_writes_digits() -> None:
    def pieces(kind: str) -> list[list[str]]:
        documents = make_needles(tokenizer(kind), books(), length=800, count=8, seed=2)
        return [
            [read(tokenizer(kind), [number]) for number in document.token_ids[document.needle.answer[0] :]]
            for document in documents
        ]

    assert all(re.fullmatch(r"\d", piece) for answer in pieces("split-digits") for piece in answer)
    assert all(len(answer) == 7 for answer in pieces("split-digits"))
    # The lone space before the first run stays in the prompt.
    runs = pieces("digit-runs")
    assert all(re.fullmatch(r"\d{1,3}", piece) for answer in runs for piece in answer)
    assert any(len(answer) < 7 for answer in runs)
    assert all(answer[0].startswith(" ") for answer in pieces("space-with-digits"))


def test_no_token_spans_prefix_and_answer() -> None:
    """Where the tokenizer would write "s 6" as one token, the value is written apart."""
    greedy = spelled([("s", " "), *(("s ", str(digit)) for digit in range(1, 10))])
    assert len(greedy("is 6716097", add_special_tokens=False).input_ids) == 8
    for document in make_needles(greedy, books(), length=1500, count=5, seed=0):
        text = check(greedy, document, 1500)
        assert text.endswith(f"is {document.needle.value}")
        answer = document.token_ids[document.needle.answer[0] :]
        assert "".join(read(greedy, [number]) for number in answer) == document.needle.value


def test_tokens_may_span_words() -> None:
    """Where a piece cannot be separated from the text before it, it is tokenised on its own."""
    greedy = spelled([("a", " "), ("\n", "O"), ("\n", "W")])
    for document in make_needles(greedy, books(), length=1500, count=4, seed=0, depth=[0.0, 0.5]):
        check(greedy, document, 1500)


def test_prefix_that_brings_its_own_space() -> None:
    template = NeedleTemplate(answer_prefix="{key} is ")
    greedy = spelled([("s", " "), *((" ", str(digit)) for digit in range(1, 10))])
    for document in make_needles(greedy, books(), length=1500, count=3, seed=0, template=template):
        assert check(greedy, document, 1500, template).endswith(f"{document.needle.key} is {document.needle.value}")


def test_answer_that_cannot_be_written_is_refused() -> None:
    model = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match=r"no separate tokens for the answer '\d{7}': it reads back '<unk>"):
        make_needles(wrap(model), books(), length=1500, count=1, seed=0)


def test_tokenizer_that_loses_the_key_is_refused() -> None:
    lossy = spelled([])
    lossy.backend_tokenizer.normalizer = normalizers.Replace("-", " ")
    with pytest.raises(DataError, match="does not reproduce its input"):
        make_needles(lossy, books(), length=1500, count=1, seed=0)


# Seeds.


def test_same_seed_same_documents() -> None:
    def make(seed: int) -> list[NeedleDocument]:
        return make_needles(tokenizer("unigram"), books(), length=900, count=4, seed=seed, depth="uniform")

    assert make(7) == make(7)
    assert {document.needle.key for document in make(7)} != {document.needle.key for document in make(8)}


@pytest.mark.parametrize("shelf", [3, 10])
def test_documents_do_not_depend_on_how_many_are_asked_for(shelf: int) -> None:
    short = one_book("Too short.", title="short")
    given_books = [short, *books(shelf)]
    ten = make_needles(tokenizer("digit-runs"), given_books, length=900, count=10, seed=4, depth="uniform")
    for count in (1, 4, 9):
        fewer = make_needles(
            tokenizer("digit-runs"), iter(given_books), length=900, count=count, seed=4, depth="uniform"
        )
        assert fewer == ten[:count]


def test_depths_are_taken_in_turn_or_drawn() -> None:
    def depths(depth: Any) -> list[float]:
        documents = make_needles(tokenizer("digit-runs"), books(), length=2000, count=8, seed=0, depth=depth)
        return [document.needle.depth for document in documents]

    assert depths([0.0, 1.0]) == [0.0, 1.0] * 4
    assert depths(0) == [0.0] * 8
    drawn = depths("uniform")
    assert len(set(drawn)) == 8
    assert min(drawn) < 0.3
    assert max(drawn) > 0.7


def test_keys_and_values() -> None:
    assert len(ADJECTIVES) == len(set(ADJECTIVES)) >= 60
    assert len(NOUNS) == len(set(NOUNS)) >= 60
    assert all(word.isascii() and word.isalpha() and word.islower() for word in ADJECTIVES + NOUNS)
    rng = np.random.default_rng(0)
    draws = [key_value(rng, digits) for digits in (1, 3, 7, 30) for _ in range(50)]
    for (key, value), digits in zip(draws, np.repeat((1, 3, 7, 30), 50), strict=True):
        assert re.fullmatch(r"[a-z]+-[a-z]+", key)
        assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", value)
    assert len(set(draws)) > 190


# Books.


def test_books_serve_again_from_another_start_and_that_is_noted() -> None:
    notes: list[str] = []
    documents = make_needles(tokenizer("split-digits"), books(3), length=900, count=9, seed=0, note=notes.append)
    assert len({(document.book, document.book_start) for document in documents}) == 9
    assert [sum(document.book == book.title for document in documents) for book in books(3)] == [3, 3, 3]
    assert len({document.book for document in documents[:3]}) == 3
    assert notes == [
        "9 documents from 3 books long enough for 900 tokens: books serve more than once, each time from another start"
    ]


def test_short_books_are_left_out_and_noted() -> None:
    notes: list[str] = []
    shelf = [one_book("A short story. " * 3, title="short"), one_book("", title="empty"), *books(2)]
    documents = make_needles(tokenizer("split-digits"), shelf, length=900, count=2, seed=1, note=notes.append)
    assert {document.book for document in documents} == {"part 0", "part 1"}
    assert all(re.match("skipped '(short|empty)'", line) for line in notes)


def test_no_book_long_enough() -> None:
    with pytest.raises(DataError, match=r"100,000 tokens needed, the longest, 'part \d', has [\d,]+"):
        make_needles(tokenizer("split-digits"), books(), length=100_000, count=1, seed=0)
    with pytest.raises(DataError, match="no books"):
        make_needles(tokenizer("split-digits"), [], length=1000, count=1, seed=0)


def exact_book(length: int) -> Book:
    """A book of just `length` tokens."""
    fast = tokenizer("split-digits")
    ids = fast(books()[0].text, add_special_tokens=False).input_ids[:length]
    book = one_book(read(fast, ids), "exact")
    assert len(fast(book.text, add_special_tokens=False).input_ids) == length
    return book


def test_book_of_just_the_length_serves_once() -> None:
    fast, book = tokenizer("split-digits"), exact_book(3000)
    check(fast, make_needles(fast, [book], length=3000, count=1, seed=0)[0], 3000)
    with pytest.raises(DataError, match="no book is long enough"):
        make_needles(fast, [book], length=3001, count=1, seed=0)
    # Without room for many starts the other book serves instead, and then none does.
    documents = make_needles(fast, [book, *books(1)], length=3000, count=8, seed=0)
    assert len({(document.book, document.book_start) for document in documents}) == 8
    with pytest.raises(DataError, match=rf"document \d+: none of {ATTEMPTS} draws .* no room for another start"):
        make_needles(fast, [book], length=3000, count=500, seed=0)


def test_book_that_only_seems_long_enough() -> None:
    """Digits where the length is guessed from, long words elsewhere."""
    size = 11_000
    text = "".join(
        "1" if any(start <= place < start + 2000 for start in (1100, 5500, 9900)) else "the "[place % 4]
        for place in range(size)
    )
    fast = tokenizer("split-digits")
    assert len(fast(text, add_special_tokens=False).input_ids) < 7500
    with pytest.raises(DataError, match="no room"):
        make_needles(fast, [one_book(text)], length=8000, count=1, seed=0)


def test_key_or_value_in_the_book_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    book = one_book("The numerous-kite flew 6716097 times. " * 600)
    draws = [("numerous-kite", "1234567"), ("noble-otter", "6716097"), ("calm-heron", "7654321")]
    left = iter(draws)
    monkeypatch.setattr(needles, "key_value", lambda rng, digits: next(left))
    document = make_needles(tokenizer("split-digits"), [book], length=900, count=1, seed=0)[0]
    assert (document.needle.key, document.needle.value) == draws[-1]


def test_book_full_of_numbers_has_no_place_for_one_digit() -> None:
    book = one_book("1 2 3 4 5 6 7 8 9 and so on. " * 600)
    with pytest.raises(DataError, match="already stands in 'one'") as caught:
        make_needles(tokenizer("split-digits"), [book], length=900, count=1, seed=0, value_digits=1)
    assert "value_digits" in str(caught.value.hint)


def test_short_values_where_the_book_has_no_numbers() -> None:
    book = one_book("All of it in words alone. " * 2000)
    documents = make_needles(tokenizer("space-with-digits"), [book], length=900, count=9, seed=0, value_digits=1)
    assert sorted(document.needle.value for document in documents) == list("123456789")
    for document in documents:
        check(tokenizer("space-with-digits"), document, 900)


def test_special_token_in_the_book_that_cannot_be_split() -> None:
    """A Unigram model finds the piece "<s>" even where special tokens are taken as text."""
    fast = tokenizer("unigram", True)
    marked, clean = one_book("He wrote <s> here. " * 800, "marked"), books(1)[0]
    if fast.bos_token_id not in fast("a <s>", add_special_tokens=False, split_special_tokens=True).input_ids:
        pytest.fail("this Unigram model does not find the piece")
    with pytest.raises(DataError, match="'marked' holds the beginning-of-sequence token"):
        make_needles(fast, [marked], length=900, count=1, seed=0)
    for seed in range(4):
        assert make_needles(fast, [marked, clean], length=900, count=1, seed=seed)[0].book == clean.title


# Arguments and templates.


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("depth", [0.0, "uniform"])
def test_too_small_a_length_names_the_smallest(kind: str, depth: Any) -> None:
    with pytest.raises(DataError, match="no room for its sentences") as caught:
        make_needles(tokenizer(kind), books(), length=60, count=1, seed=0, depth=depth)
    match = re.search(r"smallest length .* is (\d+)$", str(caught.value.hint))
    assert match is not None
    smallest = int(match[1])
    for seed in range(4):
        for document in make_needles(tokenizer(kind), books(), length=smallest, count=10, seed=seed, depth=depth):
            check(tokenizer(kind), document, smallest)
    with pytest.raises(DataError, match="no room"):
        make_needles(tokenizer(kind), books(), length=smallest - 40, count=5, seed=1, depth=depth)
    check_length(tokenizer(kind), smallest)
    with pytest.raises(DataError, match=f"document of {smallest - 1} tokens"):
        check_length(tokenizer(kind), smallest - 1)
    for refuse in (partial(make_needles, books=books(), count=1, seed=0), check_length):
        with pytest.raises(DataError, match="document of 70 tokens") as caught:
            refuse(tokenizer(kind), length=60, around=10)
        assert str(caught.value.hint).endswith(f" {smallest + 10}")


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan"), [], [0.5, 2.0], "middle"])
def test_bad_arguments_are_all_named(depth: Any) -> None:
    with pytest.raises(DataError, match="4 problems") as caught:
        make_needles(tokenizer("unigram"), books(), length=900, count=0, seed=-1, depth=depth, value_digits=0)
    for name in ("count", "seed", "depth", "value_digits"):
        assert f"- {name} must" in caught.value.message


def test_no_more_documents_than_keys_or_values() -> None:
    with pytest.raises(DataError, match="count must be at most 9 with 1 value_digits, got 10"):
        make_needles(tokenizer("unigram"), books(), length=900, count=10, seed=0, value_digits=1)
    with pytest.raises(DataError, match=f"at most {len(ADJECTIVES) * len(NOUNS)} with"):
        make_needles(tokenizer("unigram"), books(), length=900, count=5000, seed=0)


def test_default_template_is_the_papers() -> None:
    filled = [
        text.replace("{key}", "numerous-kite").replace("{value}", "6716097")
        for text in (
            PAPER_TEMPLATE.instruction,
            PAPER_TEMPLATE.needle,
            PAPER_TEMPLATE.question,
            PAPER_TEMPLATE.answer_prefix,
        )
    ]
    assert filled == [
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.",
        "One of the special magic numbers for numerous-kite is: 6716097.",
        "What is the special magic number for numerous-kite mentioned in the provided text?",
        "The special magic number for numerous-kite mentioned in the provided text is",
    ]
    assert "numerous" in ADJECTIVES
    assert "kite" in NOUNS


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("depth", [0.0, 0.5])
def test_own_template_without_instruction(kind: str, depth: float) -> None:
    template = NeedleTemplate.from_dict(
        {
            "instruction": "",
            "needle": "Note {this}: the code of {key}, yes {key}, is {value}!",
            "question": "The code of {key}?",
            "answer_prefix": "{key}:\n",
        }
    )
    for document in make_needles(
        tokenizer(kind, True), books(), length=700, count=2, seed=0, depth=depth, template=template
    ):
        text = check(tokenizer(kind, True), document, 700, template)
        assert text.startswith("Note {this}: the code") == (depth == 0.0)


def test_template_names_every_problem() -> None:
    with pytest.raises(DataError, match="6 problems") as caught:
        NeedleTemplate(
            instruction="Find {key}.",
            needle="It is 7.",
            question="What is {value}?",
            answer_prefix=3,  # type: ignore[arg-type]
        )
    assert caught.value.message.splitlines()[1:] == [
        "  - instruction must hold no {key}, got 'Find {key}.'",
        "  - needle must hold at least one {key}, got 'It is 7.'",
        "  - needle must hold exactly one {value}, got 'It is 7.'",
        "  - question must hold at least one {key}, got 'What is {value}?'",
        "  - question must hold no {value}, got 'What is {value}?'",
        "  - answer_prefix must be a string, got 3",
    ]


def test_template_holds_the_value_once() -> None:
    with pytest.raises(DataError, match=r"exactly one \{value\}"):
        NeedleTemplate(needle="{key} is {value}, {value}.")
    with pytest.raises(DataError, match=r"answer_prefix must hold no \{value\}"):
        NeedleTemplate(answer_prefix="{key} is {value}")


def test_template_from_dict() -> None:
    assert NeedleTemplate.from_dict({}) == PAPER_TEMPLATE
    assert NeedleTemplate.from_dict({"instruction": ""}).instruction == ""
    with pytest.raises(DataError, match="2 problems") as caught:
        NeedleTemplate.from_dict({"prefix": "x", "haystack": "y"})
    assert "unknown key 'prefix'" in caught.value.message
    assert "answer_prefix" in str(caught.value.hint)


def test_import_brings_no_torch() -> None:
    code = "import sys, longrope2.needles; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# From the start of a book, and without a needle


def test_from_the_start_a_book_begins_at_its_beginning_when_it_first_serves():
    fast = tokenizer("split-digits")
    documents = make_needles(fast, books(3), length=900, count=7, seed=0, depth=0.5, from_start=True)
    assert [document.book_start for document in documents[:3]] == [0, 0, 0]
    assert len({document.book for document in documents[:3]}) == 3
    assert all(document.book_start > 0 for document in documents[3:])
    for document in documents:
        check(fast, document, 900)
    elsewhere = make_needles(fast, books(3), length=900, count=3, seed=0, depth=0.5)
    assert any(document.book_start > 0 for document in elsewhere)
    # Keys and values are those of the same seed.
    assert [document.needle.value for document in elsewhere] == [document.needle.value for document in documents[:3]]


@pytest.mark.parametrize("kind", ["split-digits", "metaspace-bpe", "unigram"])
@pytest.mark.parametrize("bos", [False, True])
def test_plain_documents_are_book_text_alone(kind, bos):
    fast, shelf = tokenizer(kind, bos), books(3)
    documents = make_plain(fast, shelf, length=800, count=5, seed=0)
    by_title = {book.title: book.text for book in shelf}
    for number, document in enumerate(documents):
        assert len(document.token_ids) == 800
        assert list(document.token_ids[:1]) == [fast.bos_token_id] or not bos
        text = fast.decode(document.token_ids, skip_special_tokens=True)
        expected = by_title[document.book][document.book_start :]
        assert "".join(expected.split()).startswith("".join(text.split())[:-8])
        assert (document.book_start == 0) == (number < 3)
    fewer = make_plain(fast, shelf, length=800, count=2, seed=0)
    assert fewer == documents[:2]


def test_plain_documents_need_books_that_are_long_enough():
    with pytest.raises(DataError, match="no book is long enough"):
        make_plain(tokenizer("split-digits"), books(), length=100_000, count=1, seed=0)
    with pytest.raises(DataError, match="count must be at least 1"):
        make_plain(tokenizer("split-digits"), books(), length=800, count=0, seed=0)

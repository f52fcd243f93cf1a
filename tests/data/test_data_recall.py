"""Recall documents: exact lengths, questions that the text answers, and the same ones every time."""

import json
import re

import pytest

from longrope2.books import Book, read_books
from longrope2.cli import cli
from longrope2.data.config import RecallConfig, Source
from longrope2.data.corpus import document_marks, plain_encoder, tokenise
from longrope2.data.recall import ATTEMPTS, WORDINGS, _insert, recall_documents, write_recall
from longrope2.errors import DataError
from longrope2.models import describe, load_tokenizer
from longrope2.needles import ADJECTIVES, NOUNS, PAPER_TEMPLATE, key_value

QUESTION = re.compile(r"([a-z]+-[a-z]+)\b.*\D(\d{7})$")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(describe("tiny"))


@pytest.fixture(scope="module")
def books():
    return list(read_books(held_out=False, limit=2))


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_they_have_exactly_the_length_asked_for_in_the_corpus(tokenizer, books, length, tmp_path):
    config = RecallConfig(lengths=(length,), documents=4, needles=3)
    path = tmp_path / "recall.jsonl"
    texts = [text for _, text in recall_documents(tokenizer, books, config)]
    assert all(QUESTION.search(text.splitlines()[-1]) for text in texts)  # in the shortest ones, too
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = tokenise(Source(path=str(path)), tokenizer, tmp_path / "cache")
    marks = document_marks(tokenizer)
    assert [marks.size(int(tokens), ends=True) for tokens in corpus.lengths] == [length] * 4


def test_every_question_is_answered_once_in_the_text_before_it(tokenizer, books):
    for _, text in recall_documents(tokenizer, books, RecallConfig(lengths=(1024,), documents=6, needles=5)):
        questions = [line for line in text.splitlines() if QUESTION.search(line)]
        assert 1 < len(questions) <= 5
        answers = dict(QUESTION.search(line).groups() for line in questions)
        assert len(answers) == len(questions)
        for question, (key, value) in zip(questions, answers.items(), strict=True):
            needles = [needle.replace("{key}", key).replace("{value}", value) for needle, _ in WORDINGS]
            assert sum(text[: text.index(question)].count(needle) for needle in needles) >= 1
            assert text.count(value) == 2
        assert text.endswith(questions[-1])


def test_most_questions_stand_alone_in_the_second_half(tokenizer, books):
    config = RecallConfig(lengths=(4096,), documents=4, needles=9)
    for _, text in recall_documents(tokenizer, books, config):
        lines = text.splitlines()
        asked = [number for number, line in enumerate(lines) if QUESTION.search(line)]
        assert len(asked) == 9
        assert asked[-3:] == list(range(len(lines) - 3, len(lines)))  # an only one would stand at the end
        assert all(text.index(lines[number]) > 0.45 * len(text) for number in asked)
        assert len({number for number in asked if number - 1 not in asked}) > 3


@pytest.mark.parametrize("sentence", ["No end in sight ", "One. ", "It goes on and on. "])
def test_nothing_moves_past_what_is_deeper(sentence):
    words = re.findall(r"\s*\S+", sentence * 40)
    places = [(depth / 100, f" <{depth}>") for depth in range(101)]
    text = "".join(_insert(places, words))
    assert re.findall(r"<(\d+)>", text) == [*map(str, range(101))]
    meeting = "".join(_insert([(0.5, " <b>"), (0.5, " <a>")], words))
    assert "<b> <a>" in meeting  # as given


def test_the_wording_that_needles_are_measured_with_is_never_trained_on():
    """Or a test for needles would measure how well a sentence was learned."""
    for needle, question in WORDINGS:
        assert "magic" not in needle + question
        assert needle != PAPER_TEMPLATE.needle
        assert not question.startswith(PAPER_TEMPLATE.question)
        assert needle.count("{value}") == needle.count("{key}") == 1
        assert question.count("{value}") == 0
        assert question.count("{key}") == 2


def test_needles_stand_at_all_depths(tokenizer, books):
    places = []
    for _, text in recall_documents(tokenizer, books, RecallConfig(lengths=(1024,), documents=20, needles=4)):
        values = set(re.findall(r"\b\d{7}\b", text))
        places += [text.index(value) / len(text) for value in values]
    assert min(places) < 0.15
    assert max(places) > 0.7
    assert 0.3 < sum(places) / len(places) < 0.6


def test_a_short_document_has_fewer_needles(tokenizer, books):
    (_, text), *_ = recall_documents(tokenizer, books, RecallConfig(lengths=(256,), documents=1, needles=8))
    assert len(QUESTION.findall(text)) == 1


def test_documents_do_not_depend_on_how_many_there_are(tokenizer, books):
    few = list(recall_documents(tokenizer, books, RecallConfig(lengths=(256,), documents=2)))
    more = list(recall_documents(tokenizer, books, RecallConfig(lengths=(128, 256), documents=3)))
    assert more[3:5] == few
    other = list(recall_documents(tokenizer, books, RecallConfig(lengths=(256,), documents=2, seed=1)))
    assert not set(other) & set(few)


def test_no_key_stands_in_the_book_already(tokenizer):
    """Of a book that is a list of keys, in which every tenth draw or so finds its own."""
    keys = [f"{adjective}-{noun}" for noun in NOUNS for adjective in ADJECTIVES]
    book = Book(title="a", text=" ".join(keys), source="a")
    for _, text in recall_documents(tokenizer, [book], RecallConfig(lengths=(1024,), documents=12, needles=5)):
        asked = [found[1] for line in text.splitlines() if (found := QUESTION.search(line))]
        assert [text.count(key) for key in asked] == [3] * len(asked)  # once in the needle, twice in the question


def test_the_command_writes_a_source(tmp_path):
    output = tmp_path / "recall.jsonl"
    arguments = ["data", "recall", "tiny", "--lengths", "256", "--documents", "8", "-o", str(output)]
    cli.main(arguments, standalone_mode=False)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 8
    # Of those that nothing is measured with.
    assert {row["title"] for row in rows} <= {f"recall, {book.title}" for book in read_books(held_out=False)}
    write_recall(load_tokenizer(describe("tiny")), RecallConfig(lengths=(256,), documents=8), tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == output.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "no length is named"),
        ({"lengths": (32,)}, r"lengths must be at least 64, got \[32\]"),
        ({"lengths": (512, 256, 512)}, "length 512 is named twice"),
        ({"lengths": (256,), "documents": 0, "needles": 0}, "2 problems"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(DataError, match=message):
        RecallConfig(**options)


def test_books_that_are_too_short_or_missing_are_refused(tokenizer):
    config = RecallConfig(lengths=(1024,), documents=1)
    with pytest.raises(DataError, match=r"no recall document of 1,024 tokens could be made from 1 book\b"):
        list(recall_documents(tokenizer, [Book(title="a", text="A few words. " * 99, source="a")], config))
    with pytest.raises(DataError, match="no books"):
        list(recall_documents(tokenizer, [], config))


@pytest.mark.parametrize("length", [64, 72, 80])
def test_too_short_a_length_is_told_to_be_that(tokenizer, books, length):
    with pytest.raises(DataError, match=f"document of {length} tokens .*no room for a number") as caught:
        list(recall_documents(tokenizer, books, RecallConfig(lengths=(length,), documents=1)))
    assert caught.value.hint == "ask for a longer length"


@pytest.mark.parametrize("line", ["", "\n"])
def test_a_script_without_spaces_serves_too(tokenizer, line):
    book = Book(title="a", text=("春眠不觉晓处处闻啼鸟。夜来风雨声花落知多少。" + line) * 400, source="a")
    count = plain_encoder(tokenizer)
    marks = document_marks(tokenizer)
    for _, text in recall_documents(tokenizer, [book], RecallConfig(lengths=(512,), documents=4)):
        assert marks.size(len(count([text])[0]), ends=True) == 512
        assert QUESTION.search(text.splitlines()[-1])


def test_what_cannot_be_is_refused_at_once(tokenizer, books, monkeypatch):
    monkeypatch.setattr("longrope2.data.recall._Maker.make", None)
    with pytest.raises(DataError, match=r"document of 1,048,574,951,424 tokens; the longest has \d") as caught:
        list(recall_documents(tokenizer, books, RecallConfig(lengths=(256, 999999 << 20))))
    assert "longer books" in caught.value.hint


def test_no_more_needles_are_drawn_than_there_can_be_room_for(tokenizer, books, monkeypatch):
    drawn = []
    monkeypatch.setattr("longrope2.data.recall.key_value", lambda rng: drawn.append(1) or key_value(rng))
    documents = recall_documents(tokenizer, books, RecallConfig(lengths=(512,), documents=1, needles=10**6))
    assert "-" in QUESTION.search(next(documents)[1])[1]
    assert len(drawn) <= 512 * ATTEMPTS

"""Suites: samples in their published form, scores computed by hand, files that are wrong or missing."""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from longrope2.data import recall
from longrope2.errors import DataError, LongRopeError, chosen
from longrope2.evaluation.suite import (
    Published,
    Setup,
    by_task,
    encode,
    most_that_fit,
    prompt_tokens,
    read_rows,
    truncate_middle,
)
from longrope2.evaluation.suites import infinitebench, loft, longbench, niah, passkey, perplexity
from longrope2.models import describe, load_tokenizer
from longrope2.needles import PAPER_TEMPLATE, NeedleTemplate


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(describe("tiny"))


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = load_tokenizer(describe("tiny"))
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Samples are kept in a folder of the working directory here."""
    monkeypatch.chdir(tmp_path)


def setup_of(tokenizer, **options) -> Setup:
    defaults = {
        "lengths": (256,), "tasks": (), "named": False, "samples": None, "seed": 42, "data": None, "books": None,
        "chat": False, "note": lambda message: None, "cache": Path("samples"),
    }  # fmt: skip
    return Setup(tokenizer=tokenizer, **{**defaults, **options})


def write_rows(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def fits(sample, tokenizer) -> int:
    """Tokens of prompt and answer, which must be within the length."""
    total = len(prompt_tokens(tokenizer, [sample])[0]) + sample.max_new_tokens
    assert total <= sample.length, sample.key
    return total


# Needle in a haystack


def test_needles_fill_their_length_at_every_depth(tokenizer):
    samples = niah.niah_samples(niah.PAPER, setup_of(tokenizer, samples=2), 256)
    assert len(samples) == 22
    assert [sample.details["depth"] for sample in samples[:11]] == [tenth / 10 for tenth in range(11)]
    for sample in samples:
        assert fits(sample, tokenizer) == 256
        text = tokenizer.decode(sample.prompt, skip_special_tokens=True)
        (value,) = sample.references
        assert text.count(value) == 1
        assert text.rstrip().endswith("mentioned in the provided text is")
        assert sample.details["placed_at"] == pytest.approx(sample.details["depth"], abs=0.2)
    assert len({sample.references for sample in samples}) == 22


def test_needles_are_made_once(tokenizer, tmp_path, monkeypatch):
    """The same documents with the same words about them, until something they depend on changes."""
    calls, said = [], []
    real = niah.make_needles
    monkeypatch.setattr(niah, "make_needles", lambda *args, **options: calls.append(1) or real(*args, **options))
    setup = setup_of(tokenizer, samples=1, note=said.append)
    first, words = niah.niah_samples(niah.MULTIKEY, setup, 512), list(said)
    said.clear()
    assert niah.niah_samples(niah.MULTIKEY, setup, 512) == first
    assert (len(calls), said) == (1, words)
    (kept,) = Path("samples").iterdir()

    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text("one two three. " * 400, encoding="utf-8")
    others = [
        (niah.MULTIVALUE, setup, 512), (niah.MULTIKEY, setup, 500), (niah.MULTIKEY, replace(setup, samples=2), 512),
        (niah.MULTIKEY, replace(setup, seed=1), 512), (niah.MULTIKEY, replace(setup, books=str(books)), 512),
    ]  # fmt: skip
    for number, (kind, other, length) in enumerate(others, start=2):
        assert niah.niah_samples(kind, other, length) != first
        assert len(calls) == number
    (books / "a.txt").write_text("four five six. " * 400, encoding="utf-8")
    niah.niah_samples(*others[-1])
    assert len(calls) == len(others) + 2

    content = kept.read_text()
    kept.write_text(content.replace('"tokens": "e', '"tokens": "f'))
    with pytest.raises(LongRopeError, match="made again"):
        niah.niah_samples(niah.MULTIKEY, setup, 512)


def test_needles_in_a_chat(chat_tokenizer):
    for sample in niah.niah_samples(niah.PAPER, setup_of(chat_tokenizer, samples=1, chat=True), 256):
        assert fits(sample, chat_tokenizer) > 200
        assert sample.prompt.startswith("[user] A special magic number")  # the tokenizer adds the opening itself
        assert re.search(
            r"provided text\?\n\[assistant\]The special magic number for \S+ mentioned .* is$", sample.prompt
        )
        assert sample.references[0] in sample.prompt
        assert prompt_tokens(chat_tokenizer, [sample])[0].count(chat_tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("answer", "score"),
    [("1234567", 1), (" 1234567.\nThe", 1), ("no: 1234567!", 1), ("12345678", 1), ("1234576", 0), ("123", 0), ("", 0)],
)
def test_a_number_must_have_every_digit(answer, score):
    assert niah.found_numbers(answer, ["1234567"]) == score


def sentences(kind, text: str) -> list[tuple[str, str]]:
    """Keys and values of all needles, in the order of the text."""
    found = []
    for template in dict.fromkeys(template.needle for template in kind.templates):
        pattern = re.escape(template).replace(r"\{key\}", r"([a-z]+-[a-z]+)").replace(r"\{value\}", r"(\d{7})")
        key_first = template.index("{key}") < template.index("{value}")
        for match in re.finditer(pattern, text):
            found.append((match.start(), match.groups() if key_first else match.groups()[::-1]))
    return [pair for _, pair in sorted(found)]


@pytest.mark.parametrize("kind", [niah.WORDINGS, niah.MULTIKEY, niah.MULTIVALUE], ids=lambda kind: kind.name)
def test_a_reader_of_the_sentences_answers(kind, tokenizer):
    """A known truth, at every depth in every wording, within the length; what is asked for last decides."""
    length, runs = 512, 4
    samples = niah.niah_samples(kind, setup_of(tokenizer, samples=runs), length)
    assert len(samples) == 11 * runs * kind.keys
    asked, first_depths = set(), []
    for index, sample in enumerate(samples):
        assert length - 40 < fits(sample, tokenizer) <= length
        template = kind.templates[index // kind.keys * kind.keys // 11 % len(kind.templates)]
        text = tokenizer.decode(sample.prompt, skip_special_tokens=True)
        key = sample.details["key"]
        assert text.rstrip().endswith(f"\n{template.question} {template.answer_prefix}".replace("{key}", key))
        hidden = sentences(kind, text)
        assert len(hidden) == (1 if kind is niah.WORDINGS else 4)
        values = [value for own, value in hidden if own == key]
        assert sorted(values) == sorted(sample.references)
        assert len(values) == (4 if kind is niah.MULTIVALUE else 1)
        assert len({own for own, _ in hidden}) == (4 if kind is niah.MULTIKEY else 1)
        assert sample.score(f" {', '.join(values)}.", sample.references) == 1
        assert sample.score(f" {values[0]}", sample.references) == 1 / len(values)
        assert kind.keys > 1 or sample.details["depth"] == index % 11 / 10
        assert sample.details["placed_at"] == pytest.approx(sample.details["depth"], abs=0.12)
        asked.add(template)
        first_depths.append(hidden.index((key, sample.references[0])))
    assert asked == set(kind.templates)
    depths = [sample.details["depth"] for sample in samples]
    assert Counter(depths) == dict.fromkeys(niah.DEPTHS, runs * kind.keys)
    for document in range(0, len(samples), kind.keys):  # all of its needles, far from each other
        own = sorted(depths[document : document + kind.keys])
        assert all(after - before > 0.15 for before, after in pairwise(own))
    if len(hidden) == 4:  # at depth 0 the needle is the first of its kind, at depth 1 the last, and anywhere between
        by_depth = [[first for first, own in zip(first_depths, depths, strict=True) if own == at] for at in (0, 1)]
        assert (set(by_depth[0]), set(by_depth[1])) == ({0}, {3})
        assert {1, 2} <= set(first_depths)


def test_questions_about_one_document_count_once(tokenizer):
    """In intervals and paired tests; each is at its own depth in the grid."""
    samples = niah.niah_samples(niah.MULTIKEY, setup_of(tokenizer, samples=1), 512)
    scores = [float(number % 4 == 0) for number in range(44)]
    (found,) = by_task(samples, scores, {"niah_multikey": "number found"}, together=niah.MULTIKEY.keys)
    assert (found.score, found.samples, found.each.values) == (25.0, 11, (0.25,) * 11)


@pytest.mark.parametrize("kind", [niah.MULTIKEY, niah.MULTIVALUE], ids=lambda kind: kind.name)
def test_several_needles_in_a_chat_and_without_room(kind, chat_tokenizer):
    for sample in niah.niah_samples(kind, setup_of(chat_tokenizer, samples=4, chat=True), 400):
        assert fits(sample, chat_tokenizer) > 320
        assert sample.prompt.startswith(f"[user] {niah.INSTRUCTION}")
        assert sample.details["key"] in sample.prompt.split("[assistant]")[1]
    setup = setup_of(chat_tokenizer, lengths=(400, 100))
    with pytest.raises(DataError, match="document of 100 tokens has no room") as caught:
        niah.check(kind, setup)
    least = int(caught.value.hint.split()[-1])
    niah.check(kind, setup_of(chat_tokenizer, lengths=(400, least)))
    assert len(niah.niah_samples(kind, setup_of(chat_tokenizer, samples=4), least)) == 44 * kind.keys


def test_the_wordings_are_those_of_no_training_and_no_search():
    """Nothing but plain words is shared with training text, the needles of a search and those of the tiny base."""
    tiny = json.loads((Path(__file__).parents[2] / "recipes" / "tiny" / "templates.json").read_text())

    def grams(texts, size: int) -> set[tuple[str, ...]]:
        words = [re.findall(r"\{\w+\}|[a-z']+", text.lower()) for text in texts]
        return {tuple(each[place : place + size]) for each in words for place in range(len(each) - size + 1)}

    def parts(template: NeedleTemplate) -> tuple[str, ...]:
        return template.instruction, template.needle, template.question, template.answer_prefix

    held_out = [text for template in (*niah.HELD_OUT, *niah.HELD_OUT_MANY) for text in parts(template)]
    known = [*recall.INSTRUCTIONS, *(text for wording in recall.WORDINGS for text in wording), *parts(PAPER_TEMPLATE)]
    assert len(niah.HELD_OUT) == len({template.needle for template in niah.HELD_OUT}) >= 4
    plain = {(word,) for word in ("a", "to", "was", "which", "{key}", "{value}")}
    assert grams(held_out, 1) & grams(known, 1) <= plain
    known += [text for group in tiny.values() for template in group for text in template.values()]
    assert grams(held_out, 2) & grams(known, 2) == set()


# Pass keys


def test_pass_keys_move_through_the_text(tokenizer):
    samples = passkey.passkey_samples(setup_of(tokenizer, samples=3), 256)
    for sample in samples:
        fits(sample, tokenizer)
        (key,) = sample.references
        assert sample.prompt.count(f"The pass key is {key}. Remember it. {key} is the pass key.\n") == 1
        assert sample.prompt.endswith("\n\n\nWhat is the pass key?\n\nThe pass key is")
    noise = passkey.NOISE
    lines = samples[0].prompt.count(noise)
    assert lines > 3
    before = [sample.prompt.split("The pass key is")[0].count(noise) for sample in samples]
    assert before == [0, round(lines / 2), lines]
    # One line more would be too long.
    longer = samples[0].prompt.replace(noise, noise * 2, 1)
    assert len(encode(tokenizer, longer)) + 6 > 256 - 8


@pytest.mark.parametrize(
    ("answer", "score"), [(" 71432.", 1), ("is 71432, not 1", 1), ("1 71432", 0), ("714321", 0), ("", 0)]
)
def test_the_first_number_counts(answer, score):
    assert passkey.first_number(answer, ["71432"]) == score


def test_no_room_for_a_prompt(tokenizer):
    with pytest.raises(DataError, match="sample of 64 tokens has no room") as caught:
        passkey.passkey_samples(setup_of(tokenizer, samples=1), 64)
    least = int(caught.value.hint.split()[-1])
    assert fits(passkey.passkey_samples(setup_of(tokenizer, samples=1), least)[0], tokenizer) <= least
    with pytest.raises(DataError, match="no room"):
        passkey.SUITE.refuse(setup_of(tokenizer, lengths=(256, least - 1), tasks=passkey.SUITE.tasks))


def test_no_room_for_a_needle(tokenizer):
    with pytest.raises(DataError, match="document of 5 tokens has no room") as caught:
        niah.check(niah.PAPER, setup_of(tokenizer, lengths=(256, 5)))
    least = int(caught.value.hint.split()[-1])
    niah.check(niah.PAPER, setup_of(tokenizer, lengths=(256, least)))
    for sample in niah.niah_samples(niah.PAPER, setup_of(tokenizer, samples=1), least):
        fits(sample, tokenizer)
    setup = setup_of(tokenizer, lengths=(256, least - 1), samples=1)
    for refuse in (
        partial(niah.check, niah.PAPER),
        lambda setup: niah.niah_samples(niah.PAPER, setup, setup.lengths[-1]),
    ):
        with pytest.raises(DataError, match=f"document of {least - 1} tokens has no room") as caught:
            refuse(setup)
        assert int(caught.value.hint.split()[-1]) == least


@pytest.mark.parametrize("tokens", [10, 11, 57, 400, 100_000])
def test_as_many_parts_as_fit(tokens):
    """Against trying them all; parts of 3 and now and then 4 tokens after an opening of 7."""

    def count(parts: int) -> int:
        return 7 + 3 * parts + parts // 5

    expected = max(parts for parts in range(1, 501) if count(parts) <= tokens)
    assert most_that_fit(count, 500, tokens) == expected


# ∞Bench


def test_key_value_prompts_are_as_published(tokenizer):
    samples = infinitebench.key_value_samples(setup_of(tokenizer, samples=4), 512)
    for index, sample in enumerate(samples):
        assert fits(sample, tokenizer) > 400
        head, body, tail = re.fullmatch(r"(.*?\n\nJSON data:\n)(\{.*\})(\n\n\nKey: .*)", sample.prompt, re.S).groups()
        assert head.startswith("Extract the value corresponding to the specified key in the JSON object below.")
        pairs = json.loads(body)
        assert len(pairs) == sample.details["pairs"] > 2
        key = re.fullmatch(r'\n\n\nKey: "(.*)"\nThe value associated with the specified key is: ', tail).group(1)
        assert sample.references == (pairs[key],)
        assert list(pairs).index(key) == sample.details["asked"] == index * len(pairs) // 4
        assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value) for value in pairs.values())
    again = infinitebench.key_value_samples(setup_of(tokenizer, samples=4), 512)
    assert [sample.prompt for sample in again] == [sample.prompt for sample in samples]


def test_2500_pairs_where_there_is_room(tokenizer, monkeypatch):
    monkeypatch.setattr(infinitebench, "encode", lambda tokenizer, text: range(len(text) // 4))
    (sample,) = infinitebench.key_value_samples(setup_of(tokenizer, samples=1), 1 << 17)
    assert sample.details["pairs"] == 2500


def test_a_length_that_only_some_samples_of_key_values_fit_is_refused(tokenizer):
    """Of no pairs at all none can be asked for."""
    with pytest.raises(DataError, match="the shortest prompt and its answer do not fit"):
        infinitebench.key_value_samples(setup_of(tokenizer, samples=6), 220)


@pytest.mark.parametrize(
    ("answer", "score"),
    [('"ab-1"', 1), ("ab-1}", 1), ("it is: ab-1.", 1), ("ab-12", 0), ("ab", 0), ("", 0)],
)
def test_a_value_is_found_among_words(answer, score):
    assert infinitebench.value_found(answer, ["ab-1"]) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (" B", 1),
        ("B. The sea", 1),
        ("A", 0),
        ("the sea", 1),  # the option itself
        ("So the answer is B", 1),
        ("I think the answer: C", 0),
        ("the answer is", 0),
        ("maybe, C or B", 0),  # the first letter found
        ("(B)", 0),  # brackets are not among the published punctuation
        ("no idea", 0),
        ("  \n", 0),
    ],
)
def test_a_letter_is_chosen(answer, score):
    assert infinitebench.letter_chosen(answer, ["the sea", "B"]) == score


def choice_row(**changes) -> dict:
    row = {
        "id": 0,
        "context": "word " * 600,
        "input": "Where?",
        "answer": ["the sea"],
        "options": ["land", "the sea", "sky", "hill"],
    }
    return {**row, **changes}


def test_choices_come_from_their_file_and_lose_their_middle(tokenizer, tmp_path):
    write_rows(tmp_path / "infinitebench" / "longbook_choice_eng.jsonl", [choice_row(), choice_row(context="Short.")])
    long, short = infinitebench.choice_samples(setup_of(tokenizer, data=tmp_path), 256)
    assert long.references == ("the sea", "B")
    assert 240 < fits(long, tokenizer) <= 256
    assert long.prompt.startswith("Read the book and answer the question.")
    tail = "Question: Where?\nA. land\nB. the sea\nC. sky\nD. hill\n\nThe letter of the correct answer is"
    assert long.prompt.endswith(tail)
    assert short.prompt == f"Read the book and answer the question.\n\nShort.\n\n{tail}"
    assert len(infinitebench.choice_samples(setup_of(tokenizer, data=tmp_path, samples=1), 256)) == 1


def test_wrong_choices_are_named(tokenizer, tmp_path):
    setup = setup_of(tokenizer, data=tmp_path)
    path = tmp_path / "longbook_choice_eng.jsonl"
    write_rows(path, [choice_row(), choice_row(answer=["the moon"])])
    with pytest.raises(DataError, match=r"sample 2: 'the moon' is not one of its options"):
        infinitebench.choice_samples(setup, 256)
    write_rows(path, [choice_row(answer=[])])
    with pytest.raises(DataError, match=r"sample 1: None is not one of its options"):
        infinitebench.choice_samples(setup, 256)
    path.write_text(json.dumps(choice_row()) + "\n{broken\n")
    with pytest.raises(DataError, match=r"longbook_choice_eng.jsonl, line 2: invalid JSON"):
        infinitebench.choice_samples(setup, 256)


# LongBench


def test_f1_by_hand():
    # "the" and punctuation go; cat, sat, mat against cat, mat: precision 2/3, recall 1, F1 0.8.
    assert longbench.f1("\n\nThe cat sat, mat!\nnoise", ["a cat mat"]) == pytest.approx(0.8)
    assert longbench.f1("cat", ["dog", "The Cat."]) == 1.0
    assert longbench.f1("", ["dog"]) == 0.0
    assert longbench.f1("the", ["a"]) == 0.0
    # Words count as often as they occur: min(2, 1) common, precision 1/2, recall 1.
    assert longbench.f1("dog dog", ["dog"]) == pytest.approx(2 / 3)


def test_classes_by_hand():
    classes = ["Date", "Human being", "Description of a person", "Other location", "Country", "City"]
    assert longbench.class_right("Type: City\nCountry", ["City"], classes) == 1.0  # the first line alone
    assert longbench.class_right("City or Country", ["City"], classes) == 0.5
    assert longbench.class_right("Country", ["City"], classes) == 0.0
    assert longbench.class_right("none", ["City"], classes) == 0.0
    # A name within the right one is dropped, and with it the turn of the one after it.
    nested = ["person", "a person", "Description of a person"]
    assert longbench.class_right("Description of a person", ["Description of a person"], nested) == 0.5
    assert longbench.class_right("Description of a person", ["Description of a person"], nested[1:]) == 1.0


def test_edit_similarity_by_hand():
    # "return x" and "return y": 7 of 8 letters in common, 2·7/16 = 0.875, which rounds to 88.
    assert longbench.edit_similarity("\n# comment\nreturn x\nmore", ["return y"]) == 0.88
    assert longbench.edit_similarity("// only\n`remarks`", ["return y"]) == 0.0
    assert longbench.edit_similarity("return y", ["x", "return y"]) == 1.0


ROW = {"input": "Q", "context": "C", "answers": ["A"], "length": 2, "all_classes": None, "language": "en", "_id": "1"}


def test_longbench_prompts(tokenizer, tmp_path):
    write_rows(tmp_path / "trec.jsonl", [{**ROW, "all_classes": ["A", "B"]}])
    for task in ("triviaqa", "lcc", "repobench-p"):
        write_rows(tmp_path / f"{task}.jsonl", [ROW, {**ROW, "context": "word " * 900}])
    setup = setup_of(tokenizer, data=tmp_path)
    (trec,) = longbench.longbench_samples(setup, "trec", 256)
    assert (
        trec.prompt == "Please determine the type of the question below. Here are some examples of questions.\n\nC\nQ"
    )
    assert trec.score("A or B", trec.references) == 0.5
    short, cut = longbench.longbench_samples(setup, "repobench-p", 256)
    assert short.prompt == "Please complete the code given below. \nCQNext line of code:\n"
    assert 250 <= fits(cut, tokenizer) <= 256
    assert cut.prompt.endswith("QNext line of code:\n")
    lcc, _ = longbench.longbench_samples(setup, "lcc", 256)
    assert lcc.prompt == "Please complete the code given below. \nCNext line of code:\n"
    assert lcc.max_new_tokens == 64
    trivia, _ = longbench.longbench_samples(setup, "triviaqa", 256)
    assert trivia.prompt.endswith("The following are some examples.\n\nC\n\nQ")
    assert trivia.max_new_tokens == 32


@pytest.mark.parametrize(("key", "value"), [("answers", [1]), ("all_classes", [1]), ("all_classes", None)])
def test_longbench_rows_that_cannot_be_scored(key, value, tokenizer, tmp_path):
    write_rows(tmp_path / "trec.jsonl", [{**ROW, "all_classes": ["A"], key: value}])
    with pytest.raises(DataError, match=rf"trec.jsonl, line 1: {key}.* must be"):
        longbench.longbench_samples(setup_of(tokenizer, data=tmp_path), "trec", 256)


# LOFT


def loft_files(folder: Path, *, titled=True) -> Path:
    corpus = [
        {
            "pid": f"doc{n}",
            "title_text": f"Title {n}" if titled else "",
            "passage_text": f" Passage {n}. ",
            "metadata": {},
        }
        for n in range(4)
    ]
    query = {"metadata": {}}
    write_rows(folder / "corpus.jsonl", corpus)
    write_rows(
        folder / "few_shot_queries.jsonl",
        [{"qid": "f", "query_text": "Example?", "answers": [["doc1", 1], ["doc2", 1]], **query}],
    )
    write_rows(folder / "dev_queries.jsonl", [{"qid": "d", "query_text": " Now? ", "answers": [["doc3", 1]], **query}])
    return folder


def test_loft_prompts(tokenizer, tmp_path):
    loft_files(tmp_path / "loft" / "nq" / "32k")
    (sample,) = loft.loft_samples(setup_of(tokenizer, data=tmp_path), "nq", 1 << 15)
    assert sample.prompt == (
        "You will be given a list of documents. You need to read carefully and understand all of them. Then you will "
        "be given a query, and your goal is to find all documents from the list that can help answer the query. Print "
        "out the ID and TITLE of each document.\n"
        "\nYour final answer should be a list of IDs, in the following format:\nFinal Answer: [id1, id2, ...]\n"
        "If there is only one ID, it should be in the format:\nFinal Answer: [id1]\n\n"
        "If there is no perfect answer output the closest one. Do not give an empty final answer.\n\n"
        "ID: 0 | TITLE: Title 0 | CONTENT: Passage 0. | END ID: 0\n"
        "ID: 1 | TITLE: Title 1 | CONTENT: Passage 1. | END ID: 1\n"
        "ID: 2 | TITLE: Title 2 | CONTENT: Passage 2. | END ID: 2\n"
        "ID: 3 | TITLE: Title 3 | CONTENT: Passage 3. | END ID: 3\n"
        "====== Example 1 ======\n"
        "Which document is most relevant to answer the query? Print out the TITLE and ID of the document. Then format "
        "the IDs into a list.\n"
        "If there is no perfect answer output the closest one. Do not give an empty final answer.\n"
        "query: Example?\nThe following documents can help answer the query:\n"
        "TITLE: Title 1 | ID: 1\nTITLE: Title 2 | ID: 2\nFinal Answer: ['1', '2']\n"
        "====== Now let's start! ======\n"
        "Which document is most relevant to answer the query? Print out the TITLE and ID of the document. Then format "
        "the IDs into a list.\n"
        "If there is no perfect answer output the closest one. Do not give an empty final answer.\n"
        "query: Now?\nThe following documents can help answer the query:\n"
    )
    assert sample.references == ("3",)
    assert sample.stop == ("======",)
    assert sample.may_be_cut
    assert sample.score("TITLE: Title 3 | ID: 3\nFinal Answer: ['3']\n", sample.references) == 1.0


def test_loft_without_titles_quotes_the_passages(tokenizer, tmp_path):
    loft_files(tmp_path / "data" / "retrieval" / "quora" / "128k", titled=False)
    (sample,) = loft.loft_samples(setup_of(tokenizer, data=tmp_path), "quora", 1 << 17)
    assert "ID: 0 | CONTENT: Passage 0. | END ID: 0\n" in sample.prompt
    assert "CONTENT: Passage 1. | ID: 1\n" in sample.prompt
    assert "TITLE" not in sample.prompt
    assert "Print out the CONTENT and ID of the question." in sample.prompt


@pytest.mark.parametrize(
    ("answer", "gold", "one", "two"),
    [
        ("Final Answer: ['3']", ["3"], 1, 1),
        ("final answer: [3, 1]", ["3"], 1, 1),
        ("Final Answer: [1, 3]", ["3"], 0, 1),
        ("**Final Answer: [`3`, 1]**", ["3", "1"], 0.5, 1),
        ("Final Answer: [3, 2]", ["3", "1"], 0.5, 0),
        ("title [7]\nFinal Answer: [3]", ["3"], 1, 1),
        ("Final Answer: 3", ["3"], 0, 0),
        ("Final Answer: [3, 99]", ["3"], 0, 0),  # no such document
        ("Final Answer: [3", ["3"], 0, 0),
        ("Final Answer: [a b]", ["3"], 0, 0),
        ("Final Answer: [{[3]}]", ["3"], 0, 0),
        ("Final Answer: []", ["3"], 0, 0),
        ("", ["3"], 0, 0),
    ],
)
def test_loft_recall(answer, gold, one, two):
    assert loft.recall(answer, gold, top=1, size=10) == one
    assert loft.recall(answer, gold, top=2, size=10) == two


def test_loft_files_that_are_wrong(tokenizer, tmp_path):
    setup = setup_of(tokenizer, data=tmp_path)
    folder = loft_files(tmp_path / "nq" / "32k")
    with pytest.raises(DataError, match="LOFT has corpora of 32k, 128k, 1m tokens, none of 4,096"):
        loft.loft_samples(setup, "nq", 4096)
    with pytest.raises(DataError, match=r"corpus.jsonl: no such file") as caught:
        loft.loft_samples(setup, "nq", 1 << 17)
    assert "https://storage.googleapis.com/loft-bench/retrieval/nq.zip" in caught.value.hint
    lost = "query 1: its answers are not in the corpus"
    for answers, message in (
        ([["doc9", 1]], lost), ([["doc1", 1], []], lost), ([], lost), ([1], "line 1: answers.0 must be a valid array")
    ):  # fmt: skip
        write_rows(folder / "test_queries.jsonl", [{"query_text": "?", "answers": answers}])
        with pytest.raises(DataError, match=message):
            loft.loft_samples(setup, "nq", 1 << 15)


# Perplexity


@pytest.mark.parametrize(("total", "length"), [(10, 4), (11, 4), (12, 5), (8, 8), (9, 8), (7, 2)])
def test_sliding_windows_score_every_token_once(total, length):
    tokens = list(range(total))
    spans = perplexity.sliding(tokens, length)
    scored = [token for span in spans for token in span.token_ids[span.start :]]
    assert scored == tokens[1:]
    assert all(len(span.token_ids) <= length for span in spans)
    # After the first window each scored token has at least half a window before it.
    assert all(span.start >= length - length // 2 for span in spans[1:])
    assert perplexity.full(tokens, length)[0].token_ids == tokens[:length]


def test_books_are_the_same_for_every_length(tokenizer):
    one = perplexity.documents(setup_of(tokenizer, lengths=(300,), samples=2))
    other = perplexity.documents(setup_of(tokenizer, lengths=(200, 100), samples=3))
    assert [len(document) for document in one] == [300, 300]
    assert len(other) == 3
    assert [document[:200] for document in one] == other[:2]


# Files and names


def test_missing_data_says_where_it_comes_from(tokenizer, tmp_path):
    for suite, tasks, place in (
        (longbench, ["trec"], "huggingface.co/datasets/THUDM/LongBench"),
        (infinitebench, ["longbook_choice_eng"], "huggingface.co/datasets/xinrongzhang2022/InfiniteBench"),
        (loft, ["nq"], "storage.googleapis.com/loft-bench/retrieval/nq.zip"),
    ):
        for data in (None, tmp_path):
            with pytest.raises(DataError) as caught:
                suite.SUITE.refuse(setup_of(tokenizer, lengths=(1 << 15,), tasks=tasks, data=data))
            assert place in caught.value.hint
    infinitebench.SUITE.refuse(setup_of(tokenizer, lengths=(1 << 15,), tasks=["kv_retrieval"]))


@dataclass(frozen=True, kw_only=True)
class PublishedRow(Published):
    a: int
    b: str


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "the whole must be an object"),
        (b'{"a": 1}', "b is missing"),
        (b'{"a": 1, "b": 2}', "b must be a valid string, got '2'"),
        (b'{"a": 1,', "invalid JSON"),
    ],
)
def test_a_corrupt_line_is_named(line, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 0, "b": "x", "more": []}\n\n' + line + b"\n")
    rows = read_rows(path, PublishedRow, source="the moon")
    assert next(rows) == PublishedRow(a=0, b="x")
    with pytest.raises(DataError, match=rf"rows.jsonl, line 3: {re.escape(message)}") as caught:
        next(rows)
    assert caught.value.hint == "the moon"


def test_a_torn_archive_is_named(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00torn")
    with pytest.raises(DataError, match=r"rows.jsonl.gz: cannot be read"):
        list(read_rows(path, PublishedRow, source=""))


def test_the_nearest_name_is_suggested():
    assert chosen("suite", ["b", "a", "b"], ["a", "b"]) == ["b", "a"]
    with pytest.raises(LongRopeError, match="suite 'rulr' is not known") as caught:
        chosen("suite", ["rulr"], ["ruler", "niah"])
    assert caught.value.hint == "did you mean 'ruler'? there are ruler, niah"
    with pytest.raises(LongRopeError) as caught:
        chosen("task", ["xyz"], [f"task{n}" for n in range(99)])
    assert caught.value.hint == "there are 99"


def test_the_middle_is_cut_and_the_ends_stay(tokenizer):
    text = "BEGIN " + "word " * 300 + "END"
    cut = truncate_middle(tokenizer, text, 50)
    assert cut.startswith("BEGIN")
    assert cut.endswith("END")
    assert 45 <= len(encode(tokenizer, cut)) <= 50
    assert truncate_middle(tokenizer, "short", 50) == "short"
    for most in (-24, 0, 1):
        with pytest.raises(DataError, match=rf"^{max(most, 0)} tokens have no room for a prompt of"):
            truncate_middle(tokenizer, text, most)


def test_perplexity_needs_two_tokens(tokenizer):
    with pytest.raises(DataError, match="at least 2 tokens"):
        perplexity.documents(setup_of(tokenizer, lengths=(256, 1)))


def test_a_file_without_rows_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n")
    with pytest.raises(DataError, match=r"rows.jsonl: no rows") as caught:
        list(read_rows(path, PublishedRow, source="the moon"))
    assert caught.value.hint == "the moon"

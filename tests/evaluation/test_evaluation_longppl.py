"""LongPPL against a slow computation from its definition; the judge's work is done once."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import longrope2
from longrope2.books import read_books
from longrope2.console import quiet
from longrope2.errors import LongRopeError
from longrope2.evaluation import backend
from longrope2.evaluation.backend import TorchBackend
from longrope2.evaluation.config import EvaluationConfig
from longrope2.evaluation.evaluate import _setups
from longrope2.evaluation.suite import TextSpan
from longrope2.evaluation.suites import longppl
from longrope2.evaluation.suites.perplexity import documents
from longrope2.models import ASSETS, load, rescale_model
from longrope2.needles import make_needles

LENGTH, BOOKS = 160, 2


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


@pytest.fixture(scope="module")
def factors():
    return rescale_model(longrope2.describe("tiny"), "yarn", 512).long_everywhere()


class Losses:
    """Of the tokens of a text, each given what stands between `begin` and itself: plain forwards, nothing cached."""

    def __init__(self, model, tokens: list[int]) -> None:
        self._model, self._tokens, self._known = model, tokens, {}

    @torch.no_grad()
    def __call__(self, begin: int, place: int) -> float:
        if begin not in self._known:
            self._known[begin] = self._model(torch.tensor([self._tokens[begin:]])).logits[0].double()
        logits = self._known[begin][place - begin - 1]
        return float(logits.exp().sum().log() - logits[self._tokens[place]])


def slow_keys(model, tokens: list[int], *, window: int, short: int, step: int) -> list[int]:
    """By the definition: LSD > 2 and LCL > -2, tokens one by one."""
    loss, found = Losses(model, tokens), []
    for place in range(short, len(tokens)):
        # Windows of the judge end at its window and at every half more: the first one that reaches the token counts.
        end = window
        while end <= place:
            end += window // 2
        far = loss(max(0, min(end, len(tokens)) - window), place)
        near = loss((place - short) // step * step, place)
        if near - far > 2 and -far > -2:
            found.append(place)
    return found


def books(tiny, count: int = BOOKS) -> list[list[int]]:
    texts = [book.text[:4000] for book in read_books(held_out=True, limit=count)]
    return [tiny.tokenizer(text).input_ids[:LENGTH] for text in texts]


def asked(tiny) -> list[list[int]]:
    """The texts that the suite takes."""
    config = EvaluationConfig(suites=("longppl",), lengths=(LENGTH,), samples=BOOKS)
    ((_, setup),) = _setups(config, "tiny", tiny.tokenizer, 256, note=quiet, cache=Path())
    return documents(setup)


@pytest.mark.parametrize("window", [256, 128])
def test_key_tokens_are_those_of_the_definition(tiny, window):
    """In float64, with a judge that sees all of a text and one whose window is shorter."""
    exact = copy.deepcopy(tiny.model).double()
    short, step = longppl.short_context(LENGTH, window)
    assert (short, step) == ((20, 5) if window == 256 else (16, 4))
    judge = TorchBackend(tiny.model, tiny.tokenizer, window=window)
    found = [longppl.key_places(judge, tokens) for tokens in books(tiny)]
    expected = [slow_keys(exact, tokens, window=window, short=short, step=step) for tokens in books(tiny)]
    assert [list(places) for places in found] == expected
    assert 0 < sum(map(len, expected)) < BOOKS * LENGTH / 5


def test_the_published_contexts():
    """4,096 tokens, 1,024 of which share one, in the paper's texts of 32k; the same share of shorter ones."""
    assert longppl.short_context(32_768, 131_072) == (4096, 1024)
    assert longppl.short_context(131_072, 131_072) == (4096, 1024)
    assert longppl.short_context(131_072, 8192) == (1024, 256)
    tokens = list(range(100))
    spans = longppl.short_spans(tokens, 40, 16)
    assert [span.token_ids[span.start :] for span in spans] == [
        tokens[40:56],
        tokens[56:72],
        tokens[72:88],
        tokens[88:],
    ]
    assert [span.token_ids[0] for span in spans] == [0, 16, 32, 48]


def test_the_answer_of_a_needle_is_found(tiny):
    """A known truth: a number that can only be known from far away."""
    judge = TorchBackend(tiny.model, tiny.tokenizer, window=256)
    made = make_needles(tiny.tokenizer, read_books(held_out=True), length=256, count=4, seed=3, depth=0.3)
    hits = 0
    for document in made:
        places = longppl.key_places(judge, document.token_ids)
        answer = set(range(*document.needle.answer))
        hits += len(answer & set(places))
    assert hits >= 0.7 * sum(document.answer_tokens for document in made)


def test_perplexity_of_the_key_tokens_alone(tiny, factors, tmp_path):
    """Found by the model without factors, scored with them: against forwards of one token each."""
    result = longrope2.evaluate(
        "tiny", ["longppl"], tmp_path / "run", factors=factors, lengths=(LENGTH,), samples=BOOKS
    )
    (score,) = result["scores"]
    model = longrope2.load("tiny", factors)
    means, losses = [], []
    for tokens in asked(tiny):
        loss = Losses(model, tokens)
        own = [loss(0, place) for place in slow_keys(tiny.model, tokens, window=256, short=20, step=5)]
        losses += own
        means.append(sum(own) / len(own))
    assert score["score"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert result["values"][f"longppl/longppl/{LENGTH}"]["values"] == pytest.approx(means, rel=1e-4)
    assert score["metric"] == "perplexity"
    assert f"longppl at {LENGTH}: {len(losses)} key tokens in {BOOKS} books; judged by tiny" in result["notes"][0]


def test_only_some_tokens_are_scored(tiny):
    judge = TorchBackend(tiny.model, tiny.tokenizer, window=256)
    (tokens,) = books(tiny, 1)
    ((each),) = judge.losses([TextSpan(token_ids=tokens, start=1)])
    (whole,) = judge.score([TextSpan(token_ids=tokens, start=1)])
    assert sum(each) == pytest.approx(whole.nll, rel=1e-5)
    (some,) = judge.score([TextSpan(token_ids=tokens, start=5, only=(5, 9, 100))])
    assert some.num_tokens == 3
    assert some.nll == pytest.approx(each[4] + each[8] + each[99], rel=1e-5)
    spans = TextSpan(token_ids=tokens, start=5), TextSpan(token_ids=tokens, start=5, only=(5, 9))
    assert spans[0].digest() != spans[1].digest()


def test_logits_are_computed_in_pieces(tiny, monkeypatch):
    """Full logits of a long text would need most of the memory."""
    judge = TorchBackend(tiny.model, tiny.tokenizer, window=256)
    (tokens,) = books(tiny, 1)
    spans = [TextSpan(token_ids=tokens, start=1), TextSpan(token_ids=tokens, start=3, only=tuple(range(3, 100, 2)))]
    whole, rows = judge.losses(spans), []
    head = backend.head_logits
    monkeypatch.setattr(backend, "LOGIT_ROWS", 16)
    monkeypatch.setattr(
        backend, "head_logits", lambda model, hidden: rows.append(hidden.shape[1]) or head(model, hidden)
    )
    for found, expected in zip(judge.losses(spans), whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert max(rows) == 16
    assert sum(rows) == LENGTH - 1 + 49


def test_a_judge_works_once_for_all_models(tiny, factors, tmp_path, monkeypatch):
    """Whatever is judged is kept, text by text; an interrupted judge goes on where it was."""
    options = {"lengths": (LENGTH,), "samples": BOOKS, "cache": tmp_path / "samples"}
    first = longrope2.evaluate("tiny", ["longppl"], tmp_path / "one", **options)
    judged: list[int] = []
    find = longppl.key_places
    monkeypatch.setattr(longppl, "key_places", lambda *given: judged.append(1) or find(*given))
    longrope2.evaluate("tiny", ["longppl"], tmp_path / "two", factors=factors, **options)
    assert judged == []
    files = sorted((tmp_path / "samples").glob("longppl-*.json"))
    assert len(files) == BOOKS
    files[1].unlink()
    again = longrope2.evaluate("tiny", ["longppl"], tmp_path / "three", **options)
    assert (judged, again["scores"]) == ([1], first["scores"])
    places = json.loads(files[0].read_text())["places"]
    files[0].write_text(files[0].read_text().replace(str(places[0]), str(places[0] + 1), 1))
    with pytest.raises(LongRopeError, match="its content is not what its checksum says") as caught:
        longrope2.evaluate("tiny", ["longppl"], tmp_path / "four", **options)
    assert caught.value.hint == "delete the file; it will be made again"


def test_books_without_key_tokens(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(longppl, "LEAST_GAIN", 99.0)
    result = longrope2.evaluate("tiny", ["longppl"], tmp_path / "run", lengths=(LENGTH,), samples=2)
    assert result["scores"] == []
    assert "0 key tokens in 2 books; 2 books without any" in result["notes"][0]


def test_a_judge_of_other_tokens_is_refused(tmp_path):
    judge = shutil.copytree(ASSETS / "tiny", tmp_path / "judge")
    content = json.loads((judge / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    words = [word for word, number in vocabulary.items() if number > 300]
    numbers = [vocabulary[word] for word in words]
    vocabulary |= zip(words, numbers[1:] + numbers[:1], strict=True)
    (judge / "tokenizer.json").write_text(json.dumps(content))
    options = {"lengths": (LENGTH,), "samples": 1}
    with pytest.raises(LongRopeError, match="has other tokens than the model that is measured"):
        longrope2.evaluate("tiny", ["longppl"], tmp_path / "run", judge=str(judge), **options)
    with pytest.raises(LongRopeError, match="nothing-here"):
        longrope2.evaluate("tiny", ["longppl"], tmp_path / "run", judge="./nothing-here", **options)
    with pytest.raises(LongRopeError, match="longppl needs at least 32 tokens, got 31"):
        longrope2.evaluate("tiny", ["longppl"], tmp_path / "run", lengths=(LENGTH, 31))
    assert not (tmp_path / "run").exists()

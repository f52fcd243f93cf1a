"""Scores against an uncached forward of the untouched transformers model, with full logits."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from conftest import FAMILY_OPTIONS, family_model
from longrope2 import perplexity, pieces
from longrope2.needles import Needle, NeedleDocument
from longrope2.perplexity import Score, scoring, total
from longrope2.rotary import rescaled
from test_rotary import make_factors


def document(length: int, answer_tokens: int, seed: int) -> NeedleDocument:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 97, (length,), generator=generator).tolist()
    return asking(tokens, (length - answer_tokens, length))


def asking(tokens: list[int], *answers: tuple[int, int]) -> NeedleDocument:
    alike = {"key": "k", "value": "1", "depth": 0.0, "wanted_depth": 0.0, "start": 1}
    needles = tuple(Needle(**alike, answer=answer) for answer in answers)
    return NeedleDocument(token_ids=tuple(tokens), needles=needles, book="b", book_start=0, asked_from=0)


def expected_nll(model, factors, document, start):
    """By full logits of the eager model under our RoPE."""
    tokens = torch.tensor(document.token_ids)
    logits = expected_logits(model, factors, document)
    return F.cross_entropy(logits[start - 1 : -1], tokens[start:], reduction="sum").item()


def expected_logits(model, factors, document):
    tokens = torch.tensor([document.token_ids])
    with torch.no_grad(), rescaled(model, factors, long_rows=tokens.shape[1] > factors.original_length):
        return model(tokens, use_cache=False).logits[0]


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_needle_and_plain_scores_are_those_of_full_logits(family, monkeypatch):
    monkeypatch.setattr(perplexity, "LOGIT_ROWS", 16)
    monkeypatch.setattr(pieces, "MLP_ROWS", 20)
    model = family_model(family)
    factors = make_factors(model, long_attention_factor=1.1)
    documents = [document(72, 5, seed=0), document(72, 7, seed=1)]  # longer than the model is wide
    expected = [expected_nll(model, factors, d, d.needle.answer[0]) for d in documents]
    expected_plain = [expected_nll(model, factors, d, 1) for d in documents]
    with scoring(model, factors) as score:
        together = score(factors, documents)
        alone = [score(factors, [d])[0] for d in documents]
    with scoring(model, factors, objective="plain") as score:
        plain = score(factors, documents)
    for a, b, c in zip(together, alone, expected, strict=True):
        assert a.nll == pytest.approx(c, rel=2e-4)
        assert b.nll == pytest.approx(c, rel=2e-4)
    assert [s.num_tokens for s in together] == [5, 7]
    assert [s.nll for s in plain] == pytest.approx(expected_plain, rel=2e-4)
    assert [s.num_tokens for s in plain] == [71, 71]


def test_factors_change_from_call_to_call_and_short_documents_use_short_ones():
    model = family_model("llama")
    factors = make_factors(model)
    other = make_factors(model, long=tuple(2 * x for x in factors.long))
    long, short = document(48, 5, 0), document(20, 5, 0)
    with scoring(model, factors) as score:
        first = score(factors, [long])[0].nll
        assert score(other, [long])[0].nll != first
        assert score(factors, [long])[0].nll == first
        assert score(factors, [short])[0].nll == score(other, [short])[0].nll
        assert score(factors, [short])[0].nll == pytest.approx(expected_nll(model, factors, short, 15), rel=1e-4)


def test_exact_means_every_first_choice_right():
    model = family_model("llama")
    factors = make_factors(model)
    tokens = list(document(40, 3, 0).token_ids)
    with torch.no_grad(), rescaled(model, factors):
        for position in range(37, 40):  # continue greedily: the model's own choices
            tokens[position] = model(torch.tensor([tokens[:position]])).logits[0, -1].argmax().item()
    with scoring(model, factors) as score:
        assert score(factors, [asking(tokens, (37, 40))])[0].exact == 1
        assert score(factors, [document(40, 3, 5)])[0].exact == 0


def test_each_of_several_answers_counts_by_itself():
    model = family_model("llama")
    factors = make_factors(model)
    tokens = list(document(60, 3, 0).token_ids)
    with torch.no_grad(), rescaled(model, factors):
        for position in (40, 41, 58, 59):
            tokens[position] = model(torch.tensor([tokens[:position]])).logits[0, -1].argmax().item()
    spans = ((40, 42), (50, 52), (58, 60))  # the first and the last are the model's own choices
    whole = asking(tokens, *spans)
    logits = expected_logits(model, factors, whole)
    expected = sum(
        F.cross_entropy(logits[start - 1 : end - 1], torch.tensor(tokens[start:end]), reduction="sum").item()
        for start, end in spans
    )
    with scoring(model, factors) as score:
        found = score(factors, [whole])[0]
    assert (found.num_tokens, found.exact) == (6, 2)
    assert found.nll == pytest.approx(expected, abs=2e-4)


def test_scores_add_up_by_token():
    scores = [Score(2.0, 4, True), Score(6.0, 4, False)]
    assert total(scores) == Score(8.0, 8, 1)
    assert total(scores).perplexity == pytest.approx(math.e)
    assert Score(1e9, 1, False).perplexity == math.inf


def test_a_broken_model_scores_infinity_not_nan():
    model = family_model("llama")
    factors = make_factors(model)
    with scoring(model, factors) as score, torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
        assert score(factors, [document(40, 3, 0)])[0].nll == math.inf


def test_long_documents_go_through_an_mlp_in_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "MLP_ROWS", 20)
    model, seen = family_model("llama"), []
    factors = make_factors(model)
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    with scoring(model, factors) as score:
        seen.clear()  # what setting up has tried
        score(factors, [document(48, 5, seed=0)])
    assert seen == [20, 20, 8, 6]  # the last layer: the answer's five tokens, and the one before them
    assert all("forward" not in layer.mlp.__dict__ for layer in model.model.layers)


def test_compiling_spares_the_last_layer(monkeypatch):
    compiled = []
    monkeypatch.setattr(perplexity, "compiled_layer", lambda layer: nullcontext(compiled.append(layer)))
    model = family_model("llama", num_hidden_layers=3)
    for wanted in (False, True):
        with scoring(model, make_factors(model), compiled=wanted):
            assert compiled == (list(model.model.layers[:2]) if wanted else [])

"""Batches: every logit of a row equals that of a fresh, uncached forward of the row alone."""

import math

import pytest
import torch

from conftest import ORIGINAL_LENGTH, family_model
from longrope2 import attention
from longrope2.errors import LongRopeError
from longrope2.evaluation import backend as backend_module
from longrope2.evaluation.backend import TorchBackend
from longrope2.evaluation.decoding import RowsCache, last_token_attention
from longrope2.evaluation.suite import Prompt, TextSpan
from longrope2.generation.switch import switching
from longrope2.kernels import reference_attention
from longrope2.models import decoder_layers
from longrope2.rotary import rescaled
from test_rotary import make_factors, tokens_of

FAMILIES = ["llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "qwen3_moe"]
SIDES = {"short_attention_factor": 1.0, "long_attention_factor": 1.3}


class Letters:
    """A tokenizer of the small vocabularies: token n is the n-th character."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(64 + token) for token in tokens)


class Recording(TorchBackend):
    """Remembers the logits of every step."""

    def _next(self, hidden):
        from longrope2.perplexity import head_logits

        self.steps.append(head_logits(self.model, hidden)[:, -1])
        return super()._next(hidden)


def recording(model) -> Recording:
    backend = Recording(model, Letters(), window=1 << 20)
    backend.steps = []
    backend._ends = set()
    return backend


def prompt_of(length: int, new_tokens: int = 5, **options) -> Prompt:
    return Prompt(token_ids=tokens_of(length, seed=length)[0].tolist(), max_new_tokens=new_tokens, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_on_both_sides(family):
    """Rows shorter and longer than sliding windows, than each other and than the switch, in one batch."""
    plain = family_model(family)
    factors = make_factors(plain, **SIDES)
    backend = recording(switching(family_model(family), factors))
    prompts = [prompt_of(length) for length in (3, ORIGINAL_LENGTH + 9, 20, ORIGINAL_LENGTH + 1, 2 * ORIGINAL_LENGTH)]
    read: list[int] = []
    backend.on_read = read.append
    answers = backend._decode(prompts)
    assert read == [len(prompt.token_ids) for prompt in prompts]
    assert [len(answer) for answer in answers] == [5] * 5
    assert len(backend.steps) == 5
    for row, prompt in enumerate(prompts):
        for step, alone in enumerate(exact(plain, factors, prompt, answers[row])):
            assert (backend.steps[step][row] - alone).abs().max() < 1e-4 * alone.abs().max()
            assert int(alone.argmax()) == answers[row][step]


def exact(plain, factors, prompt, answer) -> list[torch.Tensor]:
    """The logits of every step by an uncached forward of the row alone."""
    long = len(prompt.token_ids) > ORIGINAL_LENGTH
    with rescaled(plain, factors, long_rows=long, check=False), torch.no_grad():
        rows = [torch.tensor([[*prompt.token_ids, *answer[:step]]]) for step in range(len(answer))]
        return [plain(input_ids=row, use_cache=False).logits[0, -1] for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_prompts_have_in_common_is_read_once(family, monkeypatch):
    """Questions about one text, on both sides of the switch and across it, in pieces and whole."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    plain = family_model(family)
    factors = make_factors(plain, **SIDES)
    text = tokens_of(3 * ORIGINAL_LENGTH, seed=1)[0].tolist()

    def asking(text_tokens: int, question: int) -> Prompt:
        return Prompt(token_ids=[*text[:text_tokens], *prompt_of(question).token_ids], max_new_tokens=4)

    cut = ORIGINAL_LENGTH - 9
    prompts = [asking(50, 3), asking(50, 5), asking(50, 4), asking(cut, 7), asking(cut, 6), asking(cut, 12)]
    prompts += [prompts[-1], asking(8, 10)]
    for piece in (1 << 17, 12):
        monkeypatch.setattr(backend_module, "READ_TOKENS", piece)
        backend = recording(switching(family_model(family), factors))
        read, ran = [], []
        backend.on_read = read.append
        first = decoder_layers(backend.model)[0]
        handle = first.register_forward_pre_hook(lambda _, args, ran=ran: ran.append(args[0].shape[1]))
        answers = backend._decode(prompts)
        handle.remove()
        assert sum(read) == sum(len(prompt.token_ids) for prompt in prompts)
        # Not shared: by the fourth with the third, of which it has too little; by the sixth, on another side than the
        # fifth; and by the last. The seventh is the sixth again, of which the last token is run. Then three steps.
        assert ran[-3:] == [1, 1, 1]
        assert sum(ran[:-3]) == 53 + 5 + 4 + (cut + 7) + 6 + (cut + 12) + 1 + 18
        for row, prompt in enumerate(prompts):
            for step, alone in enumerate(exact(plain, factors, prompt, answers[row])):
                assert (backend.steps[step][row] - alone).abs().max() < 1e-4 * alone.abs().max()


def test_nothing_is_shared_where_rope_stretches_with_the_text():
    model = family_model("llama")
    backend, prompts = recording(model), [prompt_of(20), prompt_of(20)]
    assert backend._shared(prompts[:1], prompts[1]) == 19
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    assert backend._shared(prompts[:1], prompts[1]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_are_read_in_pieces(family, monkeypatch):
    """The same answers and losses as in one forward, on both sides, whatever a piece has to do with a window."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)  # pieces of 12 tokens are several blocks
    backend = recording(switching(family_model(family), make_factors(family_model(family), **SIDES)))
    prompts = [prompt_of(length) for length in (7, ORIGINAL_LENGTH - 6, 2 * ORIGINAL_LENGTH)]
    tokens = tokens_of(2 * ORIGINAL_LENGTH + 1, seed=3)[0].tolist()
    spans = [
        TextSpan(token_ids=tokens, start=1),
        TextSpan(token_ids=tokens, start=40, only=(40, 41, 64)),
        TextSpan(token_ids=tokens[:30], start=13),
    ]
    expected = backend._decode(prompts), backend.losses(spans), backend.score(spans)
    whole = list(backend.steps)
    monkeypatch.setattr(backend_module, "READ_TOKENS", 12)
    seen = []
    backend.steps.clear()
    decoder_layers(backend.model)[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    answers, losses, scores = backend._decode(prompts), backend.losses(spans), backend.score(spans)
    assert max(seen) == 12
    assert answers == expected[0]
    for together, alone in zip(backend.steps, whole, strict=True):
        assert (together - alone).abs().max() < 1e-4 * alone.abs().max()
    for found, wanted in zip(losses, expected[1], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    for found, wanted in zip(scores, expected[2], strict=True):
        assert (found.num_tokens, found.exact) == (wanted.num_tokens, wanted.exact)
        assert found.nll == pytest.approx(wanted.nll, rel=1e-4)


def test_a_plain_model_has_no_switch():
    model = family_model("llama")
    backend = recording(model)
    prompts = [prompt_of(9), prompt_of(40)]
    answers = backend._decode(prompts)
    for row, prompt in enumerate(prompts):
        expected = model.generate(
            torch.tensor([prompt.token_ids]), max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        assert answers[row] == expected[0, len(prompt.token_ids) :].tolist()
    assert model.config._attn_implementation == "eager"  # as it was


def test_rows_that_may_cross_the_switch_are_generated_exactly():
    model = switching(family_model("llama"), make_factors(family_model("llama"), **SIDES))
    backend = recording(model)
    prompts = [prompt_of(length, 6) for length in (ORIGINAL_LENGTH - 5, ORIGINAL_LENGTH - 4, ORIGINAL_LENGTH, 50)]
    # The last of six new tokens is never run: 27 + 5 tokens are still short, 28 + 5 are not.
    assert [backend._may_cross(prompt) for prompt in prompts] == [False, True, True, False]
    answers = backend.answer(prompts)
    for answer, prompt in zip(answers, prompts, strict=True):
        tokens = list(prompt.token_ids)
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert answer == Letters().decode(tokens[-6:])


def test_a_model_with_one_rope_has_no_switch_to_cross():
    factors = make_factors(family_model("llama"), **SIDES).long_everywhere()
    model = switching(family_model("llama"), factors)
    backend = recording(model)
    prompts = [prompt_of(length, 6) for length in (ORIGINAL_LENGTH - 4, ORIGINAL_LENGTH)]
    assert not any(backend._may_cross(prompt) for prompt in prompts)
    together = backend.answer(prompts)
    alone = [backend._generate(prompt) for prompt in prompts]
    assert together == [Letters().decode(tokens) for tokens in alone]


def test_an_answer_ends_at_its_limit_its_end_token_or_its_stop():
    backend = recording(family_model("llama"))
    limits = [prompt_of(9, 3), prompt_of(12, 8)]
    free = backend.answer(limits)
    assert [len(answer) for answer in free] == [3, 8]
    whole = free[1]
    stopped = backend.answer([prompt_of(9, 3), prompt_of(12, 8, stop=(whole[2:4],))])
    assert stopped == [free[0], whole[: whole.index(whole[2:4])]]
    backend._ends = {ord(whole[4]) - 64}
    backend.steps.clear()
    ended = backend.answer(limits)
    assert ended[1] == whole[: whole.index(whole[4]) + 1]
    assert len(backend.steps) < 8  # all had ended: nothing more is run


def test_memory_left_of_a_row_never_matters(monkeypatch):
    """Hidden columns hold what memory held before, which may be NaN."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: empty(self, *size).fill_(float("nan")))
    backend = recording(family_model("llama"))
    backend._decode([prompt_of(5), prompt_of(30)])
    assert all(torch.isfinite(step).all() for step in backend.steps)


def test_the_cache_takes_no_more_room_than_its_rows_need():
    cache = RowsCache([3, 7], steps=2)
    with cache.filling(0, 0):
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
        assert cache._layers[0][0].shape == (2, 2, 9, 4)
        assert cache.get_seq_length() == 0
    cache.grow()
    assert cache.visible(torch.device("cpu")).tolist() == [[False] * 4, [True] * 4]
    assert RowsCache([5, 5], steps=1).visible(torch.device("cpu")) is None


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": 4}, {"window": 3, "softcap": 2.0}])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dim", [8, 12])  # torch's kernel takes multiples of 8
def test_attention_of_the_last_token(options, padded, dim):
    """Against the reference, row by row without its padding."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, size, dim, generator=generator) for heads, size in ((4, 1), (2, 9), (2, 9))
    )
    starts = [0, 4] if padded else [0, 0]
    if "sinks" in options:
        options = {**options, "sinks": torch.randn(4, generator=generator)}
    visible = torch.arange(4) >= torch.tensor(starts)[:, None] if padded else None
    found = last_token_attention(query, key, value, visible, scale=0.3, **options)
    for row, start in enumerate(starts):
        alone = reference_attention(
            query[row : row + 1], key[row : row + 1, :, start:], value[row : row + 1, :, start:], scale=0.3, **options
        )
        assert torch.allclose(found[row], alone[0], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [0, 300])
def test_attention_of_the_last_token_in_half_precision(ragged):
    """The kernel for long rows, whose sums are split among many blocks."""
    shapes = ((9, 1), (3, 20_001), (3, 20_001))
    query, key, value = (torch.randn(4, heads, size, 64, device="cuda").bfloat16() for heads, size in shapes)
    starts = torch.linspace(0, ragged, 4, dtype=torch.long).tolist()
    visible = torch.arange(ragged, device="cuda") >= torch.tensor(starts, device="cuda")[:, None] if ragged else None
    found = last_token_attention(query, key, value, visible, scale=0.3)
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        alone = reference_attention(
            query[one].float(), key[one, :, start:].float(), value[one, :, start:].float(), scale=0.3
        )
        assert (found[row].float() - alone[0]).norm() < 1e-2 * alone.norm()


# Scores


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_scores_of_texts_of_different_lengths(family):
    plain = family_model(family)
    factors = make_factors(plain, **SIDES)
    backend = recording(switching(family_model(family), factors))
    spans = [
        TextSpan(token_ids=tokens_of(length, seed=length)[0].tolist(), start=start)
        for length, start in ((12, 1), (ORIGINAL_LENGTH + 8, 30), (2, 1), (ORIGINAL_LENGTH, 31))
    ]
    for span, score in zip(spans, backend.score(spans), strict=True):
        tokens = torch.tensor([span.token_ids])
        with rescaled(plain, factors, long_rows=len(span.token_ids) > ORIGINAL_LENGTH, check=False), torch.no_grad():
            logits = plain(input_ids=tokens, use_cache=False).logits[0, span.start - 1 : -1].double()
        expected = -logits.log_softmax(-1).gather(-1, tokens[0, span.start :, None]).sum().item()
        assert score.nll == pytest.approx(expected, rel=1e-4)
        assert score.num_tokens == len(span.token_ids) - span.start
        assert score.exact == bool((logits.argmax(-1) == tokens[0, span.start :]).all())


def test_a_text_is_long_once_more_tokens_are_run_than_the_switch():
    """As for an answer, the last token is only predicted."""
    model = switching(family_model("llama"), make_factors(family_model("llama"), **SIDES))
    for length in (ORIGINAL_LENGTH, ORIGINAL_LENGTH + 1, ORIGINAL_LENGTH + 2):
        tokens = tokens_of(length)
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0].double()
        expected = -logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).sum().item()
        found = recording(model).score([TextSpan(token_ids=tokens[0].tolist(), start=1)])[0]
        assert found.nll == pytest.approx(expected, rel=1e-5)


def test_a_greedy_continuation_is_exact_and_answers_to_one_question_share_a_row():
    model = family_model("llama")
    backend = recording(model)
    question = tokens_of(10)[0].tolist()
    best = backend._decode([Prompt(token_ids=question, max_new_tokens=1)])[0][0]
    seen = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("input_ids")), with_kwargs=True
    )
    spans = [TextSpan(token_ids=[*question, token], start=10) for token in (best, 5, 6, 7)]
    scores = backend.score(spans)
    assert [score.exact for score in scores] == [token == best for token in (best, 5, 6, 7)]
    assert math.fsum(math.exp(-score.nll) for score in scores) < 1
    assert seen[0].shape == (1, 10)


def test_logits_come_in_pieces(monkeypatch):
    backend = recording(family_model("llama"))
    span = TextSpan(token_ids=tokens_of(30)[0].tolist(), start=3)
    whole = backend.score([span])[0]
    monkeypatch.setattr("longrope2.evaluation.backend.LOGIT_ROWS", 4)
    assert backend.score([span])[0].nll == pytest.approx(whole.nll, rel=1e-6)


def test_out_of_memory_says_what_to_do(monkeypatch):
    backend = recording(family_model("llama"))

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend.model.base_model, "forward", exhausted)
    with pytest.raises(LongRopeError, match="out of memory while answering 9 tokens") as caught:
        backend.answer([prompt_of(9)])
    assert "--batch-tokens" in caught.value.hint
    with pytest.raises(LongRopeError, match="out of memory while scoring"):
        backend.score([TextSpan(token_ids=[1, 2, 3], start=1)])

"""The oracle of test_generation.py on a CUDA device: real streams, compiled decode steps, memory on two devices."""

import pytest
import torch

from conftest import ORIGINAL_LENGTH
from longrope2 import attention
from longrope2.generation import strategies
from longrope2.kernels import Heads, choose_continued
from test_generation import Oracle, batch_of, generate, switching_model

pytestmark = pytest.mark.gpu


def cuda(family="llama", **options):
    model, oracle = switching_model(family, **options).cuda(), Oracle(family)
    oracle.model.cuda()
    return model, oracle


def batch(*lengths):
    return (tensor.cuda() for tensor in batch_of(*lengths))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("strategy", ["recompute", "shadow"])
def test_dynamic_caches(family, strategy):
    """One row crosses at once, one later, one never, and one is long from the start."""
    model, oracle = cuda(family, strategy=strategy, shadow_chunk=4)
    ids, mask = batch(31, 28, 20, 36)
    oracle.check(generate(model, ids, mask), mask)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("strategy", ["recompute", "shadow"])
def test_compiled_decode(family, strategy):
    """transformers compiles decode steps of a static cache by itself; the steps before and after use one graph."""
    torch._dynamo.reset()
    model, oracle = cuda(family, strategy=strategy, shadow_chunk=4)
    ids, mask = batch(31, 28)
    for _ in range(2):  # the second call finds the graph there
        oracle.check(generate(model, ids, mask, new=12, cache_implementation="static"), mask)
    assert getattr(model, "_compiled_call", None) is not None, "transformers did not compile"
    assert model.longrope2.extra_tokens[-3:] == [0, 0, 0]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (32, 8, 128), (32, 32, 96)])
def test_a_fast_kernel_goes_on_after_a_cache(heads, kv_heads, size):
    assert choose_continued(Heads(torch.device("cuda"), torch.bfloat16, heads, kv_heads, size)) is not None


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_long_texts_are_read_in_pieces(family, monkeypatch):
    monkeypatch.setattr(strategies, "READ_TOKENS", 12)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    model, oracle = cuda(family)
    ids, mask = batch(2 * ORIGINAL_LENGTH)
    oracle.check(generate(model, ids, mask), mask)


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("strategy", ["recompute", "shadow"])
def test_offloaded_caches(cache, strategy):
    model, oracle = cuda(strategy=strategy, shadow_chunk=4)
    ids, mask = batch(31, 28, 36)
    oracle.check(generate(model, ids, mask, cache_implementation=cache), mask)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunked_prefill_near_the_switch(cache):
    """The work ahead begins with the prompt, and in chunks."""
    model, oracle = cuda(strategy="shadow", shadow_chunk=4)
    ids, mask = batch(ORIGINAL_LENGTH - 2, 20)
    oracle.check(generate(model, ids, mask, prefill_chunk_size=7, cache_implementation=cache), mask)
    assert model.longrope2.extra_tokens[0] > 0


def test_ended_rows_do_not_cross():
    model, _ = cuda()
    ids, mask = batch(30, 24)
    first, second = (row[30:].tolist() for row in generate(model, ids, mask, new=14).sequences)
    assert first[0] not in second
    generate(model, ids, mask, new=14, eos_token_id=first[0])
    assert [tokens for tokens in model.longrope2.extra_tokens if tokens] == [38]


def test_a_conversation_that_crosses_between_turns():
    model, oracle = cuda(strategy="shadow", shadow_chunk=4)
    ids, mask = batch(20)
    first = generate(model, ids, mask, new=4)
    more = torch.cat((first.sequences, batch_of(12, seed=3)[0].cuda()), dim=1)
    output = generate(model, more, torch.ones_like(more), past_key_values=first.past_key_values)
    oracle.check(output, torch.ones_like(more))

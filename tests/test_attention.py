"""The attention function against plain float64 arithmetic and against transformers' eager attention."""

import math

import pytest
import torch

from conftest import FAMILY_OPTIONS, family_model
from longrope2 import attention, kernels
from longrope2.attention import TrailingQueries, causal_attention, one_by_one, our_attention, share_a_kernel
from longrope2.errors import LongRopeError
from longrope2.kernels import TORCH_KERNEL, Heads, Kernel, choose_continued, choose_kernel, reference_attention


def naive(q, k, v, scale, window=None, softcap=None, sinks=None):
    """Attention written from its definition, one query at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    offset = k.shape[2] - q.shape[2]
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        for i in range(q.shape[2]):
            last = i + offset
            first = 0 if window is None else max(0, last - window + 1)
            scores = q[:, h, i : i + 1] @ k[:, g, first : last + 1].transpose(-1, -2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            norm = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[h].double().exp())
            out[:, h, i] = ((weights / norm) @ v[:, g, first : last + 1])[:, 0]
    return out


@pytest.mark.parametrize("num_queries", [1, 7, 33])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}, {"window": 33}, {"softcap": 2.0}, {"window": 9, "softcap": 3.0}, {"sinks": True}],
    ids=str,
)
def test_against_the_definition(num_queries, kv_heads, options, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)  # several blocks even at this size
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 8)
    q = torch.randn(2, 4, num_queries, 16)
    k, v = torch.randn(2, kv_heads, 33, 16), torch.randn(2, kv_heads, 33, 16)
    options = {**options, "sinks": torch.randn(4)} if "sinks" in options else options
    expected = naive(q, k, v, 0.3, **options).float()
    for function in (causal_attention, reference_attention):
        torch.testing.assert_close(function(q, k, v, scale=0.3, **options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 16), (4, 1, 12)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(9, 10), (9, 33), (32, 33), (17, 64)])
def test_positions_after_a_cache_need_no_mask(heads, kv_heads, dim, num_queries, num_keys, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    monkeypatch.setattr(attention, "by_blocks", lambda *_: pytest.fail("a mask"))
    q = torch.randn(2, heads, num_queries, dim)
    k, v = torch.randn(2, kv_heads, num_keys, dim), torch.randn(2, kv_heads, num_keys, dim)
    k[:, :, 0] *= 30  # most weight on one key before, or on none
    expected = naive(q, k, v, 0.3).float()
    torch.testing.assert_close(causal_attention(q, k, v, scale=0.3), expected, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_cannot_continue_is_passed_over(monkeypatch):
    heads = Heads(torch.device("cpu"), torch.float32, 4, 2, 16)
    assert choose_continued(heads) is kernels.flash_weighed  # cuDNN needs a GPU

    def in_bits(*arguments, **options):
        output, sums = kernels.flash_weighed(*arguments, **options)
        return output, sums / math.log(2)  # logarithms to the base of 2, as some kernels give

    assert kernels.continues(kernels.flash_weighed, heads)
    assert not kernels.continues(in_bits, heads)
    q, k, v = heads.random(40)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    expected = causal_attention(q[:, :, -20:], k, v, scale=0.25)
    monkeypatch.setattr(attention, "choose_continued", lambda _: None)
    torch.testing.assert_close(causal_attention(q[:, :, -20:], k, v, scale=0.25), expected)
    values = v[..., :8]  # narrower than keys, as in DeepSeek's models
    torch.testing.assert_close(causal_attention(q[:, :, -20:], k, values, scale=0.25), expected[..., :8])


def test_a_wrong_kernel_is_found_out():
    heads = Heads(torch.device("cpu"), torch.float32, 4, 2, 16)
    assert choose_kernel(heads) is TORCH_KERNEL
    assert kernels.agrees(TORCH_KERNEL, heads)

    class Corrupt(Kernel):
        def __call__(self, query, key, value, scale, **mask):
            output = super().__call__(query, key, value, scale, **mask)
            output[:, :, -100:] = 0  # the last block never written
            return output

    assert not kernels.agrees(Corrupt("corrupt", None, grouped=True), heads)


@pytest.mark.parametrize("learning", range(3))
def test_a_kernel_is_chosen_for_training_where_anything_learns(learning, monkeypatch):
    """Queries may be frozen while keys and values learn."""
    asked = []
    monkeypatch.setattr(attention, "choose_kernel", lambda _, *, training: asked.append(training) or TORCH_KERNEL)
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    causal_attention(*tensors, scale=1.0)
    tensors[learning].requires_grad_()
    causal_attention(*tensors, scale=1.0)
    assert asked == [False, True]


def test_short_documents_share_a_kernel_and_long_ones_have_one_each(monkeypatch):
    monkeypatch.setattr(attention, "varlen_agrees", lambda heads, training: True)
    heads = Heads(torch.device("cuda"), torch.bfloat16, 9, 3, 64)
    rows = {size: list(range(0, 2**17 + 1, size)) for size in (512, 2048, 4096, 8192)}
    assert [share_a_kernel(ends, heads, training=True) for ends in rows.values()] == [True, True, True, False]
    assert not share_a_kernel([0, 2**17], heads, training=True)
    assert not share_a_kernel([0, 100], heads, training=True)  # a single one has nobody to share with
    wide = Heads(torch.device("cuda"), torch.bfloat16, 32, 8, 128)
    assert not share_a_kernel(rows[2048], wide, training=True)
    monkeypatch.setattr(attention, "varlen_agrees", lambda heads, training: False)
    assert not share_a_kernel(rows[512], heads, training=True)


def test_texts_are_padded_for_a_kernel_that_prepares_for_each_length(monkeypatch):
    """Outputs and gradients are those without: of documents of one token, of whole steps, and between."""
    ends, scale, lengths = [0, 1, 17, 33, 40, 72, 100], 0.25, []

    class Preparing(Kernel):
        def missing(self, length):
            return -length % 16

        def __call__(self, query, *rest, **options):
            lengths.append(query.shape[2])
            return super().__call__(query, *rest, **options)

    q, k, v = (x.requires_grad_() for x in Heads(torch.device("cpu"), torch.float32, 4, 2, 16).random(ends[-1]))
    upstream = torch.randn(1, 4, ends[-1], 16)

    def results():
        output = one_by_one(q, k, v, ends, scale=scale)
        return [output, *torch.autograd.grad(output, (q, k, v), upstream)]

    plain = results()
    monkeypatch.setattr(attention, "choose_kernel", lambda _, training: Preparing("preparing", None, grouped=True))
    for ours, true in zip(results(), plain, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)
    assert lengths == [16, 16, 16, 16, 32, 32]


def test_only_cudnn_is_run_at_few_lengths():
    found = {
        name: [Kernel(name, backend, grouped=True).missing(length) for length in (1, 64, 1000, 1024, 1025, 32_768)]
        for name, backend in kernels.BACKENDS.items()
    }
    assert found.pop("cudnn") == [63, 0, 24, 0, 255, 0]
    assert not any(map(sum, found.values()))


def test_key_heads_are_repeated_for_kernels_that_need_it():
    q, k, v = Heads(torch.device("cpu"), torch.float32, 4, 2, 16).random(20)
    plain = Kernel("plain", None, grouped=False)
    torch.testing.assert_close(plain(q, k, v, 0.25, is_causal=True), TORCH_KERNEL(q, k, v, 0.25, is_causal=True))


def tokens_of(length, batch=2):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_models_give_the_same_logits(family):
    """Also with queries for the last positions alone: keys of all, queries of few."""
    model, tokens = family_model(family), tokens_of(40)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        with our_attention(model):
            assert model.config._attn_implementation == "longrope2"
            ours = model(tokens, use_cache=False).logits
            layer = model.base_model.layers[-1]
            with TrailingQueries(layer, 6).installed():
                trailing = model(tokens, use_cache=False).logits
            again = model(tokens, use_cache=False).logits
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    assert trailing.shape[1] == 6
    torch.testing.assert_close(trailing, expected[:, -6:], rtol=1e-3, atol=1e-3)
    assert torch.equal(again, ours)


def test_short_inputs_need_no_second_pass():
    model, tokens = family_model("llama"), tokens_of(5)
    with torch.no_grad(), our_attention(model), TrailingQueries(model.model.layers[-1], 6).installed():
        assert model(tokens, use_cache=False).logits.shape[1] == 5


def test_padding_is_refused_not_ignored():
    model, tokens = family_model("llama"), tokens_of(8)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with our_attention(model), pytest.raises(LongRopeError, match="padded batches"):
        model(tokens, attention_mask=mask)


def test_a_layer_that_bypasses_the_function_is_reported():
    model, tokens = family_model("llama"), tokens_of(20)  # eager attention: our function is never called
    trailing = TrailingQueries(model.model.layers[-1], 6)
    with pytest.raises(LongRopeError, match="never called"), torch.no_grad(), trailing.installed():
        model(tokens, use_cache=False)
    assert "forward" not in model.model.layers[-1].__dict__


@pytest.mark.parametrize(
    ("capability", "lacking", "chosen"), [((9, 0), (), "cudnn"), ((8, 0), (), "flash"), ((9, 0), ("cudnn",), "flash")]
)
def test_the_same_kernel_is_chosen_whenever_a_job_resumes(capability, lacking, chosen, monkeypatch):
    """By order, not by a stopwatch: kernels differ in rounding."""

    def agree(kernel, heads, *, training):
        if kernel.name in lacking:
            raise RuntimeError("not in this build")
        return True

    monkeypatch.setattr(kernels, "agrees", agree)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    heads = Heads(torch.device("cuda"), torch.bfloat16, 9, 3, 64)
    assert choose_kernel.__wrapped__(heads) == Kernel(chosen, kernels.BACKENDS[chosen], grouped=True)

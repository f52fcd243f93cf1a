"""Attention kernels: the reference that is right, and a fast one that agrees with it on this device.

Shapes: B batch, H query heads, K key/value heads, Q queries, S keys, D head dimension.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

P = ParamSpec("P")
R = TypeVar("R")
QUERY_BLOCK = 512
LENGTH_STEP, SHORT_STEP = 256, 64
"""cuDNN's attention is run at multiples of these, the second up to 1,024 tokens. It prepares itself for each new
length, which takes 40 ms forward and 50 backward on an H200: more than attention itself over most texts (LOG.md)."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A way to run scaled dot-product attention."""

    name: str
    backend: SDPBackend | None
    """None leaves the choice to torch."""
    grouped: bool
    """Whether it takes fewer key/value heads than query heads; otherwise they are repeated for it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, **mask: Any) -> Tensor:
        """Attend, with `is_causal` or `attn_mask` as torch's function takes them."""
        grouped = query.shape[1] != key.shape[1]
        if grouped and not self.grouped:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            grouped = False
        chosen: AbstractContextManager[Any] = sdpa_kernel([self.backend]) if self.backend else nullcontext()
        with chosen:
            return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped, **mask)

    def missing(self, length: int) -> int:
        """By how many positions to pad a text, so that the kernel meets few different lengths."""
        if self.backend is not SDPBackend.CUDNN_ATTENTION:
            return 0
        return -length % (LENGTH_STEP if length > 1024 else SHORT_STEP)


TORCH_KERNEL = Kernel("torch", None, grouped=True)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
HOPPER = (9, 0)
"""From this chip on cuDNN's kernel is 1.4 to 1.9 times as fast as flash attention (docs/speed.md)."""


@dataclass(frozen=True)
class Heads:
    """What a kernel's fitness depends on."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "Heads":
        """Read them off the tensors of an attention call."""
        return cls(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3])

    def random(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value to try a kernel on."""
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, length, self.head_dim, device=self.device, generator=generator)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)


def aside(function: Callable[P, R]) -> Callable[P, R]:
    """Run in a thread of its own, once for the same arguments.

    What the caller has switched on is on for its thread: checkpointing records every operation, and what a trial of
    kernels did the first time only would be missing when it runs again.
    """

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args, **options).result()

    return cast(Callable[P, R], lru_cache(run))


@aside
def choose_kernel(heads: Heads, *, training: bool = False) -> Kernel:
    """The first kernel that agrees with the reference on this device for these heads, the fastest ones first.

    In training its gradients must agree, too. Nothing is timed: a job that resumes must choose what it had before,
    since kernels differ in rounding, and a search or training would go on differently.
    """
    if heads.device.type != "cuda":
        return TORCH_KERNEL
    names = list(BACKENDS)
    if torch.cuda.get_device_capability(heads.device) < HOPPER:
        names.sort(key=lambda name: name != "flash")
    for name in names:
        for grouped in (True, False) if heads.num_heads != heads.num_kv_heads else (True,):
            kernel = Kernel(name, BACKENDS[name], grouped)
            try:
                with warnings.catch_warnings(action="ignore"):  # torch warns of every kernel that it cannot use
                    if agrees(kernel, heads, training=training):
                        return kernel
            except RuntimeError:
                continue  # this build or chip does not have it
    return TORCH_KERNEL


def agrees(kernel: Kernel, heads: Heads, *, training: bool = False) -> bool:
    """Compare with float32 at an odd length: some kernels are wrong only at block edges or few KV heads."""
    scale = heads.head_dim**-0.5
    return _same(
        lambda q, k, v: kernel(q, k, v, scale, is_causal=True),
        lambda q, k, v: reference_attention(q, k, v, scale=scale),
        heads,
        length=1111,
        training=training,
    )


def _same(attend: Attention, reference: Attention, heads: Heads, *, length: int, training: bool) -> bool:
    """Whether a kernel's output, and in training its gradients, are those of the reference in float32."""
    tensors = heads.random(length)
    found = _results(attend, tensors, training=training)
    expected = _results(reference, [x.float() for x in tensors], training=training)
    tolerance = 1e-2 if heads.dtype in (torch.bfloat16, torch.float16) else 1e-3
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    return all(bool(error < tolerance) for error in errors)


def _results(attend: Attention, tensors: Sequence[Tensor], *, training: bool) -> list[Tensor]:
    """What attention gives, with the gradients of its square's half in training."""
    with torch.set_grad_enabled(training):
        leaves = [x.detach().requires_grad_(training) for x in tensors]
        output = attend(*leaves)
    if not training:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, leaves, output.detach())]


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same in plain operations and float32 at least: the oracle, and the way for soft caps and sinks."""
    precise = torch.promote_types(query.dtype, torch.float32)
    repeats = query.shape[1] // key.shape[1]

    def attend(queries: Tensor, start: int, stop: int, mask: Tensor) -> Tensor:
        keys = key[:, :, start:stop].repeat_interleave(repeats, 1).to(precise)
        values = value[:, :, start:stop].repeat_interleave(repeats, 1).to(precise)
        scores = queries.to(precise) @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks.to(precise).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ values
        return scores.softmax(-1) @ values

    return by_blocks(query, key, QUERY_BLOCK, window, attend)


Weighed = Callable[..., tuple[Tensor, Tensor]]
"""(query, key, value, scale, is_causal) → attention, and for each query the logarithm of what its weights were divided
by: [B,H,Q]. Not for gradients."""


def flash_weighed(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Flash attention as a `Weighed`."""
    aten = torch.ops.aten
    kernel = aten._scaled_dot_product_flash_attention if query.is_cuda else FLASH_ON_CPU
    output, sums = kernel(query, key, value, 0.0, is_causal, scale=scale)[:2]
    return output, sums


def cudnn_weighed(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """cuDNN's attention as a `Weighed`."""
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, sums = kernel(query, key, value, None, True, 0.0, is_causal, scale=scale)[:2]
    return output, sums.reshape(output.shape[:3])


def continued_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, attend: Weighed) -> Tensor:
    """Causal attention of the last Q positions over all S, for which kernels without a mask know no alignment.

    What came before needs no mask, the new positions are a square: both apart, joined by their weights.
    """
    before, repeats = key.shape[2] - query.shape[2], query.shape[1] // key.shape[1]
    # Heads that share a key are as many queries of one head: the keys before are not repeated for them.
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    old, old_sums = attend(grouped, key[:, :, :before], value[:, :, :before], scale)
    keys, values = (x[:, :, before:].repeat_interleave(repeats, 1) for x in (key, value))
    new, new_sums = attend(query, keys, values, scale, is_causal=True)
    share = torch.sigmoid(old_sums.reshape(new_sums.shape) - new_sums)[..., None]
    return torch.lerp(new.float(), old.reshape(new.shape).float(), share).to(query.dtype)


@aside
def choose_continued(heads: Heads) -> Weighed | None:
    """The first kernel with which `continued_attention` agrees with the reference on this device, if there is one."""
    for attend in (cudnn_weighed, flash_weighed):
        try:
            if continues(attend, heads):
                return attend
        except (NotImplementedError, RuntimeError):
            continue  # this build or chip does not have it
    return None


def continues(attend: Weighed, heads: Heads) -> bool:
    """Compare with float32, at odd numbers of positions before and after."""
    scale = heads.head_dim**-0.5
    return _same(
        lambda q, k, v: continued_attention(q[:, :, -515:], k, v, scale, attend),
        lambda q, k, v: reference_attention(q[:, :, -515:], k, v, scale=scale),
        heads,
        length=1111,
        training=False,
    )


def by_blocks(
    query: Tensor,
    key: Tensor,
    block: int,
    window: int | None,
    attend: Callable[[Tensor, int, int, Tensor], Tensor],
) -> Tensor:
    """Attend block of queries by block, each over the keys it may see, so that no mask is ever S × S."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    first = num_keys - num_queries
    outputs = []
    for begin in range(0, num_queries, block):
        end = min(begin + block, num_queries)
        stop = first + end
        start = 0 if window is None else max(first + begin - window + 1, 0)
        rows = torch.arange(first + begin, stop, device=query.device)[:, None]
        columns = torch.arange(start, stop, device=query.device)[None]
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
        outputs.append(attend(query[:, :, begin:end], start, stop, mask).to(query.dtype))
    return torch.cat(outputs, dim=2)


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], scale: float) -> Tensor:
    """All documents of one row in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.tensor(ends, dtype=torch.int32, device=query.device)
    longest = max(stop - start for start, stop in pairwise(ends))
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    # A window that looks back without limit and never ahead is a causal mask.
    output = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(output, Tensor)
    return output.transpose(0, 1)[None]


@aside
def varlen_agrees(heads: Heads, *, training: bool = False) -> bool:
    """Whether torch has a kernel for packed documents here that gives what the reference gives."""
    ends, scale = (0, 129, 130, 700, 1111), heads.head_dim**-0.5

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = [reference_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale=scale) for a, b in pairwise(ends)]
        return torch.cat(pieces, dim=2)

    try:
        return _same(
            lambda q, k, v: varlen_attention(q, k, v, ends, scale),
            reference,
            heads,
            length=ends[-1],
            training=training,
        )
    except (ImportError, RuntimeError, TypeError):
        return False

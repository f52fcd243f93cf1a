"""The one attention function: causal, without a mask in memory, by the fastest kernel that proves right.

`with our_attention(model):` makes a transformers model use it. Sliding windows, soft caps and attention sinks
are honoured; padding is refused, since documents here have exact lengths.

Shapes: B batch, H query heads, K key/value heads, Q queries, S keys, D head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from longrope2.errors import LongRopeError
from longrope2.kernels import (
    QUERY_BLOCK,
    TORCH_KERNEL,
    Heads,
    by_blocks,
    choose_continued,
    choose_kernel,
    continued_attention,
    reference_attention,
    varlen_agrees,
    varlen_attention,
)

NAME = "longrope2"
LAUNCH_FLOPS = 32 * 10**9
"""Of attention forward: below this many a document, starting a kernel for each costs more than the faster kernel saves
(three shapes of heads on an H200, benchmarks/packing.py)."""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last Q positions over all S: [B,H,Q,D] × [B,K,S,D] → [B,H,Q,D]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if softcap is not None or sinks is not None:
        return reference_attention(query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks)
    slides = window is not None and window < num_keys
    # Fewer queries than a block have one small mask. Gradients never meet a cache.
    if not slides and QUERY_BLOCK < num_queries < num_keys and query.shape[3] == value.shape[3]:
        attend = None if _learns(query, key, value) else choose_continued(Heads.of(query, key))
        if attend is not None:
            return continued_attention(query, key, value, scale, attend)
    if slides or num_queries < num_keys:
        # torch aligns is_causal to the first key and knows no window: these need masks, block by block.
        block = max(window, QUERY_BLOCK) if slides and window else QUERY_BLOCK
        return by_blocks(query, key, block, window, _masked(key, value, scale))
    kernel = choose_kernel(Heads.of(query, key), training=_learns(query, key, value))
    if missing := kernel.missing(num_keys):  # zeros at the end, which nothing before them sees
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
        return kernel(query, key, value, scale, is_causal=True)[:, :, :num_keys]
    return kernel(query, key, value, scale, is_causal=True)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Sequence[Sequence[int]], *, scale: float, **options: Any
) -> Tensor:
    """Causal attention within each document of each row: boundaries[row] = 0 < … < S, where documents end.

    The work is that of the documents, not of the row: a mask would only hide it.
    """
    rows = []
    plain = all(option is None for option in options.values())
    for row, ends in enumerate(boundaries):
        q, k, v = query[row : row + 1], key[row : row + 1], value[row : row + 1]
        if plain and q.is_cuda and share_a_kernel(ends, Heads.of(q, k), training=_learns(q, k, v)):
            rows.append(varlen_attention(q, k, v, ends, scale))
        else:
            rows.append(one_by_one(q, k, v, ends, scale=scale, **options))
    return torch.cat(rows)


def share_a_kernel(ends: Sequence[int], heads: Heads, *, training: bool) -> bool:
    """Whether the documents of a row are better off in the one kernel for packed rows than in a faster one for each."""
    sizes = [stop - start for start, stop in pairwise(ends)]
    flops = 2 * heads.num_heads * heads.head_dim * sum(size**2 for size in sizes)
    return len(sizes) > 1 and flops < LAUNCH_FLOPS * len(sizes) and varlen_agrees(heads, training=training)


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], *, scale: float, **options: Any
) -> Tensor:
    """The documents of a row, each by itself."""
    # Split, not sliced: the gradient of a slice is as long as the row.
    sizes = [stop - start for start, stop in pairwise(ends)]
    pieces = zip(*(x.split(sizes, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([causal_attention(*piece, scale=scale, **options) for piece in pieces], dim=2)


def _learns(*tensors: Tensor) -> bool:
    """Whether gradients will flow; where W_q is frozen, and all before it, they do through keys and values alone."""
    return any(tensor.requires_grad for tensor in tensors)


def _masked(key: Tensor, value: Tensor, scale: float) -> Callable[[Tensor, int, int, Tensor], Tensor]:
    def attend(queries: Tensor, start: int, stop: int, mask: Tensor) -> Tensor:
        # cuDNN and flash take no mask; torch picks what does.
        return TORCH_KERNEL(queries, key[:, :, start:stop], value[:, :, start:stop], scale, attn_mask=mask)

    return attend


class _KeysCaptured(Exception):  # noqa: N818
    """Ends a layer's first pass, whose keys and values are all that is wanted of it."""


class TrailingQueries:
    """Lets one layer compute keys and values for all positions, but queries only for the last `count`.

    The layer runs twice: up to its attention for the keys and values of every position, then whole, for the
    last positions alone. Works for any family, since only the attention function takes part.
    """

    def __init__(self, layer: nn.Module, count: int) -> None:
        self.layer = layer
        self.count = count
        self._captured: tuple[Tensor, Tensor] | None = None

    def exchange(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Called by the attention function: keep the keys of the first pass, hand them to the second."""
        if self._captured is None:
            self._captured = (key, value)
            raise _KeysCaptured
        captured, self._captured = self._captured, None
        return captured

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Change the layer inside the block."""
        forward = self.layer.forward

        def last(states: Any) -> Any:
            return states[:, -self.count :] if isinstance(states, Tensor) else states

        def forward_trailing(hidden_states: Tensor, *args: Any, **options: Any) -> Any:
            if hidden_states.shape[1] <= self.count:
                return forward(hidden_states, *args, **options)
            for module in self.layer.modules():
                module.__dict__["_trailing_queries"] = self
            try:
                with _suppress_capture():
                    forward(hidden_states, *args, **options)
                if "position_embeddings" in options:
                    options["position_embeddings"] = tuple(map(last, options["position_embeddings"]))
                options["position_ids"] = last(options.get("position_ids"))
                return forward(last(hidden_states), *args, **options)
            finally:
                self._captured = None
                for module in self.layer.modules():
                    module.__dict__.pop("_trailing_queries", None)

        self.layer.forward = forward_trailing
        try:
            yield
        finally:
            del self.layer.forward


@contextmanager
def _suppress_capture() -> Iterator[None]:
    try:
        yield
    except _KeysCaptured:
        return
    raise LongRopeError(
        "the last layer never called its attention function",
        hint="this may be a new transformers version; please report it with the versions you use",
    )


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    trailing: TrailingQueries | None = module.__dict__.get("_trailing_queries")
    if trailing is not None:
        key, value = trailing.exchange(key, value)
    if _exchange is not None:
        query, key, value, options["sinks"] = _exchange.to_heads(query, key, value, options["sinks"])
    if _boundaries is not None:
        output = packed_attention(query, key, value, _boundaries, **options)
    else:
        output = causal_attention(query, key, value, **options)
    return output if _exchange is None else _exchange.to_sequence(output)


class HeadExchange(Protocol):
    """Sequence parallelism (Ulysses): between layers a process holds all heads of a part of the row; inside
    attention it holds the whole row for a part of the heads.
    """

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """From parts of the sequence to parts of the heads."""

    def to_sequence(self, output: Tensor) -> Tensor:
        """And back."""


_exchange: HeadExchange | None = None


@contextmanager
def exchanging(exchange: HeadExchange | None) -> Iterator[None]:
    """Let attention of `our_attention` be shared by processes that hold parts of the same rows."""
    global _exchange
    before, _exchange = _exchange, exchange
    try:
        yield
    finally:
        _exchange = before


# Of the whole process, not of a thread: checkpointed layers run again in autograd's own threads.
_boundaries: Sequence[Sequence[int]] | None = None


@contextmanager
def documents(boundaries: Sequence[Sequence[int]]) -> Iterator[None]:
    """Keep attention of `our_attention` within documents: for each row 0 and where its documents end.

    Backward passes belong inside the block, too, where layers are checkpointed.
    """
    global _boundaries
    before, _boundaries = _boundaries, boundaries
    try:
        yield
    finally:
        _boundaries = before


def _no_mask(attention_mask: Tensor | None = None, **_: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise LongRopeError("padded batches are not supported here; documents must have equal lengths")


@contextmanager
def our_attention(model: Any) -> Iterator[None]:
    """Let a transformers model attend through this module inside the block."""
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, _no_mask)
    # Kernels are chosen by trying them, which a compiler cannot trace.
    with attending(model, NAME, torch.compiler.disable(for_transformers(_attend))):
        yield


def for_transformers(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """A function of ours, with the module and our names of options, as transformers calls it."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = attend(module, query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
        return output.transpose(1, 2).contiguous(), None

    return attention


@contextmanager
def attending(model: Any, name: str, attention: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let a transformers model attend through a function inside the block, under the name that it gets there."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

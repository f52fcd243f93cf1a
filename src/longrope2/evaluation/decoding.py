"""Rows of different lengths in one batch, without masks in memory: filled one by one, then decoded together.

A prompt alone needs no padding, so it runs through the fastest causal kernel. Its keys and values go straight to
their place in a common cache, whose rows all end in the same column; from there on one forward gives the next token
of every row, and what lies left of a row's start is hidden from it.

Shapes: B batch, H query heads, K key/value heads, S columns, D head dimension.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longrope2.attention import causal_attention
from longrope2.kernels import TORCH_KERNEL

NAME = "longrope2_rows"


class RowsCache:
    """Keys and values of several rows that end in the same column; stands in for a transformers cache."""

    def __init__(self, lengths: Sequence[int], steps: int) -> None:
        """For prompts of these lengths, and so many decode steps after them."""
        self._columns = max(lengths)
        self._starts = [self._columns - length for length in lengths]
        self._capacity = self._columns + steps
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._first: Tensor | None = None
        self.filling: int | None = None
        """The row whose prompt is being run; None while all rows are decoded."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each layer: keep new keys and values, return those to attend to."""
        if layer_idx not in self._layers:
            shape = (len(self._starts), key.shape[1], self._capacity)
            self._layers[layer_idx] = (key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]))
        keys, values = self._layers[layer_idx]
        if self.filling is not None:
            row, start = self.filling, self._starts[self.filling]
            keys[row, :, start : self._columns] = key[0]
            values[row, :, start : self._columns] = value[0]
            # What memory happens to hold may be NaN, which hiding its column does not undo.
            keys[row, :, :start] = 0
            values[row, :, :start] = 0
            return key, value
        keys[:, :, self._columns - 1] = key[:, :, 0]
        values[:, :, self._columns - 1] = value[:, :, 0]
        return keys[:, :, : self._columns], values[:, :, : self._columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before those of the forward under way."""
        return 0 if self.filling is not None else self._columns - 1

    def grow(self) -> None:
        """Make room for one more token of every row."""
        self._columns += 1

    def visible(self, device: torch.device) -> Tensor | None:
        """[B, S]: the columns that belong to each row; None if all do."""
        if not any(self._starts):
            return None
        if self._first is None:
            self._first = torch.tensor(self._starts, device=device)[:, None]
        return torch.arange(self._columns, device=device) >= self._first


def last_token_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per row over its row: [B,H,1,D] × [B,K,S,D] → [B,H,1,D]."""
    batch, num_heads, _, dim = query.shape
    if window is not None and window < key.shape[2]:
        key, value = key[:, :, -window:], value[:, :, -window:]
        visible = None if visible is None else visible[:, -window:]
    # The heads that share a key are as many queries of one head: nothing is repeated, and all see the same columns.
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    mask = None if visible is None else visible[:, None, None]
    if softcap is None and sinks is None:
        output = TORCH_KERNEL(grouped, key, value, scale, attn_mask=mask)
    else:
        scores = grouped.float() @ key.float().transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks.float().reshape(1, key.shape[1], -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        output = (scores.softmax(-1)[..., : key.shape[2]] @ value.float()).to(query.dtype)
    return output.reshape(batch, num_heads, 1, -1)


@dataclass(frozen=True)
class _Step:
    """A forward that gives every row one token."""

    visible: Tensor | None


_step: _Step | None = None


def _rows_attention(
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
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux,
    }
    if _step is None:
        output = causal_attention(query, key, value, **options)
    else:
        output = last_token_attention(query, key, value, _step.visible, **options)
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def rows_attention(model: Any) -> Iterator[None]:
    """Let a transformers model attend through this module inside the block."""
    from transformers import AttentionInterface

    # No mask function goes with it, so transformers makes no mask.
    AttentionInterface.register(NAME, _rows_attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def one_token_each(visible: Tensor | None) -> Iterator[None]:
    """Inside `rows_attention`: forwards give one token to every row, which sees its own columns."""
    global _step
    _step = _Step(visible)
    try:
        yield
    finally:
        _step = None

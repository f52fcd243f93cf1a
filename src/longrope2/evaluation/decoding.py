"""Rows of different lengths in one batch, without masks in memory: filled one by one, then decoded together.

A prompt alone needs no padding, so it runs through the fastest causal kernel. Its keys and values go straight to
their place in a common cache, whose rows all end in the same column; from there on one forward gives the next token
of every row, and what lies left of a row's start is hidden from it.

Shapes: B batch, H query heads, K key/value heads, S columns, D head dimension.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from longrope2.attention import attending, causal_attention, for_transformers
from longrope2.kernels import flash_weighed

NAME = "longrope2_rows"


class RowsCache:
    """Keys and values of several rows that end in the same column; stands in for a transformers cache."""

    def __init__(self, lengths: Sequence[int], steps: int) -> None:
        """For prompts of these lengths, and this many decode steps after them."""
        self._columns = max(lengths)
        self._starts = [self._columns - length for length in lengths]
        self._capacity = self._columns + steps
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._visible: Tensor | None = None
        self._filling: tuple[int, int] | None = None

    @contextmanager
    def filling(self, row: int, done: int) -> Iterator[None]:
        """Inside the block forwards run the prompt of one row, of which so many tokens are there already."""
        self._filling = row, done
        try:
            yield
        finally:
            self._filling = None

    def share(self, row: int, tokens: int) -> None:
        """Give a row the first tokens of the row before, whose prompt begins alike."""
        start, before = self._starts[row], self._starts[row - 1]
        for kept in chain.from_iterable(self._layers.values()):
            kept[row, :, :start] = 0  # as in `update`
            kept[row, :, start : start + tokens] = kept[row - 1, :, before : before + tokens]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each layer: keep new keys and values, return those to attend to."""
        if layer_idx not in self._layers:
            shape = (len(self._starts), key.shape[1], self._capacity)
            self._layers[layer_idx] = (key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]))
        keys, values = self._layers[layer_idx]
        if self._filling is not None:
            row, done = self._filling
            start = self._starts[row]
            end = start + done + key.shape[2]
            keys[row, :, start + done : end] = key[0]
            values[row, :, start + done : end] = value[0]
            if done:
                return keys[row : row + 1, :, start:end], values[row : row + 1, :, start:end]
            # What memory happens to hold may be NaN, which hiding its column does not undo.
            keys[row, :, :start] = 0
            values[row, :, :start] = 0
            return key, value
        keys[:, :, self._columns - 1] = key[:, :, 0]
        values[:, :, self._columns - 1] = value[:, :, 0]
        return keys[:, :, : self._columns], values[:, :, : self._columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before those of the forward under way."""
        return self._columns - 1 if self._filling is None else self._filling[1]

    def grow(self) -> None:
        """Make room for one more token of every row."""
        self._columns += 1

    def visible(self, device: torch.device) -> Tensor | None:
        """[B, C]: which of the first C columns belong to each row, and all the others to all; None if C is 0."""
        if not any(self._starts):
            return None
        if self._visible is None:
            starts = torch.tensor(self._starts, device=device)[:, None]
            self._visible = torch.arange(max(self._starts), device=device) >= starts
        return self._visible


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
    """Attention of one new token per row over its row: [B,H,1,D] × [B,K,S,D] → [B,H,1,D].

    `visible` [B, C] hides columns among the first C; those after them are seen by every row.
    """
    batch, num_heads, _, dim = query.shape
    if window is not None and window < key.shape[2]:
        visible = None if visible is None else visible[:, key.shape[2] - window :]
        key, value = key[:, :, -window:], value[:, :, -window:]
    # The heads that share a key are as many queries of one head: nothing is repeated, and all see the same columns.
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    # Kernels that read long rows at full speed take no mask. So the ragged beginning is attended to apart.
    ragged = 0 if visible is None else visible.shape[1]
    output, lse = _attend(grouped, key[:, :, ragged:], value[:, :, ragged:], scale, softcap)
    parts = [lse]
    if visible is not None:
        scores = _scores(grouped, key[:, :, :ragged], scale, softcap).masked_fill(~visible[:, None, None], -torch.inf)
        parts.append(scores.logsumexp(-1))
    if sinks is not None:
        parts.append(sinks.float().reshape(1, key.shape[1], -1).expand_as(lse))
    if len(parts) > 1:
        total = torch.stack(parts).logsumexp(0)
        output = output.float() * (lse - total).exp()[..., None]
        if visible is not None:
            output = output + (scores - total[..., None]).exp() @ value[:, :, :ragged].float()
    return output.to(query.dtype).reshape(batch, num_heads, 1, -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Attention without a mask, and the logarithm of what its weights were divided by: [B,K,Q]."""
    flash = softcap is None and query.shape[3] == value.shape[3] and query.shape[3] % 8 == 0
    on_gpu = query.is_cuda and query.dtype.itemsize == 2 and query.shape[3] <= 256
    if flash and (on_gpu or query.device.type == "cpu"):
        return flash_weighed(query, key, value, scale)
    scores = _scores(query, key, scale, softcap)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value.float(), lse


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


@dataclass(frozen=True)
class _Step:
    """A forward that gives every row one token."""

    visible: Tensor | None


_step: _Step | None = None


def _attend_rows(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if _step is None:
        return causal_attention(query, key, value, **options)
    return last_token_attention(query, key, value, _step.visible, **options)


_rows_attention = for_transformers(_attend_rows)  # one for all, since a compiled model knows it by identity


def rows_attention(model: Any) -> AbstractContextManager[None]:
    """Let a transformers model attend through this module inside the block."""
    # No mask function goes with it, so transformers makes no mask.
    return attending(model, NAME, _rows_attention)


@contextmanager
def one_token_each(visible: Tensor | None) -> Iterator[None]:
    """Inside `rows_attention`: forwards give one token to every row, which sees its own columns."""
    global _step
    _step = _Step(visible)
    try:
        yield
    finally:
        _step = None

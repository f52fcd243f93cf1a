"""Key-value caches: what one was filled with, how to empty it, how rows move from one into another."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from longrope2.errors import LongRopeError

# Layers that hold plain keys and values. Quantised ones are lossy, so nothing built on them could be exact.
KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
PADDING = -1
_NOTE = "longrope2_filled"


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What lies in a cache, to decide whether it still fits a conversation and its side of the switch."""

    tokens: Tensor
    """[batch, columns], PADDING where the attention mask is 0."""
    long_rows: Tensor
    """[batch] bool: the rows whose keys and values were computed with the long factors."""

    def serves(self, tokens: Tensor, long_rows: Tensor, columns: int) -> bool:
        """Whether a cache with this many columns can be continued: the same tokens in it, on the same sides."""
        same_rows = torch.equal(self.long_rows, long_rows)
        # Columns rather than all that was noted: the user may have cropped the cache since.
        return same_rows and torch.equal(self.tokens[:, :columns], tokens[:, :columns])


def without_padding(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens with PADDING where the mask is 0: equal exactly if a row attends to the same."""
    return tokens if mask is None else tokens.masked_fill(mask == 0, PADDING)


def note(cache: Any, filled: Filled | None) -> None:
    """Write on a cache what is in it; it travels with the cache, through `copy.deepcopy` as well."""
    setattr(cache, _NOTE, filled)


def noted(cache: Any) -> Filled | None:
    """What `note` wrote; None for a cache that others filled."""
    return getattr(cache, _NOTE, None)


def num_cached(cache: Any) -> int:
    """Columns in a cache, padding included; 0 without a cache."""
    return 0 if cache is None else int(cache.get_seq_length())


def check_kind(cache: Any) -> None:
    """Refuse a cache that cannot be refilled exactly."""
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in KNOWN_LAYERS})
    if odd:
        raise LongRopeError(
            f"generation with {type(cache).__name__} is not exact across the switch (layers: {', '.join(odd)})",
            hint="use cache_implementation 'dynamic', 'static', 'offloaded' or 'offloaded_static'",
        )


def empty(cache: Any) -> None:
    """Forget everything in a cache, which stays the same object."""
    cache.reset()
    note(cache, None)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            # Some transformers releases fill dynamic layers with zeros here instead of dropping them.
            layer.keys = layer.values = None
            layer.is_initialized = False


def blank_like(cache: Any) -> Any:
    """An empty cache of the same kind, for any number of rows."""
    blank = copy.copy(cache)
    note(blank, None)
    blank.layers = [_blank_layer(layer) for layer in cache.layers]
    return blank


def _blank_layer(layer: Any) -> Any:
    blank = copy.copy(layer)
    blank.keys = blank.values = None
    blank.is_initialized = False
    for counter in ("cumulative_length", "cumulative_length_int"):
        if hasattr(layer, counter):
            value = getattr(layer, counter)
            setattr(blank, counter, torch.zeros_like(value) if isinstance(value, Tensor) else 0)
    return blank


def replace_rows(cache: Any, rows: list[int], source: Any) -> None:
    """Put the rows of `source`, which holds as many columns, in the place of `rows` of `cache`.

    In place, so that a compiled decode step finds its static tensors where they were.
    """
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # its layers move between devices on a stream of their own
    indices: dict[torch.device, Tensor] = {}  # one copy to each device, which the host has to wait for
    for layer, new in zip(cache.layers, source.layers, strict=True):
        device = layer.keys.device
        if device not in indices:
            indices[device] = torch.tensor(rows, device=device)
        layer.keys.index_copy_(0, indices[device], new.keys.to(device))
        layer.values.index_copy_(0, indices[device], new.values.to(device))

"""Key-value caches: what one was filled with, how to empty it, how rows move from one into another."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import StaticLayer

from longrope2.errors import LongRopeError

# Layers whose tensors are plain and known: keys and values, states of convolutions and linear attention, keys of an
# indexer. Quantised ones are lossy, so nothing built on them could be exact.
KNOWN_LAYERS = {
    *("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer"),
    *("DynamicIndexedLayer", "StaticIndexedLayer", "LinearAttentionLayer"),
    *("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
    *("LinearAttentionAndStaticFullAttentionLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer"),
}
_TENSORS = ("keys", "values", "indexer_keys", "conv_states", "recurrent_states")
_SIZES = ("max_cache_len", "sliding_window", "number_of_states")
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
    odd = sorted({type(layer).__name__ for layer in cache.layers if not _is_known(layer)})
    if odd or type(cache).__module__ != cache_utils.__name__:  # a family's own may keep more than layers
        raise LongRopeError(
            f"generation with {type(cache).__name__} is not exact across the switch"
            + (f" (layers: {', '.join(odd)})" if odd else ", since it keeps more than layers of a known kind"),
            hint="use cache_implementation 'dynamic', 'static', 'offloaded' or 'offloaded_static'",
        )


def empty(cache: Any) -> None:
    """Forget everything in a cache, which stays the same object."""
    cache.reset()
    note(cache, None)
    # Static ones stay where a compiled step finds them. Of others, some transformers releases keep zeros.
    cache.layers = [layer if isinstance(layer, StaticLayer) else _blank_layer(layer) for layer in cache.layers]


def blank_like(cache: Any) -> Any:
    """An empty cache of the same kind, for any number of rows."""
    blank = copy.copy(cache)
    note(blank, None)
    blank.layers = [_blank_layer(layer) for layer in cache.layers]
    return blank


def _is_known(layer: Any) -> bool:
    return type(layer).__name__ in KNOWN_LAYERS and type(layer).__module__ == cache_utils.__name__


def _blank_layer(layer: Any) -> Any:
    sizes = {name: getattr(layer, name) for name in _SIZES if hasattr(layer, name)}
    # Static layers that slide keep the smaller of both sizes only; the others pass over what they need not know.
    return type(layer)(**{"sliding_window": sizes.get("max_cache_len"), **sizes})


def _tensors(layer: Any) -> Iterator[Tensor]:
    """What a layer holds, in a fixed order; rows come first."""
    for name in _TENSORS:
        held = getattr(layer, name, None)
        yield from (each for each in (held.values() if isinstance(held, dict) else (held,)) if each is not None)


def replace_rows(cache: Any, rows: list[int], source: Any) -> None:
    """Put the rows of `source`, which holds as many columns, in the place of `rows` of `cache`.

    In place, so that a compiled decode step finds its static tensors where they were.
    """
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # its layers move between devices on a stream of their own
    indices: dict[torch.device, Tensor] = {}  # one copy to each device, which the host has to wait for
    for layer, new in zip(cache.layers, source.layers, strict=True):
        for old, fresh in zip(_tensors(layer), _tensors(new), strict=True):
            if old.device not in indices:
                indices[old.device] = torch.tensor(rows, device=old.device)
            old.index_copy_(0, indices[old.device], fresh.to(old.device))

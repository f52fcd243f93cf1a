"""The RoPE layer that stands in for vLLM's own while a model with the switch is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding as LongRope,
)

from longrope2.serving.running import TokenOffsets
from longrope2.serving.settings import check_methods, refuse_layers

NAME = "Phi3LongRoPEScaledRotaryEmbedding"


class SwitchingLongRope(LongRope):
    """vLLM's layer with both sides in one table, read at the position plus the offset of each token."""

    def __init__(self, *args: Any, offsets: TokenOffsets, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_long_rope = False  # which would add the offset of the long side to all tokens
        settings = offsets.settings
        if self.original_max_position_embeddings != settings.original_length:
            refuse_layers(f"a layer's original window is {self.original_max_position_embeddings:,} tokens")
        if missing := settings.short_rows - settings.original_length:
            table: Tensor = self.long_short_cos_sin_cache  # type: ignore[has-type]
            rows = self._compute_cos_sin_cache(settings.short_rows, self.short_factor, self.short_mscale)
            rows = rows[-missing:].to(table)
            original = settings.original_length
            self.long_short_cos_sin_cache = torch.cat([table[:original], rows, table[original:]])
        self.register_buffer("token_offsets", offsets.buffer, persistent=False)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate queries and keys."""
        return super().forward(positions + self.token_offsets[: positions.shape[0]], query, key, offsets)


@contextmanager
def switching_layers(offsets: TokenOffsets) -> Iterator[None]:
    """Within, vLLM makes our layers in place of its own."""
    expected = {
        "forward": ("self", "positions", "query", "key", "offsets"),
        "_compute_cos_sin_cache": ("self", "max_position_embeddings", "rescale_factors", "mscale"),
    }
    check_methods(LongRope, expected)
    _forget_layers()  # of another engine in this process
    original = getattr(rotary_embedding, NAME)
    setattr(rotary_embedding, NAME, partial(SwitchingLongRope, offsets=offsets))
    try:
        yield
    finally:
        setattr(rotary_embedding, NAME, original)
        _forget_layers()


def _forget_layers() -> None:
    made = rotary_embedding._ROPE_DICT
    for key in [key for key, layer in made.items() if isinstance(layer, LongRope)]:
        del made[key]


def check_layers(model: nn.Module, offsets: TokenOffsets) -> None:
    """Refuse a model with RoPE layers that do not switch, where all should."""
    ropes = [module for module in model.modules() if isinstance(module, LongRope)]
    if not all(isinstance(rope, SwitchingLongRope) and rope.token_offsets is offsets.buffer for rope in ropes):
        refuse_layers("it has a longrope layer that was made elsewhere")
    if offsets.settings.has_other_layers:  # of which a stage of a pipeline may have no others
        return
    others = {type(module).__name__ for module in model.modules() if isinstance(module, RotaryEmbeddingBase)}
    if others or not ropes:
        refuse_layers(f"it has RoPE layers of other kinds: {', '.join(sorted(others)) or 'none that vLLM knows'}")

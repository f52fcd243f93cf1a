"""The attention temperature, moved from RoPE into the weights that make queries.

Some engines multiply cos and sin by √(1 + ln s/ln L_train), whatever the config says. In the rotated dimensions
scores are then off by the square of (forced/wanted attention factor). Queries divided by that square bring them
back: exactly, apart from the rounding of the weights.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from longrope2.errors import ModelError
from longrope2.export.serving_config import live_config
from longrope2.families import FULL_ATTENTION, SLIDING_ATTENTION, read_config
from longrope2.models import head_dim

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NORMS = ("q_norm.", "q_layernorm.")
PROJECTIONS = ("self_attn.q_proj.", "self_attn.qkv_proj.", "attention.query_key_value.")


class QueryScale:
    """Multiplies a model's queries in the dimensions that rotate, tensor by tensor."""

    def __init__(self, config: Mapping[str, Any], names: Collection[str], factor: float) -> None:
        live = live_config(config)
        reading = read_config(config)
        self._family = reading.family
        self._num_heads = live.num_attention_heads
        self._pattern = torch.ones(head_dim(live))
        self._pattern[: reading.rope.rotary_dim] = factor
        kinds = reading.layer_types
        if self._family == "gemma3_text":  # sliding layers have a RoPE of their own
            self._layers = {i for i, kind in enumerate(kinds) if kind == FULL_ATTENTION}
        elif self._family == "cohere2":  # full layers have none
            self._layers = {i for i, kind in enumerate(kinds) if kind == SLIDING_ATTENTION}
        else:
            rotates = getattr(live, "no_rope_layers", None) or [True] * len(kinds)  # SmolLM3; 1 means it rotates
            self._layers = {i for i in range(len(kinds)) if rotates[i]}
        # A norm would undo what is done to the projection before it.
        self._parts = NORMS if any(part in name for name in names for part in NORMS) else PROJECTIONS
        missing = self._layers - {self._layer(name) for name in names}
        if missing:
            raise ModelError(f"the weights that make the queries of layer {min(missing)} are not where they should be")

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of that name, in float32 where it was changed."""
        if self._layer(name) is None:
            return tensor
        values = tensor.float()
        if values.dim() == 2 and self._parts is NORMS:  # Cohere's: a row for each head
            return values * self._pattern
        rows = self._rows(name, len(values)).reshape(-1, *[1] * (values.dim() - 1))
        if self._family == "gemma3_text":  # its norms multiply by 1 + weight
            return (1 + values) * rows - 1
        return values * rows

    def _layer(self, name: str) -> int | None:
        """The layer whose queries this tensor makes, if it does that."""
        layer = LAYER.search(name)
        if layer is None or int(layer[1]) not in self._layers or not any(part in name for part in self._parts):
            return None
        return int(layer[1])

    def _rows(self, name: str, count: int) -> Tensor:
        """What each row of a tensor is multiplied by."""
        if "query_key_value" in name:  # per head: query, key, value
            untouched = torch.ones(2, len(self._pattern))
            return torch.cat((self._pattern[None], untouched)).flatten().repeat(self._num_heads)
        queries = self._pattern.repeat(max(min(count // len(self._pattern), self._num_heads), 1))
        return torch.cat((queries, torch.ones(count - len(queries))))
